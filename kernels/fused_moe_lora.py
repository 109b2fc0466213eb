"""Adds each token's expert LoRA to the products of fused_moe.py: y += (x A) B, in four operations.

gate_up_shrink, gate_up_expand, down_shrink, down_expand are two kernels, each compiled for either
projection. An expand
writes straight into the base product's output. `add_lora` is the host half that dense_lora.py
shares.
Not here: the grouping of rows by (slot, expert) (worklist.py), the memory of the factors
(lora_tables.py).
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.lora_decode import add_pairs
from kernels.lora_decode import aot_specs as decode_aot_specs
from kernels.lora_tables import LoraTables, Worklist
from kernels.op import AotSpec, Case, Inputs, Op, require_contiguous, use_triton
from kernels.tiling import (
    MAX_LORA_RANK,
    Tiles,
    gpu_name,
    moe_block_m,
    power_of_two,
    tiles_for,
)
from kernels.worklist import build_worklist, slot_groups

MAX_TARGETS = 3
# Rank lanes of one tile; a larger rank takes several.
MAX_BLOCK_R = 64
# Targets, and every size that follows the token count: one compilation serves all their values.
UNSPECIALISED = ("target_0", "target_1", "target_2", "num_segments", "num_rows")
# CPU: up to this many rows of a slot their factors are gathered, above it it goes by expert.
GATHER_ROWS = 128


def moe_lora(
    y: Tensor, x: Tensor, tables: LoraTables, target: int, ids: Tensor, slot_of_token: Tensor,
    work: Worklist | None, x_rows_per_pair: bool, weights: Tensor | None,
    deterministic: bool = False, num_experts: int = 0, settled: bool = False,
) -> None:  # fmt: skip
    """Add to each (token, expert) row the delta of the token's adapter for that expert, in place.

    Shapes:  y [T·K, out] (written);  x [T, in], or [T·K, in] if x_rows_per_pair;
             ids [T, K] int32, -1 = no expert here;  slot_of_token [T] int32, -1 = base;
             weights [T, K] fp32 or None
    target   row of the tables
    work     pairs by (slot, expert): the four operations below. None: the kernels of
             lora_decode.py, which need none and serve as many rows as its `pairs_suffice` allows
             (on a CPU: made from the slots)
    num_experts  ids from here on have no expert either; must be given without work
    weights  the router weights, for down: y has them already, the delta gets them here, once
    settled  x, ids, slot_of_token and weights are older than the launch in front of this call
             (which then made y): without work they are read while that one still runs (overlap.py)
    deterministic: partial sums in a fixed order; else split-K adds them as they come (fp32).
    Rows of base tokens, of pairs without an expert, and of slots without this target keep all bits.
    Needs:   x and the tables' memory of one dtype, x not quantised.
    Cost:    reads each factor in use once per block_m of its rows.
    """
    if not use_triton(x):
        moe_lora_reference(
            y, x, tables, target, ids, slot_of_token, work, x_rows_per_pair, weights, deterministic,
            num_experts,
        )  # fmt: skip
        return
    if work is None:
        add_pairs(
            y, x, tables, target, ids, slot_of_token, num_experts, x_rows_per_pair, weights,
            settled=settled,
        )  # fmt: skip
        return
    x_div = 1 if x_rows_per_pair else ids.shape[1]
    add_lora((y,), x, tables, (target,), work, x_div, weights, deterministic)


def moe_lora_reference(
    y: Tensor, x: Tensor, tables: LoraTables, target: int, ids: Tensor, slot_of_token: Tensor,
    work: Worklist | None, x_rows_per_pair: bool, weights: Tensor | None,
    deterministic: bool = False, num_experts: int = 0,
) -> None:  # fmt: skip
    """The same in torch, slot by slot: factors of slots that are not in use are never read."""
    top_k = ids.shape[1]
    groups = None if work is None else work.groups
    if groups is None:
        groups = slot_groups(slot_of_token.cpu(), tables.num_slots, top_k)
    flat_ids = ids.flatten()  # [N]
    for slot, rows in groups:
        rows = rows.to(x.device)
        expert = flat_ids.index_select(0, rows)  # [n]
        if not len(rows):
            continue
        least, most = _range_of(expert)
        if least < 0 or 0 < num_experts <= most:
            is_here = (expert >= 0) & (expert < (num_experts or most + 1))  # [n]
            rows, expert = rows[is_here], expert[is_here]
            if not len(rows):
                continue
            most = _range_of(expert)[1]
        factors = slot_factors(tables, target, slot, x.shape[1], y.shape[1], most + 1, x.dtype)
        if factors is None:
            continue
        source = x.index_select(0, rows if x_rows_per_pair else rows // top_k)  # [n, in]
        delta = _expert_delta(source, *factors, expert)  # [n, out]
        if weights is not None:
            delta *= weights.view(-1, 1).index_select(0, rows).to(delta.dtype)
        y.index_add_(0, rows, delta)


def slot_factors(
    tables: LoraTables, target: int, slot: int, in_: int, out: int, num_experts: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """One slot's factors for the references (views where `dtype` is the memory's), or None where it
    has no delta.

    Shapes:  A [E or 1, r, in], B [E or 1, r, out]
    """

    def at(table: Tensor) -> int:
        # numpy reads one number four times as fast as torch does.
        return int(table[target, slot] if table.is_cuda else table.numpy()[target, slot])

    a_off, b_off, rank = at(tables.a_off), at(tables.b_off), at(tables.lora_rank)
    if a_off < 0 or b_off < 0 or rank <= 0:
        return None
    views = []
    for off, stride, width in (
        (a_off, at(tables.a_stride), in_),
        (b_off, at(tables.b_stride), out),
    ):
        shape = (num_experts if stride else 1, rank, width)
        start = tables.memory.storage_offset() + off
        views.append(tables.memory.as_strided(shape, (stride, width, 1), start).to(dtype))
    return views[0], views[1]


def _range_of(expert: Tensor) -> tuple[int, int]:
    """Least and largest of expert [n]."""
    if len(expert) <= GATHER_ROWS:
        listed = expert.tolist()  # faster than two reductions
        return min(listed), max(listed)
    least, most = torch.aminmax(expert)
    return int(least), int(most)


def _expert_delta(x: Tensor, a: Tensor, b: Tensor, expert: Tensor) -> Tensor:
    """Rows x [n, in] through the factors of their experts [n] -> [n, out]."""
    if len(expert) <= GATHER_ROWS:
        if len(a) == 1:
            z = x @ a[0].t()  # [n, r]
        else:
            z = torch.bmm(a.index_select(0, expert), x.unsqueeze(2)).squeeze(2)  # [n, r]
        if len(b) == 1:
            return z @ b[0]  # [n, out]
        return torch.bmm(z.unsqueeze(1), b.index_select(0, expert)).squeeze(1)  # [n, out]
    delta = x.new_empty(len(x), b.shape[2])  # [n, out]
    order = torch.sort(expert, stable=True).indices  # [n]
    for e, rows in enumerate(order.split(torch.bincount(expert).tolist())):
        if len(rows):
            z = x.index_select(0, rows) @ a[e if len(a) > 1 else 0].t()
            delta.index_copy_(0, rows, z @ b[e if len(b) > 1 else 0])
    return delta


def add_lora(
    ys: tuple[Tensor, ...], x: Tensor, tables: LoraTables, targets: tuple[int, ...],
    work: Worklist, x_div: int, weights: Tensor | None, deterministic: bool,
) -> None:  # fmt: skip
    """Launch a shrink and an expand for targets that share x: ys[i] += (x A_i) B_i.

    Shapes:  ys[i] [N, out_i], any row stride (written);  x [N / x_div, in];  weights [N] fp32 or
             None
    """
    num_rows, num_segments, num_targets = work.rows.shape[0], work.segments.shape[0], len(targets)
    assert 1 <= num_targets <= MAX_TARGETS and num_targets == len(ys), (num_targets, len(ys))
    assert x.dtype == tables.memory.dtype, (x.dtype, tables.memory.dtype)
    assert x.stride(1) == 1 and all(y.stride(1) == 1 for y in ys), "columns must lie side by side"
    require_contiguous(weights=weights)
    if not num_rows:
        return
    in_, max_rank, gpu = x.shape[1], tables.max_rank, gpu_name(x.device)
    lanes = power_of_two(max_rank)  # as tiles are looked up, and what a program holds at most
    block_r = min(MAX_BLOCK_R, max(16, lanes))
    shrink = tiles_for("lora_shrink", {"rows": num_rows, "out": lanes, "in": in_}, gpu)
    split_k = min(shrink.split_k, triton.cdiv(in_, shrink.block_k))
    atomic = split_k > 1 and not deterministic
    parts = split_k if deterministic else 1
    make = torch.zeros if atomic else torch.empty
    z = make(num_targets, parts, num_rows, max_rank, dtype=torch.float32, device=x.device)
    three = (*targets, *(targets[:1] * (MAX_TARGETS - num_targets)))
    grid = (num_segments * triton.cdiv(max_rank, block_r) * split_k, num_targets)
    _shrink_kernel[grid](
        x, z, tables.memory, tables.a_off, tables.a_stride, tables.b_off, tables.lora_rank,
        work.rows, work.segments, *three, tables.num_slots, num_segments, num_rows, x.stride(0),
        in_, max_rank, X_DIV=x_div, BLOCK_M=work.block_m, BLOCK_R=block_r, BLOCK_K=shrink.block_k,
        SPLIT_K=split_k, GROUP_M=shrink.group_m, EVEN_K=in_ % (shrink.block_k * split_k) == 0,
        ATOMIC=atomic, num_warps=shrink.num_warps, num_stages=shrink.num_stages,
    )  # fmt: skip
    out = max(y.shape[1] for y in ys)
    expand = tiles_for("lora_expand", {"rows": num_rows, "out": out, "in": lanes}, gpu)
    places = (*ys, *(ys[:1] * (MAX_TARGETS - num_targets)))
    _expand_kernel[(num_segments * triton.cdiv(out, expand.block_n), num_targets)](
        z, *places, tables.memory, tables.a_off, tables.b_off, tables.b_stride, tables.lora_rank,
        weights if weights is not None else z, work.rows, work.segments, *three, tables.num_slots,
        num_rows, *(y.stride(0) for y in places), *(y.shape[1] for y in places), out, max_rank,
        NUM_TARGETS=num_targets, WEIGHTED=weights is not None, PARTS=parts, BLOCK_M=work.block_m,
        BLOCK_R=block_r, BLOCK_N=expand.block_n,
        num_warps=_expand_warps(expand, work.block_m), num_stages=expand.num_stages,
    )  # fmt: skip


def _expand_warps(tiles: Tiles, block_m: int) -> int:
    """A tile of many rows takes four warps at least: Hopper's wide products are theirs, and fewer
    could not hold its sums in their registers. Files are measured with tiles of few rows too."""
    return max(tiles.num_warps, 4) if block_m > 16 else tiles.num_warps


@triton.jit
def _pick(index, first, second, third):
    return tl.where(index == 0, first, tl.where(index == 1, second, third))


@triton.jit(do_not_specialize=UNSPECIALISED)
def _shrink_kernel(
    x_ptr, z_ptr, memory_ptr, a_off_ptr, a_stride_ptr, b_off_ptr, rank_ptr, rows_ptr, segments_ptr,
    target_0, target_1, target_2, num_slots, num_segments, num_rows,
    x_stride, in_features, max_rank,
    X_DIV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr, GROUP_M: tl.constexpr, EVEN_K: tl.constexpr, ATOMIC: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    num_n = tl.cdiv(max_rank, BLOCK_R) * SPLIT_K
    pid = tl.program_id(0)
    group = pid // (GROUP_M * num_n)
    height = tl.minimum(num_segments - group * GROUP_M, GROUP_M)
    in_group = pid - group * GROUP_M * num_n
    segment = segments_ptr + (group * GROUP_M + in_group % height) * 4
    split = (in_group // height) % SPLIT_K
    r = (in_group // height) // SPLIT_K * BLOCK_R + tl.arange(0, BLOCK_R)
    count = tl.load(segment + 3)
    if count == 0:
        return
    slot = tl.load(segment)
    expert = tl.load(segment + 1).to(tl.int64)
    at = _pick(part, target_0, target_1, target_2) * num_slots + slot
    # Factors start on 16 bytes and a rank is a multiple of 8. Unless the compiler is told so, it
    # reads them two bytes at a time.
    a_off = tl.multiple_of(tl.load(a_off_ptr + at), 8)
    # Lanes past the adapter's own rank lie in the next expert's rows, or in another adapter.
    rank = tl.minimum(tl.load(rank_ptr + at), max_rank)
    r_live = r < rank
    if (a_off < 0) | (tl.load(b_off_ptr + at) < 0) | (tl.min(r, 0) >= rank):
        return
    a_ptr = memory_ptr + a_off + expert * tl.multiple_of(tl.load(a_stride_ptr + at), 8)
    m = tl.arange(0, BLOCK_M)
    live = m < count
    row = tl.load(rows_ptr + tl.load(segment + 2) + m, mask=live, other=0).to(tl.int64)
    x_ptrs = x_ptr + (row // X_DIV)[:, None] * x_stride
    a_ptrs = a_ptr + r.to(tl.int64)[None, :] * in_features
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    per_split = tl.cdiv(in_features, BLOCK_K * SPLIT_K) * BLOCK_K
    for start in range(0, per_split, BLOCK_K):
        k = split * per_split + start + tl.arange(0, BLOCK_K)
        if EVEN_K:
            x = tl.load(x_ptrs + k[None, :], mask=live[:, None], other=0.0)
            a = tl.load(a_ptrs + k[:, None], mask=r_live[None, :], other=0.0)
        else:
            k_live = k < in_features
            x = tl.load(x_ptrs + k[None, :], mask=live[:, None] & k_live[None, :], other=0.0)
            a = tl.load(a_ptrs + k[:, None], mask=r_live[None, :] & k_live[:, None], other=0.0)
        acc = tl.dot(x, a, acc, input_precision="ieee")
    z_row = row
    if ATOMIC or SPLIT_K == 1:
        z_row += part.to(tl.int64) * num_rows
    else:
        z_row += (part * SPLIT_K + split).to(tl.int64) * num_rows
    z_ptrs = z_ptr + z_row[:, None] * max_rank + r[None, :]
    mask = live[:, None] & r_live[None, :]
    if ATOMIC:
        tl.atomic_add(z_ptrs, acc, mask=mask, sem="relaxed")
    else:
        tl.store(z_ptrs, acc, mask=mask)


@triton.jit(do_not_specialize=UNSPECIALISED)
def _expand_kernel(
    z_ptr, y_0_ptr, y_1_ptr, y_2_ptr, memory_ptr, a_off_ptr, b_off_ptr, b_stride_ptr, rank_ptr,
    weights_ptr, rows_ptr, segments_ptr, target_0, target_1, target_2, num_slots, num_rows,
    y_0_stride, y_1_stride, y_2_stride, out_0, out_1, out_2, max_out, max_rank,
    NUM_TARGETS: tl.constexpr, WEIGHTED: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    num_n = tl.cdiv(max_out, BLOCK_N)
    segment = segments_ptr + tl.program_id(0) // num_n * 4
    n = tl.program_id(0) % num_n * BLOCK_N + tl.arange(0, BLOCK_N)
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
    count = tl.load(segment + 3)
    if (count == 0) | (tl.min(n, 0) >= out_features):
        return
    slot = tl.load(segment)
    expert = tl.load(segment + 1).to(tl.int64)
    at = target * num_slots + slot
    b_off = tl.multiple_of(tl.load(b_off_ptr + at), 8)
    rank = tl.minimum(tl.load(rank_ptr + at), max_rank)
    if (b_off < 0) | (tl.load(a_off_ptr + at) < 0) | (rank <= 0):
        return
    b_ptr = memory_ptr + b_off + expert * tl.multiple_of(tl.load(b_stride_ptr + at), 8)
    m = tl.arange(0, BLOCK_M)
    live = m < count
    row = tl.load(rows_ptr + tl.load(segment + 2) + m, mask=live, other=0).to(tl.int64)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, rank, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        r_live = r < rank
        z_row = row + part.to(tl.int64) * PARTS * num_rows
        z_mask = live[:, None] & r_live[None, :]
        z = tl.load(z_ptr + z_row[:, None] * max_rank + r[None, :], mask=z_mask, other=0.0)
        for _ in range(1, PARTS):
            z_row += num_rows
            z += tl.load(z_ptr + z_row[:, None] * max_rank + r[None, :], mask=z_mask, other=0.0)
        b = tl.load(
            b_ptr + r.to(tl.int64)[:, None] * out_features + n[None, :],
            mask=r_live[:, None] & n_live[None, :],
            other=0.0,
        )
        acc = tl.dot(z.to(b.dtype), b, acc, input_precision="ieee")
    if WEIGHTED:
        acc *= tl.load(weights_ptr + row, mask=live, other=0.0)[:, None]
    y_ptrs = y_ptr + row[:, None] * y_stride + n[None, :]
    mask = live[:, None] & n_live[None, :]
    acc += tl.load(y_ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask)


def random_tables(
    shapes: list[tuple[int, int, int]], ranks: list[int], max_rank: int, device: str,
    dtype: torch.dtype,
    seed: int, missing: tuple[tuple[int, int], ...] = (), shared: bool = False,
) -> LoraTables:  # fmt: skip
    """Tables for cases and benchmarks, NaN wherever no factor lies.

    shapes  (experts, in, out) of each target;  ranks  of each slot (0 = an empty one);  missing
            (target, slot) without a delta
    shared  one A for all experts. Factors have about unit gain together.
    """
    g = torch.Generator().manual_seed(seed)
    tables = torch.full((4, len(shapes), len(ranks)), -1, dtype=torch.int64)  # [4, N, L]
    tables[2:] = 0
    rank_table = torch.zeros(len(shapes), len(ranks), dtype=torch.int32)  # [N, L]
    pieces, used = [], 0
    for target, (experts, in_, out) in enumerate(shapes):
        for slot, rank in enumerate(ranks):
            if not rank or (target, slot) in missing:
                continue
            padded = (rank + 7) // 8 * 8
            rank_table[target, slot] = padded
            for which, width in enumerate((in_, out)):
                count = 1 if shared and which == 0 else experts
                factor = torch.randn(count, padded, width, generator=g)  # [E or 1, r, width]
                factor[:, rank:] = 0
                factor /= (in_ if which == 0 else rank) ** 0.5
                tables[which, target, slot] = used
                tables[2 + which, target, slot] = padded * width if count > 1 else 0
                # 128 elements of NaN after each factor: whoever reads past the end shows.
                gap = 128 + -factor.numel() % 128
                pieces += [factor.flatten(), torch.full((gap,), float("nan"))]
                used += factor.numel() + gap
    memory = torch.cat([*pieces, torch.full((128,), float("nan"))])
    a_off, b_off, a_stride, b_stride = tables.to(device)  # [N, L] each
    memory = memory.bfloat16().to(device, dtype)
    return LoraTables(memory, a_off, b_off, a_stride, b_stride, rank_table.to(device), max_rank)


def _cases() -> Iterator[Case]:
    def case(
        name: str, tokens: int, top_k: int, experts: int, in_: int, out: int, ranks: list[int],
        down: bool = False, shared: bool = False, deterministic: bool = False, max_rank: int = 0,
        small: bool = True, decode: bool = False,
    ) -> Case:  # fmt: skip
        def make(device: str, dtype: torch.dtype, seed: int) -> Inputs:
            g = torch.Generator().manual_seed(seed)
            ids = torch.rand(tokens, experts, generator=g).argsort(-1)[:, :top_k].int().to(device)
            # Every slot and the base in turn.
            slots = torch.arange(tokens).remainder(len(ranks) + 1).sub(1).int().to(device)
            y = torch.randn(tokens * top_k, out, generator=g)  # [T·K, out]
            x = torch.randn(tokens * top_k if down else tokens, in_, generator=g)  # [rows, in]
            weights = torch.rand(tokens, top_k, generator=g).to(device)  # [T, K]
            missing = ((0, 0),) if len(ranks) > 2 else ()
            shapes = [(experts, in_, out), (experts, in_, out)]
            block_m = moe_block_m(tokens, top_k, experts)
            return {
                "y": y.bfloat16().to(device, dtype),
                "x": x.bfloat16().to(device, dtype),
                "tables": random_tables(
                    shapes, ranks, max_rank or max(ranks), device, dtype, seed, missing, shared
                ),
                "target": len(ranks) % 2,
                "ids": ids,
                "slot_of_token": slots,
                "work": None
                if decode
                else build_worklist(ids, slots, experts, len(ranks), block_m),
                "x_rows_per_pair": down,
                "weights": weights if down else None,
                "deterministic": deterministic,
                "num_experts": experts,
            }

        return Case(name, make, small)

    yield case("gate_up_odd", 9, 2, 5, 77, 70, [4, 16, 0, 8])
    yield case("down_odd", 9, 2, 5, 77, 70, [4, 16, 0], down=True)
    yield case("deterministic_odd", 7, 3, 4, 333, 50, [8, 12], down=True, deterministic=True)
    yield case("shared_a", 6, 2, 3, 64, 48, [8, 16], shared=True)
    yield case("large_rank", 5, 1, 2, 96, 40, [100, 8], max_rank=128)
    yield case("largest_rank", 3, 1, 2, 32, 24, [MAX_LORA_RANK])
    yield case("one", 2, 1, 1, 16, 16, [8])
    yield case("crowded", 60, 2, 2, 128, 64, [8, 32], down=True)
    yield case("decode_gate_up_odd", 9, 2, 5, 77, 70, [4, 16, 0, 8], decode=True)
    yield case("decode_down_odd", 9, 2, 5, 333, 70, [4, 16, 0], down=True, decode=True)
    yield case("decode_shared_a", 6, 2, 3, 64, 48, [8, 16], shared=True, decode=True)
    yield case("decode_wide_rank", 5, 1, 2, 96, 40, [40, 8], max_rank=64, decode=True)
    yield case("decode_one", 2, 1, 1, 16, 16, [8], decode=True)
    yield case("decode_even", 6, 4, 8, 256, 128, [32, 8, 32], down=True, decode=True)
    for tokens in (1, 8, 32):
        name, ranks = f"gpt_oss_{tokens}", [32] * 8
        yield case(
            f"decode_gate_up_{name}", tokens, 4, 32, 2880, 5760, ranks, small=False, decode=True
        )
        yield case(
            f"decode_down_{name}", tokens, 4, 32, 2880, 2880, ranks, True, small=False, decode=True
        )
    for tokens in (1, 8, 32, 1600):
        name, ranks = f"gpt_oss_{tokens}", [32] * 8
        yield case(f"gate_up_{name}", tokens, 4, 32, 2880, 5760, ranks, small=False)
        yield case(f"down_{name}", tokens, 4, 32, 2880, 2880, ranks, down=True, small=False)


def aot_specs(
    name: str, rows: int, in_: int, outs: tuple[int, ...], max_rank: int, block_m: int, x_div: int,
    weighted: bool, deterministic: bool = False,
) -> Iterator[AotSpec]:  # fmt: skip
    """The two compilations that one call of `add_lora` uses on an H200."""
    block_r = min(MAX_BLOCK_R, max(16, triton.next_power_of_2(max_rank)))
    lanes = power_of_two(max_rank)
    t = tiles_for("lora_shrink", {"rows": rows, "out": lanes, "in": in_}, "NVIDIA H200")
    split_k = min(t.split_k, triton.cdiv(in_, t.block_k))
    constants = {
        "X_DIV": x_div, "BLOCK_M": block_m, "BLOCK_R": block_r, "BLOCK_K": t.block_k,
        "SPLIT_K": split_k,
        "GROUP_M": t.group_m, "EVEN_K": in_ % (t.block_k * split_k) == 0,
        "ATOMIC": split_k > 1 and not deterministic,
    }  # fmt: skip
    yield _spec(f"{name}_shrink", _shrink_kernel, constants, t.num_warps, t.num_stages)
    t = tiles_for("lora_expand", {"rows": rows, "out": max(outs), "in": lanes}, "NVIDIA H200")
    constants = {
        "NUM_TARGETS": len(outs), "WEIGHTED": weighted, "PARTS": split_k if deterministic else 1,
        "BLOCK_M": block_m, "BLOCK_R": block_r, "BLOCK_N": t.block_n,
    }  # fmt: skip
    warps = _expand_warps(t, block_m)
    yield _spec(f"{name}_expand", _expand_kernel, constants, warps, t.num_stages)


def _spec(
    name: str, fn: triton.JITFunction, constants: dict[str, object], warps: int, stages: int
) -> AotSpec:
    loose = dict.fromkeys(("num_slots", *UNSPECIALISED), "i32")
    numbers = dict.fromkeys(("rank_ptr", "rows_ptr", "segments_ptr"), "*i32")
    wide = dict.fromkeys(("a_off_ptr", "b_off_ptr", "a_stride_ptr", "b_stride_ptr"), "*i64")
    types = loose | numbers | wide | dict.fromkeys(("z_ptr", "weights_ptr"), "*fp32")
    signature = {
        n: types.get(n, "*bf16" if n.endswith("_ptr") else "i32:16")
        for n in fn.arg_names
        if n not in constants
    }
    return AotSpec(name, fn, signature, constants, num_warps=warps, num_stages=stages)


def _aot() -> Iterator[AotSpec]:
    for tokens, rank in ((32, 32), (32, 128), (1600, 32), (1600, 128)):
        block_m, name = moe_block_m(tokens, 4, 32), f"{tokens}_r{rank}"
        rows, outs = 4 * tokens, (5760,)
        yield from aot_specs(f"gate_up_{name}", rows, 2880, outs, rank, block_m, 4, False)
        yield from aot_specs(f"down_{name}", rows, 2880, (2880,), rank, block_m, 1, True)
    yield from aot_specs("down_deterministic", 128, 2880, (2880,), 32, 16, 1, True, True)
    for rows, rank in ((4, 32), (128, 32), (4, 64), (128, 64)):
        name = f"{rows}_r{rank}"
        yield from decode_aot_specs(
            f"decode_gate_up_{name}", rows, 2880, (5760,), rank, 4, 4, False
        )
        yield from decode_aot_specs(f"decode_down_{name}", rows, 2880, (2880,), rank, 4, 1, True)


def factor_bytes(tables: LoraTables, target: int, in_: int, out: int, pairs: Tensor) -> int:
    """Bytes of the factors in use, each once: pairs [n, 2] are distinct (slot, expert)."""
    ranks = tables.lora_rank[target].tolist()
    values = sum(ranks[slot] * (in_ + out) for slot, _ in pairs.tolist() if slot >= 0)
    return values * tables.memory.itemsize


def _bytes(inputs: Inputs) -> int:
    ids, x, y = inputs["ids"], inputs["x"], inputs["y"]
    slots = inputs["slot_of_token"].repeat_interleave(ids.shape[1])  # [N]
    pairs = torch.stack([slots, ids.flatten()], 1).unique(dim=0)  # [n, 2]
    factors = factor_bytes(inputs["tables"], inputs["target"], x.shape[1], y.shape[1], pairs)
    rows = int((slots >= 0).sum())
    return factors + rows * (x.shape[1] + 2 * y.shape[1]) * x.itemsize


OPS = (
    Op(
        name="moe_lora",
        run=moe_lora,
        reference=moe_lora_reference,
        cases=_cases,
        outputs=lambda inputs, result: [inputs["y"]],
        aot=_aot,
        bytes=_bytes,
    ),
)
