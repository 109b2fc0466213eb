"""Reading small files and JSON that somebody else wrote: sizes are bounded before memory is taken.

Not here: what the files mean (peft_config, safetensors_file).
"""

import json
import os
import re
import reprlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from json.decoder import scanstring  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any

from adapter_store.errors import AdapterInvalid, AdapterUnavailable
from adapter_store.regular_file import open_regular

_MAX_DEPTH = 100
_SHOWN_CHARS = 160
_REPR = reprlib.Repr()  # does not walk all of a deep or long value
_REPR.maxstring = _REPR.maxother = _SHOWN_CHARS


def shown(value: object) -> str:
    """A stranger's value as one safe line for a message: escaped, about 160 characters at most."""
    whole = _REPR.repr(value)
    return whole if len(whole) <= _SHOWN_CHARS else whole[:_SHOWN_CHARS] + "..."


def read_exactly(fd: int, offset: int, num_bytes: int, what: str) -> bytearray:
    """`num_bytes` at `offset`; the caller has checked them against the file's size.

    Errors:  AdapterInvalid("file") if the file ends early, AdapterUnavailable if the disk fails.
    """
    data = bytearray(num_bytes)
    view, done = memoryview(data), 0
    while done < num_bytes:
        try:
            got = os.preadv(fd, [view[done : done + (1 << 26)]], offset + done)
        except OSError as error:
            raise AdapterUnavailable(f"{what}: {error.strerror}") from error
        if got == 0:
            raise AdapterInvalid("file", f"{what} ends after {done} of {num_bytes} bytes")
        done += got
    return data


def read_small(path: Path, max_bytes: int) -> bytes:
    """The whole of a small file. Errors: as `open_regular`; AdapterInvalid("file") if larger."""
    fd = open_regular(path)
    try:
        num_bytes = os.fstat(fd).st_size
        if num_bytes > max_bytes:
            raise AdapterInvalid(
                "file", f"{path.name} has {num_bytes} bytes; at most {max_bytes} are read"
            )
        return bytes(read_exactly(fd, 0, num_bytes, path.name))
    finally:
        os.close(fd)


def parse_json(raw: bytes, reason: str, what: str, max_items: int) -> dict[str, Any]:
    """A JSON object. `max_items` bounds its values, and so what it unfolds to: some 300 bytes each.

    Errors:  AdapterInvalid(reason) for what is not UTF-8 or not JSON, is nested too deep, has a key
             twice, NaN or Infinity, or is no object.
    """
    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") > max_items:
        raise AdapterInvalid(reason, f"{what} has more than {max_items} values")
    with json_errors(reason, what):
        value = DECODER.decode(raw.decode())
        check_depth(value)
    if not isinstance(value, dict):
        raise AdapterInvalid(reason, f"{what} is not a JSON object")
    return value


def json_items(
    raw: bytearray, reason: str, what: str, max_chars: Callable[[str], int]
) -> Iterator[tuple[str, Any]]:
    """The keys and values of a large JSON object, one after the other: memory is the text's and one
    value's. A key that is there twice comes twice.

    raw        emptied when it has been decoded
    max_chars  key -> how long the text of its value may be
    Errors:  as `parse_json`, while it goes.
    """
    with json_errors(reason, what):
        text = raw.decode()
        raw.clear()
        at = _expect(_BEGIN, text, 0)
        while text[at - 1] != "}":
            key, at = scanstring(text, at, True)
            at = _expect(_COLON, text, at)
            window = text[at : at + max_chars(key)]
            try:
                value, used = DECODER.raw_decode(window)
            except json.JSONDecodeError as error:
                where = f"{error.msg}, in the first {len(window)} characters of {shown(key)}"
                raise ValueError(where) from None
            yield key, value
            at = _expect(_NEXT, text, at + used)
        _expect(_END, text, at)


# What stands between the parts of an object: up to its first key or its end, and so on.
_BEGIN = re.compile(r'[ \t\n\r]*\{[ \t\n\r]*["}]')
_COLON = re.compile(r"[ \t\n\r]*:[ \t\n\r]*")
_NEXT = re.compile(r'[ \t\n\r]*(?:,[ \t\n\r]*"|\})')
_END = re.compile(r"[ \t\n\r]*\Z")


def _expect(between: re.Pattern[str], text: str, at: int) -> int:
    """The place behind what must stand there."""
    found = between.match(text, at)
    if found is None:
        raise json.JSONDecodeError(f"Expecting {between.pattern}", text, at)
    return found.end()


def check_depth(value: Any) -> None:
    """RecursionError where more than _MAX_DEPTH lists and objects lie in each other: Python's own
    limit depends on who asks."""
    level = [value]
    for _ in range(_MAX_DEPTH + 1):
        tables = [part for part in level if isinstance(part, dict | list)]
        if not tables:
            return
        level = [p for t in tables for p in (t.values() if isinstance(t, dict) else t)]
    raise RecursionError


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"the key {shown(key)} is there twice")
        table[key] = value
    return table


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)


@contextmanager
def json_errors(reason: str, what: str) -> Iterator[None]:
    """What goes wrong with JSON in there is AdapterInvalid(reason)."""
    try:
        yield
    except RecursionError:
        raise AdapterInvalid(reason, f"{what} is nested too deep") from None
    except ValueError as error:
        raise AdapterInvalid(reason, f"{what} is not valid JSON: {str(error)[:200]}") from None
