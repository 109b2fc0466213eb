"""`adapter_model.bin`, which only an operator's setting lets in: the same face as SafetensorsFile.

torch's restricted unpickler runs no code of the file, but it is younger and larger than a header of
JSON, and a compressed archive may unfold to more than the file's size: hence the setting.
"""

import os
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from adapter_store.errors import AdapterInvalid
from adapter_store.formats.bounded_files import open_regular, shown
from adapter_store.formats.safetensors_file import FLOAT_DTYPES, TensorInfo

_NAMES = {dtype: name for name, dtype in FLOAT_DTYPES.items()}


class PickleFile:
    """A dictionary of tensors by name. Errors: AdapterInvalid("file") for anything else."""

    def __init__(self, path: Path) -> None:
        with os.fdopen(open_regular(path), "rb") as file:
            try:
                table = torch.load(file, map_location="cpu", weights_only=True)
            except Exception as error:  # torch raises what it likes on garbage
                raise AdapterInvalid("file", f"{path.name}: {str(error)[:200]}") from None
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
