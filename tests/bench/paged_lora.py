"""Decode LoRA whose factors lie in one extent an adapter, or in pages of rank rows: for design.py.

The same pair of kernels either way; only how they find a rank row differs. Not for serving: the
shipped form is kernels/lora_decode.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.lora_decode import DecodeTiles


class Memory:
    """One factor of many adapters.

    page    rank rows of one page; 0 = an extent an adapter
    memory  the values;  table  where each adapter's extent starts [layers · L] int64, or which page
            holds which rows [layers · L · E · r / page] int32, in no order
    """

    def __init__(self, factors: Tensor, page: int) -> None:
        """factors [layers · L, E, r, width]; extents share its memory, pages are a copy."""
        adapters, experts, rank, width = factors.shape
        if not page:
            self.memory = factors
            self.table = torch.arange(adapters, device=factors.device) * experts * rank * width
            return
        rows = factors.reshape(-1, page, width)  # [pages, page, width]
        generator = torch.Generator(factors.device).manual_seed(page)
        places = torch.randperm(len(rows), device=factors.device, generator=generator)
        self.table = places.int()
        self.memory = torch.empty_like(rows)
        self.memory[places] = rows


def add_paged(
    y: Tensor, x: Tensor, a: Memory, b: Memory, slots: Tensor, ids: Tensor, layer: int,
    num_slots: int, num_experts: int, rank: int, page: int, tiles: DecodeTiles,
) -> Tensor:  # fmt: skip
    """y [T·K, out] += (x [T, in] A) B, row by row.

    Shapes:  slots [T] int32, -1 = base;  ids [T, K] int32;  rank  a power of two, of all adapters
    """
    num_rows, in_, out = ids.numel(), x.shape[1], y.shape[1]
    splits = triton.cdiv(in_, tiles.block_k)
    z = torch.empty(splits, num_rows, rank, dtype=torch.float32, device=x.device)  # [S, N, R]
    form = {"RANK": rank, "TOP_K": ids.shape[1], "SPLITS": splits, "PAGE": page}
    common = (slots, ids, layer, num_slots, num_experts, num_rows)
    _shrink_kernel[(num_rows * splits,)](
        x, z, a.memory, a.table, *common, in_, **form, BLOCK_K=tiles.block_k,
        EVEN_K=in_ % tiles.block_k == 0, num_warps=tiles.shrink_warps,
    )  # fmt: skip
    _expand_kernel[(num_rows * triton.cdiv(out, tiles.block_n),)](
        z, y, b.memory, b.table, *common, out, **form, BLOCK_N=tiles.block_n,
        BLOCK_S=triton.next_power_of_2(splits), num_warps=tiles.expand_warps,
    )  # fmt: skip
    return y


@triton.jit
def _rank_rows(
    table_ptr, adapter, expert, num_experts, r, width, RANK: tl.constexpr, PAGE: tl.constexpr
):
    """Where each rank row of an expert's factor starts, in elements."""
    if PAGE == 0:
        start = tl.multiple_of(tl.load(table_ptr + adapter), 8)
        return start + (expert * RANK + r).to(tl.int64) * width
    else:
        pages = (adapter * num_experts + expert) * (RANK // PAGE)
        page = tl.load(table_ptr + pages + r // PAGE).to(tl.int64)
        return (page * PAGE + r % PAGE) * width


@triton.jit(do_not_specialize=["layer", "num_rows"])
def _shrink_kernel(
    x_ptr, z_ptr, memory_ptr, table_ptr, slots_ptr, ids_ptr, layer, num_slots, num_experts,
    num_rows, in_features,
    RANK: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    EVEN_K: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    row, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    slot = tl.load(slots_ptr + row // TOP_K)
    expert = tl.load(ids_ptr + row)
    if slot < 0:
        return
    r = tl.arange(0, RANK)
    k = split * BLOCK_K + tl.arange(0, BLOCK_K)
    adapter = layer * num_slots + slot
    rows = _rank_rows(table_ptr, adapter, expert, num_experts, r, in_features, RANK, PAGE)
    a_ptrs = memory_ptr + rows[:, None] + k[None, :]
    x_ptrs = x_ptr + (row // TOP_K).to(tl.int64) * in_features + k
    if EVEN_K:
        a = tl.load(a_ptrs)
        x = tl.load(x_ptrs)
    else:
        a = tl.load(a_ptrs, mask=(k < in_features)[None, :], other=0.0)
        x = tl.load(x_ptrs, mask=k < in_features, other=0.0)
    z = tl.sum(a.to(tl.float32) * x.to(tl.float32)[None, :], 1)
    tl.store(z_ptr + (split.to(tl.int64) * num_rows + row) * RANK + r, z)


@triton.jit(do_not_specialize=["layer", "num_rows"])
def _expand_kernel(
    z_ptr, y_ptr, memory_ptr, table_ptr, slots_ptr, ids_ptr, layer, num_slots, num_experts,
    num_rows, out_features,
    RANK: tl.constexpr, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    num_n = tl.cdiv(out_features, BLOCK_N)
    row = tl.program_id(0) // num_n
    n = tl.program_id(0) % num_n * BLOCK_N + tl.arange(0, BLOCK_N)
    slot = tl.load(slots_ptr + row // TOP_K)
    expert = tl.load(ids_ptr + row)
    if slot < 0:
        return
    r = tl.arange(0, RANK)
    s = tl.arange(0, BLOCK_S)
    n_live = n < out_features
    adapter = layer * num_slots + slot
    rows = _rank_rows(table_ptr, adapter, expert, num_experts, r, out_features, RANK, PAGE)
    b = tl.load(memory_ptr + rows[:, None] + n[None, :], mask=n_live[None, :], other=0.0)
    z_ptrs = z_ptr + (s.to(tl.int64) * num_rows + row)[:, None] * RANK + r[None, :]
    z = tl.sum(tl.load(z_ptrs, mask=(s < SPLITS)[:, None], other=0.0), 0)
    y_ptrs = y_ptr + row.to(tl.int64) * out_features + n
    acc = tl.load(y_ptrs, mask=n_live, other=0.0).to(tl.float32)
    acc += tl.sum(z[:, None] * b.to(tl.float32), 0)
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=n_live)
