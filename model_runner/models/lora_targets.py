"""Every weight of a model that an adapter may change, in the arena's order.

Not here: how files spell them (adapter_store.formats), and the weights themselves (decoder.py).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from adapter_store.weights import LoraTarget
from kernels.fused_moe import ExpertWeights
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
    mlp           the feed-forward module, below `model.layers.N.`;  old_mlp  its name in
                  transformers 4 where that is another
    shared        the expert that every token has, below `mlp`
    """

    gate: str
    gate_up_parts: tuple[str, ...]
    down_parts: tuple[str, ...]
    interleaved: bool
    weight_is_in_out: bool
    read_gate_up: Callable[[WeightReader, str, ModelConfig], ExpertWeights]
    read_down: Callable[[WeightReader, str, ModelConfig], ExpertWeights]
    mlp: str = "mlp"
    old_mlp: str = ""
    shared: str = ""


def list_lora_targets(config: ModelConfig, names: NameMap | None) -> tuple[LoraTarget, ...]:
    """The embedding, layer by layer, the head."""
    c = config
    targets = [LoraTarget("model.embed_tokens", c.vocab_size, c.hidden_size, "embedding")]
    for n in range(c.num_layers):
        p = f"model.layers.{n}."
        targets += _attention(c, f"{p}self_attn.")
        if not c.experts_of_layer[n]:
            mlp = "mlp" if names is None else names.mlp
            targets += _dense(c.hidden_size, c.intermediate_size, f"{p}{mlp}.")
            continue
        assert names is not None
        targets += _experts(c, names, p)
        if c.shared_intermediate_size:
            at = f"{p}{names.mlp}.{names.shared}."
            targets += _dense(c.hidden_size, c.shared_intermediate_size, at)
    targets.append(LoraTarget("lm_head", c.hidden_size, c.vocab_size))
    return tuple(targets)


def attention_parts(config: ModelConfig) -> tuple[tuple[str, int, int], ...]:
    """(name, in, out) of the projections of one layer's attention."""
    c, latent = config, config.latent
    if latent is None:
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        inputs = (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
        return (
            *((name, c.hidden_size, out) for name, out in inputs),
            ("o_proj", q, c.hidden_size),
        )
    q = c.num_heads * (latent.dim_nope + latent.dim_rope)
    queries: tuple[tuple[str, int, int], ...] = (("q_proj", c.hidden_size, q),)
    if latent.q_rank:
        queries = (("q_a_proj", c.hidden_size, latent.q_rank), ("q_b_proj", latent.q_rank, q))
    return (
        *queries,
        ("kv_a_proj_with_mqa", c.hidden_size, latent.kv_rank + latent.dim_rope),
        ("kv_b_proj", latent.kv_rank, c.num_heads * (latent.dim_nope + latent.dim_v)),
        ("o_proj", c.num_heads * latent.dim_v, c.hidden_size),
    )


def _attention(c: ModelConfig, p: str) -> Iterator[LoraTarget]:
    for name, fan_in, fan_out in attention_parts(c):
        yield LoraTarget(p + name, fan_in, fan_out)


def _dense(hidden: int, inner: int, p: str) -> Iterator[LoraTarget]:
    yield LoraTarget(f"{p}gate_proj", hidden, inner)
    yield LoraTarget(f"{p}up_proj", hidden, inner)
    yield LoraTarget(f"{p}down_proj", inner, hidden)


def _experts(c: ModelConfig, names: NameMap, p: str) -> Iterator[LoraTarget]:
    inner, experts = c.expert_intermediate_size, c.num_experts
    old = f"{p}{names.old_mlp}." if names.old_mlp else ""
    gate = names.gate.removeprefix(f"{names.mlp}.")
    yield LoraTarget(p + names.gate, c.hidden_size, experts, aliases=(old + gate,) if old else ())
    for name, fan_in, fan_out, parts, interleaved in (
        ("gate_up_proj", c.hidden_size, 2 * inner, names.gate_up_parts, names.interleaved),
        ("down_proj", inner, c.hidden_size, names.down_parts, False),
    ):
        yield LoraTarget(
            f"{p}{names.mlp}.experts.{name}",
            fan_in,
            fan_out,
            "experts",
            experts,
            parts,
            interleaved,
            names.weight_is_in_out,
            aliases=(f"{old}experts",) if old else (),
        )
