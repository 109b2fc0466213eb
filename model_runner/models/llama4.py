"""Llama 4's text model: chunked attention on rotating layers, no rotation on the others, one expert
a token whose weight multiplies its input, an expert that every token has.

The checkpoint may be the text model alone or one with a vision tower, of which nothing is read.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kernels.fused_moe import ExpertWeights
from kernels.moe_gate_groups import GateRule
from model_runner.layers.attention import Attention
from model_runner.models.base import (
    MixedRotation,
    ModelConfig,
    RenamedReader,
    WeightReader,
    read_common,
    require,
)
from model_runner.models.decoder import Decoder
from model_runner.models.lora_targets import NameMap


def _read_experts(reader: WeightReader, name: str, rows: int, cols: int, experts: int):
    """[E, in, out] as the checkpoint has it -> rows = outputs."""
    weight = reader.read(name, (experts, cols, rows))  # [E, in, out]
    return ExpertWeights(weight=weight.transpose(1, 2).contiguous())  # [E, out, in]


NAMES = NameMap(
    gate="feed_forward.router",
    gate_up_parts=("gate_proj", "up_proj"),
    down_parts=("down_proj",),
    interleaved=False,
    weight_is_in_out=True,
    read_gate_up=lambda reader, p, c: _read_experts(
        reader,
        p + "feed_forward.experts.gate_up_proj",
        2 * c.expert_intermediate_size,
        c.hidden_size,
        c.num_experts,
    ),
    read_down=lambda reader, p, c: _read_experts(
        reader,
        p + "feed_forward.experts.down_proj",
        c.hidden_size,
        c.expert_intermediate_size,
        c.num_experts,
    ),
    mlp="feed_forward",
    shared="shared_expert",
)


class Llama4(Decoder):
    """Llama4ForCausalLM, and the text half of Llama4ForConditionalGeneration."""

    names = NAMES

    def __init__(self, config: ModelConfig, reader: WeightReader, max_len: int) -> None:
        renamed = RenamedReader(reader, lambda name: f"language_model.{name}")
        super().__init__(config, renamed, max_len)

    @staticmethod
    def read_config(raw: dict[str, Any], folder: Path) -> ModelConfig:
        """config.json -> ModelConfig. Errors: ModelUnsupported naming the field."""
        if "text_config" in raw:
            whole = ("architectures", "quantization_config", "dtype", "torch_dtype")
            raw = raw["text_config"] | {name: raw[name] for name in whole if name in raw}
        require(raw, "hidden_act", "silu")
        require(raw, "attention_bias", False)
        require(raw, "num_experts_per_tok", 1)
        common = read_common(raw, folder, head_dim=128, num_key_value_heads=8, rope_theta=500000.0)
        layers = common["num_layers"]
        step = int(raw.get("interleave_moe_layer_step") or 1)
        listed = raw.get("moe_layers")
        moe = set(range(step - 1, layers, step) if listed is None else listed)
        every = int(raw.get("no_rope_layer_interval") or 4)
        rotating = raw.get("no_rope_layers") or [int((n + 1) % every != 0) for n in range(layers)]
        kinds = raw.get("layer_types") or [
            "chunked_attention" if rotates else "full_attention" for rotates in rotating
        ]
        chunk = int(raw.get("attention_chunk_size", 8192) or 0)
        inner = common["intermediate_size"]
        common["intermediate_size"] = int(raw["intermediate_size_mlp"])
        tuned = bool(raw.get("attn_temperature_tuning", True))
        return ModelConfig(
            **common,
            windows=tuple(chunk if kind == "chunked_attention" else 0 for kind in kinds[:layers]),
            chunked=True,
            experts_of_layer=tuple(
                int(raw["num_local_experts"]) if n in moe else 0 for n in range(layers)
            ),
            top_k=1,
            expert_intermediate_size=inner,
            shared_intermediate_size=inner,
            gate_rule=GateRule(sigmoid=True),
            scale_input=True,
            rotation=MixedRotation(
                rotating=tuple(bool(rotates) for rotates in rotating[:layers]),
                l2_norm=bool(raw.get("use_qk_norm", True)),
                scale_floor=float(raw.get("floor_scale") or 8192) if tuned else 0.0,
                scale_slope=float(raw.get("attn_scale") or 0.1),
            ),
        )

    def _load_attention(self, reader: WeightReader, n: int) -> Attention:
        attention = super()._load_attention(reader, n)
        rotation, weight = self.config.rotation, attention.qkv.weight
        assert rotation is not None
        if rotation.rotating[n]:
            # A norm without weights, behind a rotation that keeps lengths: it may stand before.
            norm = weight.new_ones(self.config.head_dim) if rotation.l2_norm else None  # [D]
            return replace(attention, interleaved=True, q_norm=norm, k_norm=norm)
        if not rotation.scale_floor:
            return replace(attention, rope=None)
        positions = torch.arange(len(self._rope), device=weight.device, dtype=torch.float32)
        growth = torch.log1p(torch.floor((positions + 1) / rotation.scale_floor))  # [positions]
        return replace(attention, rope=None, q_scale=growth * rotation.scale_slope + 1)
