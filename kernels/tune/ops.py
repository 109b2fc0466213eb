"""`TUNED`: what can be tuned, one entry an op of the tiles folder. The command and its tests run
over it.

To add an op: its candidates as a function of a problem, and a line below (problems.py and inputs.py
where it needs problems or tensors of a new kind).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from triton import cdiv, next_power_of_2

from kernels.skinny_linear import SUM_BLOCK_T
from kernels.tiling import BLOCK_MS, SHARED_BYTES, Tiles, power_of_two
from kernels.tune.inputs import Batch, make_linear, make_lora, make_products
from kernels.tune.problems import (
    Key,
    ModelShape,
    Problem,
    base_products,
    expand_key,
    linear_products,
    lora_products,
    product_key,
    shrink_key,
)

# Values of a tile that one thread may hold in registers.
MAX_VALUES = 256
# Parts of a sum that the decode expand adds up, of all rank lanes at once.
MAX_SPLITS = 64
# More programs than these gain nothing from parts of a sum: the GPU is full.
MAX_PROGRAMS = 528


@dataclass(frozen=True)
class TunedOp:
    """One op of the tiles folder.

    problems    of a model and ranks;  key  what the file is looked up by
    candidates  tiles to try (what the file has now is always tried as well)
    make        (problem, device, filled) -> its calls. Ops with the same `make` share a batch: when
                one is measured, those before it have the best tiles found.
    """

    name: str
    problems: Callable[[ModelShape, Sequence[int]], Iterable[Problem]]
    key: Callable[[Problem], Key]
    candidates: Callable[[Problem], Iterable[Tiles]]
    make: Callable[[Problem, torch.device, bool], Batch]


# (block_n, warps, stages) and group_m, by the rows of a tile: up to 16, up to 64, more.
_Sizes = tuple[tuple[tuple[int, int, int], ...], tuple[int, ...]]
_DENSE_FEW: _Sizes = (((32, 4, 4), (32, 4, 5), (64, 4, 3), (64, 4, 4), (128, 4, 3)), (1,))
_DENSE_SOME: _Sizes = (((64, 4, 3), (64, 4, 4), (128, 4, 3), (128, 8, 4)), (4,))
_DENSE: _Sizes = (((128, 8, 3), (128, 8, 4), (128, 4, 3), (256, 8, 3)), (4, 8))


def dense_candidates(p: Problem) -> Iterator[Tiles]:
    """Grouped products of bf16 weights."""
    block_k = [k for k in (64, 128) if p.in_ % k == 0] or [64]
    sizes, groups = _DENSE_FEW if p.block_m <= 16 else _DENSE_SOME if p.block_m <= 64 else _DENSE
    for block_n, warps, stages in sizes:
        for k in block_k if block_n < 256 else block_k[:1]:
            for group in groups if stages == 3 else groups[:1]:
                tiles = Tiles(block_n, k, 1, group, warps, stages)
                # The file may give them to a model with fewer experts: taller tiles.
                if tiles.shared_bytes(BLOCK_MS[-1]) <= SHARED_BYTES:
                    yield tiles


def packed_candidates(p: Problem) -> Iterator[Tiles]:
    """Grouped products of packed MXFP4 weights (its chunk takes block_k's place)."""
    if p.block_m <= 16:
        # Eight rows a tile, or the worklist's.
        for block_m in (8,) if p.block_m <= 8 else (8, BLOCK_MS[-1]):
            for block_n, warps, stages, registers in (
                (64, 4, 3, 0), (64, 2, 3, 168), (64, 2, 4, 168), (128, 4, 3, 0), (128, 4, 3, 168),
            ):  # fmt: skip
                yield Tiles(block_n, 64, 1, 1, warps, stages, block_m, registers)
        for split in (2, 4) if p.rows <= 8 else ():
            yield Tiles(64, split_k=split, block_m=8)
            yield Tiles(128, split_k=split, block_m=8)
        return
    for group in (1, 4, 8):
        yield Tiles(128, group_m=group, num_warps=8, num_stages=3)
    yield Tiles(128, group_m=4, num_warps=8, num_stages=2)
    yield Tiles(128, group_m=4, num_warps=8, num_stages=2, block_m=64)
    yield Tiles(128, group_m=4, num_warps=8, num_stages=3, block_m=64)
    yield Tiles(256, group_m=4, num_warps=8, num_stages=3, block_m=64)
    yield Tiles(64, group_m=4, num_warps=4, num_stages=3)


# (block_n, block_k, warps, stages) by the rows: up to 16, more.
_DOT_FEW = (
    (64, 64, 4, 8), (64, 128, 4, 4), (32, 128, 4, 6), (32, 128, 2, 6), (32, 64, 2, 8),
    (16, 128, 1, 8),
)  # fmt: skip
_DOT_MORE = (
    (64, 64, 4, 8), (64, 128, 4, 4), (128, 64, 8, 4), (128, 128, 8, 3), (32, 128, 4, 4),
    (32, 64, 4, 4),
)  # fmt: skip


def dot_candidates(p: Problem) -> Iterator[Tiles]:
    """Plain linears of few rows: parts of K side by side where the columns are few."""
    for block_n, block_k, warps, stages in _DOT_FEW if p.rows <= 16 else _DOT_MORE:
        for split in (1, 2, 3, 4, 8):
            enough = cdiv(p.in_, block_k) >= 4 * split
            if split == 1 or (enough and cdiv(p.outs[0], block_n) * split <= MAX_PROGRAMS):
                yield Tiles(block_n, block_k, split, 1, warps, stages)


def sum_candidates(p: Problem) -> Iterator[Tiles]:
    """The same of a token or two, and routers: whole rows of weights in registers."""
    rows = min(SUM_BLOCK_T, power_of_two(p.rows))
    for block_n in (1, 2) if p.product == "router" else (1, 2, 4, 8):
        for block_k in (512, 1024, 2048, 4096):
            for warps in (4, 8):
                values = block_n * block_k // (32 * warps)
                if block_k < 2 * p.in_ and 16 <= values <= 64 and rows * values <= MAX_VALUES // 2:
                    yield Tiles(block_n, block_k, num_warps=warps, num_stages=1)


def shrink_candidates(p: Problem) -> Iterator[Tiles]:
    """x A for rows grouped by adapter: the smaller the batch, the more parts of K side by side."""
    wanted = (4, 8, 16, 32) if p.rows <= 256 else (1, 4, 16) if p.rows <= 2048 else (1, 2, 4)
    for block_k in [k for k in (64, 128) if p.in_ % k == 0] or [64]:
        steps = cdiv(p.in_, block_k)
        splits = [s for s in range(1, min(steps, 64) + 1) if steps % s == 0]
        near = {min(splits, key=lambda s: abs(s - want)) for want in wanted}
        for split in sorted(near):
            for warps, stages in ((4, 3), (4, 4)) if block_k == 64 else ((4, 3),):
                yield Tiles(64, block_k, split, 8, warps, stages)


def expand_candidates(p: Problem) -> Iterator[Tiles]:
    """(x A) B for rows grouped by adapter: the reduction is the rank, in one go."""
    few = ((64, 2), (64, 4), (128, 4), (256, 8))
    many = ((64, 4), (128, 4), (128, 8), (256, 8))
    for block_n, warps in few if p.block_m <= 16 else many:
        yield Tiles(block_n, num_warps=warps, num_stages=1)


def decode_shrink_candidates(p: Problem) -> Iterator[Tiles]:
    """One row of x by a slice of A."""
    lanes = next_power_of_2(p.lora_rank)
    for block_k in (64, 128, 256, 512, 1024):
        if not 4 <= cdiv(p.in_, block_k) <= MAX_SPLITS:
            continue
        for warps in (1, 2, 4, 8):
            if 16 <= block_k * lanes // (32 * warps) <= MAX_VALUES:
                yield Tiles(64, block_k, num_warps=warps, num_stages=1)


def decode_expand_candidates(p: Problem) -> Iterator[Tiles]:
    """One row's z by a slice of B."""
    lanes = next_power_of_2(p.lora_rank)
    for block_n in (32, 64, 128, 256):
        for warps in (1, 2, 4):
            # No fewer than four values a thread.
            if 4 <= block_n * lanes // (32 * warps) <= MAX_VALUES // 2:
                yield Tiles(block_n, num_warps=warps, num_stages=1)


_four = partial(make_lora, decode=False)
_rows = partial(make_lora, decode=True)
TUNED = (
    TunedOp(
        "moe_gemm_packed", lambda shape, _: base_products(shape, "packed"), product_key,
        packed_candidates, make_products,
    ),
    TunedOp(
        "moe_gemm", lambda shape, _: base_products(shape, "dense"), product_key, dense_candidates,
        make_products,
    ),
    TunedOp(
        "linear_dot", lambda shape, _: linear_products(shape, "linear_dot"), product_key,
        dot_candidates, make_linear,
    ),
    TunedOp(
        "linear_sum", lambda shape, _: linear_products(shape, "linear_sum"), product_key,
        sum_candidates, make_linear,
    ),
    TunedOp(
        "decode_shrink", partial(lora_products, decode=True), shrink_key,
        decode_shrink_candidates, _rows,
    ),
    TunedOp(
        "decode_expand", partial(lora_products, decode=True), expand_key,
        decode_expand_candidates, _rows,
    ),
    TunedOp(
        "lora_shrink", partial(lora_products, decode=False), shrink_key, shrink_candidates, _four
    ),
    TunedOp(
        "lora_expand", partial(lora_products, decode=False), expand_key, expand_candidates, _four
    ),
)  # fmt: skip
