"""Reading small files and JSON that somebody else wrote: sizes are bounded before memory is taken.

Not here: what the files mean (peft_config, safetensors_file).
"""

import errno
import json
import os
import reprlib
import stat
from pathlib import Path
from typing import Any

from adapter_store.errors import AdapterInvalid, AdapterNotFound, AdapterUnavailable

_SHOWN_CHARS = 160
_REPR = reprlib.Repr()  # does not walk all of a deep or long value
_REPR.maxstring = _REPR.maxother = _SHOWN_CHARS


def shown(value: object) -> str:
    """A stranger's value as one safe line for a message: escaped, about 160 characters at most."""
    whole = _REPR.repr(value)
    return whole if len(whole) <= _SHOWN_CHARS else whole[:_SHOWN_CHARS] + "..."


def open_regular(path: Path) -> int:
    """Open a file for reading and return its descriptor; the caller closes it.

    Errors:  AdapterInvalid("file") for a link, folder, pipe or device: a link could lead out of the
             adapter's folder. AdapterNotFound if there is none, AdapterUnavailable if it cannot be
             read.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags)
    except FileNotFoundError:
        raise AdapterNotFound(f"{path.name} is not in the adapter's folder") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            what = f"{path.name} is a symbolic link; put the file itself there"
            raise AdapterInvalid("file", what) from None
        raise AdapterUnavailable(f"{path.name}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise AdapterInvalid("file", f"{path.name} is not a regular file")
    return fd


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
    """A JSON object. `max_items` bounds its lists and objects, and so what it unfolds to.

    Errors:  AdapterInvalid(reason) for what is not UTF-8 or not JSON, is nested too deep, has a key
             twice, NaN or Infinity, or is no object.
    """
    if raw.count(b"[") + raw.count(b"{") > max_items:
        raise AdapterInvalid(reason, f"{what} has more than {max_items} lists and objects")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table: dict[str, Any] = {}
        for key, value in pairs:
            if key in table:
                raise ValueError(f"the key {shown(key)} is there twice")
            table[key] = value
        return table

    def no_constant(name: str) -> None:
        raise ValueError(f"{name} is no number")

    try:
        value = json.loads(raw.decode(), object_pairs_hook=unique, parse_constant=no_constant)
    except RecursionError:
        raise AdapterInvalid(reason, f"{what} is nested too deep") from None
    except ValueError as error:
        raise AdapterInvalid(reason, f"{what} is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise AdapterInvalid(reason, f"{what} is not a JSON object")
    return value
