"""Attention over the paged cache: project, norm and rotate, write keys and values, attend, project
back."""

from dataclasses import dataclass

from torch import Tensor

from kernels.norm import rms_norm
from kernels.paged_attention import paged_attention
from kernels.rope_kv import rope_kv_write
from model_runner.layers.context import ForwardContext
from model_runner.layers.linear import Linear


@dataclass(frozen=True)
class Attention:
    """One layer's attention with grouped heads.

    qkv [ (Q + 2 G) D, H ];  out [H, Q D];  q_norm, k_norm [D] or None;  sinks [Q] or None;  window
    0 = full, chunked as for kernels.paged_attention
    rope  [positions, D] float32, shared by all layers; None: this layer does not rotate
    interleaved  the rotated pairs are (2 i, 2 i + 1)
    norm_full    q_norm is [Q D] and k_norm [G D]: one norm over all heads (OLMoE)
    q_scale      [positions] float32: queries times this at each position (Llama 4), or None
    """

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv: Linear
    out: Linear
    rope: Tensor | None
    eps: float
    window: int = 0
    chunked: bool = False
    interleaved: bool = False
    norm_full: bool = False
    q_scale: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    sinks: Tensor | None = None

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """x [T, H] -> [T, H]"""
        heads, kv_heads, dim = self.num_heads, self.num_kv_heads, self.head_dim
        qkv = self.qkv(x, ctx).view(len(x), heads + 2 * kv_heads, dim)  # [T, Q + 2G, D]
        q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)  # [T, Q, D], [T, G, D] twice
        q_norm, k_norm = self.q_norm, self.k_norm
        if self.norm_full and q_norm is not None and k_norm is not None:
            q = rms_norm(q.flatten(1), q_norm, self.eps).view(q.shape)
            k = rms_norm(k.flatten(1), k_norm, self.eps).view(k.shape)
            q_norm = k_norm = None
        if self.q_scale is not None:
            # In fp32, rounded once: a rounded scale would shift all scores of a position alike.
            q.copy_(q * self.q_scale[ctx.positions][:, None, None])
        group = ctx.groups[ctx.group_of_layer[self.layer]]
        k_cache, v_cache = ctx.caches[self.layer]
        # Positions, places and lengths are the step's inputs.
        rope_kv_write(
            q, k, v, self.rope, ctx.positions, k_cache, v_cache, group.write_idx, q_norm,
            k_norm, self.eps, self.interleaved, settled=True,
        )  # fmt: skip
        y = paged_attention(
            q,
            k_cache,
            v_cache,
            group.page_table,
            ctx.seq_lens,
            ctx.cu_q,
            scale=dim**-0.5,
            window=self.window,
            chunked=self.chunked,
            sinks=self.sinks,
            max_q=ctx.max_q,
            max_len=ctx.max_len,
            settled=True,
        )  # [T, Q, D]
        return self.out(y.reshape(len(x), heads * dim), ctx)
