"""Qwen3-MoE: softmax routing, per-expert weights on disk (a fused 3-D tensor is read too), some
layers may be dense."""

from pathlib import Path
from typing import Any

import torch

from kernels.fused_moe import ExpertWeights
from model_runner.models.base import (
    ModelConfig,
    ModelUnsupported,
    WeightReader,
    read_common,
    require,
)
from model_runner.models.decoder import Decoder
from model_runner.models.lora_targets import NameMap


def read_experts(
    reader: WeightReader,
    p: str,
    parts: tuple[str, ...],
    fused: str,
    rows: int,
    cols: int,
    experts: int,
):
    """Experts saved one by one (`experts.E.gate_proj.weight`) or fused (`experts.gate_up_proj`),
    rows = outputs."""
    if reader.has(p + fused):
        return ExpertWeights(weight=reader.read(p + fused, (experts, rows * len(parts), cols)))
    stacked = [
        torch.cat([reader.read(f"{p}{e}.{part}.weight", (rows, cols)) for part in parts])
        for e in range(experts)
    ]
    return ExpertWeights(weight=torch.stack(stacked))  # [E, out, in]


def expert_names(
    gate_up_parts: tuple[str, ...] = ("gate_proj", "up_proj"),
    down_parts: tuple[str, ...] = ("down_proj",),
    *,
    old_mlp: str = "",
    shared: str = "",
) -> NameMap:
    """The names of a family with experts below `mlp.experts`, rows = outputs; arguments as
    NameMap has them."""
    at = "mlp.experts."
    return NameMap(
        gate="mlp.gate",
        gate_up_parts=gate_up_parts,
        down_parts=down_parts,
        interleaved=False,
        weight_is_in_out=False,
        read_gate_up=lambda reader, p, c: read_experts(
            reader,
            p + at,
            gate_up_parts,
            "gate_up_proj",
            c.expert_intermediate_size,
            c.hidden_size,
            c.num_experts,
        ),
        read_down=lambda reader, p, c: read_experts(
            reader,
            p + at,
            down_parts,
            "down_proj",
            c.hidden_size,
            c.expert_intermediate_size,
            c.num_experts,
        ),
        old_mlp=old_mlp,
        shared=shared,
    )


class Qwen3Moe(Decoder):
    """Qwen3MoeForCausalLM."""

    names = expert_names()

    @staticmethod
    def read_config(raw: dict[str, Any], folder: Path) -> ModelConfig:
        """config.json -> ModelConfig. transformers 5 says `num_local_experts`, published files
        `num_experts`."""
        require(raw, "hidden_act", "silu")
        require(raw, "attention_bias", False)
        require(raw, "use_sliding_window", False)
        common = read_common(raw, folder, num_key_value_heads=4)
        experts = int(raw.get("num_experts") or raw.get("num_local_experts") or 0)
        if not experts:
            raise ModelUnsupported("config.json: num_experts is missing")
        step, dense = (
            int(raw.get("decoder_sparse_step") or 1),
            set(raw.get("mlp_only_layers") or ()),
        )
        layers = common["num_layers"]
        return ModelConfig(
            **common,
            windows=(0,) * layers,
            experts_of_layer=tuple(
                experts if n not in dense and (n + 1) % step == 0 else 0 for n in range(layers)
            ),
            top_k=int(raw["num_experts_per_tok"]),
            expert_intermediate_size=int(raw["moe_intermediate_size"]),
            renormalize=bool(raw.get("norm_topk_prob", False)),
            qk_norm=True,
        )
