"""LoRA for decode steps: y += (x A) B for few rows, by a pair of kernels that overlap.

Each row goes by itself, cut into many small programs of few warps that read 4 to 16 KiB of a factor
in one go; rows that share a factor meet in the L2. The shrink writes partial sums, which the expand
adds up in a fixed order: nothing is zeroed before, nothing is atomic, and the result is the same
every time. On GPUs that can, the expand starts while the shrink runs: it looks up its factor and
has B and y in registers by the time it needs z (programmatic dependent launch).
Not here: prefill, large ranks (fused_moe_lora.py, the four operations), and who calls which
(moe_lora, dense_lora).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.lora_tables import LoraTables
from kernels.op import AotSpec
from kernels.tiling import gpu_name, tiles_for

MAX_TARGETS = 3
# One tile holds all rank lanes.
MAX_RANK = 64
# With rows spread over eight adapters the four operations lost at every size measured: up to 128
# pairs and 32 tokens. The more rows share a factor, the more grouping them is worth its worklist.
MAX_PAIRS = 128
MAX_TOKENS = 64
UNSPECIALISED = ("target_0", "target_1", "target_2", "num_rows")


@dataclass(frozen=True)
class DecodeTiles:
    """block_k values of x a shrink program, block_n values of y an expand program."""

    block_k: int
    block_n: int
    shrink_warps: int = 1
    expand_warps: int = 1


def decode_tiles(num_rows: int, in_: int, out: int, max_rank: int, gpu: str) -> DecodeTiles:
    """Small programs of few warps: waiting for each other costs more than more lanes help.

    out  of the widest target;  gpu  as in `tiles_for`
    """
    shrink = tiles_for("decode_shrink", {"rows": num_rows, "out": max_rank, "in": in_}, gpu)
    expand = tiles_for("decode_expand", {"rows": num_rows, "out": out, "in": max_rank}, gpu)
    return DecodeTiles(shrink.block_k, expand.block_n, shrink.num_warps, expand.num_warps)


def pairs_suffice(num_rows: int, tables: LoraTables) -> bool:
    """Whether (token, expert) rows need no worklist: `add_pairs` serves so many."""
    return num_rows <= MAX_PAIRS and tables.max_rank <= MAX_RANK


def tokens_suffice(num_tokens: int, tables: LoraTables) -> bool:
    """The same for the rows of plain linears."""
    return num_tokens <= MAX_TOKENS and tables.max_rank <= MAX_RANK


@lru_cache(maxsize=16)
def can_overlap(device: torch.device) -> bool:
    """Whether the device knows programmatic dependent launches."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


def add_rows(
    ys: tuple[Tensor, ...], x: Tensor, tables: LoraTables, targets: tuple[int, ...],
    slots: Tensor, tiles: DecodeTiles | None = None, overlap: bool | None = None,
) -> None:  # fmt: skip
    """Add to each row its slot's delta, for up to three linears that share x.

    Shapes:  ys[i] [T, out_i], any row stride (written);  x [T, in];
             slots [T] int32, -1 = base
    tiles, overlap  for benchmarks; None = chosen here
    """
    _launch(ys, x, tables, targets, slots, None, 1, 0, None, tiles, overlap)


def add_pairs(
    y: Tensor, x: Tensor, tables: LoraTables, target: int, ids: Tensor, slots: Tensor,
    num_experts: int, x_rows_per_pair: bool, weights: Tensor | None,
    tiles: DecodeTiles | None = None, overlap: bool | None = None,
) -> None:  # fmt: skip
    """Add to each (token, expert) row the delta of the token's slot for that expert.

    Shapes:  as moe_lora
    Left out: slots outside 0..L - 1, experts outside 0..num_experts - 1.
    """
    top_k = ids.shape[1]
    assert num_experts > 0, "pairs need the number of experts"
    _launch(
        (y,), x, tables, (target,), slots, ids.contiguous(), 1 if x_rows_per_pair else top_k,
        num_experts, weights, tiles, overlap,
    )  # fmt: skip


