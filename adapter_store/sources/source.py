"""What a source is (`Source`), how S3 is reached, and which files of an adapter are read at all.

Not here: how bytes are read (local, s3) and what they mean (formats).
"""

import errno
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from adapter_store.errors import (
    AdapterInvalid,
    AdapterNotFound,
    AdapterUnavailable,
    DiskFull,
    StoreFull,
)
from adapter_store.ref import AdapterRef
from adapter_store.regular_file import reserve

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
FILES = (CONFIG_FILE, WEIGHTS_FILE)
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
GENERATION_FILE = "generation_config.json"
PICKLE_FILES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")

MAX_CONFIG_BYTES = 8 << 20  # a rank_pattern may name every expert's linears
DEFAULT_MAX_BYTES = 64 << 30
JUDGED_FROM_BYTES = 32 << 20
"""Weights larger than this are judged by their head before the rest of them is read."""
_MAX_HEAD_BYTES = 64 << 20

Judge = Callable[[Path], object]
OPTIONAL_FILES = {
    TOKENIZER_FILE: 32 << 20,
    TOKENIZER_CONFIG_FILE: 4 << 20,
    TEMPLATE_FILE: 256 << 10,
    GENERATION_FILE: 1 << 20,
}
"""What may lie beside, and how many bytes it may have. They belong to the content: another template
is another revision, and another digest."""


class Source(Protocol):
    """Where the bytes of adapters lie. Safe to use from several threads at once.

    Errors: AdapterNotFound if nothing is there; AdapterUnavailable if it cannot be read just now,
    naming the cause; AdapterChanged and DiskFull (`fetch`); AdapterInvalid for a folder that can be
    seen to be no adapter before its weights are read; StoreFull if too large.
    """

    def revision(self, ref: AdapterRef) -> str:
        """Name of what the uri holds now: equal names, equal bytes. Reads no weights."""
        ...

    def fetch(self, ref: AdapterRef, into: Path, revision: str, judge: Judge | None = None) -> None:
        """Copy the adapter's files, and no other, into an existing folder.

        revision  as `revision` named it, lately or long ago: exactly that content is copied, an
                  older one where the source keeps versions, else AdapterChanged
        judge     of weights above JUDGED_FROM_BYTES: gets `into` when the config is there and the
                  weights have their size and their head, the rest a hole; what it raises ends the
                  fetch, so that gigabytes of no use are never copied
        """
        ...


@dataclass(frozen=True)
class S3Options:
    """How S3 is reached. An empty value leaves it to the environment and boto3's own files.

    part_bytes        one ranged GET;  parts_at_once  of one file
    connect_timeout_s, read_timeout_s  silence on the line that counts as broken
    part_timeout_s    a part that takes longer is broken too, even if bytes still drip
    attempts          of each part, the first one included
    """

    endpoint_url: str = ""
    region: str = ""
    access_key: str = ""
    secret_key: str = field(default="", repr=False)
    session_token: str = field(default="", repr=False)
    part_bytes: int = 16 << 20
    parts_at_once: int = 4
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 10.0
    part_timeout_s: float = 120.0
    attempts: int = 4


def check_files(ref: AdapterRef, names: Collection[str]) -> None:
    """Whether what stands there can be an adapter, by the names alone.

    names  of files that are there; others than the known ones do not matter
    Errors: AdapterNotFound if nothing known is there; AdapterInvalid ("config", "pickle", "file")
            if only a part is.
    """
    pickles = [name for name in PICKLE_FILES if name in names]
    if WEIGHTS_FILE not in names and pickles:
        raise AdapterInvalid("pickle", f"{ref.uri} holds {pickles[0]} and no {WEIGHTS_FILE}")
    if WEIGHTS_FILE not in names and CONFIG_FILE not in names:
        raise AdapterNotFound(f"{ref.uri} holds neither {CONFIG_FILE} nor {WEIGHTS_FILE}")
    if WEIGHTS_FILE not in names:
        raise AdapterInvalid("file", f"{ref.uri} holds {CONFIG_FILE} and no {WEIGHTS_FILE}")
    if CONFIG_FILE not in names:
        raise AdapterInvalid("config", f"{ref.uri} holds {WEIGHTS_FILE} and no {CONFIG_FILE}")


def check_sizes(ref: AdapterRef, sizes: Mapping[str, int], max_bytes: int) -> None:
    """Refuse files that are too large before one byte of them is read."""
    for name, most in {CONFIG_FILE: MAX_CONFIG_BYTES, **OPTIONAL_FILES}.items():
        if sizes.get(name, 0) > most:
            text = f"{sizes[name]} bytes, more than {most}"
            raise AdapterInvalid("file", f"{ref.uri}/{name} has {text}")
    total = sum(sizes.values())
    if total > max_bytes:
        raise StoreFull(f"{ref.uri} has {total} bytes, more than the limit of {max_bytes}")


def take_room(fd: int, num_bytes: int, what: str) -> None:
    """Give the copy of a file its size before its bytes are asked for.

    Errors: DiskFull, AdapterUnavailable.
    """
    try:
        reserve(fd, num_bytes)
    except OSError as e:
        raise cannot_keep(what, num_bytes, e) from e


def cannot_keep(what: str, num_bytes: int, error: OSError) -> AdapterUnavailable:
    """The error for a copy that could not be written: DiskFull where only room is missing."""
    words = f"cannot keep {what}: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(words, num_bytes)
    return AdapterUnavailable(words)


def head_end(first: bytes, num_bytes: int) -> int:
    """Where the head of a safetensors file ends: 8 bytes of length, and so many more.

    first  bytes of the file, 8 at least;  num_bytes  of the file. Bounded, whatever they claim.
    """
    return min(8 + int.from_bytes(first[:8], "little"), num_bytes, _MAX_HEAD_BYTES)
