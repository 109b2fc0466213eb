"""Shapes of three more families for benchmarks, as their configs are published (Llama 4 Scout with
few of its layers), and what their decode steps read.

Not here: measuring them (families.py); the shapes that the engine's own benchmark drives
(shapes.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from adapter_store.weights import LoraTarget
from model_runner.models.base import ModelConfig
from tests.bench.judging import expected_experts
from tests.bench.shapes import QWEN3_30B_A3B

FP8 = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
    "weight_block_size": [128, 128],
}  # fmt: skip
QWEN3_30B_A3B_FP8 = QWEN3_30B_A3B | {"quantization_config": FP8}

DEEPSEEK_V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "attention_bias": False,
    "dtype": "bfloat16",
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "rope_theta": 10000,
        "rope_type": "yarn",
    },
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}

SCOUT_LAYERS = 4  # of 48: three that rotate and attend by chunks, one that does neither
LLAMA4_SCOUT: dict[str, Any] = {
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "attention_bias": False,
    "attention_chunk_size": 8192,
    "attn_scale": 0.1,
    "attn_temperature_tuning": True,
    "dtype": "bfloat16",
    "eos_token_id": 200001,
    "floor_scale": 8192,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "interleave_moe_layer_step": 1,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "max_position_embeddings": 262144,
    "num_attention_heads": 40,
    "num_experts_per_tok": 1,
    "num_hidden_layers": SCOUT_LAYERS,
    "num_key_value_heads": 8,
    "num_local_experts": 16,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {
        "factor": 16.0,
        "high_freq_factor": 1.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False,
    "use_qk_norm": True,
    "vocab_size": 202048,
}


@dataclass(frozen=True)
class FamilyShape:
    """A config; fp8: its checkpoint is written and read, else weights are a seed."""

    config: dict[str, Any]
    fp8: bool = False


FAMILY_SHAPES = {
    "deepseek-v2-lite": FamilyShape(DEEPSEEK_V2_LITE),
    "qwen3-30b-a3b-fp8": FamilyShape(QWEN3_30B_A3B_FP8, fp8=True),
    f"llama4-scout/{SCOUT_LAYERS} layers": FamilyShape(LLAMA4_SCOUT),
}


def plain_products(c: ModelConfig) -> Iterator[tuple[str, int]]:
    """(role, weights) of a step's plain products, in the order of their launches."""
    latent, hidden = c.latent, c.hidden_size
    for experts in c.experts_of_layer:
        if latent is None:
            q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
            yield "qkv", hidden * (q + 2 * kv)
            yield "o", hidden * q
        else:
            q = c.num_heads * (latent.dim_nope + latent.dim_rope)
            yield "qkv", hidden * ((latent.q_rank or q) + latent.kv_rank + latent.dim_rope)
            if latent.q_rank:
                yield "q_up", latent.q_rank * q
            yield "key_up", c.num_heads * latent.dim_nope * latent.kv_rank
            yield "value_up", c.num_heads * latent.dim_v * latent.kv_rank
            yield "o", hidden * c.num_heads * latent.dim_v
        if not experts:
            yield "gate_up", 2 * hidden * c.intermediate_size
            yield "down", hidden * c.intermediate_size
            continue
        if c.shared_intermediate_size:
            yield "shared_gate_up", 2 * hidden * c.shared_intermediate_size
            yield "shared_down", hidden * c.shared_intermediate_size
        yield "router", hidden * experts
    yield "head", hidden * c.vocab_size


def floor_bytes(
    c: ModelConfig,
    tokens: int,
    context: int,
    distinct: float,
    targets: Sequence[LoraTarget],
    adapters: int,
    lora_rank: int,
) -> dict[str, float]:
    """Group (as floors.py names them) -> bytes of one decode step in bf16.

    tokens    sequences in the step, each with `context` keys, fewer than any window here
    distinct  experts hit in a layer, 0 = as uniform routing would
    targets   that the adapters change, over which requests are dealt in turn; adapters 0 = none
    """
    found: dict[str, float] = {}
    for role, weights in plain_products(c):
        found[role] = found.get(role, 0.0) + 2.0 * weights
    layers = sum(1 for experts in c.experts_of_layer if experts)
    if layers:
        hit = distinct or expected_experts(c.num_experts, c.top_k, tokens)
        found["experts"] = 2.0 * layers * hit * 3 * c.hidden_size * c.expert_intermediate_size
    found["attention"] = 2.0 * c.num_layers * tokens * context * c.kv_values
    if adapters:
        counts = [tokens // adapters + (i < tokens % adapters) for i in range(adapters)]
        used = [count for count in counts if count]
        total = 0.0
        for target in targets:
            size = 2.0 * lora_rank * (target.in_features + target.out_features)
            many = target.num_experts > 1
            for count in used:
                total += size * (
                    expected_experts(target.num_experts, c.top_k, count) if many else 1
                )
        found["lora"] = total
    return found
