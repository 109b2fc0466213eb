"""What a source is (`Source`), how S3 is reached (`S3Options`), and which files of an adapter are read at all.

Not here: how bytes are read (local, s3) and what they mean (formats).
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from adapter_store.errors import AdapterInvalid, AdapterNotFound, StoreFull
from adapter_store.ref import AdapterRef

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
INDEX_FILE = "adapter_model.safetensors.index.json"
PICKLE_FILES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
SHARD_NAME = re.compile(r"adapter_model-\d{5}-of-\d{5}\.safetensors")

MAX_CONFIG_BYTES = 1 << 20
MAX_INDEX_BYTES = 16 << 20
DEFAULT_MAX_BYTES = 64 << 30


class Source(Protocol):
    """Where the bytes of adapters lie. Safe to use from several threads at once.

    Errors: AdapterNotFound if nothing is there; AdapterUnavailable if it cannot be read just now, naming the cause;
    AdapterInvalid for a folder that can be seen to be no adapter before its weights are read; StoreFull if too large.
    """

    def revision(self, ref: AdapterRef) -> str:
        """Name of the content that the uri holds now: equal names, equal bytes. Reads no weights."""
        ...

    def fetch(self, ref: AdapterRef, into: Path) -> None:
        """Copy the adapter's files, and no other, into an existing folder."""
        ...


@dataclass(frozen=True)
class S3Options:
    """How S3 is reached. An empty value leaves it to the environment and the files that boto3 reads.

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


def choose_files(ref: AdapterRef, names: Collection[str]) -> list[str]:
    """The files to read among those that are there: the config and the weights, whole or sharded.

    Errors: AdapterNotFound if neither stands there; AdapterInvalid ("config", "pickle", "file") if only a part does.
    """
    weights = [WEIGHTS_FILE] if WEIGHTS_FILE in names else []
    if not weights:
        shards = sorted(name for name in names if SHARD_NAME.fullmatch(name))
        weights = [INDEX_FILE, *shards] if shards and INDEX_FILE in names else shards
    pickles = [name for name in PICKLE_FILES if name in names]
    if not weights and pickles:
        raise AdapterInvalid("pickle", f"{ref.uri} holds {pickles[0]} and no {WEIGHTS_FILE}")
    if not weights and CONFIG_FILE not in names:
        raise AdapterNotFound(f"{ref.uri} holds neither {CONFIG_FILE} nor {WEIGHTS_FILE}")
    if not weights:
        raise AdapterInvalid("file", f"{ref.uri} holds {CONFIG_FILE} and no {WEIGHTS_FILE}")
    if CONFIG_FILE not in names:
        raise AdapterInvalid("config", f"{ref.uri} holds {weights[-1]} and no {CONFIG_FILE}")
    return [CONFIG_FILE, *weights]


def check_sizes(ref: AdapterRef, sizes: Mapping[str, int], max_bytes: int) -> None:
    """Refuse files that are too large before one byte of them is read."""
    for name, limit in ((CONFIG_FILE, MAX_CONFIG_BYTES), (INDEX_FILE, MAX_INDEX_BYTES)):
        if sizes.get(name, 0) > limit:
            raise AdapterInvalid(
                "file", f"{ref.uri}/{name} has {sizes[name]} bytes, more than {limit}"
            )
    total = sum(sizes.values())
    if total > max_bytes:
        raise StoreFull(f"{ref.uri} has {total} bytes, more than the limit of {max_bytes}")
