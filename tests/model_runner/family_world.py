"""Every family at a mid-size, its weights random, with three random adapters on all that it has;
what the tests of families at speed share.

Heads and latents are as wide as published, layers and experts few. No tests here.
"""

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from adapter_store.ref import AdapterRef
from adapter_store.weights import AdapterManifest, AdapterWeights, LoraFactors, LoraTarget
from kernels.op import use_reference_kernels
from model_runner.config import EngineConfig
from model_runner.engine import Engine
from model_runner.request import Request, SamplingParams
from tests.model_runner.speed_world import seeded_adapters

_COMMON: dict[str, Any] = {
    "dtype": "bfloat16", "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 512,
    "intermediate_size": 512, "max_position_embeddings": 4096, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False, "vocab_size": 1024,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 64,
}  # fmt: skip
_LATENT = {
    "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "first_k_dense_replace": 1, "moe_intermediate_size": 256, "n_shared_experts": 1,
    "rope_parameters": _YARN,
}  # fmt: skip
# Architecture, fields of the middle size, and those by which every expert is chosen.
_FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gpt-oss": ("GptOss", {
        "attention_bias": True, "head_dim": 64, "num_local_experts": 16, "num_experts_per_tok": 4,
        "num_hidden_layers": 4, "sliding_window": 16, "swiglu_limit": 7.0,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "quantization_config": {"quant_method": "mxfp4"},
    }, {"num_local_experts": 4, "quantization_config": None}),
    "qwen3-moe": ("Qwen3Moe", {
        "head_dim": 128, "num_experts": 32, "num_experts_per_tok": 8, "mlp_only_layers": [1],
        "moe_intermediate_size": 192, "norm_topk_prob": True,
    }, {"num_experts": 4, "num_experts_per_tok": 4}),
    "deepseek v2": ("DeepseekV2", _LATENT | {
        "n_routed_experts": 32, "num_experts_per_tok": 6, "topk_method": "group_limited_greedy",
        "n_group": 8, "topk_group": 3, "q_lora_rank": None, "routed_scaling_factor": 1.0,
    }, {"n_routed_experts": 4, "num_experts_per_tok": 4, "n_group": 2, "topk_group": 2}),
    "deepseek v3": ("DeepseekV3", _LATENT | {
        "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
        "hidden_size": 1024, "n_routed_experts": 32, "num_experts_per_tok": 8, "n_group": 8,
        "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    }, {"n_routed_experts": 4, "num_experts_per_tok": 4, "n_group": 2, "topk_group": 2}),
    "llama4": ("Llama4", {
        "head_dim": 128, "num_hidden_layers": 4, "intermediate_size": 512,
        "intermediate_size_mlp": 1024, "num_local_experts": 16, "num_experts_per_tok": 1,
        "attention_chunk_size": 24, "floor_scale": 16, "attn_scale": 0.1,
        "interleave_moe_layer_step": 1, "moe_layers": [0, 2, 3],
    }, {"num_local_experts": 1}),
    "mixtral": ("Mixtral", {
        "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None, "head_dim": 128,
    }, {"num_local_experts": 2}),
    "olmoe": ("Olmoe", {
        "num_key_value_heads": 8, "num_experts": 32, "num_experts_per_tok": 8, "head_dim": 128,
        "intermediate_size": 256,
    }, {"num_experts": 4, "num_experts_per_tok": 4}),
    "llama": ("Llama", {"head_dim": 128, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 32}}, {}),
    "qwen3": ("Qwen3", {"head_dim": 128}, {}),
}  # fmt: skip
NAMES = tuple(_FAMILIES)
# On a CPU narrower: there the references compute, and what is tested is the tests.
_NARROW = {
    "hidden_size": 128, "intermediate_size": 128, "intermediate_size_mlp": 128, "head_dim": 32,
    "moe_intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4,
    "kv_lora_rank": 64, "q_lora_rank": 96, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}  # fmt: skip
