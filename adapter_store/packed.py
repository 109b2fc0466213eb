"""A converted adapter as one file: a JSON header, then the factors as the arena holds them.

The data part is laid out exactly like the arena's spans, so that a load is a few large copies.
alpha/r is folded into B already; the rank is padded with zero rows. Not here: where such files live
(host_cache) and how they are read (formats).

File:  8 bytes magic, 8 bytes header length (little endian), JSON, padding;  data from the next
       multiple of 256.
Data:  for each adapted target in order of its index: A [E or 1, R, in], then B [E or 1, R, out], R
       the padded rank; each factor starts at a multiple of 256 bytes, and the data end at one.
"""

import fcntl
import hashlib
import json
import mmap
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from adapter_store.errors import AdapterInvalid
from adapter_store.extras import NO_EXTRAS, AdapterExtras, extras_from_json
from adapter_store.packed_layout import (
    ALIGN_BYTES,
    FORMAT_VERSION,
    RANK_MULTIPLE,
    PackedLayout,
    dtype_name,
    fingerprint,
    layout_of,
    plan_layout,
)
from adapter_store.regular_file import reserve
from adapter_store.weights import AdapterWeights, LoraTarget, is_finite

LOADER_VERSION = 1
"""Raised when a format's reader changes what it makes of the same bytes: old packed files are then
not used again."""

_MAGIC = b"MLORAPK1"
_MAX_HEADER_BYTES = 16 << 20
_CRC_CHUNK_BYTES = 4 << 20


class PackedFileError(Exception):
    """The file is no packed adapter for these targets: cut, damaged, or of another model."""


def content_digest(folder: Path) -> str:
    """sha256 over names, sizes and bytes of a fetched adapter's files, and the reader's version."""
    digest = hashlib.sha256(f"loader {LOADER_VERSION}\n".encode())
    for path in sorted(folder.iterdir()):
        with open(path, "rb") as file:
            inner = hashlib.file_digest(file, "sha256")
        digest.update(f"{path.name} {path.stat().st_size} {inner.hexdigest()}\n".encode())
    return digest.hexdigest()


def write_packed(
    path: Path,
    weights: AdapterWeights,
    targets: Sequence[LoraTarget],
    dtype: torch.dtype,
    digest: str = "",
    extras: AdapterExtras = NO_EXTRAS,
) -> int:
    """Write one adapter as one file; returns its size in bytes. Not atomic: the caller renames.

    digest  of the content it was made of;  extras  what else that brings: both kept in the header
    Errors:  AdapterInvalid ("shape", "unbound_tensor") if weights and targets do not fit each
             other, ("not_finite") if a value is not finite or does not survive the cast;  OSError
             if the disk is full.
    """
    layout = layout_of(weights, targets, dtype)
    factors = [
        (targets[t.index], t, weights.factors[targets[t.index].name]) for t in layout.targets
    ]
    start = _data_start(len(_header_bytes(digest, targets, dtype, layout, 0, extras)))
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b") as file:
        # The space is taken now: a full tmpfs is an error here and not a signal in the middle.
        reserve(file.fileno(), start + layout.num_bytes)
        file.seek(start)
        crc = 0
        for target, packed, factor in factors:
            for name, tensor in (("A", factor.a), ("B", factor.b)):
                rows = _pad_rows(tensor, packed.lora_rank, dtype)  # [E or 1, R, in or out]
                if not is_finite(rows):
                    raise AdapterInvalid(
                        "not_finite", f"{name} of {target.name} is not finite in {dtype}"
                    )
                crc = _write_padded(file, rows, crc)
        file.seek(0)
        file.write(_header_bytes(digest, targets, dtype, layout, crc, extras))
    return start + layout.num_bytes


def packed_bytes(
    weights: AdapterWeights,
    targets: Sequence[LoraTarget],
    dtype: torch.dtype,
    digest: str = "",
    extras: AdapterExtras = NO_EXTRAS,
) -> int:
    """Size of the file that `write_packed` would make."""
    layout = layout_of(weights, targets, dtype)
    header = _header_bytes(digest, targets, dtype, layout, 0, extras)
    return _data_start(len(header)) + layout.num_bytes


