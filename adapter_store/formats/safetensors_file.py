"""A strict reader of one safetensors file: the header is checked whole before a tensor is read.

Memory never follows what the header says, only what the file has. Tensors are read by `pread`, not
mapped: a file that is cut while it is read gives an error, not a SIGBUS. Not here: what the tensors
mean.
"""

import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from adapter_store.errors import AdapterInvalid
from adapter_store.formats.bounded_files import json_items, read_exactly, shown
from adapter_store.regular_file import open_regular

MAX_HEADER_BYTES = 48 << 20  # 90,000 tensors of a per-expert DeepSeek-V3 adapter need 20 MB
MAX_WIDE_HEADER_BYTES = 8 << 20  # with characters outside ASCII, which take four times the memory
MAX_METADATA_CHARS = 1 << 20
MAX_ENTRY_CHARS = 4096
MAX_TENSORS = 200_000
MAX_NAME_CHARS = 512
MAX_DIMS = 8

_METADATA = "__metadata__"
FLOAT_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_ITEM_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
    "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What is known of a tensor before it is read. dtype in safetensors' spelling."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class SafetensorsFile:
    """An open file: `infos` by tensor name, `read(name)`, `close()`; also a context manager.

    Errors:  AdapterInvalid("file") at opening for a truncated or oversized file, a header that is
             too long, not JSON or of the wrong form, offsets that overlap, leave holes or lie
             outside the file; AdapterInvalid("dtype") for an element type that is not known.
    """

    def __init__(self, path: Path) -> None:
        self._file_name = path.name
        self._fd = open_regular(path)
        try:
            self._spans: dict[str, tuple[int, int]] = {}
            self.infos: dict[str, TensorInfo] = {}
            self._data_start = self._read_header()
            self._check_spans(os.fstat(self._fd).st_size - self._data_start)
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> "SafetensorsFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the descriptor back; `read` must not be called after."""
        os.close(self._fd)

    def read(self, name: str) -> Tensor:
        """The tensor, in host memory of its own. Its dtype must be one of FLOAT_DTYPES."""
        info, (begin, end) = self.infos[name], self._spans[name]
        data = read_exactly(self._fd, self._data_start + begin, end - begin, shown(name))
        return torch.frombuffer(data, dtype=FLOAT_DTYPES[info.dtype]).view(info.shape)

    def _read_header(self) -> int:
        """Fills infos and spans; gives the place where the data begin."""
        size = os.fstat(self._fd).st_size
        if size < 8:
            raise AdapterInvalid("file", f"{self._file_name} has {size} bytes and no header")
        length = int.from_bytes(read_exactly(self._fd, 0, 8, self._file_name), "little")
        if length > min(size - 8, MAX_HEADER_BYTES):
            raise AdapterInvalid(
                "file",
                f"{self._file_name}: the header claims {length} bytes; the file has {size - 8}, "
                f"at most {MAX_HEADER_BYTES} are read",
            )
        raw = read_exactly(self._fd, 8, length, self._file_name)
        what = f"the header of {self._file_name}"
        if length > MAX_WIDE_HEADER_BYTES and not raw.isascii():
            raise AdapterInvalid(
                "file", f"{what} has {length} bytes, {MAX_WIDE_HEADER_BYTES} at most beyond ASCII"
            )
        has_metadata = False
        for name, entry in json_items(raw, "file", what, _max_chars):
            if name in self.infos or (has_metadata and name == _METADATA):
                raise AdapterInvalid("file", f"{what}: the key {shown(name)} is there twice")
            if name == _METADATA:
                has_metadata = True
                _check_metadata(what, entry)
                continue
            self.infos[name], self._spans[name] = _parse_entry(self._file_name, name, entry)
            if len(self.infos) > MAX_TENSORS:
                raise AdapterInvalid("file", f"{what} has more than {MAX_TENSORS} tensors")
        return 8 + length

    def _check_spans(self, data_bytes: int) -> None:
        at = 0
        for name, (begin, end) in sorted(self._spans.items(), key=lambda item: item[1]):
            if begin != at:
                raise AdapterInvalid(
                    "file",
                    f"{shown(name)} begins at byte {begin} of the data, where {at} is next: "
                    "tensors overlap or leave a hole",
                )
            at = end
            if at > data_bytes:
                raise AdapterInvalid(
                    "file",
                    f"{shown(name)} ends at byte {at}, {self._file_name} has {data_bytes} of data",
                )
        if at != data_bytes:
            raise AdapterInvalid(
                "file", f"{self._file_name} has {data_bytes - at} bytes that belong to no tensor"
            )


def _max_chars(key: str) -> int:
    return MAX_METADATA_CHARS if key == _METADATA else MAX_ENTRY_CHARS


def _check_metadata(what: str, metadata: Any) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise AdapterInvalid("file", f"{what}: {_METADATA} is not a table of strings")


def _parse_entry(file_name: str, name: str, entry: Any) -> tuple[TensorInfo, tuple[int, int]]:
    """One line of the header, checked on its own: form, dtype, size of shape against offsets."""
    if len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise AdapterInvalid("file", f"{file_name}: {shown(name)} is no tensor name")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise AdapterInvalid("file", f"{shown(name)}: the header needs dtype, shape, data_offsets")
    dtype, shape, span = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not _sizes(shape) or len(shape) > MAX_DIMS:
        raise AdapterInvalid("file", f"{shown(name)}: {shown(shape)} is no shape")
    if not _sizes(span) or len(span) != 2 or span[0] > span[1]:
        raise AdapterInvalid("file", f"{shown(name)}: {shown(span)} are no offsets")
    if not isinstance(dtype, str) or dtype not in _ITEM_BITS:
        raise AdapterInvalid("dtype", f"{shown(name)}: dtype {shown(dtype)} is not known")
    bits = math.prod(shape) * _ITEM_BITS[dtype]
    if bits != 8 * (span[1] - span[0]):
        raise AdapterInvalid(
            "file",
            f"{shown(name)}: {dtype} {shape} takes {bits // 8} bytes, its offsets hold "
            f"{span[1] - span[0]}",
        )
    return TensorInfo(name, sys.intern(dtype), tuple(shape)), (span[0], span[1])


def _sizes(value: Any) -> bool:
    """A list of plain integers from 0 to 2^48."""
    if not isinstance(value, list):
        return False
    for size in value:  # noqa: SIM110  (a generator takes three times as long)
        if type(size) is not int or not 0 <= size < 1 << 48:
            return False
    return True
