"""The Triton side of paged attention: decode with split keys, prefill by query blocks.

For paged_attention.py alone, which has the contract and the cases (paged_attention_torch.py is the
truth): `decode` serves the rows of exactly one query, `prefill` those of several; each skips the
other's rows.
One compilation serves all lengths: counts and the strides that follow them are not specialised,
nor is the alignment of the small tables, which may be slices of one uploaded buffer.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.op import interpreting, require_contiguous
from kernels.overlap import can_overlap, follow

_LOG2E = tl.constexpr(1.4426950408889634)
# Keys of one block of decode; a split takes at least two blocks, so that its partial result (one
# fp32 row per head) stays small beside the keys and values that it reads.
DECODE_N = 64
MIN_BLOCKS = 2
MAX_SPLITS = 64
# Keys hang on the page number loaded just before them: two loads deep, five stages buffer the keys
# and values twice (four would once, so that loading waits for the product).
STAGES = 5
# A split of the longest possible row covers at most this many keys, however full the batch: one
# long row among short ones must not run alone on a few programs.
_MAX_SPLIT_TOKENS = 16384


def choose_num_splits(num_rows: int, num_kv: int, span: int, num_sms: int) -> int:
    """Into how many programs the keys of one row and kv head are divided at most: a power of two.

    span: keys that the longest row can see. About four programs per multiprocessor hide latency.
    """
    useful = triton.cdiv(span, DECODE_N * MIN_BLOCKS)
    wanted = max(4 * num_sms // max(1, num_rows * num_kv), triton.cdiv(span, _MAX_SPLIT_TOKENS))
    splits = max(1, min(wanted, useful, MAX_SPLITS))
    return 1 << (splits.bit_length() - 1)


@functools.cache
def _num_sms(index: int | None) -> int:
    """Multiprocessors of a GPU; under the interpreter a small number, so that splits occur."""
    if index is None:
        return 4
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_q: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    scale: float,
    window: int,
    chunked: bool,
    max_len: int,
    settled: bool,
) -> None:
    """Rows of exactly one query: keys in splits, then one combining launch if there are several."""
    require_contiguous(k_cache=k_cache, v_cache=v_cache, seq_lens=seq_lens, cu_q=cu_q, sinks=sinks)
    overlap = can_overlap(q.device)
    num_tokens, num_q, dim = q.shape
    num_rows, num_kv = seq_lens.shape[0], k_cache.shape[2]
    span = min(max_len, window) if window else max_len
    num_splits = choose_num_splits(num_rows, num_kv, span, _num_sms(q.device.index))
    block_d = max(16, triton.next_power_of_2(dim))
    if num_splits > 1:
        parts = torch.empty(
            num_rows, num_q, num_splits, dim, dtype=torch.float32, device=q.device
        )  # [S, Q, splits, D]
        lse = torch.empty(
            num_rows, num_q, num_splits, dtype=torch.float32, device=q.device
        )  # [S, Q, splits]
    else:
        parts = lse = out
    held = out if sinks is None else sinks
    decode_kernel[(num_splits, num_kv, num_rows)](
        q,
        k_cache,
        v_cache,
        page_table,
        seq_lens,
        cu_q,
        held,
        out,
        parts,
        lse,
        num_tokens,
        num_rows,
        page_table.stride(0),
        q.stride(0),
        num_splits,
        scale,
        Q=num_q,
        G=num_kv,
        D=dim,
        C=k_cache.shape[1],
        WINDOW=window,
        CHUNKED=chunked,
        HAS_SINKS=sinks is not None,
        SPLIT=num_splits > 1,
        BLOCK_H=max(16, triton.next_power_of_2(num_q // num_kv)),
        BLOCK_N=DECODE_N,
        BLOCK_D=block_d,
        MIN_BLOCKS=MIN_BLOCKS,
        SETTLED=settled,
        OVERLAP=overlap,
        UPCAST=interpreting(),
        num_warps=4,
        num_stages=STAGES if q.element_size() == 2 else 1,
        **follow(overlap),
    )
    if num_splits > 1:
        combine_kernel[(num_q, num_rows)](
            parts,
            lse,
            seq_lens,
            cu_q,
            held,
            out,
            num_splits,
            Q=num_q,
            D=dim,
            WINDOW=window,
            CHUNKED=chunked,
            HAS_SINKS=sinks is not None,
            BLOCK_N=DECODE_N,
            BLOCK_D=block_d,
            MIN_BLOCKS=MIN_BLOCKS,
            MAX_SPLITS=MAX_SPLITS,
            SETTLED=settled,
            OVERLAP=overlap,
            num_warps=4,
            **follow(overlap),
        )


def prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_q: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    scale: float,
    window: int,
    chunked: bool,
) -> None:
    """Rows of several queries: blocks of query tokens, all heads of one kv head in a tile."""
    require_contiguous(k_cache=k_cache, v_cache=v_cache, seq_lens=seq_lens, cu_q=cu_q, sinks=sinks)
    num_tokens, num_q, dim = q.shape
    num_rows, num_kv = seq_lens.shape[0], k_cache.shape[2]
    heads = triton.next_power_of_2(num_q // num_kv)
    wide = q.element_size() == 4
    block_m, block_n = prefill_tile(heads, wide)
    # Row s begins its blocks at block cu_q[s] // tokens + s: distinct for all rows, and no more
    # than this many together, whatever the rows' lengths are.
    grid = (num_tokens // (block_m // heads) + num_rows, num_kv)
    prefill_kernel[grid](
        q,
        k_cache,
        v_cache,
        page_table,
        seq_lens,
        cu_q,
        out if sinks is None else sinks,
        out,
        num_rows,
        page_table.stride(0),
        q.stride(0),
        scale,
        Q=num_q,
        G=num_kv,
        D=dim,
        C=k_cache.shape[1],
        WINDOW=window,
        CHUNKED=chunked,
        HAS_SINKS=sinks is not None,
        HEADS=heads,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        UPCAST=interpreting(),
        num_warps=4 if wide else 8,
        num_stages=1 if wide else STAGES,
    )


def prefill_tile(heads: int, wide: bool) -> tuple[int, int]:
    """(rows, keys) of a tile. fp32 tiles are smaller: shared memory holds half as many values."""
    if interpreting():
        return max(32, heads), 16
    return max(32 if wide else 128, heads), 32 if wide else 64


@triton.jit
def _blocks_per_split(num_keys, num_splits, BLOCK_N: tl.constexpr, MIN_BLOCKS: tl.constexpr):
    """The one place that says how a row's keys are split: both decode kernels ask here."""
    return tl.maximum(MIN_BLOCKS, tl.cdiv(tl.cdiv(num_keys, BLOCK_N), num_splits))


