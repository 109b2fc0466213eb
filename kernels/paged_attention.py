"""Attention over the paged cache: decode and prefill rows in one batch, sinks, sliding window.

This file: the contract, the choice of the form, the cases. The two forms: paged_attention_torch.py
(the truth, and what serves on a CPU) and paged_attention_triton.py. Not here: writing the cache
(rope_kv.py), the latent form (mla_attention.py).
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kernels.op import AotSpec, Case, Inputs, Op, use_triton
from kernels.paged_attention_torch import first_key, paged_attention_reference
from kernels.paged_attention_triton import (
    DECODE_N,
    MAX_SPLITS,
    MIN_BLOCKS,
    STAGES,
    combine_kernel,
    decode,
    decode_kernel,
    prefill,
    prefill_kernel,
    prefill_tile,
)


def paged_attention(
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
    """Causal attention of each row's newest tokens over that row's pages.

    Shapes:  q [T, Q, D], any token stride, heads and values contiguous;
             k_cache, v_cache [P, C, G, D], contiguous, Q a multiple of G;
             page_table [S, M] int32;  seq_lens [S] int32: keys of a row, this step's included;
             cu_q [S + 1] int32: row s owns the tokens cu_q[s] .. cu_q[s + 1] - 1, the last of them
             at position seq_lens[s] - 1;  sinks [Q] or None;  returns [T, Q, D], contiguous.
    window   0: all keys; else a query sees itself and the window - 1 keys before it, or with
             `chunked` those since the last position that is a multiple of the window (Llama 4).
    sinks    one more logit per head in the softmax's denominator (GPT-OSS).
    max_q, max_len  upper bounds of a row's queries and keys: host integers, for the launch alone.
             Under a captured graph max_len is the model's longest sequence; work follows seq_lens.
    settled  no kernel still running writes seq_lens and cu_q (overlap.py)
    Padding: a row without queries or keys, and a token of no row, give zeros.
    Isolation: places past a row's end or before its window are not read, or read as zero: the pages
             of others may hold NaN.
    Order of summation: rows of one query depend on their own length and on S and max_len (the
             number of splits), others on their own length and place in the batch's query blocks;
             never on the neighbours' lengths or contents. On a CPU, see the reference.
    Cost:    decode reads each visible key and value once.
    Source:  FlashAttention-2, arXiv 2307.08691; split keys: Flash-Decoding.
    """
    if not use_triton(q):
        return paged_attention_reference(
            q,
            k_cache,
            v_cache,
            page_table,
            seq_lens,
            cu_q,
            scale=scale,
            window=window,
            chunked=chunked,
            sinks=sinks,
            max_q=max_q,
            max_len=max_len,
        )
    num_tokens, num_q, dim = q.shape
    num_rows = seq_lens.shape[0]
    num_kv = k_cache.shape[2]
    assert q.stride()[1:] == (dim, 1), f"q must have contiguous heads, strides {q.stride()}"
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and page_table.stride(1) == 1
    assert k_cache.shape == v_cache.shape and k_cache.shape[3] == dim, "caches unlike q"
    assert num_q % num_kv == 0, f"{num_q} query heads over {num_kv} kv heads"
    assert cu_q.shape[0] == num_rows + 1, f"cu_q {cu_q.shape[0]} for {num_rows} rows"
    # With decode rows alone the kernel itself zeroes the tokens of no row: a fill of its own would
    # cost one launch more in every layer.
    fresh = torch.zeros if max_q > 1 else torch.empty
    out = fresh(num_tokens, num_q, dim, dtype=q.dtype, device=q.device)  # [T, Q, D]
    if num_tokens and num_rows:
        args = (q, k_cache, v_cache, page_table, seq_lens, cu_q, sinks, out, scale, window, chunked)
        if max_q > 1:
            prefill(*args)
        decode(*args, max_len, settled)
    return out


# (queries, keys) of a row; a row of (0, 0) is padding.
Rows = Sequence[tuple[int, int]]


def make_case(
    name: str,
    rows: Rows,
    num_q: int,
    num_kv: int,
    dim: int,
    *,
    page: int = 16,
    window: int = 0,
    chunked: bool = False,
    sinks: bool = False,
    spare: int = 0,
    poison: float = float("nan"),
    max_len: int = 0,
    small: bool = True,
) -> Case:
    """A batch of these rows over shuffled pages, everything that no row may see being `poison`.

    spare    tokens of no row at the end.
    max_len  0 = the longest row, else what a capture would say.
    """

    def make(device: str, dtype: torch.dtype, seed: int) -> Inputs:
        draw = torch.Generator(device).manual_seed(seed)
        num_pages = [-(-length // page) for _, length in rows]
        total = 1 + sum(num_pages)
        order = 1 + torch.randperm(total - 1, generator=draw, device=device)  # [P - 1]; 0: no one's
        table = torch.zeros(
            len(rows), max(1, *num_pages), dtype=torch.int32, device=device
        )  # [S, M]
        caches = torch.full(
            (2, total * page, num_kv, dim), poison, dtype=dtype, device=device
        )  # [2, P C, G, D]
        taken = 0
        for row, (num_queries, length) in enumerate(rows):
            low = first_key(length - num_queries, window, chunked) if length else 0
            table[row, : num_pages[row]] = order[taken : taken + num_pages[row]].int()
            taken += num_pages[row]
            pos = torch.arange(low, length, device=device)  # [L]
            place = table[row, pos // page].long() * page + pos % page  # [L]
            seen = torch.randn(2, length - low, num_kv, dim, generator=draw, device=device)
            caches[:, place] = seen.to(dtype)
            table[row, : low // page] = 0  # fell out of the window, given back to the pool
        counts = [count for count, _ in rows]
        num_tokens = sum(counts) + spare
        queries = torch.randn(num_tokens, num_q + 2, dim, generator=draw, device=device)
        lens = torch.tensor([length for _, length in rows], dtype=torch.int32)  # [S]
        ends = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0)  # [S + 1]
        k_cache, v_cache = caches.view(2, total, page, num_kv, dim)  # [P, C, G, D] twice
        return {
            "q": queries.to(dtype)[:, :num_q],  # [T, Q, D], as a slice of qkv
            "k_cache": k_cache,
            "v_cache": v_cache,
            "page_table": table,
            "seq_lens": lens.to(device),
            "cu_q": ends.int().to(device),
            "scale": dim**-0.5,
            "window": window,
            "chunked": chunked,
            "sinks": torch.randn(num_q, generator=draw, device=device).to(dtype) if sinks else None,
            "max_q": max(counts),
            "max_len": max_len or int(lens.max()),
        }

    return Case(name, make, small)


_PAD = (0, 0)


def _cases() -> Iterable[Case]:
    ragged = ((1, 5), (1, 33), _PAD, (1, 300), (1, 16))
    mixed = ((1, 40), (7, 7), _PAD, (20, 45), (1, 1), (3, 64))
    yield make_case("decode_one", ((1, 1),), 2, 1, 16)
    yield make_case("decode_d64", ragged, 6, 2, 64, spare=2)
    yield make_case("decode_d128_sinks", ragged, 4, 4, 128, sinks=True)
    yield make_case("decode_window", ragged, 5, 1, 24, window=20, sinks=True)
    yield make_case("decode_chunked", ragged, 5, 1, 24, window=20, chunked=True)
    yield make_case("decode_captured", ragged, 4, 2, 64, max_len=4096, spare=7)
    yield make_case("decode_large", ragged, 4, 2, 64, sinks=True, poison=1e4)
    yield make_case("prefill_one", ((9, 9),), 4, 2, 32)
    yield make_case("mixed_d64", mixed, 6, 2, 64, spare=3)
    yield make_case("mixed_window_sinks", mixed, 5, 1, 24, window=6, sinks=True)
    yield make_case("mixed_chunked", mixed, 5, 1, 24, window=12, chunked=True)
    yield make_case("mixed_large", mixed, 4, 4, 128, poison=-1e4)
    # Sizes of service: GPT-OSS-20B (Q 64, G 8, D 64) and Qwen3-30B-A3B (Q 32, G 4, D 128).
    for num_rows, length in ((1, 8192), (8, 2048), (32, 2048), (64, 2048)):
        yield make_case(
            f"gptoss_decode_{num_rows}x{length}",
            ((1, length),) * num_rows,
            64,
            8,
            64,
            sinks=True,
            max_len=131072,
            small=False,
        )
    yield make_case(
        "gptoss_decode_window_32x2048",
        ((1, 2048),) * 32,
        64,
        8,
        64,
        window=128,
        sinks=True,
        max_len=131072,
        small=False,
    )
    skewed = ((1, 65536), *(((1, 512),) * 31))
    yield make_case("qwen3_decode_skewed", skewed, 32, 4, 128, max_len=131072, small=False)
    chunk = ((2048, 4096), *(((1, 1024),) * 16))
    yield make_case("qwen3_prefill_mixed", chunk, 32, 4, 128, small=False)
    yield make_case(
        "gptoss_prefill_window", ((4096, 4096),), 64, 8, 64, window=128, sinks=True, small=False
    )


def _shape_constexprs(num_q: int, num_kv: int, dim: int, window: int, sinks: bool) -> Inputs:
    return {
        "Q": num_q,
        "D": dim,
        "WINDOW": window,
        "CHUNKED": False,
        "HAS_SINKS": sinks,
        "BLOCK_D": dim,
    }


def _aot() -> Iterable[AotSpec]:
    tensors = {
        "q": "*bf16",
        "k_cache": "*bf16",
        "v_cache": "*bf16",
        "page_table": "*i32",
        "seq_lens": "*i32",
        "cu_q": "*i32",
        "sinks": "*bf16",
        "out": "*bf16",
    }
    for model, num_q, num_kv, dim, window, sinks in (
        ("gptoss", 64, 8, 64, 0, True),
        ("gptoss", 64, 8, 64, 128, True),
        ("qwen3", 32, 4, 128, 0, False),
    ):
        shape = _shape_constexprs(num_q, num_kv, dim, window, sinks)
        cache = {**shape, "G": num_kv, "C": 16, "UPCAST": False}
        heads = num_q // num_kv
        for split in (False, True):
            where = "fp32" if split else "bf16"
            yield AotSpec(
                name=f"{model}_decode_w{window}_{'split' if split else 'whole'}",
                fn=decode_kernel,
                signature={
                    **tensors,
                    "parts": f"*{where}",
                    "lse": f"*{where}",
                    "num_tokens": "i32",
                    "num_rows": "i32",
                    "table_stride": "i32",
                    "q_stride": "i32:16",
                    "num_splits": "i32",
                    "scale": "fp32",
                },
                constexprs={
                    **cache,
                    "SPLIT": split,
                    "BLOCK_H": 16,
                    "BLOCK_N": DECODE_N,
                    "MIN_BLOCKS": MIN_BLOCKS,
                    "SETTLED": True,
                    "OVERLAP": True,
                },
                num_stages=STAGES,
            )
        yield AotSpec(
            name=f"{model}_combine_w{window}",
            fn=combine_kernel,
            signature={
                "parts": "*fp32",
                "lse": "*fp32",
                "seq_lens": "*i32",
                "cu_q": "*i32",
                "sinks": "*bf16",
                "out": "*bf16",
                "num_splits": "i32",
            },
            constexprs={
                **shape,
                "BLOCK_N": DECODE_N,
                "MIN_BLOCKS": MIN_BLOCKS,
                "MAX_SPLITS": MAX_SPLITS,
                "SETTLED": True,
                "OVERLAP": True,
            },
        )
        block_m, block_n = prefill_tile(heads, wide=False)
        yield AotSpec(
            name=f"{model}_prefill_w{window}",
            fn=prefill_kernel,
            signature={
                **tensors,
                "num_rows": "i32",
                "table_stride": "i32",
                "q_stride": "i32:16",
                "scale": "fp32",
            },
            constexprs={**cache, "HEADS": heads, "BLOCK_M": block_m, "BLOCK_N": block_n},
            num_warps=8,
            num_stages=STAGES,
        )


def _visible(inputs: Inputs) -> list[tuple[int, int, int]]:
    """(queries, keys that some query sees, pairs of query and key) of each row."""
    bounds, lens = inputs["cu_q"].tolist(), inputs["seq_lens"].tolist()
    window, chunked = inputs["window"], inputs["chunked"]
    rows = []
    for row, length in enumerate(lens):
        count = bounds[row + 1] - bounds[row]
        first = length - count  # position of the first query
        pairs = sum(at + 1 - first_key(at, window, chunked) for at in range(first, length))
        rows.append((count, length - first_key(first, window, chunked) if count else 0, pairs))
    return rows


def _bytes(inputs: Inputs) -> int:
    cache = inputs["k_cache"]
    keys = sum(keys for count, keys, _ in _visible(inputs) if count)
    moved = 2 * keys * cache.shape[2] * cache.shape[3] + 2 * inputs["q"].numel()
    return int(moved * cache.element_size())


def _flops(inputs: Inputs) -> int:
    pairs = sum(pairs for _, _, pairs in _visible(inputs))
    return int(4 * pairs * inputs["q"].shape[1] * inputs["q"].shape[2])


OPS = (
    Op(
        name="paged_attention",
        run=paged_attention,
        reference=paged_attention_reference,
        cases=_cases,
        outputs=lambda inputs, result: [result],
        aot=_aot,
        bytes=_bytes,
        flops=_flops,
    ),
)
