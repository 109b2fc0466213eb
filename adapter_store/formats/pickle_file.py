"""`adapter_model.bin`, which only an operator's setting lets in: the same face as SafetensorsFile.

torch's restricted unpickler runs no code of the file, but it is younger and larger than a header of
JSON, and lets a few bytes become gigabytes. So the archive is looked at first: nothing in it may be
compressed, and its pickle may name only what a table of tensors needs.
"""

import os
import pickletools
import zipfile
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch
from torch import Tensor

from adapter_store.errors import AdapterInvalid
from adapter_store.formats.bounded_files import shown
from adapter_store.formats.safetensors_file import FLOAT_DTYPES, TensorInfo
from adapter_store.regular_file import open_regular

MAX_PICKLE_BYTES = 16 << 20
_NAMES = {dtype: name for name, dtype in FLOAT_DTYPES.items()}
_GLOBALS = frozenset({
    "collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter",
    "torch FloatStorage", "torch HalfStorage", "torch BFloat16Storage", "torch DoubleStorage",
})  # fmt: skip
# Other ways to name a function, which torch.save does not use.
_REFUSED_OPCODES = frozenset({"STACK_GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4"})


class PickleFile:
    """A dictionary of tensors by name. Errors: AdapterInvalid("file") for anything else."""

    def __init__(self, path: Path) -> None:
        with os.fdopen(open_regular(path), "rb") as file:
            _check_archive(file, path.name)
            file.seek(0)
            try:
                table = torch.load(file, map_location="cpu", weights_only=True)
            except Exception as error:  # torch raises what it likes on garbage
                raise AdapterInvalid("file", f"{path.name}: {shown(str(error))}") from None
        if not isinstance(table, dict):
            raise AdapterInvalid("file", f"{path.name} is not a table of tensors")
        self._tensors: dict[str, Tensor] = {}
        self.infos: dict[str, TensorInfo] = {}
        for name, tensor in table.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise AdapterInvalid("file", f"{path.name}: {shown(name)} is no named tensor")
            if tensor.layout is not torch.strided or tensor.device.type != "cpu":
                raise AdapterInvalid("file", f"{shown(name)} is sparse or not in host memory")
            dtype = _NAMES.get(tensor.dtype, str(tensor.dtype))
            self.infos[name] = TensorInfo(name, dtype, tuple(tensor.shape))
            self._tensors[name] = tensor.detach()

    def __enter__(self) -> "PickleFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._tensors.clear()

    def read(self, name: str) -> Tensor:
        """The tensor, in host memory."""
        return self._tensors[name]


def _check_archive(file: BinaryIO, name: str) -> None:
    """Whether this is an archive that unfolds to no more than its size and names nothing odd."""
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            stored = all(member.compress_type == zipfile.ZIP_STORED for member in members)
            unfolded = sum(member.file_size for member in members)
            if not stored or unfolded > os.fstat(file.fileno()).st_size:
                raise AdapterInvalid(
                    "file", f"{name} is compressed: it unfolds to {unfolded} bytes"
                )
            pickles = [member for member in members if member.filename.endswith("/data.pkl")]
            if len(pickles) != 1 or pickles[0].file_size > MAX_PICKLE_BYTES:
                raise AdapterInvalid("file", f"{name} is no table of tensors as torch.save writes")
            raw = archive.read(pickles[0])
        for opcode, argument, _ in pickletools.genops(raw):
            is_odd = opcode.name == "GLOBAL" and argument not in _GLOBALS
            if is_odd or opcode.name in _REFUSED_OPCODES:
                what = shown(argument) if is_odd else opcode.name
                raise AdapterInvalid(
                    "file", f"{name} names {what}, which no table of tensors needs"
                )
    except AdapterInvalid:
        raise
    except Exception as error:  # both raise what they like on garbage
        raise AdapterInvalid("file", f"{name}: {shown(str(error))}") from None