def _launch(
    ys: tuple[Tensor, ...], x: Tensor, tables: LoraTables, targets: tuple[int, ...],
    slots: Tensor, ids: Tensor | None, x_div: int, num_experts: int, weights: Tensor | None,
    tiles: DecodeTiles | None, overlap: bool | None,
) -> None:  # fmt: skip
    num_rows = slots.shape[0] if ids is None else ids.numel()
    top_k = 1 if ids is None else ids.shape[1]
    num_targets, in_, max_rank = len(targets), x.shape[1], tables.max_rank
    assert 1 <= num_targets <= MAX_TARGETS and num_targets == len(ys), (num_targets, len(ys))
    assert x.dtype == tables.memory.dtype, (x.dtype, tables.memory.dtype)
    assert x.stride(1) == 1 and all(y.stride(1) == 1 for y in ys), "columns must lie side by side"
    assert max_rank <= MAX_RANK and slots.is_contiguous(), (max_rank, slots.stride())
    if not num_rows:
        return
    out = max(y.shape[1] for y in ys)
    tiles = tiles or decode_tiles(num_rows, in_, out, max_rank, gpu_name(x.device))
    if overlap is None:
        overlap = can_overlap(x.device)
    splits = triton.cdiv(in_, tiles.block_k)
    z = torch.empty(
        num_targets, splits, num_rows, max_rank, dtype=torch.float32, device=x.device
    )  # [targets, S, N, R]
    three = (*targets, *(targets[:1] * (MAX_TARGETS - num_targets)))
    form = {
        "TOP_K": top_k, "BY_EXPERT": ids is not None,
        "BLOCK_R": triton.next_power_of_2(max_rank), "SPLITS": splits, "OVERLAP": overlap,
    }  # fmt: skip
    sources = (slots, slots if ids is None else ids)
    # Only where it is known: other backends refuse the option.
    early = {"launch_pdl": True} if overlap else {}
    _shrink_kernel[(num_rows * splits, num_targets)](
        x, z, tables.memory, tables.a_off, tables.a_stride, tables.b_off, tables.lora_rank,
        *sources, *three, tables.num_slots, num_experts, num_rows, x.stride(0), in_, max_rank,
        **form, X_DIV=x_div, BLOCK_K=tiles.block_k, EVEN_K=in_ % tiles.block_k == 0,
        num_warps=tiles.shrink_warps,
    )  # fmt: skip
    places = (*ys, *(ys[:1] * (MAX_TARGETS - num_targets)))
    _expand_kernel[(num_rows * triton.cdiv(out, tiles.block_n), num_targets)](
        z, *places, tables.memory, tables.a_off, tables.b_off, tables.b_stride, tables.lora_rank,
        weights if weights is not None else z, *sources, *three, tables.num_slots, num_experts,
        num_rows, *(y.stride(0) for y in places), *(y.shape[1] for y in places), out, max_rank,
        **form, NUM_TARGETS=num_targets, WEIGHTED=weights is not None, BLOCK_N=tiles.block_n,
        BLOCK_S=triton.next_power_of_2(splits),
        num_warps=tiles.expand_warps, **early,
    )  # fmt: skip


@triton.jit
def _pick(index, first, second, third):
    return tl.where(index == 0, first, tl.where(index == 1, second, third))