RANKS = (8, 16, 24)
# Deviation of a delta's product with a normed input: scores of attention then differ by about its
# square, neither too little to be felt nor so much that one key takes all.
DELTA = 1.5


@dataclass(frozen=True)
class World:
    """A model that is a config alone, and who its adapters are. all_chosen: no rounding can turn a
    choice of experts over, and adapters change the seldom targets too."""

    folder: Path
    refs: tuple[AdapterRef, ...]
    device: str
    all_chosen: bool


def config_of(name: str, device: str, all_chosen: bool) -> dict[str, Any]:
    """The model's config.json."""
    architecture, fields, whole = _FAMILIES[name]
    config = _COMMON | {"architectures": [f"{architecture}ForCausalLM"]} | fields
    if all_chosen:
        config |= whole
    if device == "cpu":
        narrow = {k: v for k, v in _NARROW.items() if config.get(k)}
        config |= narrow | {"num_key_value_heads": min(4, config["num_key_value_heads"])}
    return config


def make_world(name: str, root: Path, device: str, all_chosen: bool) -> World:
    """Write the model's config and three folders that are a seed alone."""
    model = root / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config_of(name, device, all_chosen)))
    return World(root, tuple(seeded_adapters(root)), device, all_chosen)


def random_factors(targets: Sequence[LoraTarget], seed: int, seldom: bool) -> AdapterWeights:
    """An adapter of every projection, exact in bf16. seldom: the routers and the head too."""
    g, factors = torch.Generator().manual_seed(seed), {}
    for target in targets:
        if target.kind == "embedding" or not (seldom or "_proj" in target.name):
            continue
        rank = RANKS[seed % len(RANKS)]
        a = torch.randn(target.num_experts, rank, target.in_features, generator=g)
        b = torch.randn(target.num_experts, rank, target.out_features, generator=g)
        a, b = a / target.in_features**0.5, b * DELTA / rank**0.5
        factors[target.name] = LoraFactors(a.bfloat16().float(), b.bfloat16().float())
    return AdapterWeights(factors, AdapterManifest())


@contextmanager
def engine_of(world: World, **fields: Any) -> Iterator[Engine]:
    """An engine that has the adapters loaded."""
    defaults = {
        "load_format": "random:3", "device": world.device, "max_model_len": 128,
        "kv_bytes": 64 << 20, "lora_bytes": 512 << 20 if world.device == "cuda" else 64 << 20,
        "max_loras": 3, "max_num_seqs": 8, "max_step_tokens": 64, "prefix_cache": False, "seed": 1,
        "dtype": "bfloat16", "deterministic": True,
    }  # fmt: skip

    def load(folder: Path, targets: Sequence[LoraTarget], **limits: int) -> AdapterWeights:
        seed = json.loads((folder / "adapter_config.json").read_text())["seed"]
        return random_factors(targets, seed, world.all_chosen)

    engine = Engine(EngineConfig(str(world.folder / "model"), **(defaults | fields)))
    try:
        engine.store.loader._load_adapter = load
        engine.load_adapters(world.refs)
        yield engine
    finally:
        engine.close()


@contextmanager
def references(on: bool = True) -> Iterator[None]:
    """Within: torch in place of the kernels."""
    use_reference_kernels(on)
    try:
        yield
    finally:
        use_reference_kernels(False)


def requests_of(refs: Sequence[AdapterRef | None], name: str, greedy: bool) -> list[Request]:
    """Twelve of 2 to 50 tokens; every fourth of the base; unless greedy, half draw."""
    rng = random.Random(5)
    return [
        Request(
            f"{name}-{i}",
            tuple(rng.randrange(3, 1000) for _ in range(rng.randrange(2, 50))),
            SamplingParams(
                temperature=0.0 if greedy else float(i % 2), seed=i, max_tokens=16, ignore_eos=True
            ),
            refs[i % 4],
        )
        for i in range(12)
    ]
