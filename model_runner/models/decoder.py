"""The decoder that every family here is: embedding, layers of attention and MLP, norm, head.

A family says what it is made of (`ModelConfig`) and how its checkpoint spells it (`NameMap`); this
file builds and runs it.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from model_runner.layers.attention import Attention
from model_runner.layers.context import ForwardContext
from model_runner.layers.embedding import Embedding
from model_runner.layers.linear import Linear
from model_runner.layers.mla import LatentAttention
from model_runner.layers.mlp import DenseMlp, MoeMlp
from model_runner.layers.norm import RmsNorm
from model_runner.layers.rope import rope_table
from model_runner.models.base import ModelConfig, WeightReader
from model_runner.models.lora_targets import NameMap, attention_parts, list_lora_targets


@dataclass(frozen=True)
class DecoderLayer:
    """A norm, attention, another norm, an MLP (dense or MoE); the residual runs past both
    halves.

    shared  an expert that every token has, beside the chosen ones
    """

    input_norm: RmsNorm
    post_norm: RmsNorm
    attention: Attention | LatentAttention
    mlp: DenseMlp | MoeMlp
    shared: DenseMlp | None = None


class Decoder:
    """A causal language model over `config`, loaded from `reader`.

    names         the family's own; None = it has no MoE layers
    lora_targets  the tuple whose order is the arena's; a layer keeps indices into it
    """

    names: ClassVar[NameMap | None] = None

    def __init__(self, config: ModelConfig, reader: WeightReader, max_len: int) -> None:
        self.config = config
        self.lora_targets = list_lora_targets(config, self.names)
        self._index = {t.name: i for i, t in enumerate(self.lora_targets)}
        c = config
        embed = reader.read("model.embed_tokens.weight", (c.vocab_size, c.hidden_size))  # [V, H]
        self.embedding = Embedding(embed, self._index["model.embed_tokens"])
        rope = c.rope
        self._rope = rope_table(
            rope.theta, rope.kind, rope.fields, c.head_dim, max_len, embed.device
        )
        self.layers = [self._load_layer(reader, n) for n in range(c.num_layers)]
        self.norm = self._load_norm(reader, "model.norm")
        head = (
            embed
            if c.tied_embeddings
            else reader.read("lm_head.weight", (c.vocab_size, c.hidden_size))
        )
        self.head = Linear(head, None, ((self._index["lm_head"], 0, c.vocab_size),), seldom=True)

    @property
    def seldom_targets(self) -> tuple[int, ...]:
        """Targets that hardly any adapter has: the embedding, the routers, the head. Indices into
        `lora_targets`."""
        gates = () if self.names is None else (f".{self.names.gate}",)
        ends = ("model.embed_tokens", "lm_head", *gates)
        return tuple(i for i, t in enumerate(self.lora_targets) if t.name.endswith(ends))

    def forward(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """token_ids [T] int64 -> logits of ctx.logit_rows [Z, V] in the model's dtype."""
        x = self.hidden(token_ids, ctx)  # [Z, H]
        return self.head.apply(
            x, ctx, ctx.slot_of_token[ctx.logit_rows], ctx.logit_slot_work
        )  # [Z, V]

    def hidden(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """token_ids [T] int64 -> what the head reads of ctx.logit_rows [Z, H]."""
        residual = self.embedding(token_ids, ctx)  # [T, H]
        x = self.layers[0].input_norm(residual)
        for n, layer in enumerate(self.layers):
            x = layer.attention(x, ctx)
            x = layer.post_norm.add(x, residual)
            if layer.shared is not None:
                residual += layer.shared(x, ctx)
            x = layer.mlp(x, ctx)
            last = n + 1 == len(self.layers)
            x = (self.norm if last else self.layers[n + 1].input_norm).add(x, residual)
        return x[ctx.logit_rows]  # [Z, H]

    def _load_layer(self, reader: WeightReader, n: int) -> DecoderLayer:
        p, c, names = f"model.layers.{n}.", self.config, self.names
        mlp: DenseMlp | MoeMlp
        shared = None
        if c.experts_of_layer[n]:
            mlp = self._load_moe(reader, p)
            if names is not None and c.shared_intermediate_size:
                at = f"{p}{names.mlp}.{names.shared}."
                shared = self._load_dense(reader, at, c.shared_intermediate_size)
        else:
            at = f"{p}{'mlp' if names is None else names.mlp}."
            mlp = self._load_dense(reader, at, c.intermediate_size)
        return DecoderLayer(
            self._load_norm(reader, p + "input_layernorm"),
            self._load_norm(reader, p + "post_attention_layernorm"),
            self._load_mixer(reader, n),
            mlp,
            shared,
        )

    def _load_mixer(self, reader: WeightReader, n: int) -> Attention | LatentAttention:
        """What mixes tokens: a family of another kind of attention overrides it."""
        return self._load_attention(reader, n)

    def _load_norm(self, reader: WeightReader, name: str) -> RmsNorm:
        return RmsNorm(
            reader.read(f"{name}.weight", (self.config.hidden_size,)), self.config.rms_eps
        )

    def _load_attention(self, reader: WeightReader, n: int) -> Attention:
        p, c = f"model.layers.{n}.self_attn.", self.config
        *inputs, (_, q, _) = attention_parts(c)
        norm: list[Tensor | None] = [None, None]
        if c.qk_norm:
            heads = (c.num_heads, c.num_kv_heads) if c.qk_norm_full else (1, 1)
            norm = [
                reader.read(p + f"{x}_norm.weight", (number * c.head_dim,))
                for x, number in zip("qk", heads, strict=True)
            ]
        sinks = reader.read(p + "sinks", (c.num_heads,)) if c.sinks else None
        return Attention(
            layer=n,
            num_heads=c.num_heads,
            num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            qkv=self._load_linear(
                reader,
                p,
                tuple((name, out) for name, _, out in inputs),
                c.hidden_size,
                c.attention_bias,
            ),
            out=self._load_linear(reader, p, (("o_proj", c.hidden_size),), q, c.output_bias),
            rope=self._rope,
            eps=c.rms_eps,
            window=c.windows[n],
            chunked=c.chunked,
            q_norm=norm[0],
            k_norm=norm[1],
            norm_full=c.qk_norm_full,
            sinks=sinks,
        )

    def _load_dense(self, reader: WeightReader, p: str, inner: int) -> DenseMlp:
        c = self.config
        return DenseMlp(
            self._load_linear(
                reader, p, (("gate_proj", inner), ("up_proj", inner)), c.hidden_size, False
            ),
            self._load_linear(reader, p, (("down_proj", c.hidden_size),), inner, False),
            c.activation,
        )

    def _load_moe(self, reader: WeightReader, p: str) -> MoeMlp:
        c, names = self.config, self.names
        assert names is not None
        correction = None
        if c.gate_correction:
            name = f"{p}{names.gate}.e_score_correction_bias"
            correction = reader.read(name, (c.num_experts,), torch.float32)  # [E]
        experts = f"{p}{names.mlp}.experts."
        return MoeMlp(
            gate=self._load_linear(
                reader, p, ((names.gate, c.num_experts),), c.hidden_size, c.gate_bias, seldom=True
            ),
            gate_up=names.read_gate_up(reader, p, c),
            down=names.read_down(reader, p, c),
            num_experts=c.num_experts,
            top_k=c.top_k,
            renormalize=c.renormalize,
            activation=c.activation,
            gate_up_target=self._index[experts + "gate_up_proj"],
            down_target=self._index[experts + "down_proj"],
            rule=c.gate_rule,
            correction=correction,
            scale_input=c.scale_input,
        )

    def _load_linear(
        self,
        reader: WeightReader,
        prefix: str,
        parts: tuple[tuple[str, int], ...],
        in_features: int,
        bias: bool,
        seldom: bool = False,
    ) -> Linear:
        """Linears that share an input, as one product; each keeps its own LoRA target."""
        weights, biases, slices, row = [], [], [], 0
        for name, rows in parts:
            weights.append(reader.read(f"{prefix}{name}.weight", (rows, in_features)))
            if bias:
                biases.append(reader.read(f"{prefix}{name}.bias", (rows,)))
            slices.append((self._index[prefix + name], row, row + rows))
            row += rows
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]  # [out, in]
        return Linear(weight, torch.cat(biases) if biases else None, tuple(slices), seldom)
