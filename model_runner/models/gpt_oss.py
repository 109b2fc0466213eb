"""GPT-OSS: attention sinks, alternating windows, YaRN, clamped SwiGLU, biases everywhere, MXFP4
experts.

The checkpoint interleaves gate and up (g0, u0, g1, u1); rows are put gate first, then up, once at
load.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.fused_moe import ExpertWeights
from kernels.op import use_triton
from model_runner.models.base import (
    ModelConfig,
    ModelUnsupported,
    WeightReader,
    read_common,
    require,
)
from model_runner.models.decoder import Decoder
from model_runner.models.lora_targets import NameMap

MXFP4_GROUP = 32


def _for_device(w: ExpertWeights) -> ExpertWeights:
    """A GPU's kernels want MXFP4 packed; references compute from what the checkpoint has."""
    return w.pack() if w.blocks is not None and w.blocks.is_cuda and use_triton(w.blocks) else w


def _gate_then_up(x: Tensor) -> Tensor:
    """Rows g0, u0, g1, u1 on axis 1 -> gate rows, then up rows."""
    return torch.cat([x[:, 0::2], x[:, 1::2]], 1).contiguous()


def _read(
    reader: WeightReader, name: str, rows: int, cols: int, config: ModelConfig
) -> ExpertWeights:
    """[E, rows, cols]; MXFP4 as the checkpoint has it."""
    experts = config.num_experts
    bias = reader.read(name + "_bias", (experts, rows))  # [E, out]
    if config.mxfp4:
        shape = (experts, rows, cols // MXFP4_GROUP)
        blocks = reader.read(name + "_blocks", (*shape, MXFP4_GROUP // 2), torch.uint8)
        scales = reader.read(name + "_scales", shape, torch.uint8)  # [E, out, in / 32]
        return ExpertWeights(
            blocks=blocks.reshape(experts, rows, cols // 2), scales=scales, bias=bias
        )
    weight = reader.read(name, (experts, cols, rows))  # [E, in, out]
    return ExpertWeights(weight=weight.transpose(1, 2).contiguous(), bias=bias)


def _read_gate_up(reader: WeightReader, p: str, c: ModelConfig) -> ExpertWeights:
    w = _read(
        reader, p + "mlp.experts.gate_up_proj", 2 * c.expert_intermediate_size, c.hidden_size, c
    )
    weight, blocks, scales, bias = (
        None if x is None else _gate_then_up(x) for x in (w.weight, w.blocks, w.scales, w.bias)
    )
    return _for_device(ExpertWeights(weight=weight, blocks=blocks, scales=scales, bias=bias))


def _read_down(reader: WeightReader, p: str, c: ModelConfig) -> ExpertWeights:
    name, inner = p + "mlp.experts.down_proj", c.expert_intermediate_size
    return _for_device(_read(reader, name, c.hidden_size, inner, c))


NAMES = NameMap(
    gate="mlp.router",
    gate_up_parts=("gate_proj", "up_proj"),
    down_parts=("down_proj",),
    interleaved=True,
    weight_is_in_out=True,
    read_gate_up=_read_gate_up,
    read_down=_read_down,
)


class GptOss(Decoder):
    """GptOssForCausalLM."""

    names = NAMES

    @staticmethod
    def read_config(raw: dict[str, Any], folder: Path) -> ModelConfig:
        """config.json -> ModelConfig. Errors: ModelUnsupported naming the field."""
        require(raw, "hidden_act", "silu")
        require(raw, "swiglu_limit", 7.0)
        require(raw, "swiglu_alpha", 1.702)
        if not (raw.get("rope_parameters") or raw.get("rope_scaling")):
            raise ModelUnsupported("config.json: neither rope_parameters nor rope_scaling is there")
        quantization = raw.get("quantization_config") or {}
        if quantization and quantization.get("quant_method") != "mxfp4":
            raise ModelUnsupported(
                f"quant_method {quantization.get('quant_method')!r} is not supported"
            )
        common = read_common(
            {**raw, "quantization_config": None},
            folder,
            head_dim=64,
            num_key_value_heads=8,
            rope_theta=150000.0,
        )
        layers = common["num_layers"]
        kinds = raw.get("layer_types") or ["sliding_attention", "full_attention"] * layers
        window = int(raw.get("sliding_window", 128) or 0)
        return ModelConfig(
            **common,
            windows=tuple(window if kind == "sliding_attention" else 0 for kind in kinds[:layers]),
            experts_of_layer=(int(raw["num_local_experts"]),) * layers,
            top_k=int(raw.get("num_experts_per_tok") or raw["experts_per_token"]),
            expert_intermediate_size=common["intermediate_size"],
            activation="gpt_oss",
            attention_bias=True,
            output_bias=True,
            gate_bias=True,
            sinks=True,
            mxfp4=bool(quantization),
        )
