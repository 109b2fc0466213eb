"""The decoder that every family here is: embedding, layers of attention and MLP, norm, head.

A family says what it is made of (`ModelConfig`) and how its checkpoint spells it (`NameMap`); this
file builds and runs it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from adapter_store.weights import LoraTarget
from kernels.fused_moe import ExpertWeights
from model_runner.layers.attention import Attention
from model_runner.layers.context import ForwardContext
from model_runner.layers.embedding import Embedding
from model_runner.layers.linear import Linear
from model_runner.layers.mlp import DenseMlp, MoeMlp
from model_runner.layers.norm import RmsNorm
from model_runner.layers.rope import rope_table
from model_runner.models.base import ModelConfig, WeightReader


@dataclass(frozen=True)
class NameMap:
    """How a family's checkpoint and its adapters spell the parts of a MoE layer. The rest is
    spelled alike everywhere.

    gate          the router, below `model.layers.N.`
    gate_up_parts, down_parts   one expert's linears in per-expert files, canonical order
    interleaved, weight_is_in_out   see LoraTarget
    read_gate_up, read_down     (reader, prefix of the layer, config) -> expert weights in canonical
                                rows [E, out, in]
    """

    gate: str
    gate_up_parts: tuple[str, ...]
    down_parts: tuple[str, ...]
    interleaved: bool
    weight_is_in_out: bool
    read_gate_up: Callable[[WeightReader, str, ModelConfig], ExpertWeights]
    read_down: Callable[[WeightReader, str, ModelConfig], ExpertWeights]


@dataclass(frozen=True)
class DecoderLayer:
    """A norm, attention, another norm, an MLP (dense or MoE); the residual runs past both
    halves."""

    input_norm: RmsNorm
    post_norm: RmsNorm
    attention: Attention
    mlp: DenseMlp | MoeMlp


class Decoder:
    """A causal language model over `config`, loaded from `reader`.

    `lora_targets` is the tuple whose order is the arena's; a layer keeps indices into it.
    """

    def __init__(
        self, config: ModelConfig, names: NameMap | None, reader: WeightReader, max_len: int
    ) -> None:
        self.config, self.names = config, names
        self.lora_targets = list_lora_targets(config, names)
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
            x = layer.mlp(x, ctx)
            last = n + 1 == len(self.layers)
            x = (self.norm if last else self.layers[n + 1].input_norm).add(x, residual)
        return x[ctx.logit_rows]  # [Z, H]

    def _load_layer(self, reader: WeightReader, n: int) -> DecoderLayer:
        p, c = f"model.layers.{n}.", self.config
        return DecoderLayer(
            self._load_norm(reader, p + "input_layernorm"),
            self._load_norm(reader, p + "post_attention_layernorm"),
            self._load_attention(reader, n),
            self._load_moe(reader, p) if c.experts_of_layer[n] else self._load_dense(reader, p),
        )

    def _load_norm(self, reader: WeightReader, name: str) -> RmsNorm:
        return RmsNorm(
            reader.read(f"{name}.weight", (self.config.hidden_size,)), self.config.rms_eps
        )

    def _load_attention(self, reader: WeightReader, n: int) -> Attention:
        p, c = f"model.layers.{n}.self_attn.", self.config
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        norm = [
            reader.read(p + f"{x}_norm.weight", (c.head_dim,)) if c.qk_norm else None for x in "qk"
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
                (("q_proj", q), ("k_proj", kv), ("v_proj", kv)),
                c.hidden_size,
                c.attention_bias,
            ),
            out=self._load_linear(reader, p, (("o_proj", c.hidden_size),), q, c.output_bias),
            rope=self._rope,
            eps=c.rms_eps,
            window=c.windows[n],
            q_norm=norm[0],
            k_norm=norm[1],
            sinks=sinks,
        )

    def _load_dense(self, reader: WeightReader, p: str) -> DenseMlp:
        c, p = self.config, p + "mlp."
        inner = c.intermediate_size
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
            gate_up_target=self._index[p + "mlp.experts.gate_up_proj"],
            down_target=self._index[p + "mlp.experts.down_proj"],
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


def list_lora_targets(config: ModelConfig, names: NameMap | None) -> tuple[LoraTarget, ...]:
    """Every weight of the model that an adapter may change, in the arena's order: the embedding,
    layer by layer, the head."""
    c = config
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    targets = [LoraTarget("model.embed_tokens", c.vocab_size, c.hidden_size, "embedding")]
    for n in range(c.num_layers):
        p = f"model.layers.{n}."
        attention = (
            ("q_proj", c.hidden_size, q),
            ("k_proj", c.hidden_size, kv),
            ("v_proj", c.hidden_size, kv),
        )
        for name, fan_in, fan_out in (*attention, ("o_proj", q, c.hidden_size)):
            targets.append(LoraTarget(f"{p}self_attn.{name}", fan_in, fan_out))
        if not c.experts_of_layer[n]:
            for name in ("gate_proj", "up_proj"):
                targets.append(LoraTarget(f"{p}mlp.{name}", c.hidden_size, c.intermediate_size))
            targets.append(LoraTarget(f"{p}mlp.down_proj", c.intermediate_size, c.hidden_size))
            continue
        assert names is not None
        inner, experts = c.expert_intermediate_size, c.num_experts
        targets += [
            LoraTarget(p + names.gate, c.hidden_size, experts),
            LoraTarget(
                p + "mlp.experts.gate_up_proj",
                c.hidden_size,
                2 * inner,
                "experts",
                experts,
                names.gate_up_parts,
                names.interleaved,
                names.weight_is_in_out,
            ),
            LoraTarget(
                p + "mlp.experts.down_proj",
                inner,
                c.hidden_size,
                "experts",
                experts,
                names.down_parts,
                False,
                names.weight_is_in_out,
            ),
        ]
    targets.append(LoraTarget("lm_head", c.hidden_size, c.vocab_size))
    return tuple(targets)
