"""Attention over the latent cache of DeepSeek's models: one key a token, its front the value.

This file: the contract, the torch form that is the truth and serves on a CPU, the cases. Not here:
the Triton kernels (mla_attention_triton.py), the projections into and out of the latent space (the
layer absorbs them into its queries and outputs), writing the cache (mla_kv.py).
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kernels.mla_attention_triton import (
    MIN_BLOCKS,
    LatentTile,
    combine_kernel,
    decode,
    decode_kernel,
    decode_tile,
    prefill,
    prefill_kernel,
    prefill_tile,
)
from kernels.op import AotSpec, Case, Inputs, Op, require_contiguous, use_triton
from kernels.paged_attention import Rows, make_case
from kernels.paged_attention_torch import paged_attention_reference
from kernels.paged_attention_triton import MAX_SPLITS


def mla_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_q: Tensor,
    *,
    scale: float,
    max_q: int,
    max_len: int,
) -> Tensor:
    """Causal attention of each row's newest tokens over that row's latent pages.

    Shapes:  q_latent [T, Q, R], contiguous: queries without position, already in the latent space;
             q_rope [T, Q, Dr], any token and head strides;
             cache [P, C, R + Dr], contiguous: the normed latent, then the rotated key that all
             heads share;  page_table [S, M], seq_lens [S], cu_q [S + 1] int32, max_q, max_len,
             padding and isolation as for `paged_attention`;
             returns [T, Q, R], in the latent space, contiguous.
    Order of summation: a token's depends on its own length and on T and max_len (the number of
             splits), never on its neighbours.
    Cost:    reads each visible latent once for every block of heads of every query.
    Source:  DeepSeek-V2, arXiv 2405.04434; split keys: Flash-Decoding.
    """
    assert cache.shape[2] == q_latent.shape[2] + q_rope.shape[2], "cache unlike q_latent and q_rope"
    if not use_triton(q_latent):
        return mla_attention_reference(
            q_latent, q_rope, cache, page_table, seq_lens, cu_q,
            scale=scale, max_q=max_q, max_len=max_len,
        )  # fmt: skip
    assert q_rope.stride(2) == 1, f"q_rope must have contiguous heads, strides {q_rope.stride()}"
    assert page_table.stride(1) == 1, "a row's pages must lie side by side"
    require_contiguous(q_latent=q_latent, cache=cache, seq_lens=seq_lens, cu_q=cu_q)
    if not q_latent.shape[0] or not seq_lens.shape[0]:
        return torch.zeros_like(q_latent)
    args = (q_latent, q_rope, cache, page_table, seq_lens, cu_q, scale)
    return prefill(*args) if max_q > 1 else decode(*args, max_len)


def mla_attention_reference(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_q: Tensor,
    *,
    scale: float,
    max_q: int,
    max_len: int,
) -> Tensor:
    """The same in torch."""
    num_latent = q_latent.shape[2]
    q = torch.cat((q_latent, q_rope), 2)  # [T, Q, R + Dr]
    pages = cache.unsqueeze(2)  # [P, C, 1, R + Dr]
    # The value is the latent part of the key; the rotated part's columns are dropped at the end.
    values = paged_attention_reference(
        q,
        pages,
        pages,
        page_table,
        seq_lens,
        cu_q,
        scale=scale,
        max_q=max_q,
        max_len=max_len,
    )  # [T, Q, R + Dr]
    return values[..., :num_latent].contiguous()


def make_latent_case(
    name: str, rows: Rows, num_q: int, num_latent: int, dim_rope: int, *, max_len: int = 0,
    small: bool = True,
) -> Case:  # fmt: skip
    """A case of `paged_attention` with one kv head, its queries and cache seen as latent.

    rows  (queries, keys) of each
    """
    base = make_case(
        name, rows, num_q, 1, num_latent + dim_rope, spare=1, max_len=max_len, small=small
    )

    def make(device: str, dtype: torch.dtype, seed: int) -> Inputs:
        inputs = base.make(device, dtype, seed)
        q = inputs["q"]
        shared = ("page_table", "seq_lens", "cu_q", "scale", "max_q", "max_len")
        return {
            "q_latent": q[..., :num_latent].contiguous(),  # [T, Q, R]
            "q_rope": q[..., num_latent:],  # [T, Q, Dr]
            "cache": inputs["k_cache"].squeeze(2),  # [P, C, R + Dr]
            **{key: inputs[key] for key in shared},
        }

    return Case(name, make, base.small)


def _cases() -> Iterable[Case]:
    yield make_latent_case("decode", ((1, 5), (1, 33), (0, 0), (1, 20)), 5, 24, 8)
    yield make_latent_case("decode_split", ((1, 300), (0, 0), (1, 70)), 3, 40, 8, max_len=4096)
    yield make_latent_case("mixed", ((1, 40), (7, 7), (0, 0), (20, 45)), 4, 32, 16)
    yield make_latent_case("wide", ((1, 70), (3, 9)), 18, 64, 16)
    for name, num_q in (("v2_lite", 16), ("v3", 128)):
        sizes = (((1, 8192),), ((1, 2048),) * 32)
        for rows in sizes:
            at = f"{name}_decode_{len(rows)}x{rows[0][1]}"
            yield make_latent_case(at, rows, num_q, 512, 64, max_len=32768, small=False)
    yield make_latent_case("v2_lite_prefill", ((1024, 1024),), 16, 512, 64, small=False)


def _aot() -> Iterable[AotSpec]:
    kept = ("q_latent", "q_rope", "cache", "out")
    signature = dict.fromkeys(("page_table", "seq_lens", "cu_q"), "*i32")
    signature |= dict.fromkeys(("parts", "lse"), "*fp32") | {"scale": "fp32"}
    counts = ("num_rows", "num_splits")
    strides = ("rope_token", "rope_head")
    signature |= dict.fromkeys(counts, "i32") | dict.fromkeys(strides, "i32:16")
    signature |= {"table_stride": "i32"}

    def spec(name: str, kernel: Any, tile: LatentTile, wide: bool, **constants: Any) -> AotSpec:
        every = {
            "R": 512, "D": 64, "C": 16, "BLOCK_T": tile.tokens, "BLOCK_H": tile.heads,
            "BLOCK_N": tile.keys, "BLOCK_R": 512, "BLOCK_D": 64, "MIN_BLOCKS": MIN_BLOCKS,
            "MAX_SPLITS": MAX_SPLITS, "UPCAST": False, **constants,
        }  # fmt: skip
        typed = signature | dict.fromkeys(kept, "*fp32" if wide else "*bf16")
        wanted, known = (
            {k: v for k, v in given.items() if k in kernel.arg_names} for given in (typed, every)
        )
        # 80: with which it was fastest. In fp32 nobody is in a hurry.
        spills = 80 if kernel is prefill_kernel else 112 if wide else 0
        return AotSpec(
            name, kernel, wanted, known, tile.num_warps, tile.num_stages, max_spills=spills
        )

    for num_q in (16, 128):
        for wide in (False, True):
            at, tile = f"q{num_q}{'_fp32' if wide else ''}", decode_tile(num_q, wide)
            for split in (False, True):
                name = f"{at}_{'split' if split else 'whole'}"
                yield spec(name, decode_kernel, tile, wide, Q=num_q, SPLIT=split)
            yield spec(f"{at}_combine", combine_kernel, replace(tile, num_warps=4), wide, Q=num_q)
            yield spec(f"{at}_prefill", prefill_kernel, prefill_tile(num_q, wide), wide, Q=num_q)


def _bytes(inputs: Inputs) -> int:
    keys = int(inputs["seq_lens"].sum()) * inputs["cache"].shape[2]
    return int((keys + 2 * inputs["q_latent"].numel()) * inputs["cache"].element_size())


OPS = (
    Op(
        name="mla_attention",
        run=mla_attention,
        reference=mla_attention_reference,
        cases=_cases,
        outputs=lambda inputs, result: [result],
        aot=_aot,
        bytes=_bytes,
    ),
)
