"""Attention over the latent cache of DeepSeek's models: one key a token, its front the value.

Not here: the projections into and out of the latent space (the layer absorbs them into its
queries and outputs), writing the cache, and a Triton kernel: torch serves on the GPU too.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from kernels.op import Case, Inputs, Op
from kernels.paged_attention import Rows, make_case, paged_attention_reference


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

    Shapes:  q_latent [T, Q, R]: queries without position, already in the latent space;
             q_rope [T, Q, Dr];  cache [P, C, R + Dr], contiguous: the normed latent, then the
             rotated key that all heads share;  page_table [S, M], seq_lens [S], cu_q [S + 1] int32,
             max_q, max_len, padding and isolation as for `paged_attention`;
             returns [T, Q, R], in the latent space.
    Cost:    torch on every device, with the row lengths read by the host: it waits for the device,
             so it cannot be captured in a CUDA graph.
    Source:  DeepSeek-V2, arXiv 2405.04434.
    """
    num_latent = q_latent.shape[2]
    assert cache.shape[2] == num_latent + q_rope.shape[2], "cache unlike q_latent and q_rope"
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
    return values[..., :num_latent]


def _make(name: str, rows: Rows, num_q: int, num_latent: int, dim_rope: int) -> Case:
    """A case of `paged_attention` with one kv head, its queries and cache seen as latent."""
    base = make_case(name, rows, num_q, 1, num_latent + dim_rope, spare=1)

    def make(device: str, dtype: torch.dtype, seed: int) -> Inputs:
        inputs = base.make(device, dtype, seed)
        q = inputs["q"]
        shared = ("page_table", "seq_lens", "cu_q", "scale", "max_q", "max_len")
        return {
            "q_latent": q[..., :num_latent],  # [T, Q, R]
            "q_rope": q[..., num_latent:],  # [T, Q, Dr]
            "cache": inputs["k_cache"].squeeze(2),  # [P, C, R + Dr]
            **{key: inputs[key] for key in shared},
        }

    return Case(name, make, base.small)


def _cases() -> Iterable[Case]:
    yield _make("decode", ((1, 5), (1, 33), (0, 0), (1, 20)), 5, 24, 8)
    yield _make("mixed", ((1, 40), (7, 7), (0, 0), (20, 45)), 4, 32, 16)


OPS = (
    Op(
        name="mla_attention",
        run=mla_attention,
        reference=mla_attention,
        cases=_cases,
        outputs=lambda inputs, result: [result],
    ),
)