@triton.jit
def _source(
    row, slots_ptr, ids_ptr, num_slots, num_experts, TOP_K: tl.constexpr, BY_EXPERT: tl.constexpr
):
    """(slot, expert, whether there may be a delta) of a row."""
    slot = tl.load(slots_ptr + row // TOP_K)
    expert = tl.zeros_like(slot)
    live = (slot >= 0) & (slot < num_slots)
    if BY_EXPERT:
        expert = tl.load(ids_ptr + row)
        live = live & (expert >= 0) & (expert < num_experts)
    return slot, expert.to(tl.int64), live


@triton.jit
def _factor(off_ptr, stride_ptr, other_ptr, rank_ptr, expert, live, max_rank):
    """(where the expert's factor starts, its rank); start < 0: nothing to add.

    One branch hangs on all of it, so that the four loads travel together.
    """
    # Factors start on 16 bytes and a rank is a multiple of 8. Unless the compiler is told so, and
    # keeps it through the select, it reads them two bytes at a time.
    off, stride = tl.multiple_of(tl.load(off_ptr), 8), tl.multiple_of(tl.load(stride_ptr), 8)
    other = tl.load(other_ptr)
    # Lanes past the adapter's own rank lie in the next expert's rows, or in another adapter.
    rank = tl.minimum(tl.load(rank_ptr), max_rank)
    none = ~live | (off < 0) | (other < 0) | (rank <= 0)
    return tl.where(none, -8, off + expert * stride), rank


@triton.jit(do_not_specialize=UNSPECIALISED)
def _shrink_kernel(
    x_ptr, z_ptr, memory_ptr, a_off_ptr, a_stride_ptr, b_off_ptr, rank_ptr,
    slots_ptr, ids_ptr, target_0, target_1, target_2, num_slots, num_experts, num_rows,
    x_stride, in_features, max_rank,
    X_DIV: tl.constexpr, TOP_K: tl.constexpr, BY_EXPERT: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, EVEN_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        # The expand may come as soon as all of this grid is under way.
        gdc_launch_dependents()
    part = tl.program_id(1)
    row = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    slot, expert, live = _source(row, slots_ptr, ids_ptr, num_slots, num_experts, TOP_K, BY_EXPERT)
    at = _pick(part, target_0, target_1, target_2) * num_slots + tl.maximum(slot, 0)
    start, rank = _factor(
        a_off_ptr + at, a_stride_ptr + at, b_off_ptr + at, rank_ptr + at, expert, live, max_rank
    )
    if start < 0:
        return
    r = tl.arange(0, BLOCK_R)
    k = split * BLOCK_K + tl.arange(0, BLOCK_K)
    r_live = r < rank
    r_kept = r < max_rank  # the others get zeros: so wide stores and loads of z are possible
    k_live = k < in_features
    a_ptr = memory_ptr + start
    z_row = (part * SPLITS + split).to(tl.int64) * num_rows
    row = row.to(tl.int64)
    a_ptrs = a_ptr + r.to(tl.int64)[:, None] * in_features + k[None, :]
    x_ptrs = x_ptr + row // X_DIV * x_stride + k
    if EVEN_K:
        a = tl.load(a_ptrs, mask=r_live[:, None], other=0.0)
        x = tl.load(x_ptrs)
    else:
        a = tl.load(a_ptrs, mask=r_live[:, None] & k_live[None, :], other=0.0)
        x = tl.load(x_ptrs, mask=k_live, other=0.0)
    z = tl.sum(a.to(tl.float32) * x.to(tl.float32)[None, :], 1)
    tl.store(z_ptr + (z_row + row) * max_rank + r, z, mask=r_kept)


@triton.jit(do_not_specialize=UNSPECIALISED)
def _expand_kernel(
    z_ptr, y_0_ptr, y_1_ptr, y_2_ptr, memory_ptr, a_off_ptr, b_off_ptr, b_stride_ptr, rank_ptr,
    weights_ptr, slots_ptr, ids_ptr, target_0, target_1, target_2, num_slots, num_experts,
    num_rows, y_0_stride, y_1_stride, y_2_stride, out_0, out_1, out_2, max_out, max_rank,
    NUM_TARGETS: tl.constexpr, WEIGHTED: tl.constexpr, TOP_K: tl.constexpr,
    BY_EXPERT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # Up to the wait nothing may be read that the shrink writes. Everything before the shrink is
    # over: that one is launched in the ordinary way.
    part = tl.program_id(1)
    num_n = tl.cdiv(max_out, BLOCK_N)
    row = tl.program_id(0) // num_n
    first_n = tl.program_id(0) % num_n * BLOCK_N
    n = first_n + tl.arange(0, BLOCK_N)
    slot, expert, live = _source(row, slots_ptr, ids_ptr, num_slots, num_experts, TOP_K, BY_EXPERT)
    y_ptr, y_stride, out_features, target = y_0_ptr, y_0_stride, out_0, target_0
    if NUM_TARGETS > 1:
        y_stride = _pick(part, y_0_stride, y_1_stride, y_2_stride)
        out_features = _pick(part, out_0, out_1, out_2)
        target = _pick(part, target_0, target_1, target_2)
        if part == 1:
            y_ptr = y_1_ptr
        elif part == 2:
            y_ptr = y_2_ptr
    n_live = n < out_features
    if first_n >= out_features:
        return
    at = target * num_slots + tl.maximum(slot, 0)
    start, rank = _factor(
        b_off_ptr + at, b_stride_ptr + at, a_off_ptr + at, rank_ptr + at, expert, live, max_rank
    )
    if start < 0:
        return
    r = tl.arange(0, BLOCK_R)
    r_live = r < rank
    r_kept = r < max_rank
    b = tl.load(
        memory_ptr + start
        + r.to(tl.int64)[:, None] * out_features + n[None, :],
        mask=r_live[:, None] & n_live[None, :],
        other=0.0,
    )  # fmt: skip
    s = tl.arange(0, BLOCK_S)
    z_row = (part * SPLITS).to(tl.int64) * num_rows
    row = row.to(tl.int64)
    y_ptrs = y_ptr + row * y_stride + n
    y = tl.load(y_ptrs, mask=n_live, other=0.0)
    weight = 1.0
    if WEIGHTED:
        weight = tl.load(weights_ptr + row)
    z_ptrs = z_ptr + (z_row + row + s.to(tl.int64) * num_rows)[:, None] * max_rank + r[None, :]
    z_mask = (s < SPLITS)[:, None] & r_kept[None, :]
    if OVERLAP:
        gdc_wait()
    # Past the L1, which may be older than what the shrink wrote while this program ran.
    z = tl.sum(tl.load(z_ptrs, mask=z_mask, other=0.0, cache_modifier=".cg"), 0)
    acc = tl.sum(z[:, None] * b.to(tl.float32), 0)
    if WEIGHTED:
        acc *= weight
    acc += y.to(tl.float32)
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=n_live)


def aot_specs(
    name: str, num_rows: int, in_: int, outs: tuple[int, ...], max_rank: int, top_k: int,
    x_div: int, weighted: bool, tiles: DecodeTiles | None = None,
) -> Iterator[AotSpec]:  # fmt: skip
    """The two compilations that one call uses on an H200. top_k 0: a plain linear."""
    tiles = tiles or decode_tiles(num_rows, in_, max(outs), max_rank, "NVIDIA H200")
    form = {
        "TOP_K": max(1, top_k), "BY_EXPERT": top_k > 0,
        "BLOCK_R": triton.next_power_of_2(max_rank), "SPLITS": triton.cdiv(in_, tiles.block_k),
        "OVERLAP": True,
    }  # fmt: skip
    shrink = {"X_DIV": x_div, "BLOCK_K": tiles.block_k, "EVEN_K": in_ % tiles.block_k == 0}
    expand = {"NUM_TARGETS": len(outs), "WEIGHTED": weighted, "BLOCK_N": tiles.block_n}
    expand["BLOCK_S"] = triton.next_power_of_2(form["SPLITS"])
    yield _spec(f"{name}_shrink", _shrink_kernel, form | shrink, tiles.shrink_warps)
    yield _spec(f"{name}_expand", _expand_kernel, form | expand, tiles.expand_warps)


def _spec(name: str, fn: triton.JITFunction, constants: dict[str, object], warps: int) -> AotSpec:
    loose = dict.fromkeys(("num_slots", "num_experts", *UNSPECIALISED), "i32")
    numbers = ("rank_ptr", "slots_ptr", "ids_ptr")
    wide = dict.fromkeys(("a_off_ptr", "b_off_ptr", "a_stride_ptr", "b_stride_ptr"), "*i64")
    types = loose | dict.fromkeys(numbers, "*i32") | wide
    types |= dict.fromkeys(("z_ptr", "weights_ptr"), "*fp32")
    signature = {
        n: types.get(n, "*bf16" if n.endswith("_ptr") else "i32:16")
        for n in fn.arg_names
        if n not in constants
    }
    return AotSpec(name, fn, signature, constants, num_warps=warps, num_stages=1)
