"""The Triton side of latent attention: decode with split keys, prompts by tiles of tokens.

For mla_attention.py alone, which has the contract, the truth and the cases. A latent serves as key
and as value of all heads, so a tile (tokens by heads) reads it once. `decode` serves batches of
one query a row: keys are split where few tokens would leave the device idle, and one more launch
combines. `prefill` serves all others.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.op import interpreting
from kernels.paged_attention_triton import _LOG2E, MAX_SPLITS, _blocks_per_split, _num_sms

# Blocks of keys that a split has at least: its partial result is one fp32 latent a head.
MIN_BLOCKS = 2


@dataclass(frozen=True)
class LatentTile:
    """One launch's sizes: tokens, heads and keys of a tile; the running sum, tokens by heads by
    latent in fp32, lies in registers.

    programs  of decode, for each multiprocessor, to split keys into
    """

    tokens: int
    heads: int
    keys: int
    num_warps: int
    num_stages: int
    programs: int = 2


def decode_tile(num_heads: int, wide: bool = False) -> LatentTile:
    """For batches of one query a row. As measured on an H200 with 16 heads and 128. wide: of fp32,
    of which 64 heads and their keys do not fit."""
    if num_heads <= 16 or wide:
        return LatentTile(1, 16, 32, 4, 1 if wide else 2)
    return LatentTile(1, 64, 32, 8, 5, 1)


def prefill_tile(num_heads: int, wide: bool = False) -> LatentTile:
    """For all others. wide: of fp32, whose tiles are half as large."""
    rows = 32 if wide else 64
    heads = min(rows, max(16, triton.next_power_of_2(num_heads)))
    return LatentTile(rows // heads, heads, 16 if wide else 64, 8, 1 if wide else 2)


def choose_latent_splits(tile: LatentTile, num_programs: int, max_len: int, num_sms: int) -> int:
    """Into how many programs the keys of one token are divided at most: a power of two."""
    useful = triton.cdiv(max_len, tile.keys * MIN_BLOCKS)
    splits = max(1, min(tile.programs * num_sms // num_programs, useful, MAX_SPLITS))
    return 1 << (splits.bit_length() - 1)


def decode(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_q: Tensor,
    scale: float,
    max_len: int,
    tile: LatentTile | None = None,
) -> Tensor:
    """mla_attention of rows of one query at most. tile: None = decode_tile's."""
    num_tokens, num_heads, latent = q_latent.shape
    num_rows, dim = seq_lens.shape[0], q_rope.shape[2]
    out = torch.empty_like(q_latent)  # [T, Q, R]
    tile = tile or decode_tile(num_heads, wide=q_latent.element_size() == 4)
    num_blocks = triton.cdiv(num_heads, tile.heads)
    num_sms = _num_sms(q_latent.device.index)
    num_splits = choose_latent_splits(tile, num_tokens * num_blocks, max_len, num_sms)
    parts = lse = out
    if num_splits > 1:
        shape = (num_tokens, num_heads, num_splits)
        parts = torch.empty(*shape, latent, dtype=torch.float32, device=out.device)
        lse = torch.empty(shape, dtype=torch.float32, device=out.device)
    block_r = max(16, triton.next_power_of_2(latent))
    decode_kernel[(num_splits, num_blocks, num_tokens)](
        q_latent, q_rope, cache, page_table, seq_lens, cu_q, out, parts, lse,
        num_rows, page_table.stride(0), q_rope.stride(0), q_rope.stride(1), num_splits, scale,
        Q=num_heads, R=latent, D=dim, C=cache.shape[1], SPLIT=num_splits > 1, BLOCK_H=tile.heads,
        BLOCK_N=tile.keys, BLOCK_R=block_r, BLOCK_D=max(16, triton.next_power_of_2(dim)),
        MIN_BLOCKS=MIN_BLOCKS, UPCAST=interpreting(), num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    if num_splits > 1:
        combine_kernel[(num_heads, num_tokens)](
            parts, lse, seq_lens, cu_q, out, num_rows, num_splits,
            Q=num_heads, R=latent, BLOCK_N=tile.keys, BLOCK_R=block_r, MIN_BLOCKS=MIN_BLOCKS,
            MAX_SPLITS=MAX_SPLITS, num_warps=4,
        )  # fmt: skip
    return out


def prefill(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_q: Tensor,
    scale: float,
    tile: LatentTile | None = None,
) -> Tensor:
    """mla_attention of any rows. tile: None = prefill_tile's."""
    num_tokens, num_heads, latent = q_latent.shape
    num_rows, dim = seq_lens.shape[0], q_rope.shape[2]
    out = torch.zeros_like(q_latent)  # [T, Q, R]; tokens of no row stay zero
    tile = tile or prefill_tile(num_heads, wide=q_latent.element_size() == 4)
    # Row s begins its tiles at tile cu_q[s] // tokens + s: distinct for all rows, and no more than
    # this many together, whatever the rows' lengths are. Along one side: with many heads a tile has
    # one token, and there may be more tiles than a grid's second side takes.
    num_tiles = num_tokens // tile.tokens + num_rows
    prefill_kernel[(triton.cdiv(num_heads, tile.heads) * num_tiles,)](
        q_latent, q_rope, cache, page_table, seq_lens, cu_q, out,
        num_rows, page_table.stride(0), q_rope.stride(0), q_rope.stride(1), scale,
        Q=num_heads, R=latent, D=dim, C=cache.shape[1], BLOCK_T=tile.tokens, BLOCK_H=tile.heads,
        BLOCK_N=tile.keys, BLOCK_R=max(16, triton.next_power_of_2(latent)),
        BLOCK_D=max(16, triton.next_power_of_2(dim)), UPCAST=interpreting(),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
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


@triton.jit
def _fold(
    q, turned, cache, table, block, end, visible, acc, top, total, scale,
    R: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One step of the running softmax, in base 2: (acc, top, total) after the keys of a block.

    end: of the keys that any query sees;  visible [M] or a number: each query's own. The first
    block's first key is seen by all queries, so `top` is never -inf behind it.
    """
    r = tl.arange(0, BLOCK_R)  # [BLOCK_R]
    d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    pos = block + tl.arange(0, BLOCK_N)  # [N]
    # Masked: a weight of zero would not stop a NaN in a page that is not the row's.
    there = pos < end
    page = tl.load(table + pos // C, mask=there, other=0).to(tl.int64)
    key = cache + (page * C + pos % C) * (R + D)  # [N]
    k = tl.load(
        key[:, None] + r[None, :], mask=there[:, None] & (r < R)[None, :], other=0.0
    )  # [N, BLOCK_R]
    k_rope = tl.load(
        key[None, :] + R + d[:, None], mask=there[None, :] & (d < D)[:, None], other=0.0
    )  # [BLOCK_D, N]
    if UPCAST:  # the interpreter's product of bf16 is silently wrong
        scores = tl.dot(q.to(tl.float32), tl.trans(k.to(tl.float32)), input_precision="ieee")
        scores += tl.dot(turned.to(tl.float32), k_rope.to(tl.float32), input_precision="ieee")
    else:
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.dot(turned, k_rope, scores, input_precision="ieee")
    scores = tl.where(pos[None, :] < visible, scores * (scale * _LOG2E), float("-inf"))  # [M, N]
    new_top = tl.maximum(top, tl.max(scores, 1))  # [M]
    weights = tl.exp2(scores - new_top[:, None])  # [M, N]
    fade = tl.exp2(top - new_top)
    total = total * fade + tl.sum(weights, 1)
    acc = acc * fade[:, None]
    if UPCAST:
        acc += tl.dot(weights.to(k.dtype).to(tl.float32), k.to(tl.float32), input_precision="ieee")
    else:
        acc = tl.dot(weights.to(k.dtype), k, acc, input_precision="ieee")
    return acc, new_top, total


@triton.jit(
    do_not_specialize=["num_rows", "table_stride", "num_splits"],
    do_not_specialize_on_alignment=["page_table", "seq_lens", "cu_q"],
)
def decode_kernel(
    q_latent, q_rope, cache, page_table, seq_lens, cu_q, out, parts, lse,
    num_rows, table_stride, rope_token, rope_head, num_splits, scale,
    Q: tl.constexpr, R: tl.constexpr, D: tl.constexpr, C: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
    MIN_BLOCKS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)  # [BLOCK_H]
    token = tl.program_id(2)
    row, num_keys = _row_and_keys(seq_lens, cu_q, token, num_rows)
    r = tl.arange(0, BLOCK_R)  # [BLOCK_R]
    d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mine = head < Q  # [BLOCK_H]
    wide = token.to(tl.int64) * Q + head  # [BLOCK_H]
    live = mine[:, None] & (r < R)[None, :]  # [BLOCK_H, BLOCK_R]
    to = out + wide[:, None] * R + r[None, :]
    acc = tl.zeros([BLOCK_H, BLOCK_R], tl.float32)
    size = _blocks_per_split(num_keys, num_splits, BLOCK_N, MIN_BLOCKS) * BLOCK_N
    begin = split * size
    if begin >= num_keys:  # no row's, or short: only its first splits are used
        if (split == 0) & (not SPLIT):
            tl.store(to, acc.to(out.dtype.element_ty), mask=live)
        return
    end = tl.minimum(num_keys, begin + size)
    q = tl.load(q_latent + wide[:, None] * R + r[None, :], mask=live, other=0.0)
    at = token.to(tl.int64) * rope_token + head * rope_head  # [BLOCK_H]
    turned = tl.load(
        q_rope + at[:, None] + d[None, :], mask=mine[:, None] & (d < D)[None, :], other=0.0
    )  # [BLOCK_H, BLOCK_D]
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    table = page_table + tl.cast(row, tl.int64) * table_stride
    for block in range(begin, end, BLOCK_N):
        acc, top, total = _fold(
            q, turned, cache, table, block, end, end, acc, top, total, scale,
            R, D, C, BLOCK_N, BLOCK_R, BLOCK_D, UPCAST,
        )  # fmt: skip
    value = acc / total[:, None]
    if SPLIT:
        part = wide * num_splits + split  # [BLOCK_H]
        tl.store(parts + part[:, None] * R + r[None, :], value, mask=live)
        tl.store(lse + part, top + tl.log2(total), mask=mine)
    else:
        tl.store(to, value.to(out.dtype.element_ty), mask=live)


@triton.jit(
    do_not_specialize=["num_rows", "table_stride"],
    do_not_specialize_on_alignment=["page_table", "seq_lens", "cu_q"],
)
def prefill_kernel(
    q_latent, q_rope, cache, page_table, seq_lens, cu_q, out,
    num_rows, table_stride, rope_token, rope_head, scale,
    Q: tl.constexpr, R: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    head_blocks: tl.constexpr = (Q + BLOCK_H - 1) // BLOCK_H
    # The last tiles of a prompt see the most keys: they begin first.
    place = tl.num_programs(0) - 1 - tl.program_id(0)
    tile = place // head_blocks
    row = 0
    right = num_rows
    while right - row > 1:  # the last row that begins its tiles at or before this one
        middle = (row + right) // 2
        if tl.load(cu_q + middle) // BLOCK_T + middle <= tile:
            row = middle
        else:
            right = middle
    start = tl.load(cu_q + row)
    stop = tl.load(cu_q + row + 1)
    first = start + (tile - start // BLOCK_T - row) * BLOCK_T
    num_before = tl.load(seq_lens + row) - stop  # keys that token n sees, less n + 1
    end = num_before + tl.minimum(first + BLOCK_T, stop)
    if (first >= stop) | (end <= 0):
        return
    lane = tl.arange(0, BLOCK_T * BLOCK_H)  # [M]
    token = first + lane // BLOCK_H  # [M]
    head = place % head_blocks * BLOCK_H + lane % BLOCK_H  # [M]
    r = tl.arange(0, BLOCK_R)  # [BLOCK_R]
    d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mine = (token < stop) & (head < Q)  # [M]
    wide = token.to(tl.int64) * Q + head  # [M]
    live = mine[:, None] & (r < R)[None, :]  # [M, BLOCK_R]
    q = tl.load(q_latent + wide[:, None] * R + r[None, :], mask=live, other=0.0)
    at = token.to(tl.int64) * rope_token + head * rope_head  # [M]
    turned = tl.load(
        q_rope + at[:, None] + d[None, :], mask=mine[:, None] & (d < D)[None, :], other=0.0
    )  # [M, BLOCK_D]
    acc = tl.zeros([BLOCK_T * BLOCK_H, BLOCK_R], tl.float32)
    top = tl.full([BLOCK_T * BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_T * BLOCK_H], tl.float32)
    table = page_table + tl.cast(row, tl.int64) * table_stride
    visible = (num_before + token + 1)[:, None]  # [M, 1]
    for block in range(0, end, BLOCK_N):
        acc, top, total = _fold(
            q, turned, cache, table, block, end, visible, acc, top, total, scale,
            R, D, C, BLOCK_N, BLOCK_R, BLOCK_D, UPCAST,
        )  # fmt: skip
    value = acc / total[:, None]
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
    r = tl.arange(0, BLOCK_R)  # [BLOCK_R]
    value = tl.zeros([BLOCK_R], tl.float32)
    to = out + (token.to(tl.int64) * Q + head) * R + r
    if num_keys <= 0:
        tl.store(to, value.to(out.dtype.element_ty), mask=r < R)
        return
    size = _blocks_per_split(num_keys, num_splits, BLOCK_N, MIN_BLOCKS) * BLOCK_N
    used = tl.cdiv(num_keys, size)  # the others were never written
    first = (token.to(tl.int64) * Q + head) * num_splits
    split = tl.arange(0, MAX_SPLITS)  # [MAX_SPLITS]
    share = tl.load(lse + first + split, mask=split < used, other=float("-inf"))
    top = tl.max(share, 0)
    total = tl.sum(tl.exp2(share - top), 0)
    for one in range(0, used):
        weight = tl.exp2(tl.load(lse + first + one) - top) / total
        value += weight * tl.load(parts + (first + one) * R + r, mask=r < R, other=0.0)
    tl.store(to, value.to(out.dtype.element_ty), mask=r < R)
