"""Weights from a Hugging Face folder, or from a seed. Both are `WeightReader`s, so a family's name
map serves both.

Only safetensors are read: a pickle is a program, not data.
"""

import hashlib
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model_runner.models.base import read_json

# Deviations of RandomReader's values, by the end of the name.
STDS = {"embed_tokens.weight": 8.0, "lm_head.weight": 0.01}
OTHER_STD = 0.02
# Rows and columns of a block of an fp8 checkpoint: the one size that is published.
FP8_BLOCK = 128


class CheckpointError(ValueError):
    """The folder does not hold what the model needs; the message names the tensor and the file."""


class SafetensorsReader:
    """Tensors of one folder, sharded (`model.safetensors.index.json`) or in one file."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._files: dict[Path, Any] = {}
        self._file_of = self._list_names(folder)

    def __enter__(self) -> "SafetensorsReader":
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds this tensor."""
        return name in self._file_of

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """One tensor on the device. Errors: CheckpointError if missing, of another shape, or of a
        foreign dtype."""
        if name not in self._file_of:
            raise CheckpointError(f"the checkpoint has no tensor {name}")
        path = self._file_of[name]
        tensor = self._open(path).get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{name} in {path.name} has shape {tuple(tensor.shape)}, the config wants {shape}"
            )
        wanted = dtype or self._dtype
        if tensor.dtype == torch.float8_e4m3fn:
            tensor = self._from_blocks(name, tensor)
        if tensor.dtype != wanted and not (tensor.is_floating_point() and wanted.is_floating_point):
            raise CheckpointError(f"{name} in {path.name} is {tensor.dtype}, not {wanted}")
        return tensor.to(self._device, wanted)

    def _from_blocks(self, name: str, tensor: Tensor) -> Tensor:
        """fp8 in square blocks, each with a scale -> fp32 on the device, where it is faster and
        only a quarter of the bytes has to go. Errors: CheckpointError without scales or with
        another number of them."""
        scale_name = f"{name}_scale_inv"
        if scale_name not in self._file_of:
            raise CheckpointError(f"{name} is fp8, and there is no {scale_name}")
        scales = self._open(self._file_of[scale_name]).get_tensor(scale_name).float()
        if tuple(scales.shape) != tuple(-(-size // FP8_BLOCK) for size in tensor.shape):
            raise CheckpointError(
                f"{scale_name} has shape {tuple(scales.shape)}, {name} {tuple(tensor.shape)} in "
                f"blocks of {FP8_BLOCK}"
            )
        scales = scales.to(self._device)
        for axis, size in enumerate(tensor.shape):
            scales = scales.repeat_interleave(FP8_BLOCK, axis).narrow(axis, 0, size)
        return tensor.to(self._device).float() * scales

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            try:
                self._files[path] = safe_open(str(path), framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} is not readable: {error}") from None
        return self._files[path]

    def _list_names(self, folder: Path) -> dict[str, Path]:
        # The one file first, as transformers looks: an index beside it is a former save's.
        single = folder / "model.safetensors"
        if single.is_file():
            return {name: single for name in self._open(single).keys()}  # noqa: SIM118
        index = folder / "model.safetensors.index.json"
        if index.exists():
            files = read_json(index).get("weight_map", {})
            missing = {f for f in files.values() if not (folder / f).is_file()}
            if missing:
                raise CheckpointError(f"{index} names files that are not there: {sorted(missing)}")
            return {name: folder / file for name, file in files.items()}
        raise CheckpointError(
            f"{folder} holds neither model.safetensors nor model.safetensors.index.json"
        )


class RandomReader:
    """Values drawn in place on the device from (seed, tensor name): full-size shapes need no file.

    Norms are 1, embeddings normal(0, 8), the head normal(0, 0.01), MXFP4 codes uniform with scales
    2^-8 and 2^-7 (so that weights have a deviation near 0.02), everything else normal(0, 0.02):
    routing is then near-uniform, as it is in trained models. Also as there, a layer adds a small
    part to the residual: with embeddings of deviation 1 it would add as much as the token itself
    has, and layers would multiply bf16's rounding until every sixth greedy token differs from
    fp32's by more than 0.25 logit (tests/bench/LOG.md).
    """

    def __init__(self, seed: int, device: torch.device, dtype: torch.dtype) -> None:
        self._seed, self._device, self._dtype = seed, device, dtype

    def has(self, name: str) -> bool:
        """A seed holds every name."""
        return True

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """The tensor that this seed gives this name; the same whatever else was read before."""
        wanted = dtype or self._dtype
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        generator = torch.Generator(self._device).manual_seed(
            int.from_bytes(digest[:8], "little") >> 1
        )
        if wanted == torch.uint8:
            low, high = (119, 121) if name.endswith("_scales") else (0, 256)
            return torch.randint(
                low, high, shape, generator=generator, device=self._device, dtype=torch.uint8
            )
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=self._device, dtype=wanted)
        std = next((std for end, std in STDS.items() if name.endswith(end)), OTHER_STD)
        return torch.empty(shape, device=self._device, dtype=wanted).normal_(
            0, std, generator=generator
        )
