"""Full-size model shapes for benchmarks, and random PEFT adapters for them. No weights:
`load_format: random:SEED` makes those."""

import json
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


@dataclass(frozen=True)
class Shape:
    """A model's config, and what of it an adapter of the benchmark changes."""

    config: dict[str, Any]
    experts: int
    top_k: int


SHAPES = {"gpt-oss-20b": Shape(GPT_OSS_20B, 32, 4)}


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """A checkpoint folder that holds config.json alone."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


def write_gpt_oss_adapter(
    folder: Path, config: dict[str, Any], lora_rank: int, seed: int, device: str
) -> None:
    """A random adapter as PEFT 0.21 on transformers 5 lays it out: q, k, v, o and both expert
    parameters of every layer, bf16.

    A is normal(0, 1/sqrt(in)), B normal(0, 0.03), alpha = rank: each delta is near a sixth of the
    base's output, enough for greedy
    tokens to differ from one adapter to the next.
    """
    generator = torch.Generator(device).manual_seed(seed)
    hidden, inner, experts = (
        config["hidden_size"],
        config["intermediate_size"],
        config["num_local_experts"],
    )
    q, kv = (config[n] * config["head_dim"] for n in ("num_attention_heads", "num_key_value_heads"))
    tensors: dict[str, torch.Tensor] = {}

    def pair(name: str, fan_in: int, fan_out: int, copies: int) -> None:
        a = torch.empty(lora_rank * copies, fan_in, device=device).normal_(
            0, fan_in**-0.5, generator=generator
        )
        b = torch.empty(fan_out, lora_rank * copies, device=device).normal_(
            0, 0.03, generator=generator
        )
        tensors[f"{name}.lora_A.weight"] = a.to(torch.bfloat16).cpu()  # [r E, in]
        tensors[f"{name}.lora_B.weight"] = b.to(torch.bfloat16).cpu()  # [out, r E]

    for n in range(config["num_hidden_layers"]):
        p = f"base_model.model.model.layers.{n}."
        for name, fan_in, fan_out in (
            ("q", hidden, q),
            ("k", hidden, kv),
            ("v", hidden, kv),
            ("o", q, hidden),
        ):
            pair(f"{p}self_attn.{name}_proj", fan_in, fan_out, 1)
        pair(f"{p}mlp.experts.base_layer", hidden, 2 * inner, experts)
        pair(f"{p}mlp.experts", inner, hidden, experts)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    fields = {
        "peft_type": "LORA",
        "peft_version": "0.21.2",
        "r": lora_rank,
        "lora_alpha": lora_rank,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        "base_model_name_or_path": "random",
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(fields))
