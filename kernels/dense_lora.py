"""LoRA on plain linears and embeddings: y += (x A[slot]) B[slot], each token by its own adapter.

The kernels are those of fused_moe_lora.py with one expert, for few tokens those of lora_decode.py.
Not here: LoRA on experts.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.fused_moe_lora import (
    MAX_BLOCK_R,
    MAX_TARGETS,
    add_lora,
    aot_specs,
    factor_bytes,
    random_tables,
    slot_factors,
)
from kernels.lora_decode import add_rows
from kernels.lora_decode import aot_specs as decode_aot_specs
from kernels.lora_tables import LoraTables, Worklist
from kernels.op import AotSpec, Case, Inputs, Op, require_contiguous, use_triton
from kernels.tiling import slot_block_m
from kernels.worklist import build_worklist, slot_groups

EMBED_BLOCK = 256


def dense_lora(
    y: Tensor, x: Tensor, tables: LoraTables, target: int, slot_of_token: Tensor,
    work: Worklist | None, deterministic: bool = False, settled: bool = False,
) -> None:  # fmt: skip
    """Add every token's LoRA to its linear output, in place.

    Shapes:  y [T, out] (written; may be a column slice);  x [T, in];
             slot_of_token [T] int32, -1 = base
    target   row of the tables, -1 = nothing to add
    work     tokens by slot: the four operations. None: the kernels of lora_decode.py, which need
             none and serve as many tokens as its `tokens_suffice` allows (on a CPU: made from the
             slots)
    deterministic: partial sums in a fixed order; else split-K adds them as they come (fp32).
    Without work the order is fixed anyway.
    settled  x and slot_of_token are older than the launch in front of this call (which then made
             y): without work they are read while that one still runs (overlap.py)
    Rows of base tokens and of slots without this target keep all bits.
    Needs:   x and the tables' memory of one dtype.
    Cost:    reads each factor in use once per block_m of its rows.
    """
    dense_lora_multi((y,), x, tables, (target,), slot_of_token, work, deterministic, settled)


def dense_lora_multi(
    ys: tuple[Tensor, ...], x: Tensor, tables: LoraTables, targets: tuple[int, ...],
    slot_of_token: Tensor, work: Worklist | None, deterministic: bool = False,
    settled: bool = False,
) -> None:  # fmt: skip
    """The same for linears that share x (q, k and v): a shrink and an expand for each three.

    Shapes:  ys[i] [T, out_i] (written), targets[i] its row of the tables, -1 = nothing to add
    """
    if not use_triton(x):
        dense_lora_multi_reference(ys, x, tables, targets, slot_of_token, work, deterministic)
        return
    wanted = [(y, target) for y, target in zip(ys, targets, strict=True) if target >= 0]
    for first in range(0, len(wanted), MAX_TARGETS):
        some_ys, some_targets = zip(*wanted[first : first + MAX_TARGETS], strict=True)
        if work is None:
            add_rows(some_ys, x, tables, some_targets, slot_of_token, settled=settled)
        else:
            add_lora(some_ys, x, tables, some_targets, work, 1, None, deterministic)


def dense_lora_reference(
    y: Tensor, x: Tensor, tables: LoraTables, target: int, slot_of_token: Tensor,
    work: Worklist | None, deterministic: bool = False,
) -> None:  # fmt: skip
    """The same in torch."""
    dense_lora_multi_reference((y,), x, tables, (target,), slot_of_token, work, deterministic)


def dense_lora_multi_reference(
    ys: tuple[Tensor, ...], x: Tensor, tables: LoraTables, targets: tuple[int, ...],
    slot_of_token: Tensor, work: Worklist | None, deterministic: bool = False,
) -> None:  # fmt: skip
    """The same in torch, slot by slot: factors of slots that are not in use are never read."""
    groups = None if work is None else work.groups
    if groups is None:
        groups = slot_groups(slot_of_token.cpu(), tables.num_slots, 1)
    for slot, rows in groups:
        everyone = len(rows) == x.shape[0]
        rows = rows.to(x.device)
        source = x if everyone else x.index_select(0, rows)  # [n, in]
        for y, target in zip(ys, targets, strict=True):
            if target < 0:
                continue
            factors = slot_factors(tables, target, slot, x.shape[1], y.shape[1], 1, x.dtype)
            if factors is None:
                continue
            delta = (source @ factors[0][0].t()) @ factors[1][0]  # [n, out]
            if everyone:
                y += delta
            else:
                y.index_add_(0, rows, delta)


def embedding_lora(
    y: Tensor, token_ids: Tensor, tables: LoraTables, target: int, slot_of_token: Tensor,
    num_embeddings: int,
) -> None:  # fmt: skip
    """Add every token's LoRA to its embedding, in place: A holds a column for each token id.

    Shapes:  y [T, H] (written);  token_ids [T] int64 in 0..V - 1;
             slot_of_token [T] int32, -1 = base;  A [1, r, V], B [1, r, H]
    num_embeddings  V, the width of A
    An id outside 0..V - 1 gets nothing.
    Cost:    reads r values of A and all of B for each token.
    """
    if not use_triton(y):
        embedding_lora_reference(y, token_ids, tables, target, slot_of_token, num_embeddings)
        return
    num_tokens, hidden = y.shape
    assert y.stride(1) == 1, "columns must lie side by side"
    require_contiguous(token_ids=token_ids, slot_of_token=slot_of_token)
    if num_tokens:
        _embedding_kernel[(triton.cdiv(hidden, EMBED_BLOCK), num_tokens)](
            y, token_ids, slot_of_token,
            tables.memory, tables.a_off, tables.b_off, tables.lora_rank,
            target, tables.num_slots, y.stride(0), hidden, num_embeddings,
            BLOCK_R=min(MAX_BLOCK_R // 2, triton.next_power_of_2(tables.max_rank)),
            BLOCK_N=EMBED_BLOCK,
        )  # fmt: skip


def embedding_lora_reference(
    y: Tensor, token_ids: Tensor, tables: LoraTables, target: int, slot_of_token: Tensor,
    num_embeddings: int,
) -> None:  # fmt: skip
    """The same in torch."""
    for slot, rows in slot_groups(slot_of_token.cpu(), tables.num_slots, 1):
        factors = slot_factors(tables, target, slot, num_embeddings, y.shape[1], 1, y.dtype)
        if factors is None:
            continue
        rows = rows.to(y.device)
        column = token_ids.index_select(0, rows)  # [n]
        live = (column >= 0) & (column < num_embeddings)
        rows, column = rows[live], column[live]
        y.index_add_(0, rows, factors[0][0].index_select(1, column).t() @ factors[1][0])


@triton.jit(do_not_specialize=["target"])
def _embedding_kernel(
    y_ptr, ids_ptr, slots_ptr, memory_ptr, a_off_ptr, b_off_ptr, rank_ptr,
    target, num_slots, y_stride, hidden, num_embeddings,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_live = n < hidden
    slot = tl.load(slots_ptr + token)
    token_id = tl.load(ids_ptr + token).to(tl.int64)
    if (slot < 0) | (slot >= num_slots) | (token_id < 0) | (token_id >= num_embeddings):
        return
    at = target * num_slots + slot
    a_off, b_off = tl.load(a_off_ptr + at), tl.load(b_off_ptr + at)
    rank = tl.load(rank_ptr + at)
    if (a_off < 0) | (b_off < 0) | (rank <= 0):
        return
    acc = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, rank, BLOCK_R):
        r = (start + tl.arange(0, BLOCK_R)).to(tl.int64)
        r_live = r < rank
        z = tl.load(memory_ptr + a_off + r * num_embeddings + token_id, mask=r_live, other=0.0)
        b = tl.load(
            memory_ptr + b_off + r[:, None] * hidden + n[None, :],
            mask=r_live[:, None] & n_live[None, :],
            other=0.0,
        )
        acc += tl.sum(z.to(tl.float32)[:, None] * b.to(tl.float32), 0)
    y_ptrs = y_ptr + token * y_stride + n
    acc += tl.load(y_ptrs, mask=n_live, other=0.0).to(tl.float32)
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=n_live)


def _inputs(
    tokens: int,
    in_: int,
    outs: tuple[int, ...],
    ranks: list[int],
    device: str,
    dtype: torch.dtype,
    seed: int,
) -> tuple[Inputs, tuple[Tensor, ...]]:
    g = torch.Generator().manual_seed(seed)
    slots = torch.arange(tokens).remainder(len(ranks) + 1).sub(1).int().to(device)  # [T]
    # Column slices of one tensor, as a fused projection has them.
    y = torch.randn(tokens, sum(outs), generator=g).bfloat16().to(device, dtype)  # [T, sum of outs]
    shapes = [(1, in_, out) for out in outs]
    missing = ((len(outs) - 1, 0),) if len(ranks) > 1 else ()
    inputs = {
        "x": torch.randn(tokens, in_, generator=g).bfloat16().to(device, dtype),  # [T, in]
        "tables": random_tables(shapes, ranks, max(ranks), device, dtype, seed, missing),
        "slot_of_token": slots,
        "work": build_worklist(None, slots, 1, len(ranks), slot_block_m(tokens)),
    }
    return inputs, y.split(outs, 1)


def _cases() -> Iterator[Case]:
    def case(
        name: str,
        tokens: int,
        in_: int,
        out: int,
        ranks: list[int],
        deterministic: bool = False,
        small: bool = True,
        single: bool = False,
    ) -> Case:
        def make(device: str, dtype: torch.dtype, seed: int) -> Inputs:
            inputs, (_, y) = _inputs(tokens, in_, (24, out), ranks, device, dtype, seed)
            if single:
                inputs["work"] = None
            return {**inputs, "y": y, "target": 1, "deterministic": deterministic}

        return Case(name, make, small)

    yield case("odd", 11, 77, 70, [4, 16, 0, 8])
    yield case("deterministic_odd", 7, 333, 50, [8, 12], deterministic=True)
    yield case("one", 2, 16, 16, [8])
    yield case("crowded", 70, 96, 40, [32, 8])
    yield case("single_odd", 7, 333, 70, [4, 16, 0, 8], single=True)
    yield case("single_even", 3, 256, 64, [32, 8], single=True)
    yield case("o_proj_8", 8, 4096, 2880, [32] * 8, small=False, single=True)
    yield case("o_proj_32", 32, 4096, 2880, [32] * 8, small=False, single=True)
    yield case("o_proj_128", 128, 4096, 2880, [32] * 8, small=False)
    yield case("o_proj_prefill", 1600, 4096, 2880, [32] * 8, small=False)


def _multi_cases() -> Iterator[Case]:
    def case(
        name: str,
        tokens: int,
        in_: int,
        outs: tuple[int, ...],
        ranks: list[int],
        small: bool = True,
        single: bool = False,
    ) -> Case:
        def make(device: str, dtype: torch.dtype, seed: int) -> Inputs:
            inputs, ys = _inputs(tokens, in_, outs, ranks, device, dtype, seed)
            if single:
                inputs["work"] = None
            targets = tuple(i if i != 1 or len(outs) < 4 else -1 for i in range(len(outs)))
            return {**inputs, "ys": ys, "targets": targets}

        return Case(name, make, small)

    yield case("odd", 9, 45, (70, 22, 33), [4, 16, 0])
    yield case("two", 5, 64, (48, 48), [8])
    yield case("five_one_off", 4, 32, (16, 24, 16, 40, 8), [8, 8])
    yield case("single_odd", 6, 45, (70, 22, 33), [4, 16, 0], single=True)
    yield case("crowded", 90, 45, (70, 22, 33), [4, 16, 0])
    for tokens in (1, 8, 32, 128):
        yield case(
            f"gpt_oss_qkv_{tokens}", tokens, 2880, (4096, 512, 512), [32] * 8, small=False,
            single=tokens <= 64,
        )  # fmt: skip


def _embedding_cases() -> Iterator[Case]:
    def case(
        name: str, tokens: int, vocab: int, hidden: int, ranks: list[int], small: bool = True
    ) -> Case:
        def make(device: str, dtype: torch.dtype, seed: int) -> Inputs:
            inputs, (y,) = _inputs(tokens, vocab, (hidden,), ranks, device, dtype, seed)
            token_ids = torch.arange(tokens).mul(7).remainder(vocab).to(device)  # [T]
            kept = {k: inputs[k] for k in ("tables", "slot_of_token")}
            return {**kept, "y": y, "token_ids": token_ids, "target": 0, "num_embeddings": vocab}

        return Case(name, make, small)

    yield case("odd", 9, 53, 70, [4, 16, 0])
    yield case("large_rank", 5, 31, 300, [72, 8])
    yield case("decode", 32, 5000, 2880, [32] * 8, small=False)


def _aot() -> Iterator[AotSpec]:
    for tokens in (128, 1600):
        block_m = slot_block_m(tokens)
        yield from aot_specs(f"o_proj_{tokens}", tokens, 4096, (2880,), 32, block_m, 1, False)
    for tokens in (8, 32):
        name = f"decode_o_proj_{tokens}"
        yield from decode_aot_specs(name, tokens, 4096, (2880,), 32, 0, 1, False)


def _multi_aot() -> Iterator[AotSpec]:
    for tokens in (128, 1600):
        block_m = slot_block_m(tokens)
        yield from aot_specs(f"qkv_{tokens}", tokens, 2880, (4096, 512, 512), 32, block_m, 1, False)
    for tokens, rank in ((8, 32), (32, 32), (8, 64), (32, 64)):
        name, outs = f"decode_qkv_{tokens}_r{rank}", (4096, 512, 512)
        yield from decode_aot_specs(name, tokens, 2880, outs, rank, 0, 1, False)


def _embedding_aot() -> Iterator[AotSpec]:
    types = dict.fromkeys(("y_ptr", "memory_ptr"), "*bf16")
    types |= dict.fromkeys(("ids_ptr", "a_off_ptr", "b_off_ptr"), "*i64")
    types |= dict.fromkeys(("slots_ptr", "rank_ptr"), "*i32")
    constants = {"BLOCK_R": 32, "BLOCK_N": EMBED_BLOCK}
    signature = {n: types.get(n, "i32") for n in _embedding_kernel.arg_names if n not in constants}
    yield AotSpec("embedding_lora", _embedding_kernel, signature, constants)


def _bytes(inputs: Inputs) -> int:
    ys = inputs["ys"] if "ys" in inputs else (inputs["y"],)
    targets = inputs["targets"] if "targets" in inputs else (inputs["target"],)
    slots, x = inputs["slot_of_token"], inputs["x"]
    used = slots.unique()
    pairs = torch.stack([used, torch.zeros_like(used)], 1)  # [slots in use, 2]
    total = int((slots >= 0).sum()) * (x.shape[1] + 2 * sum(y.shape[1] for y in ys)) * x.itemsize
    for y, target in zip(ys, targets, strict=True):
        if target >= 0:
            total += factor_bytes(inputs["tables"], target, x.shape[1], y.shape[1], pairs)
    return total


OPS = (
    Op(
        name="dense_lora",
        run=dense_lora,
        reference=dense_lora_reference,
        cases=_cases,
        outputs=lambda inputs, result: [inputs["y"]],
        aot=_aot,
        bytes=_bytes,
    ),
    Op(
        name="dense_lora_multi",
        run=dense_lora_multi,
        reference=dense_lora_multi_reference,
        cases=_multi_cases,
        outputs=lambda inputs, result: list(inputs["ys"]),
        aot=_multi_aot,
        bytes=_bytes,
    ),
    Op(
        name="embedding_lora",
        run=embedding_lora,
        reference=embedding_lora_reference,
        cases=_embedding_cases,
        outputs=lambda inputs, result: [inputs["y"]],
        aot=_embedding_aot,
    ),
)
