"""DeepSeek's latent attention, absorbed: keys and values are never rebuilt from the cached latents.

Queries go into the latent space by kv_b_proj's key half, outputs come back by its value half; an
adapter on kv_b_proj works on those two products. Source: DeepSeek-V2, arXiv 2405.04434 (2.1.1 and
appendix C).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.mla_attention import mla_attention
from kernels.mla_kv import mla_kv_write
from kernels.mla_lora import mla_query_lora, mla_value_lora
from model_runner.layers.context import ForwardContext
from model_runner.layers.linear import Linear
from model_runner.layers.norm import RmsNorm


@dataclass(frozen=True)
class LatentAttention:
    """One layer's latent attention.

    down     [ (q latent or all queries) + R + Dr, H ]: what reads the hidden state;  q_width  rows
             of it that are the queries'
    q_norm, q_up   norm and second projection of the queries' latent, None where they have none
    kv_norm  [R];  key_up [Q, Dn, R], value_up [Q, Dv, R]: the halves of kv_b_proj, whose adapters
             are `kv_target`
    rope     [positions, Dr] float32, shared by all layers;  scale  of the softmax
    """

    layer: int
    num_heads: int
    dim_rope: int
    q_width: int
    down: Linear
    q_norm: RmsNorm | None
    q_up: Linear | None
    kv_norm: Tensor
    key_up: Tensor
    value_up: Tensor
    kv_target: int
    out: Linear
    rope: Tensor
    interleaved: bool
    eps: float
    scale: float

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """x [T, H] -> [T, H]"""
        heads, dim_k, dim_v = self.num_heads, self.key_up.shape[1], self.value_up.shape[1]
        q, kv = self.down(x, ctx).split((self.q_width, self.kv_norm.shape[0] + self.dim_rope), 1)
        if self.q_up is not None and self.q_norm is not None:
            q = self.q_up(self.q_norm(q), ctx)
        q = q.view(len(x), heads, dim_k + self.dim_rope)  # [T, Q, Dn + Dr]
        q_nope, q_rope = q.split((dim_k, self.dim_rope), 2)
        group = ctx.groups[ctx.group_of_layer[self.layer]]
        cache = ctx.caches[self.layer][0]  # [P, C, R + Dr]
        mla_kv_write(
            q_rope, kv, self.rope, ctx.positions, cache, group.write_idx, self.kv_norm, self.eps,
            self.interleaved,
        )  # fmt: skip
        q_latent = x.new_empty(len(x), heads, self.key_up.shape[2])  # [T, Q, R]
        _multiply_heads(q_nope, self.key_up.to(x.dtype), q_latent)
        lora, slots = ctx.lora, ctx.slot_of_token
        if lora is not None:
            mla_query_lora(q_latent, q_nope, lora, self.kv_target, slots, dim_v)
        latent = mla_attention(
            q_latent, q_rope, cache, group.page_table, ctx.seq_lens, ctx.cu_q,
            scale=self.scale, max_q=ctx.max_q, max_len=ctx.max_len,
        )  # [T, Q, R]  # fmt: skip
        values = x.new_empty(len(x), heads, dim_v)  # [T, Q, Dv]
        _multiply_heads(latent, self.value_up.to(x.dtype).transpose(1, 2), values)
        if lora is not None:
            mla_value_lora(values, latent, lora, self.kv_target, slots, dim_k)
        return self.out(values.view(len(x), heads * dim_v), ctx)


def _multiply_heads(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """out[:, h] = x[:, h] weight[h] for every head: x [T, Q, in], weight [Q, in, out], out
    [T, Q, out]. Written where it belongs, since a copy would be one launch more."""
    torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
