"""Full-size model shapes for benchmarks, and random PEFT adapters for them. No weights:
`load_format: random:SEED` makes those."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "dtype": "bfloat16",
    "eos_token_id": 200002,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_parameters": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_theta": 150000.0,
        "rope_type": "yarn",
        "truncate": False,
    },
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}

# The same widths, more layers and four times as many experts.
GPT_OSS_120B = GPT_OSS_20B | {
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "num_hidden_layers": 36,
    "num_local_experts": 128,
}

_QWEN3: dict[str, Any] = {
    "attention_bias": False,
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

QWEN3_30B_A3B: dict[str, Any] = {
    **_QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
}

QWEN3_32B: dict[str, Any] = {
    **_QWEN3,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_attention_heads": 64,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
}


@dataclass(frozen=True)
class Shape:
    """A model's config, how its experts are chosen (0 = dense), as the judge is told, and the
    deviation of its adapters' B in the whole model."""

    config: dict[str, Any]
    experts: int
    top_k: int
    b_std: float

    def cut_b_std(self, layers: int) -> float:
        """The deviation of B in a cut of so many layers (0 = all): the fewer layers an adapter
        changes, the more it changes each. By the cube root, cuts and wholes both let re-scoring
        tell adapters apart, with own tokens near the best (LOG.md)."""
        full = int(self.config["num_hidden_layers"])
        return float(self.b_std * (full / (layers or full)) ** (1 / 3))


SHAPES = {
    "gpt-oss-20b": Shape(GPT_OSS_20B, 32, 4, 0.12),
    "qwen3-30b-a3b": Shape(QWEN3_30B_A3B, 128, 8, 0.2),
    "qwen3-32b": Shape(QWEN3_32B, 0, 0, 0.0425),
}


def cut_layers(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The same model with its first `layers` layers alone; 0 = all."""
    cut = dict(config)
    if layers:
        cut["num_hidden_layers"] = layers
        if "layer_types" in cut:
            cut["layer_types"] = cut["layer_types"][:layers]
    return cut


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """A checkpoint folder that holds config.json alone."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


def adapted_weights(config: dict[str, Any]) -> Iterator[tuple[str, int, int, int]]:
    """What an adapter of the benchmark changes in one layer: q, k, v, o, and all experts or the
    MLP. Gives (name as PEFT has it below the layer, in, out, experts); experts 0 = a plain linear.
    """
    hidden, dim = config["hidden_size"], config["head_dim"]
    q, kv = (config[n] * dim for n in ("num_attention_heads", "num_key_value_heads"))
    for name, fan_in, fan_out in (
        ("q", hidden, q),
        ("k", hidden, kv),
        ("v", hidden, kv),
        ("o", q, hidden),
    ):
        yield f"self_attn.{name}_proj", fan_in, fan_out, 0
    experts = config.get("num_local_experts") or config.get("num_experts") or 0
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    if experts:
        yield "mlp.experts.base_layer", hidden, 2 * inner, experts
        yield "mlp.experts", inner, hidden, experts
    else:
        yield "mlp.gate_proj", hidden, inner, 0
        yield "mlp.up_proj", hidden, inner, 0
        yield "mlp.down_proj", inner, hidden, 0


def write_adapter(
    folder: Path,
    config: dict[str, Any],
    lora_rank: int,
    seed: int,
    device: str,
    b_std: float,
) -> None:
    """A random adapter as PEFT 0.21 on transformers 5 lays it out, in every layer, bf16.

    A is normal(0, 1/sqrt(in)), B normal(0, b_std), alpha = rank: each delta has a deviation of
    b_std * sqrt(rank), two thirds of the base's output for 0.12 and rank 32. Why so much: LOG.md.
    """
    generator = torch.Generator(device).manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    parts = list(adapted_weights(config))
    for n in range(config["num_hidden_layers"]):
        for name, fan_in, fan_out, experts in parts:
            rows = lora_rank * max(1, experts)
            a = torch.empty(rows, fan_in, device=device)
            b = torch.empty(fan_out, rows, device=device)
            a.normal_(0, fan_in**-0.5, generator=generator)
            b.normal_(0, b_std, generator=generator)
            path = f"base_model.model.model.layers.{n}.{name}"
            tensors[f"{path}.lora_A.weight"] = a.to(torch.bfloat16).cpu()  # [r E, in]
            tensors[f"{path}.lora_B.weight"] = b.to(torch.bfloat16).cpu()  # [out, r E]
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    plain = [name.split(".")[-1] for name, _, _, experts in parts if not experts]
    fused = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    fields = {
        "peft_type": "LORA",
        "peft_version": "0.21.2",
        "r": lora_rank,
        "lora_alpha": lora_rank,
        "target_modules": plain,
        "target_parameters": fused if len(plain) < len(parts) else None,
        "base_model_name_or_path": "random",
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(fields))