@triton.jit
def _first_key(position, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """The first key that a query at `position` sees."""
    if WINDOW == 0:
        return position * 0
    elif CHUNKED:
        return tl.maximum(position, 0) // WINDOW * WINDOW
    else:
        return tl.maximum(0, position - WINDOW + 1)


@triton.jit
def _load_keys(
    k_cache,
    v_cache,
    table,
    pos,
    end,
    g,
    G: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Keys [BLOCK_D, N] and values [N, BLOCK_D] at these positions of one row; zero from `end` on.

    Both loads are masked: a weight of zero would not stop a NaN in a page that is not the row's.
    """
    live = pos < end
    page = tl.load(table + pos // C, mask=live, other=0).to(tl.int64)  # [N]
    at = (page * C + pos % C) * (G * D) + g * D  # [N]
    dim = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    k = tl.load(
        k_cache + at[None, :] + dim[:, None], mask=live[None, :] & (dim < D)[:, None], other=0.0
    )  # [BLOCK_D, N]
    v = tl.load(
        v_cache + at[:, None] + dim[None, :], mask=live[:, None] & (dim < D)[None, :], other=0.0
    )  # [N, BLOCK_D]
    return k, v


@triton.jit
def _fold(q, k, v, seen, acc, top, total, scale, UPCAST: tl.constexpr):
    """One step of the running softmax, in base 2: (acc, top, total) after these keys."""
    if UPCAST:  # the interpreter's product of bf16 is silently wrong
        q = q.to(tl.float32)
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    scores = tl.dot(q, k, input_precision="ieee") * (scale * _LOG2E)  # [M, N]
    scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))  # [M]
    # A query may see nothing of the block: -inf less -inf would be NaN.
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)  # [M]
    weights = tl.exp2(scores - safe[:, None])  # [M, N]
    fade = tl.exp2(top - safe)  # [M]
    total = total * fade + tl.sum(weights, 1)
    acc = acc * fade[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")  # [M, BLOCK_D]
    return acc, new_top, total


@triton.jit(
    do_not_specialize=["num_tokens", "num_rows", "table_stride", "num_splits"],
    do_not_specialize_on_alignment=["page_table", "seq_lens", "cu_q"],
)
def decode_kernel(
    q,
    k_cache,
    v_cache,
    page_table,
    seq_lens,
    cu_q,
    sinks,
    out,
    parts,
    lse,
    num_tokens,
    num_rows,
    table_stride,
    q_stride,
    num_splits,
    scale,
    Q: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    SETTLED: tl.constexpr,
    OVERLAP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        if not SETTLED:
            gdc_wait()
    split = tl.program_id(0)
    g = tl.program_id(1)
    row = tl.program_id(2)
    per_kv: tl.constexpr = Q // G
    lane = tl.arange(0, BLOCK_H)  # [BLOCK_H]
    dim = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    tile = (g * per_kv + lane)[:, None] * D + dim[None, :]  # [BLOCK_H, BLOCK_D]
    live = (lane < per_kv)[:, None] & (dim < D)[None, :]  # [BLOCK_H, BLOCK_D]
    dtype = out.dtype.element_ty
    zero = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)  # [BLOCK_H, BLOCK_D]
    token = tl.load(cu_q + row)
    num_queries = tl.load(cu_q + row + 1) - token
    seq_len = tl.load(seq_lens + row)
    num_owned = tl.load(cu_q + num_rows)
    if OVERLAP:
        gdc_wait()
    if split == 0:
        # Tokens of no row lie at the end; the rows share them out.
        for spare in range(num_owned + row, num_tokens, num_rows):
            tl.store(out + tl.cast(spare, tl.int64) * (Q * D) + tile, zero.to(dtype), mask=live)
        if (num_queries == 1) & (seq_len <= 0):
            tl.store(out + token.to(tl.int64) * (Q * D) + tile, zero.to(dtype), mask=live)
    if num_queries != 1:
        return
    low = _first_key(seq_len - 1, WINDOW, CHUNKED)
    num_keys = seq_len - low
    size = _blocks_per_split(num_keys, num_splits, BLOCK_N, MIN_BLOCKS) * BLOCK_N
    begin = low + split * size
    if begin >= seq_len:
        return  # a short row uses only its first splits; the combining kernel knows how many
    end = tl.minimum(seq_len, begin + size)
    place = q + token.to(tl.int64) * q_stride + tile
    queries = tl.load(place, mask=live, other=0.0, cache_modifier=".cg")
    acc = zero
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)  # [BLOCK_H]
    total = tl.zeros([BLOCK_H], tl.float32)  # [BLOCK_H]
    if HAS_SINKS and not SPLIT:
        sink = tl.load(sinks + g * per_kv + lane, mask=lane < per_kv, other=0.0)  # [BLOCK_H]
        top = sink.to(tl.float32) * _LOG2E
        total += 1.0
    table = page_table + row.to(tl.int64) * table_stride
    for block in range(begin, end, BLOCK_N):
        pos = block + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        k, v = _load_keys(k_cache, v_cache, table, pos, end, g, G, D, C, BLOCK_D)
        acc, top, total = _fold(queries, k, v, (pos < end)[None, :], acc, top, total, scale, UPCAST)
    value = acc / total[:, None]  # [BLOCK_H, BLOCK_D]
    if SPLIT:
        head = row.to(tl.int64) * Q + g * per_kv + lane  # [BLOCK_H]
        part = head * num_splits + split  # [BLOCK_H]
        tl.store(parts + part[:, None] * D + dim[None, :], value, mask=live)
        tl.store(lse + part, top + tl.log2(total), mask=lane < per_kv)
    else:
        tl.store(out + token.to(tl.int64) * (Q * D) + tile, value.to(dtype), mask=live)


@triton.jit(
    do_not_specialize=["num_splits"],
    do_not_specialize_on_alignment=["seq_lens", "cu_q"],
)
def combine_kernel(
    parts,
    lse,
    seq_lens,
    cu_q,
    sinks,
    out,
    num_splits,
    Q: tl.constexpr,
    D: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SETTLED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        if not SETTLED:
            gdc_wait()
    head = tl.program_id(0)
    row = tl.program_id(1)
    token = tl.load(cu_q + row)
    num_queries = tl.load(cu_q + row + 1) - token
    num_keys = tl.load(seq_lens + row)
    num_keys -= _first_key(num_keys - 1, WINDOW, CHUNKED)
    if OVERLAP:
        gdc_wait()
    if (num_queries != 1) | (num_keys <= 0):
        return
    size = _blocks_per_split(num_keys, num_splits, BLOCK_N, MIN_BLOCKS) * BLOCK_N
    split = tl.arange(0, MAX_SPLITS)  # [MAX_SPLITS]
    used = split < tl.cdiv(num_keys, size)  # the others were never written
    first = (row.to(tl.int64) * Q + head) * num_splits
    shares = lse + first + split
    share = tl.load(shares, mask=used, other=float("-inf"), cache_modifier=".cg")  # [MAX_SPLITS]
    top = tl.max(share, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * _LOG2E
        top = tl.maximum(top, sink)
    share = tl.exp2(share - top)
    total = tl.sum(share, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - top)
    dim = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    part = tl.load(
        parts + (first + split)[:, None] * D + dim[None, :],
        mask=used[:, None] & (dim < D)[None, :],
        other=0.0,
        cache_modifier=".cg",
    )  # [MAX_SPLITS, BLOCK_D]
    value = tl.sum(part * share[:, None], 0) / total  # [BLOCK_D]
    place = out + (token.to(tl.int64) * Q + head) * D + dim
    tl.store(place, value.to(out.dtype.element_ty), mask=dim < D)


@triton.jit(
    do_not_specialize=["num_rows", "table_stride"],
    do_not_specialize_on_alignment=["page_table", "seq_lens", "cu_q"],
)
def prefill_kernel(
    q,
    k_cache,
    v_cache,
    page_table,
    seq_lens,
    cu_q,
    sinks,
    out,
    num_rows,
    table_stride,
    q_stride,
    scale,
    Q: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
):
    block = tl.program_id(0)
    g = tl.program_id(1)
    per_kv: tl.constexpr = Q // G
    tokens: tl.constexpr = BLOCK_M // HEADS
    # The last row whose first block is not past this one.
    row = 0
    right = num_rows
    while right - row > 1:
        middle = (row + right) // 2
        if tl.load(cu_q + middle) // tokens + middle <= block:
            row = middle
        else:
            right = middle
    first = tl.load(cu_q + row)
    num_queries = tl.load(cu_q + row + 1) - first
    seq_len = tl.load(seq_lens + row)
    skip = (block - (first // tokens + row)) * tokens  # queries of the row before this block
    if (num_queries <= 1) | (skip >= num_queries) | (seq_len <= 0):
        return
    lane = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    query = skip + lane // HEADS  # [BLOCK_M]
    head = lane % HEADS  # [BLOCK_M]
    dim = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    mine = (query < num_queries) & (head < per_kv)  # [BLOCK_M]
    live = mine[:, None] & (dim < D)[None, :]  # [BLOCK_M, BLOCK_D]
    token = (first + query).to(tl.int64)  # [BLOCK_M]
    tile = ((g * per_kv + head) * D)[:, None] + dim[None, :]  # [BLOCK_M, BLOCK_D]
    queries = tl.load(q + (token * q_stride)[:, None] + tile, mask=live, other=0.0)
    at = seq_len - num_queries + query  # [BLOCK_M]: position of each query
    begin = _first_key(seq_len - num_queries + skip, WINDOW, CHUNKED)
    end = tl.minimum(seq_len, seq_len - num_queries + skip + tokens)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)  # [BLOCK_M, BLOCK_D]
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)  # [BLOCK_M]
    total = tl.zeros([BLOCK_M], tl.float32)  # [BLOCK_M]
    if HAS_SINKS:
        sink = tl.load(sinks + g * per_kv + head, mask=head < per_kv, other=0.0)  # [BLOCK_M]
        top = sink.to(tl.float32) * _LOG2E
        total += 1.0
    table = page_table + tl.cast(row, tl.int64) * table_stride
    for start in range(begin, end, BLOCK_N):
        pos = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        k, v = _load_keys(k_cache, v_cache, table, pos, end, g, G, D, C, BLOCK_D)
        ahead = pos[None, :] - at[:, None]  # [BLOCK_M, BLOCK_N]
        seen = (ahead <= 0) & (pos < end)[None, :]  # [BLOCK_M, BLOCK_N]
        if WINDOW > 0 and CHUNKED:
            seen &= pos[None, :] >= (at // WINDOW * WINDOW)[:, None]
        elif WINDOW > 0:
            seen &= ahead > -WINDOW
        acc, top, total = _fold(queries, k, v, seen, acc, top, total, scale, UPCAST)
    value = acc / total[:, None]  # [BLOCK_M, BLOCK_D]; lanes of no query are not stored
    tl.store(out + (token * (Q * D))[:, None] + tile, value.to(out.dtype.element_ty), mask=live)
