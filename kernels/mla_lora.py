"""LoRA on kv_b_proj while it is absorbed into queries and outputs (latent attention).

kv_b_proj is never applied to the cached latents, so its delta cannot be added to an output of it.
With dW = B A, head h's part of a query gains A^T (B_k[h]^T q), of an output B_v[h] (A o): two
products of rank r a head, and no weight is ever rebuilt. Not here: the base's absorbed products,
and LoRA on any other projection (dense_lora.py).
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.fused_moe_lora import random_tables, slot_factors
from kernels.lora_tables import LoraTables
from kernels.op import AotSpec, Case, Inputs, Op, require_contiguous, use_triton
from kernels.worklist import slot_groups

_BLOCK_R = 16
_BLOCK_N = 128
# From so many tokens on they are taken by tiles: a prompt's tokens share their factors.
_MANY = 64
_TILE_T, _TILE_N = 64, 64


def mla_query_lora(
    q_latent: Tensor, q: Tensor, tables: LoraTables, target: int, slot_of_token: Tensor,
    dim_v: int,
) -> None:  # fmt: skip
    """Add every token's kv_b_proj delta to its absorbed queries, in place.

    Shapes:  q_latent [T, Q, R] (written), contiguous;  q [T, Q, Dk]: queries without position, any
             token and head strides;  slot_of_token [T] int32, -1 = base;
             A [1, r, R], B [1, r, Q (Dk + dim_v)], head by head: keys, then values
    target   row of the tables. Rows of base tokens and of slots without it keep all bits.
    Numerics: products and sums in fp32, rounded once; from 64 tokens on once for each 64 of the
             rank, and the small product is rounded too.
    Needs:   the tables' memory of q's dtype.
    Cost:    reads A once for every head and token (from 64 tokens on: tile of tokens), and B's
             keys once a token or tile.
    """
    if not use_triton(q):
        mla_query_lora_reference(q_latent, q, tables, target, slot_of_token, dim_v)
        return
    _launch(
        q_latent, q, tables, target, slot_of_token, (q.shape[2] + dim_v, 0), (0, 0), True
    )  # fmt: skip


def mla_value_lora(
    values: Tensor, latent: Tensor, tables: LoraTables, target: int, slot_of_token: Tensor,
    dim_k: int,
) -> None:  # fmt: skip
    """Add every token's kv_b_proj delta to its attention's output, in place.

    Shapes:  values [T, Q, Dv] (written), contiguous;  latent [T, Q, R]: attention's output in the
             latent space, contiguous;  the rest as in mla_query_lora, dim_k for Dk
    """
    if not use_triton(latent):
        mla_value_lora_reference(values, latent, tables, target, slot_of_token, dim_k)
        return
    _launch(
        values, latent, tables, target, slot_of_token, (0, 0), (dim_k + values.shape[2], dim_k),
        False,
    )  # fmt: skip


def mla_query_lora_reference(
    q_latent: Tensor, q: Tensor, tables: LoraTables, target: int, slot_of_token: Tensor,
    dim_v: int,
) -> None:  # fmt: skip
    """The same in torch."""
    num_heads, dim = q.shape[1:]
    for rows, a, b in _factors(tables, target, slot_of_token, q_latent, num_heads, dim + dim_v):
        z = torch.einsum("nhd,rhd->nhr", q[rows], b[..., :dim])  # [n, Q, r]
        q_latent.index_add_(0, rows, z @ a)


def mla_value_lora_reference(
    values: Tensor, latent: Tensor, tables: LoraTables, target: int, slot_of_token: Tensor,
    dim_k: int,
) -> None:  # fmt: skip
    """The same in torch."""
    num_heads, dim = values.shape[1:]
    for rows, a, b in _factors(tables, target, slot_of_token, latent, num_heads, dim_k + dim):
        z = latent[rows] @ a.t()  # [n, Q, r]
        values.index_add_(0, rows, torch.einsum("nhr,rhd->nhd", z, b[..., dim_k:]))


def _factors(
    tables: LoraTables, target: int, slot_of_token: Tensor, latent: Tensor, num_heads: int,
    width: int,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
    """(rows int64, A [r, R], B [r, Q, width]) of every slot in use that has the target."""
    rank_of_latent = latent.shape[2]
    for slot, rows in slot_groups(slot_of_token.cpu(), tables.num_slots, 1):
        factors = slot_factors(
            tables, target, slot, rank_of_latent, num_heads * width, 1, latent.dtype
        )
        if factors is not None:
            a, b = factors[0][0], factors[1][0]
            yield rows.to(latent.device), a, b.view(len(b), num_heads, width)


def _launch(
    y: Tensor, x: Tensor, tables: LoraTables, target: int, slot_of_token: Tensor,
    shrink: tuple[int, int], expand: tuple[int, int], b_first: bool,
) -> None:  # fmt: skip
    """shrink, expand: (columns from one head to the next, first column) of that factor."""
    num_tokens, num_heads, in_ = x.shape
    out = y.shape[2]
    assert y.is_contiguous() and x.stride(2) == 1, (y.stride(), x.stride())
    require_contiguous(slot_of_token=slot_of_token)
    if not num_tokens:
        return
    first_off, second_off = (
        (tables.b_off, tables.a_off) if b_first else (tables.a_off, tables.b_off)
    )
    wide = num_heads * max(shrink[0], expand[0])
    args = (
        y, x, slot_of_token, tables.memory, first_off, second_off, tables.lora_rank,
        target, tables.num_slots, num_tokens, x.stride(0), x.stride(1),
        wide if b_first else in_, out if b_first else wide, in_, out,
    )  # fmt: skip
    columns = {
        "FIRST_HEAD": shrink[0], "FIRST_SKIP": shrink[1],
        "SECOND_HEAD": expand[0], "SECOND_SKIP": expand[1],
    }  # fmt: skip
    if num_tokens < _MANY:
        _mla_lora_kernel[(num_heads, num_tokens)](
            *args, **columns, BLOCK_R=_BLOCK_R, BLOCK_N=_BLOCK_N, **_out_tile(out)
        )
    else:
        _mla_lora_tile_kernel[(num_heads, triton.cdiv(num_tokens, _TILE_T))](
            *args,
            **columns,
            BLOCK_T=_TILE_T,
            BLOCK_R=_tile_r(tables.max_rank),
            BLOCK_N=_TILE_N,
            num_warps=4,
        )


def _out_tile(out: int) -> dict[str, int]:
    """All of a head's columns in one tile: its sum over the rank stays in fp32 until the end."""
    return {"BLOCK_OUT": triton.next_power_of_2(out), "num_warps": 2 if out <= _BLOCK_N else 4}


