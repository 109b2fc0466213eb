"""OLMoE: softmax routing without renormalizing, one norm over all heads of q and of k."""

from pathlib import Path
from typing import Any

from model_runner.models.base import ModelConfig, read_common, require
from model_runner.models.decoder import Decoder
from model_runner.models.qwen3_moe import expert_names


class Olmoe(Decoder):
    """OlmoeForCausalLM."""

    names = expert_names()

    @staticmethod
    def read_config(raw: dict[str, Any], folder: Path) -> ModelConfig:
        """config.json -> ModelConfig. Errors: ModelUnsupported naming the field."""
        require(raw, "hidden_act", "silu")
        require(raw, "attention_bias", False)
        require(raw, "clip_qkv")
        common = read_common(raw, folder)
        layers = common["num_layers"]
        experts = int(raw.get("num_experts") or raw["num_local_experts"])
        return ModelConfig(
            **common,
            windows=(0,) * layers,
            experts_of_layer=(experts,) * layers,
            top_k=int(raw["num_experts_per_tok"]),
            expert_intermediate_size=common["intermediate_size"],
            renormalize=bool(raw.get("norm_topk_prob", False)),
            qk_norm=True,
            qk_norm_full=True,
        )
