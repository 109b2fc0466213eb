"""Paged attention in plain torch: the truth that the kernels are held against, and what serves on a
CPU.

The contract is paged_attention.py's. Not here: the Triton kernels (paged_attention_triton.py).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

# Scores that the reference holds at once (64 MiB in fp32).
_REFERENCE_SCORES = 1 << 24


def paged_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_q: Tensor,
    *,
    scale: float,
    window: int = 0,
    chunked: bool = False,
    sinks: Tensor | None = None,
    max_q: int,
    max_len: int,
    settled: bool = False,
) -> Tensor:
    """`paged_attention` in torch: rows of one query all at once, longer ones one by one.

    A row of several queries has the same bits in any company. Rows of one query are padded to the
    longest among them with keys of weight zero, at the end, so the products may be blocked
    differently: differences of about 1e-7 of the values, in fp32, remain possible.
    """
    del max_q, max_len, settled  # launch sizes: here the rows themselves are at hand
    bounds, lens = cu_q.tolist(), seq_lens.tolist()
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)  # [T, Q, D]
    single: list[int] = []
    for row, length in enumerate(lens):
        num_queries = bounds[row + 1] - bounds[row]
        if num_queries == 1 and length > 0:
            single.append(row)
        elif num_queries > 1 and length > 0:
            first, last = bounds[row], bounds[row + 1]
            out[first:last] = _attend_row(
                q[first:last],
                k_cache,
                v_cache,
                page_table[row],
                length,
                scale,
                window,
                chunked,
                sinks,
            )
    if single:
        whole = len(single) == q.shape[0] == len(lens)
        tokens = None if whole else torch.tensor([bounds[row] for row in single], device=q.device)
        table = page_table if whole else page_table[single]  # [S, M]
        queries = q if tokens is None else q[tokens]  # [S, Q, D]
        values = _attend_single(
            queries,
            k_cache,
            v_cache,
            table,
            [lens[row] for row in single],
            scale,
            window,
            chunked,
            sinks,
        )
        if tokens is None:
            return values
        out[tokens] = values
    return out


def first_key(position: int, window: int, chunked: bool) -> int:
    """The first key that a query at `position` sees."""
    if not window:
        return 0
    return position // window * window if chunked else max(0, position - window + 1)


def _attend_single(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    lens: Sequence[int],
    scale: float,
    window: int,
    chunked: bool,
    sinks: Tensor | None,
) -> Tensor:
    """One query [S, Q, D] per row of `table`, every row with at least one key."""
    num_rows, num_q, dim = q.shape
    page, num_kv = k_cache.shape[1], k_cache.shape[2]
    starts = [first_key(length - 1, window, chunked) for length in lens]
    counts = [length - start for length, start in zip(lens, starts, strict=True)]
    longest = max(counts)
    ragged = min(counts) < longest
    first_pages = [start // page for start in starts]
    span = max(-(-length // page) - low for length, low in zip(lens, first_pages, strict=True))
    if any(first_pages):
        at = torch.tensor(first_pages, device=q.device)[:, None]  # [S, 1]
        at = at + torch.arange(span, device=q.device)  # [S, M]
        pages = table.gather(1, at.clamp_(max=table.shape[1] - 1)).long()  # [S, M]
    else:
        pages = table[:, :span].long()  # [S, M]
    place = pages.mul_(page)[:, :, None] + torch.arange(page, device=q.device)  # [S, M, C]
    place = place.view(num_rows, span * page)  # [S, M C]
    skips = [start - low * page for start, low in zip(starts, first_pages, strict=True)]
    if ragged or min(skips) < max(skips):
        # Past its end a row reads its own last key again, with weight zero: never another's page.
        skip = torch.tensor(skips, device=q.device)[:, None]  # [S, 1]
        last = skip + torch.tensor(counts, device=q.device)[:, None] - 1  # [S, 1]
        at = skip + torch.arange(longest, device=q.device)  # [S, L]
        place = place.gather(1, torch.minimum(at, last))  # [S, L]
    else:
        place = place[:, skips[0] : skips[0] + longest]  # [S, L]
    # Head-major rows, so that both products are plain batched ones.
    head = torch.arange(num_kv, device=q.device)[None, :, None]  # [1, G, 1]
    place = (place.mul_(num_kv)[:, None, :] + head).view(-1)  # [S G L]
    shape = (num_rows * num_kv, longest, dim)
    k = k_cache.view(-1, dim).index_select(0, place).view(shape)  # [S G, L, D]
    v = v_cache.view(-1, dim).index_select(0, place).view(shape)  # [S G, L, D]
    per_kv = num_q // num_kv
    scores = torch.bmm(
        q.reshape(num_rows * num_kv, per_kv, dim), k.transpose(1, 2)
    )  # [S G, Q/G, L]
    scores = scores.mul_(scale).view(num_rows, num_q, longest)  # [S, Q, L]
    if ragged:
        live = torch.tensor(counts, device=q.device)[:, None, None]  # [S, 1, 1]
        past = torch.arange(longest, device=q.device) >= live  # [S, 1, L]
        scores = scores.masked_fill_(past, float("-inf"))
    weights = _softmax(scores, None if sinks is None else sinks[:, None])  # [S, Q, L]
    return torch.bmm(weights.reshape(num_rows * num_kv, per_kv, longest), v).view(q.shape)


def _attend_row(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    pages: Tensor,
    length: int,
    scale: float,
    window: int,
    chunked: bool,
    sinks: Tensor | None,
) -> Tensor:
    """The queries [n, Q, D] of one row, the last at position length - 1."""
    num_queries, num_q, dim = q.shape
    page, num_kv = k_cache.shape[1], k_cache.shape[2]
    per_kv = num_q // num_kv
    start = length - num_queries  # position of the first query
    low = first_key(start, window, chunked)
    pos = torch.arange(low, length, device=q.device)  # [L]
    place = pages[pos // page].long() * page + pos % page  # [L]
    # Head-major, and in memory: a strided operand would send each product to a copy of its own.
    k = k_cache.view(-1, num_kv, dim)[place].transpose(0, 1).contiguous()  # [G, L, D]
    v = v_cache.view(-1, num_kv, dim)[place].transpose(0, 1).contiguous()  # [G, L, D]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)  # [n, Q, D]
    step = max(1, _REFERENCE_SCORES // (num_q * (length - low)))
    for first in range(0, num_queries, step):
        some = min(step, num_queries - first)
        here = start + first  # position of this part's first query
        begin = first_key(here, window, chunked) - low
        end = here + some - low
        part = q[first : first + some].view(some, num_kv, per_kv, dim)  # [n, G, Q/G, D]
        part = part.permute(1, 2, 0, 3).reshape(num_kv, per_kv * some, dim)  # [G, Q/G n, D]
        scores = torch.bmm(part, k[:, begin:end].transpose(1, 2)).mul_(scale)  # [G, Q/G n, L]
        at = torch.arange(here, here + some, device=q.device)[:, None]  # [n, 1]
        ahead = pos[begin:end][None, :] - at  # [n, L]
        hidden = ahead > 0  # [n, L]
        if window and chunked:
            hidden |= pos[begin:end][None, :] < at // window * window
        elif window:
            hidden |= ahead <= -window
        scores = scores.view(num_q, some, end - begin)  # [Q, n, L]
        scores = scores.masked_fill_(hidden, float("-inf"))
        weights = _softmax(scores, None if sinks is None else sinks[:, None, None])  # [Q, n, L]
        values = torch.bmm(weights.reshape(num_kv, per_kv * some, end - begin), v[:, begin:end])
        out[first : first + some] = values.view(num_q, some, dim).transpose(0, 1)
    return out


def _softmax(scores: Tensor, sink: Tensor | None) -> Tensor:
    """Softmax over the last dimension, in fp32, with one more logit in the denominator if given."""
    if sink is None:
        return torch.softmax(scores, -1, dtype=torch.float32).to(scores.dtype)
    column = sink.to(scores.dtype).expand(*scores.shape[:-1], 1)  # [.., 1]
    joined = torch.cat((scores, column), -1)  # [.., L + 1]
    return torch.softmax(joined, -1, dtype=torch.float32)[..., :-1].to(scores.dtype)