def _tile_r(max_rank: int) -> int:
    """Columns of the small product: all of most ranks, so that y is rounded once."""
    return min(64, max(16, triton.next_power_of_2(max_rank)))


@triton.jit(do_not_specialize=["target", "num_tokens"])
def _mla_lora_kernel(
    y_ptr, x_ptr, slots_ptr, memory_ptr, first_off_ptr, second_off_ptr, rank_ptr,
    target, num_slots, num_tokens, x_token, x_head, first_row, second_row, in_, out,
    FIRST_HEAD: tl.constexpr, FIRST_SKIP: tl.constexpr,
    SECOND_HEAD: tl.constexpr, SECOND_SKIP: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_OUT: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if (slot < 0) | (slot >= num_slots):
        return
    row = target * num_slots + slot
    rank = tl.load(rank_ptr + row)
    first_off = tl.load(first_off_ptr + row)
    second_off = tl.load(second_off_ptr + row)
    if (rank <= 0) | (first_off < 0) | (second_off < 0):
        return
    first = memory_ptr + first_off + head * FIRST_HEAD + FIRST_SKIP
    second = memory_ptr + second_off + head * SECOND_HEAD + SECOND_SKIP
    x_row = x_ptr + token * x_token + head * x_head
    y_row = y_ptr + (token * tl.num_programs(0) + head) * out
    column = tl.arange(0, BLOCK_OUT)  # [BLOCK_OUT]
    delta = tl.zeros([BLOCK_OUT], tl.float32)
    for start in range(0, rank, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)[:, None]  # [BLOCK_R, 1]
        z = tl.zeros([BLOCK_R], tl.float32)
        for k in range(0, in_, BLOCK_N):
            n = k + tl.arange(0, BLOCK_N)[None, :]  # [1, BLOCK_N]
            x = tl.load(x_row + n, mask=n < in_, other=0.0).to(tl.float32)
            w = tl.load(first + r * first_row + n, mask=(r < rank) & (n < in_), other=0.0)
            z += tl.sum(w.to(tl.float32) * x, 1)
        mask = (r < rank) & (column < out)[None, :]
        w = tl.load(second + r * second_row + column[None, :], mask=mask, other=0.0)
        delta += tl.sum(w.to(tl.float32) * z[:, None], 0)
    y = tl.load(y_row + column, mask=column < out, other=0.0)
    tl.store(y_row + column, (y.to(tl.float32) + delta).to(y.dtype), mask=column < out)


@triton.jit(do_not_specialize=["target", "num_tokens"])
def _mla_lora_tile_kernel(
    y_ptr, x_ptr, slots_ptr, memory_ptr, first_off_ptr, second_off_ptr, rank_ptr,
    target, num_slots, num_tokens, x_token, x_head, first_row, second_row, in_, out,
    FIRST_HEAD: tl.constexpr, FIRST_SKIP: tl.constexpr,
    SECOND_HEAD: tl.constexpr, SECOND_SKIP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    slot_of = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1)
    slot_of = tl.where(slot_of < num_slots, slot_of, -1)
    x_row = x_ptr + token * x_token + head * x_head
    y_row = y_ptr + (token * tl.num_programs(0) + head) * out
    slot = tl.max(slot_of, 0)
    while slot >= 0:  # one slot after the other: in a prompt there is one
        mine = (slot_of == slot)[:, None]  # [BLOCK_T, 1]
        slot_of = tl.where(slot_of == slot, -1, slot_of)
        row = target * num_slots + slot
        slot = tl.max(slot_of, 0)
        rank = tl.load(rank_ptr + row)
        first_off = tl.load(first_off_ptr + row)
        second_off = tl.load(second_off_ptr + row)
        rank = tl.where((first_off < 0) | (second_off < 0), 0, rank)
        first = memory_ptr + first_off + head * FIRST_HEAD + FIRST_SKIP
        second = memory_ptr + second_off + head * SECOND_HEAD + SECOND_SKIP
        for start in range(0, rank, BLOCK_R):
            r = start + tl.arange(0, BLOCK_R)  # [BLOCK_R]
            z = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
            for k in range(0, in_, BLOCK_N):
                n = k + tl.arange(0, BLOCK_N)  # [BLOCK_N]
                x = tl.load(
                    x_row[:, None] + n[None, :], mask=mine & (n < in_)[None, :], other=0.0
                )  # [BLOCK_T, BLOCK_N]
                w = tl.load(
                    first + r[None, :] * first_row + n[:, None],
                    mask=(r < rank)[None, :] & (n < in_)[:, None], other=0.0,
                )  # [BLOCK_N, BLOCK_R]  # fmt: skip
                z = tl.dot(x, w, z, input_precision="ieee")
            for k in range(0, out, BLOCK_N):
                n = k + tl.arange(0, BLOCK_N)  # [BLOCK_N]
                w = tl.load(
                    second + r[:, None] * second_row + n[None, :],
                    mask=(r < rank)[:, None] & (n < out)[None, :], other=0.0,
                )  # [BLOCK_R, BLOCK_N]  # fmt: skip
                delta = tl.dot(z.to(w.dtype), w, input_precision="ieee")  # [BLOCK_T, BLOCK_N]
                to = y_row[:, None] + n[None, :]
                live = mine & (n < out)[None, :]
                y = tl.load(to, mask=live, other=0.0)
                tl.store(to, (y.to(tl.float32) + delta).to(y.dtype), mask=live)


def _cases(value: bool) -> Iterator[Case]:
    def case(
        name: str, tokens: int, heads: int, dim_k: int, dim_v: int, latent: int, ranks: list[int],
        small: bool = True,
    ) -> Case:  # fmt: skip
        def make(device: str, dtype: torch.dtype, seed: int) -> Inputs:
            g = torch.Generator().manual_seed(seed)
            shapes = [(1, 8, 8), (1, latent, heads * (dim_k + dim_v))]
            tables = random_tables(shapes, ranks, max(8, *ranks), device, dtype, seed)
            slots = torch.randint(-1, len(ranks), (tokens,), generator=g).int()  # [T]
            wide = torch.randn(tokens, heads, latent, generator=g).to(device, dtype)
            shared = {"tables": tables, "target": 1, "slot_of_token": slots.to(device)}
            if value:
                y = torch.randn(tokens, heads, dim_v, generator=g).to(device, dtype)
                return {"values": y, "latent": wide, **shared, "dim_k": dim_k}
            both = torch.randn(tokens, heads, dim_k + 8, generator=g).to(device, dtype)
            return {"q_latent": wide, "q": both[..., :dim_k], **shared, "dim_v": dim_v}

        return Case(name, make, small)

    yield case("odd", 5, 3, 12, 20, 40, [4, 0, 8])
    yield case("one", 1, 1, 16, 16, 32, [8])
    yield case("ranks", 9, 2, 16, 8, 136, [24, 8, 0, 16])
    yield case("tiles", 70, 2, 12, 20, 72, [24, 8, 0, 72])
    yield case("v2_lite_decode", 32, 16, 128, 128, 512, [32] * 8, small=False)
    yield case("v2_lite_prefill", 1600, 16, 128, 128, 512, [32], small=False)
    yield case("v3_decode", 8, 128, 128, 128, 512, [16] * 4, small=False)


def _aot() -> Iterator[AotSpec]:
    signature = {
        "y_ptr": "*bf16", "x_ptr": "*bf16", "slots_ptr": "*i32", "memory_ptr": "*bf16",
        "first_off_ptr": "*i64", "second_off_ptr": "*i64", "rank_ptr": "*i32", "target": "i32",
        "num_slots": "i32", "num_tokens": "i32", "x_token": "i32:16", "x_head": "i32:16",
        "first_row": "i32:16", "second_row": "i32:16", "in_": "i32:16", "out": "i32:16",
    }  # fmt: skip
    heads = {
        "query": {"FIRST_HEAD": 256, "FIRST_SKIP": 0, "SECOND_HEAD": 0, "SECOND_SKIP": 0},
        "value": {"FIRST_HEAD": 0, "FIRST_SKIP": 0, "SECOND_HEAD": 256, "SECOND_SKIP": 128},
    }
    for (name, columns), out in zip(heads.items(), (512, 128), strict=True):
        constants = {**columns, "BLOCK_R": _BLOCK_R, "BLOCK_N": _BLOCK_N, **_out_tile(out)}
        warps = constants.pop("num_warps")
        yield AotSpec(f"v3_{name}", _mla_lora_kernel, signature, constants, num_warps=warps)
        for block_r in (_tile_r(32), _tile_r(64)):
            tile = {**columns, "BLOCK_T": _TILE_T, "BLOCK_R": block_r, "BLOCK_N": _TILE_N}
            name_r = f"v3_{name}_r{block_r}"
            yield AotSpec(name_r, _mla_lora_tile_kernel, signature, tile, num_warps=4)


def _bytes(inputs: Inputs) -> int:
    tables, rank = inputs["tables"], int(inputs["tables"].lora_rank.max())
    x = inputs["q"] if "q" in inputs else inputs["latent"]
    y = inputs["q_latent"] if "q" in inputs else inputs["values"]
    width = x.shape[2] + y.shape[2]
    slots = len(set(inputs["slot_of_token"].tolist()) - {-1})
    factors = slots * rank * (min(x.shape[2], y.shape[2]) * x.shape[1] + width)
    return int(factors * tables.memory.element_size() + x.nbytes + 2 * y.nbytes)


OPS = (
    Op(
        name="mla_query_lora",
        run=mla_query_lora,
        reference=mla_query_lora_reference,
        cases=lambda: _cases(False),
        outputs=lambda inputs, result: [inputs["q_latent"]],
        aot=_aot,
        bytes=_bytes,
    ),
    Op(
        name="mla_value_lora",
        run=mla_value_lora,
        reference=mla_value_lora_reference,
        cases=lambda: _cases(True),
        outputs=lambda inputs, result: [inputs["values"]],
        bytes=_bytes,
    ),
)
