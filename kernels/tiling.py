"""Tile sizes: a pure function of the op, the shape and the GPU's name. Tested without a GPU.

The numbers stand in tiles/*.json, one file a GPU name, default.json for all others. Row counts are
rounded up to a power of two first: whoever has run a model once with each power of two of tokens
has compiled all that any other count will use. Not here: any kernel.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import log2
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent / "tiles"
KEYS = ("rows", "out", "in")
OPS = (
    "moe_gemm", "moe_gemm_mxfp4", "moe_gemm_packed", "lora_shrink", "lora_expand", "linear_dot",
    "linear_sum",
)  # fmt: skip
BLOCK_MS = (16, 32, 64, 128)
# What a block may use on the smallest chip that we compile for (sm_90: 227 KiB).
SHARED_BYTES = 227 * 1024


@dataclass(frozen=True)
class Tiles:
    """One launch's sizes. split_k and group_m are 1 where the op has no use for them.

    block_m        rows of a tile at most: only the packed product makes them fewer than the
                   worklist's
    max_registers  of a thread; 0 leaves it to the compiler
    """

    block_n: int = 64
    block_k: int = 64
    split_k: int = 1
    group_m: int = 1
    num_warps: int = 4
    num_stages: int = 3
    block_m: int = 128
    max_registers: int = 0

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n", "block_k", "num_warps"):
            value = getattr(self, name)
            if type(value) is not int or value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, not {value!r}")
        for name, top in (("split_k", 64), ("group_m", 64), ("num_stages", 8), ("num_warps", 16)):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= top:
                raise ValueError(f"{name} must be in 1..{top}, not {value!r}")
        if self.max_registers and self.max_registers not in range(64, 256, 8):
            raise ValueError(f"max_registers: 0 or 64..248 in eights, not {self.max_registers!r}")
        if self.block_k < 32:
            raise ValueError(f"block_k must be at least 32, not {self.block_k}")

    def shared_bytes(self, block_m: int, itemsize: int = 2) -> int:
        """Shared memory that the pipelined operands of one program fill."""
        return (block_m + self.block_n) * self.block_k * itemsize * self.num_stages


def moe_block_m(num_tokens: int, top_k: int, num_experts: int) -> int:
    """Rows of one tile for all products of one MoE layer, base and LoRA.

    Near the mean rows an expert gets. Depends on the padded batch size and the model alone, never
    on adapters.
    """
    mean = power_of_two(num_tokens * top_k) / max(1, num_experts)
    return next((m for m in BLOCK_MS[:-1] if mean <= m), BLOCK_MS[-1])


def narrow_block_m(block_m: int, num_tokens: int) -> int:
    """The rows of block_m that a tile can fill: an expert has no more than there are tokens."""
    return min(block_m, max(8, power_of_two(num_tokens)))


def slot_block_m(num_tokens: int) -> int:
    """Rows of one tile for LoRA on plain linears: in a prefill one adapter has many."""
    return 16 if power_of_two(num_tokens) <= 256 else 64


def tiles_for(op: str, shape: Mapping[str, int], gpu: str) -> Tiles:
    """The tiles of the nearest key in the GPU's file.

    shape  rows, out, in;  gpu  as torch.cuda.get_device_name gives it ("" = default)
    Nearest: the least sum of |log2(wanted / key)| over the three, rows rounded up to a power of
    two; of equals the first in the file.
    Errors:  KeyError for an op that the file does not know.
    """
    return _nearest(op, power_of_two(shape["rows"]), shape["out"], shape["in"], gpu)


def power_of_two(n: int) -> int:
    """The next one from n up."""
    return 1 << max(0, n - 1).bit_length()


@lru_cache(maxsize=4096)
def _nearest(op: str, rows: int, out: int, in_: int, gpu: str) -> Tiles:
    entries = load_tiles(gpu)[op]
    want = (rows, out, in_)

    def distance(key: tuple[int, ...]) -> float:
        return sum(abs(log2(max(1, a) / b)) for a, b in zip(want, key, strict=True))

    return min(entries, key=lambda entry: distance(entry[0]))[1]


@lru_cache(maxsize=16)
def load_tiles(gpu: str) -> dict[str, tuple[tuple[tuple[int, ...], Tiles], ...]]:
    """op -> ((rows, out, in), tiles) entries of this GPU's file, default.json if it has none."""
    path = FOLDER / f"{gpu.replace(' ', '_')}.json"
    if not gpu or not path.is_file():
        path = FOLDER / "default.json"
    return parse_tiles(json.loads(path.read_text()), path.name)


def parse_tiles(
    raw: Mapping[str, Any], source: str
) -> dict[str, tuple[tuple[tuple[int, ...], Tiles], ...]]:
    """Check one file's content.

    Errors: ValueError that names the file, the op and the entry at fault.
    """
    missing = set(OPS) - set(raw)
    unknown = set(raw) - set(OPS)
    if missing or unknown:
        raise ValueError(f"{source}: missing ops {sorted(missing)}, unknown {sorted(unknown)}")
    return {op: tuple(_entry(raw[op], i, f"{source}: {op}") for i in range(_count(raw, op, source)))
            for op in OPS}  # fmt: skip


def _count(raw: Mapping[str, Any], op: str, source: str) -> int:
    if not isinstance(raw[op], list) or not raw[op]:
        raise ValueError(f"{source}: {op} must be a list with at least one entry")
    return len(raw[op])


def _entry(entries: list[dict[str, int]], i: int, where: str) -> tuple[tuple[int, ...], Tiles]:
    entry = dict(entries[i])
    try:
        key = tuple(entry.pop(k) for k in KEYS)
        if any(type(k) is not int or k < 1 for k in key):
            raise ValueError(f"{KEYS} must be positive integers, not {key}")
        tiles = Tiles(**entry)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where}[{i}]: {error}") from error
    if tiles.shared_bytes(16) > SHARED_BYTES:
        raise ValueError(f"{where}[{i}]: needs {tiles.shared_bytes(16)} bytes of shared memory")
    return key, tiles


@lru_cache(maxsize=16)
def gpu_name(device: torch.device) -> str:
    """The device's name for `tiles_for`; "" on a CPU (the interpreter)."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""
