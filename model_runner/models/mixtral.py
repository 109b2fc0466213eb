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
from model_runner.models.lora_targets import NameMap
from model_runner.models.qwen3_moe import read_experts

NAMES = NameMap(
    gate="mlp.gate",
    gate_up_parts=("w1", "w3"),
    down_parts=("w2",),
    interleaved=False,
    weight_is_in_out=False,
    read_gate_up=lambda reader, p, c: read_experts(
        reader,
        p + "mlp.experts.",
        ("w1", "w3"),
        "gate_up_proj",
        c.expert_intermediate_size,
        c.hidden_size,
        c.num_experts,
    ),
    read_down=lambda reader, p, c: read_experts(
        reader,
        p + "mlp.experts.",
        ("w2",),
        "down_proj",
        c.hidden_size,
        c.expert_intermediate_size,
        c.num_experts,
    ),
    old_mlp="block_sparse_moe",
)


class Mixtral(Decoder):
    """MixtralForCausalLM."""

    names = NAMES

    def __init__(self, config: ModelConfig, reader: WeightReader, max_len: int) -> None:
        renamed = RenamedReader(reader, lambda name: name.replace(".mlp.", ".block_sparse_moe."))
        super().__init__(config, renamed, max_len)

    @staticmethod
    def read_config(raw: dict[str, Any], folder: Path) -> ModelConfig:
        """config.json -> ModelConfig. Errors: ModelUnsupported naming the field."""
        require(raw, "hidden_act", "silu")
        require(raw, "attention_bias", False)
        common = read_common(raw, folder)
        layers = common["num_layers"]
        return ModelConfig(
            **common,
            windows=(int(raw.get("sliding_window") or 0),) * layers,
            experts_of_layer=(int(raw["num_local_experts"]),) * layers,
            top_k=int(raw["num_experts_per_tok"]),
            expert_intermediate_size=common["intermediate_size"],
        )
