"""Tile sizes: a pure function of the op, the shape and the GPU's name. Tested without a GPU.

The numbers stand in tiles/*.json, one file a GPU name, default.json for all others; `python -m
kernels.tune` writes such a file. Row counts are rounded up to a power of two first: whoever has run
a model once with each power of two of tokens has compiled all that any other count will use. Not
here: any kernel.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from math import log2
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent / "tiles"
KEYS = ("rows", "out", "in")
OPS = (
    "moe_gemm", "moe_gemm_mxfp4", "moe_gemm_packed", "lora_shrink", "lora_expand", "decode_shrink",
    "decode_expand", "linear_dot", "linear_sum",
)  # fmt: skip
# Those whose block_n is a side of a tensor core's product, which has 16 at least.
DOTS = ("moe_gemm", "moe_gemm_mxfp4", "moe_gemm_packed", "lora_expand", "linear_dot")
# The key of a file that says how its numbers were measured; no op.
MEASURED = "measured"
# The largest rank that the LoRA kernels are tested with.
MAX_LORA_RANK = 256
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
    if op in _forced:
        return _forced[op]
    return _nearest(op, power_of_two(shape["rows"]), shape["out"], shape["in"], gpu)


_forced: dict[str, Tiles] = {}


@contextmanager
def force_tiles(tiles: Mapping[str, Tiles]) -> Iterator[None]:
    """Within: `tiles_for` gives these for the ops named, whatever the shape. To measure them."""
    before = dict(_forced)
    _forced.update(tiles)
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)


def check_start(gpu: str, max_lora_rank: int) -> None:
    """What must be refused before a model is loaded, not at its first request.

    Errors:  ValueError for a file of tiles that is not valid (names it, the op and the entry), and
             for a rank above what the kernels serve.
    """
    load_tiles(gpu)
    if max_lora_rank > MAX_LORA_RANK:
        raise ValueError(
            f"max_lora_rank {max_lora_rank} is above {MAX_LORA_RANK}, what the LoRA kernels serve"
        )


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
    path = FOLDER / file_name(gpu)
    if not path.is_file():
        path = FOLDER / file_name("")
    return parse_tiles(read_json(path), path.name)


def file_name(gpu: str) -> str:
    """Of the file that holds this GPU's tiles."""
    return f"{gpu.replace(' ', '_') or 'default'}.json"


def read_json(path: Path) -> Any:
    """A file's content. Errors: ValueError that names the file if it is no JSON."""
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error


def parse_tiles(
    raw: Mapping[str, Any], source: str
) -> dict[str, tuple[tuple[tuple[int, ...], Tiles], ...]]:
    """Check one file's content.

    Errors: ValueError that names the file, the op and the entry at fault.
    """
    if not isinstance(raw, dict):
        raise ValueError(f"{source}: must hold an object of ops, not {type(raw).__name__}")
    missing = set(OPS) - set(raw)
    unknown = set(raw) - {*OPS, MEASURED}
    if missing or unknown:
        raise ValueError(f"{source}: missing ops {sorted(missing)}, unknown {sorted(unknown)}")
    return {op: tuple(_entry(raw[op], i, op, source) for i in range(_count(raw, op, source)))
            for op in OPS}  # fmt: skip


def _count(raw: Mapping[str, Any], op: str, source: str) -> int:
    if not isinstance(raw[op], list) or not raw[op]:
        raise ValueError(f"{source}: {op} must be a list with at least one entry")
    return len(raw[op])


def _entry(
    entries: list[dict[str, int]], i: int, op: str, source: str
) -> tuple[tuple[int, ...], Tiles]:
    where = f"{source}: {op}"
    try:
        entry = dict(entries[i])
        key = tuple(entry.pop(k) for k in KEYS)
        if any(type(k) is not int or k < 1 for k in key):
            raise ValueError(f"{KEYS} must be positive integers, not {key}")
        tiles = Tiles(**entry)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where}[{i}]: {error}") from error
    if op in DOTS and tiles.block_n < 16:
        raise ValueError(f"{where}[{i}]: block_n must be at least 16, not {tiles.block_n}")
    if tiles.shared_bytes(16) > SHARED_BYTES:
        raise ValueError(f"{where}[{i}]: needs {tiles.shared_bytes(16)} bytes of shared memory")
    return key, tiles


@lru_cache(maxsize=16)
def gpu_name(device: torch.device) -> str:
    """The device's name for `tiles_for`; "" on a CPU (the interpreter)."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""