class PackedAdapter:
    """A packed file, open and mapped; its shared flock keeps it from being evicted.

    extras  what else the adapter brings
    data    [num_bytes] uint8, a private map of the file: never write to it. Good until the last
            view of it is gone.
    """

    def __init__(
        self,
        file: BinaryIO,
        digest: str,
        layout: PackedLayout,
        data: Tensor,
        crc: int,
        extras: AdapterExtras,
    ) -> None:
        self._file = file
        self._crc = crc
        self.extras = extras
        self.digest = digest
        self.layout = layout
        self.data = data

    @classmethod
    def open(
        cls,
        path: Path,
        targets: Sequence[LoraTarget],
        dtype: torch.dtype,
        verify: bool = True,
    ) -> "PackedAdapter":
        """Open a file and trust nothing in it: offsets are computed again from the model's sizes.

        verify  also check the data's checksum (reads all of it)
        Errors:  PackedFileError if the file is not a whole packed adapter for these targets;
                 FileNotFoundError.
        """
        file = open(path, "rb")  # noqa: SIM115  (lives as long as the adapter)
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            digest, layout, start, crc, extras = _read_header(file, targets, dtype)
            data = _map_data(file, start, layout.num_bytes)
            packed = cls(file, digest, layout, data, crc, extras)
            if verify:
                packed.check_data()
            return packed
        except BlockingIOError as e:
            file.close()
            raise FileNotFoundError(f"{path} is being removed") from e
        except PackedFileError as e:
            file.close()
            raise PackedFileError(f"{path}: {e}") from e
        except BaseException:
            file.close()
            raise

    def check_data(self) -> None:
        """Read all data; PackedFileError if they do not match their checksum."""
        if _crc_of(self.data) != self._crc:
            raise PackedFileError("the data do not match their checksum")

    def inode(self) -> int:
        """Of the file: tells it from another one of the same name."""
        return os.fstat(self._file.fileno()).st_ino

    def close(self) -> None:
        """Let the file go; the cache may evict it. Twice is once."""
        self._file.close()
        self.data = torch.empty(0, dtype=torch.uint8)  # [0]

    def __enter__(self) -> "PackedAdapter":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _pad_rows(tensor: Tensor, lora_rank: int, dtype: torch.dtype) -> Tensor:
    rows = torch.zeros(len(tensor), lora_rank, tensor.shape[2], dtype=dtype)  # [E, R, in]
    rows[:, : tensor.shape[1]] = tensor
    return rows


def _write_padded(file: BinaryIO, rows: Tensor, crc: int) -> int:
    data = rows.view(-1).view(torch.uint8).numpy().data
    padding = bytes(-len(data) % ALIGN_BYTES)
    file.write(data)
    file.write(padding)
    return zlib.crc32(padding, zlib.crc32(data, crc))


def _crc_of(data: Tensor) -> int:
    crc, view = 0, data.numpy().data
    for start in range(0, len(view), _CRC_CHUNK_BYTES):
        crc = zlib.crc32(view[start : start + _CRC_CHUNK_BYTES], crc)
    return crc


def _data_start(header_bytes: int) -> int:
    return -(-header_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _header_bytes(
    digest: str,
    targets: Sequence[LoraTarget],
    dtype: torch.dtype,
    layout: PackedLayout,
    crc: int,
    extras: AdapterExtras,
) -> bytes:
    header = {
        "version": FORMAT_VERSION,
        "digest": digest,
        "fingerprint": fingerprint(targets, dtype),
        "dtype": dtype_name(dtype),
        "data_bytes": layout.num_bytes,
        "crc32": f"{crc:08x}",
        "targets": [vars(t) for t in layout.targets],
        "extras": asdict(extras),
    }
    text = json.dumps(header).encode()
    return _MAGIC + len(text).to_bytes(8, "little") + text


def _read_header(
    file: BinaryIO, targets: Sequence[LoraTarget], dtype: torch.dtype
) -> tuple[str, PackedLayout, int, int, AdapterExtras]:
    """(digest, layout, start of the data, checksum, extras); PackedFileError if a word is wrong."""
    size = os.fstat(file.fileno()).st_size
    head = file.read(16)
    length = int.from_bytes(head[8:16], "little")
    if len(head) < 16 or head[:8] != _MAGIC or length > min(size - 16, _MAX_HEADER_BYTES):
        raise PackedFileError("not a packed adapter, or cut")
    try:
        header = json.loads(file.read(length))
        if header["fingerprint"] != fingerprint(targets, dtype):
            raise PackedFileError("made for another model, dtype or version")
        layout = _read_layout(header, targets, dtype)
        digest, crc = str(header["digest"]), int(header["crc32"], 16)
        extras = extras_from_json(header["extras"])
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise PackedFileError(f"damaged header: {type(e).__name__} {e}") from e
    start = _data_start(16 + length)
    if size != start + layout.num_bytes or header["data_bytes"] != layout.num_bytes:
        raise PackedFileError(f"{size} bytes instead of {start + layout.num_bytes}")
    return digest, layout, start, crc, extras


def _read_layout(
    header: Mapping[str, Any], targets: Sequence[LoraTarget], dtype: torch.dtype
) -> PackedLayout:
    """The layout made again from the ranks; PackedFileError if the header has another."""
    shapes, last = [], -1
    for entry in header["targets"]:
        index, rank, a, b = (entry[k] for k in ("index", "lora_rank", "a_experts", "b_experts"))
        if not all(type(value) is int for value in (index, rank, a, b)):
            raise PackedFileError("a number of the header is no integer")
        if not last < index < len(targets) or rank < 1 or rank % RANK_MULTIPLE:
            raise PackedFileError(f"target {index} of rank {rank} cannot be")
        if not {a, b} <= {1, targets[index].num_experts}:
            raise PackedFileError(f"target {index} has {a} and {b} experts")
        shapes.append((index, rank, a, b))
        last = index
    layout = plan_layout(targets, shapes, dtype.itemsize)
    if [vars(t) for t in layout.targets] != header["targets"]:
        raise PackedFileError("offsets are not where they must be")
    return layout


def _map_data(file: BinaryIO, start: int, num_bytes: int) -> Tensor:
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)  # [0]
    # Private and copy on write: torch wants a writable buffer, and the file must stay as it is.
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(mapped, dtype=torch.uint8, offset=start, count=num_bytes)  # [bytes]
