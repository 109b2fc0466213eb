"""The gated activation of a decode step's experts with their LoRA: the expand of gate_up that
activates what it has summed.

One launch and one round trip through memory less than lora_decode.py's expand and gated_act.py
after it; a row without an adapter is activated by the same instructions. Not here: the shrink in
front of it (lora_decode.py), prefill, and dense layers.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.fused_moe_lora import moe_lora_reference, random_tables
from kernels.gated_act import KINDS, activate, gated_act_reference
from kernels.lora_decode import (
    UNSPECIALISED,
    DecodeTiles,
    decode_tiles,
    find_factor,
    find_source,
    load_shrunk,
    lora_spec,
    shrink,
    shrink_form,
)
from kernels.lora_tables import LoraTables
from kernels.op import AotSpec, Case, Inputs, Op, use_triton
from kernels.overlap import follow


def lora_gated_act(
    gate_up: Tensor, x: Tensor, tables: LoraTables, target: int, ids: Tensor,
    slot_of_token: Tensor, num_experts: int, kind: str, settled: bool = False,
    tiles: DecodeTiles | None = None,
) -> Tensor:  # fmt: skip
    """Activate gate_up + (x A) B, row by row.

    Shapes:  gate_up [T·K, 2I], gate first;  x [T, in];  ids [T, K] int32;
             slot_of_token [T] int32, -1 = base;  result [T·K, I]
    kind     as in gated_act;  settled, target, num_experts, and whose rows get a delta: as in
             moe_lora without work;  tiles  for benchmarks
    Numerics: fp32, rounded once. Rows without a delta have the same bits in any company.
    Errors:  ValueError for another kind.
    Needs:   `lora_decode.pairs_suffice`.
    Cost:    reads gate_up once, and each row's factors.
    """
    if kind not in KINDS:
        raise ValueError(f"activation must be one of {KINDS}, not {kind!r}")
    if not use_triton(x):
        return lora_gated_act_reference(
            gate_up, x, tables, target, ids, slot_of_token, num_experts, kind
        )
    num_rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1, "columns must lie side by side"
    out = gate_up.new_empty(num_rows, inner)  # [N, I]
    lora = shrink(
        x, tables, (target,), slot_of_token, ids, ids.shape[1], num_experts, tiles, None, settled
    )
    if not num_rows:
        return out
    tiles = lora.tiles
    block_n = half_block(tiles)
    num_n = triton.cdiv(inner, block_n)
    n_tiles = tiles.per_program(num_rows, num_n)
    per_row = triton.cdiv(num_n, n_tiles)
    _expand_act_kernel[(num_rows * per_row,)](
        lora.z, gate_up, out, tables.memory, tables.a_off, tables.b_off, tables.b_stride,
        tables.lora_rank, *lora.sources, target, tables.num_slots, num_experts, num_rows,
        gate_up.stride(0), inner, per_row, n_tiles, tables.max_rank, **lora.form,
        GPT_OSS=kind == "gpt_oss", BLOCK_N=block_n,
        BLOCK_S=triton.next_power_of_2(lora.z.shape[1]), num_warps=tiles.expand_warps,
        **follow(bool(lora.form["OVERLAP"])),
    )  # fmt: skip
    return out


def half_block(tiles: DecodeTiles) -> int:
    """Columns of gate, and as many of up, so that a tile of both fills the registers that one of
    the plain expand does."""
    return max(16, tiles.block_n // 2)


def lora_gated_act_reference(
    gate_up: Tensor, x: Tensor, tables: LoraTables, target: int, ids: Tensor,
    slot_of_token: Tensor, num_experts: int, kind: str, settled: bool = False,
    tiles: DecodeTiles | None = None,
) -> Tensor:  # fmt: skip
    """The same in torch: moe_lora, then gated_act."""
    y = gate_up.clone()  # [T·K, 2I]
    moe_lora_reference(
        y, x, tables, target, ids, slot_of_token, None, False, None, num_experts=num_experts
    )
    return gated_act_reference(y, kind)


@triton.jit(do_not_specialize=UNSPECIALISED)
def _expand_act_kernel(
    z_ptr, y_ptr, out_ptr, memory_ptr, a_off_ptr, b_off_ptr, b_stride_ptr, rank_ptr,
    slots_ptr, ids_ptr, target, num_slots, num_experts, num_rows, y_stride, inner,
    per_row, n_tiles, max_rank,
    GPT_OSS: tl.constexpr, TOP_K: tl.constexpr, BY_EXPERT: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
    row = tl.program_id(0) // per_row
    first = tl.program_id(0) % per_row * n_tiles * BLOCK_N
    slot, expert, live = find_source(
        row, slots_ptr, ids_ptr, num_slots, num_experts, TOP_K, BY_EXPERT
    )
    at = target * num_slots + tl.maximum(slot, 0)
    start, rank = find_factor(
        b_off_ptr + at, b_stride_ptr + at, a_off_ptr + at, rank_ptr + at, expert, live, max_rank
    )
    # A row without a delta reads no factor, and takes the same way otherwise.
    adapted = start >= 0
    end = tl.minimum(first + n_tiles * BLOCK_N, inner)
    n = first + tl.arange(0, BLOCK_N)
    r = tl.arange(0, BLOCK_R)
    r_live = (r < rank) & adapted
    b_rows = memory_ptr + start + r.to(tl.int64)[:, None] * (2 * inner)
    mask = r_live[:, None] & (n < end)[None, :]
    b_gate = tl.load(b_rows + n[None, :], mask=mask, other=0.0)
    b_up = tl.load(b_rows + inner + n[None, :], mask=mask, other=0.0)
    row = row.to(tl.int64)
    if OVERLAP:
        gdc_wait()
    y_row = y_ptr + row * y_stride
    gate = tl.load(y_row + n, mask=n < end, other=0.0, cache_modifier=".cg")
    up = tl.load(y_row + inner + n, mask=n < end, other=0.0, cache_modifier=".cg")
    z = load_shrunk(z_ptr, row, 0, num_rows, max_rank, adapted, BLOCK_R, SPLITS, BLOCK_S)
    for _ in range(first, end, BLOCK_N):
        # The next tile travels while this one is added.
        ahead = n + BLOCK_N
        mask = r_live[:, None] & (ahead < end)[None, :]
        b_gate_ahead = tl.load(b_rows + ahead[None, :], mask=mask, other=0.0)
        b_up_ahead = tl.load(b_rows + inner + ahead[None, :], mask=mask, other=0.0)
        gate_ahead = tl.load(y_row + ahead, mask=ahead < end, other=0.0, cache_modifier=".cg")
        up_ahead = tl.load(y_row + inner + ahead, mask=ahead < end, other=0.0, cache_modifier=".cg")
        wide_gate, wide_up = gate.to(tl.float32), up.to(tl.float32)
        if adapted:
            wide_gate += tl.sum(z[:, None] * b_gate.to(tl.float32), 0)
            wide_up += tl.sum(z[:, None] * b_up.to(tl.float32), 0)
        h = activate(wide_gate, wide_up, GPT_OSS)
        tl.store(out_ptr + row * inner + n, h.to(out_ptr.dtype.element_ty), mask=n < end)
        n, gate, up, b_gate, b_up = ahead, gate_ahead, up_ahead, b_gate_ahead, b_up_ahead


def _cases() -> Iterator[Case]:
    def case(
        name: str, tokens: int, top_k: int, experts: int, in_: int, inner: int, ranks: list[int],
        kind: str = "gpt_oss", shared: bool = False, small: bool = True,
    ) -> Case:  # fmt: skip
        def make(device: str, dtype: torch.dtype, seed: int) -> Inputs:
            g = torch.Generator().manual_seed(seed)
            ids = torch.rand(tokens, experts, generator=g).argsort(-1)[:, :top_k].int()  # [T, K]
            # Every slot and the base in turn.
            slots = torch.arange(tokens).remainder(len(ranks) + 1).sub(1).int()  # [T]
            gate_up = 3 * torch.randn(tokens * top_k, 2 * inner, generator=g)  # [T·K, 2I]
            x = torch.randn(tokens, in_, generator=g)  # [T, in]
            missing = ((0, 0),) if len(ranks) > 2 else ()
            shapes = [(experts, in_, 2 * inner), (experts, in_, 2 * inner)]
            return {
                "gate_up": gate_up.bfloat16().to(device, dtype),
                "x": x.bfloat16().to(device, dtype),
                "tables": random_tables(
                    shapes, ranks, max(ranks), device, dtype, seed, missing, shared
                ),
                "target": len(ranks) % 2,
                "ids": ids.to(device),
                "slot_of_token": slots.to(device),
                "num_experts": experts,
                "kind": kind,
            }

        return Case(name, make, small)

    yield case("odd", 9, 2, 5, 77, 35, [4, 16, 0, 8])
    yield case("silu", 6, 2, 3, 64, 48, [8, 16], "silu", shared=True)
    yield case("wide_rank", 5, 1, 2, 96, 40, [40, 8, 64])
    yield case("one", 2, 1, 1, 16, 16, [8])
    for tokens in (1, 8, 32):
        yield case(f"gpt_oss_{tokens}", tokens, 4, 32, 2880, 2880, [32] * 8, small=False)


def _aot() -> Iterator[AotSpec]:
    for rows, rank in ((4, 32), (32, 32), (128, 32), (4, 64), (128, 64)):
        tiles = decode_tiles(rows)
        form, _ = shrink_form(rows, 2880, 1, rank, 4, tiles, True)
        constants = form | {"GPT_OSS": True, "BLOCK_N": half_block(tiles)}
        constants["BLOCK_S"] = triton.next_power_of_2(form["SPLITS"])
        name = f"lora_gated_act_{rows}_r{rank}"
        yield lora_spec(name, _expand_act_kernel, constants, tiles.expand_warps)


def _bytes(inputs: Inputs) -> int:
    """The rows alone: what factors add depends on who shares them."""
    return inputs["gate_up"].nbytes * 3 // 2 + inputs["x"].nbytes


OPS = (
    Op(
        name="lora_gated_act",
        run=lora_gated_act,
        reference=lora_gated_act_reference,
        cases=_cases,
        outputs=lambda inputs, result: [result],
        aot=_aot,
        bytes=_bytes,
    ),
)
