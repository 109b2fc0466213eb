"""Mixtral: softmax routing over few large experts. Checkpoints call the feed-forward half
`block_sparse_moe` and an expert's linears w1 (gate), w3 (up), w2 (down)."""

from pathlib import Path
from typing import Any

from model_runner.models.base import (
    ModelConfig,
    RenamedReader,
    WeightReader,
    read_common,
    require,
)
from model_runner.models.decoder import Decoder
from model_runner.models.qwen3_moe import expert_names


class Mixtral(Decoder):
    """MixtralForCausalLM."""

    names = expert_names(("w1", "w3"), ("w2",), old_mlp="block_sparse_moe")

    def __init__(self, config: ModelConfig, reader: WeightReader, max_len: int) -> None:
        renamed = RenamedReader(reader, lambda name: name.replace(".mlp.", ".block_sparse_moe."))
        super().__init__(config, renamed, max_len)

    @staticmethod
    def read_config(raw: dict[str, Any], folder: Path) -> ModelConfig:
        """config.json -> ModelConfig. Errors: ModelUnsupported naming the field."""
        require(raw, "hidden_act", "silu")
        require(raw, "attention_bias", False)
        common = read_common(raw, folder, num_key_value_heads=8, rope_theta=1e6)
        layers = common["num_layers"]
        return ModelConfig(
            **common,
            windows=(int(raw.get("sliding_window") or 0),) * layers,
            experts_of_layer=(int(raw["num_local_experts"]),) * layers,
            top_k=int(raw["num_experts_per_tok"]),
            expert_intermediate_size=common["intermediate_size"],
        )
