"""Dense families: Llama 3.x, and Qwen3 (which adds a norm on every head of q and k)."""

from pathlib import Path
from typing import Any

from model_runner.models.base import ModelConfig, read_common, require
from model_runner.models.decoder import Decoder


class Llama(Decoder):
    """LlamaForCausalLM."""

    @staticmethod
    def read_config(raw: dict[str, Any], folder: Path) -> ModelConfig:
        """config.json -> ModelConfig. Errors: ModelUnsupported naming the field."""
        require(raw, "hidden_act", "silu")
        require(raw, "mlp_bias", False)
        require(raw, "attention_bias", False)
        common = read_common(raw, folder)
        layers = common["num_layers"]
        return ModelConfig(**common, windows=(0,) * layers, experts_of_layer=(0,) * layers)


class Qwen3(Llama):
    """Qwen3ForCausalLM."""

    @staticmethod
    def read_config(raw: dict[str, Any], folder: Path) -> ModelConfig:
        """config.json -> ModelConfig. Errors: ModelUnsupported naming the field."""
        require(raw, "hidden_act", "silu")
        require(raw, "attention_bias", False)
        require(raw, "use_sliding_window", False)
        common = read_common(raw, folder, head_dim=128)
        layers = common["num_layers"]
        return ModelConfig(
            **common, windows=(0,) * layers, experts_of_layer=(0,) * layers, qk_norm=True
        )
