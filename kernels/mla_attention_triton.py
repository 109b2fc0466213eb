"""The Triton side of latent attention: one program for a token and a block of its heads.

For mla_attention.py alone, which has the contract, the truth and the cases. A latent serves as key
and as value of all heads, so a block of heads reads it once. Keys are split where few tokens would
leave the device idle; one more launch combines.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.op import interpreting
from kernels.paged_attention_triton import (
    _LOG2E,
    MAX_SPLITS,
    MIN_BLOCKS,
    _blocks_per_split,
    _num_sms,
    choose_num_splits,
)

BLOCK_N = 32  # latents of one block: keys and values of all heads in one tile


def head_tile(num_heads: int) -> tuple[int, int]:
    """(heads of a program, warps): the running sum, heads by latent in fp32, lies in registers."""
    return (16, 4) if num_heads <= 16 else (32, 8)


def attend(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_q: Tensor,
    scale: float,
    max_len: int,
) -> Tensor:
    """As mla_attention."""
    num_tokens, num_heads, latent = q_latent.shape
    num_rows, dim = seq_lens.shape[0], q_rope.shape[2]
    out = torch.zeros_like(q_latent)  # [T, Q, R]; tokens of no row stay zero
    if not num_tokens or not num_rows:
        return out
    block_h, num_warps = head_tile(num_heads)
    num_blocks = triton.cdiv(num_heads, block_h)
    num_splits = choose_num_splits(num_tokens, num_blocks, max_len, _num_sms(q_latent.device.index))
    parts = lse = out
    if num_splits > 1:
        shape = (num_tokens, num_heads, num_splits)
        parts = torch.empty(*shape, latent, dtype=torch.float32, device=out.device)
        lse = torch.empty(shape, dtype=torch.float32, device=out.device)
    block_r = max(16, triton.next_power_of_2(latent))
    attend_kernel[(num_splits, num_blocks, num_tokens)](
        q_latent, q_rope, cache, page_table, seq_lens, cu_q, out, parts, lse,
        num_rows, page_table.stride(0), q_rope.stride(0), q_rope.stride(1), num_splits, scale,
        Q=num_heads, R=latent, D=dim, C=cache.shape[1], SPLIT=num_splits > 1, BLOCK_H=block_h,
        BLOCK_N=BLOCK_N, BLOCK_R=block_r, BLOCK_D=max(16, triton.next_power_of_2(dim)),
        MIN_BLOCKS=MIN_BLOCKS, UPCAST=interpreting(), num_warps=num_warps,
        num_stages=2 if q_latent.element_size() == 2 else 1,
    )  # fmt: skip
    if num_splits > 1:
        combine_kernel[(num_heads, num_tokens)](
            parts, lse, seq_lens, cu_q, out, num_rows, num_splits,
            Q=num_heads, R=latent, BLOCK_N=BLOCK_N, BLOCK_R=block_r, MIN_BLOCKS=MIN_BLOCKS,
            MAX_SPLITS=MAX_SPLITS, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _row_and_keys(seq_lens, cu_q, token, num_rows):
    """(the row of a token, how many keys it sees): no keys for a token of no row."""
    row = 0
    right = num_rows
    while right - row > 1:  # the last row that begins at or before the token
        middle = (row + right) // 2
        if tl.load(cu_q + middle) <= token:
            row = middle
        else:
            right = middle
    end = tl.load(cu_q + row + 1)
    num_keys = tl.load(seq_lens + row) - (end - 1 - token)
    return row, tl.where(token < end, tl.maximum(num_keys, 0), 0)


@triton.jit(
    do_not_specialize=["num_rows", "table_stride", "num_splits"],
    do_not_specialize_on_alignment=["page_table", "seq_lens", "cu_q"],
)
def attend_kernel(
    q_latent,
    q_rope,
    cache,
    page_table,
    seq_lens,
    cu_q,
    out,
    parts,
    lse,
    num_rows,
    table_stride,
    rope_token,
    rope_head,
    num_splits,
    scale,
    Q: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    split = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)  # [BLOCK_H]
    token = tl.program_id(2)
    row, num_keys = _row_and_keys(seq_lens, cu_q, token, num_rows)
    size = _blocks_per_split(num_keys, num_splits, BLOCK_N, MIN_BLOCKS) * BLOCK_N
    begin = split * size
    if begin >= num_keys:
        return  # no row's, or short: only its first splits are used
    end = tl.minimum(num_keys, begin + size)
    r = tl.arange(0, BLOCK_R)  # [BLOCK_R]
    d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mine = head < Q  # [BLOCK_H]
    wide = token.to(tl.int64) * Q + head  # [BLOCK_H]
    live = mine[:, None] & (r < R)[None, :]  # [BLOCK_H, BLOCK_R]
    q = tl.load(q_latent + wide[:, None] * R + r[None, :], mask=live, other=0.0)
    at = token.to(tl.int64) * rope_token + head * rope_head  # [BLOCK_H]
    turned = tl.load(
        q_rope + at[:, None] + d[None, :], mask=mine[:, None] & (d < D)[None, :], other=0.0
    )  # [BLOCK_H, BLOCK_D]
    acc = tl.zeros([BLOCK_H, BLOCK_R], tl.float32)
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    table = page_table + tl.cast(row, tl.int64) * table_stride
    for block in range(begin, end, BLOCK_N):
        pos = block + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        # Masked: a weight of zero would not stop a NaN in a page that is not the row's.
        seen = pos < end
        page = tl.load(table + pos // C, mask=seen, other=0).to(tl.int64)
        key = cache + (page * C + pos % C) * (R + D)  # [BLOCK_N]
        k = tl.load(
            key[:, None] + r[None, :], mask=seen[:, None] & (r < R)[None, :], other=0.0
        )  # [BLOCK_N, BLOCK_R]
        k_rope = tl.load(
            key[None, :] + R + d[:, None], mask=seen[None, :] & (d < D)[:, None], other=0.0
        )  # [BLOCK_D, BLOCK_N]
        if UPCAST:  # the interpreter's product of bf16 is silently wrong
            scores = tl.dot(q.to(tl.float32), tl.trans(k.to(tl.float32)), input_precision="ieee")
            scores += tl.dot(turned.to(tl.float32), k_rope.to(tl.float32), input_precision="ieee")
        else:
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            scores = tl.dot(turned, k_rope, scores, input_precision="ieee")
        scores = tl.where(seen[None, :], scores * (scale * _LOG2E), float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))  # [BLOCK_H]
        weights = tl.exp2(scores - new_top[:, None])  # [BLOCK_H, BLOCK_N]
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None]
        if UPCAST:
            acc += tl.dot(
                weights.to(k.dtype).to(tl.float32), k.to(tl.float32), input_precision="ieee"
            )
        else:
            acc = tl.dot(weights.to(k.dtype), k, acc, input_precision="ieee")
        top = new_top
    value = acc / total[:, None]
    if SPLIT:
        part = wide * num_splits + split  # [BLOCK_H]
        tl.store(parts + part[:, None] * R + r[None, :], value, mask=live)
        tl.store(lse + part, top + tl.log2(total), mask=mine)
    else:
        to = out + wide[:, None] * R + r[None, :]
        tl.store(to, value.to(out.dtype.element_ty), mask=live)


@triton.jit(
    do_not_specialize=["num_rows", "num_splits"],
    do_not_specialize_on_alignment=["seq_lens", "cu_q"],
)
def combine_kernel(
    parts,
    lse,
    seq_lens,
    cu_q,
    out,
    num_rows,
    num_splits,
    Q: tl.constexpr,
    R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    head = tl.program_id(0)
    token = tl.program_id(1)
    _, num_keys = _row_and_keys(seq_lens, cu_q, token, num_rows)
    if num_keys <= 0:
        return
    size = _blocks_per_split(num_keys, num_splits, BLOCK_N, MIN_BLOCKS) * BLOCK_N
    used = tl.cdiv(num_keys, size)  # the others were never written
    first = (token.to(tl.int64) * Q + head) * num_splits
    split = tl.arange(0, MAX_SPLITS)  # [MAX_SPLITS]
    share = tl.load(lse + first + split, mask=split < used, other=float("-inf"))
    top = tl.max(share, 0)
    total = tl.sum(tl.exp2(share - top), 0)
    r = tl.arange(0, BLOCK_R)  # [BLOCK_R]
    value = tl.zeros([BLOCK_R], tl.float32)
    for one in range(0, used):
        weight = tl.exp2(tl.load(lse + first + one) - top) / total
        value += weight * tl.load(parts + (first + one) * R + r, mask=r < R, other=0.0)
    to = out + (token.to(tl.int64) * Q + head) * R + r
    tl.store(to, value.to(out.dtype.element_ty), mask=r < R)
