"""Architecture string of config.json -> the family that loads it. One line a family; imported when asked for."""

from importlib import import_module
from typing import Any

from model_runner.models.base import ModelUnsupported

FAMILIES = {
    "GptOssForCausalLM": "model_runner.models.gpt_oss:GptOss",
    "LlamaForCausalLM": "model_runner.models.llama:Llama",
    "Qwen3ForCausalLM": "model_runner.models.llama:Qwen3",
    "Qwen3MoeForCausalLM": "model_runner.models.qwen3_moe:Qwen3Moe",
}


def find_family(architectures: list[str]) -> Any:
    """The class for the first known architecture. Errors: ModelUnsupported naming what the checkpoint asks for."""
    for name in architectures:
        if name in FAMILIES:
            module, _, attribute = FAMILIES[name].partition(":")
            return getattr(import_module(module), attribute)
    raise ModelUnsupported(f"architectures {architectures} are none of {sorted(FAMILIES)}")
