"""Architecture string of config.json -> the family that loads it. One line a family; imported when
asked for."""

from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Protocol

from model_runner.models.base import ModelConfig, ModelUnsupported, WeightReader
from model_runner.models.decoder import Decoder
from model_runner.models.lora_targets import NameMap

FAMILIES = {
    "DeepseekV2ForCausalLM": "model_runner.models.deepseek:DeepSeekV2",
    "DeepseekV3ForCausalLM": "model_runner.models.deepseek:DeepSeekV3",
    "GptOssForCausalLM": "model_runner.models.gpt_oss:GptOss",
    "Llama4ForCausalLM": "model_runner.models.llama4:Llama4",
    "Llama4ForConditionalGeneration": "model_runner.models.llama4:Llama4",
    "LlamaForCausalLM": "model_runner.models.llama:Llama",
    "MixtralForCausalLM": "model_runner.models.mixtral:Mixtral",
    "OlmoeForCausalLM": "model_runner.models.olmoe:Olmoe",
    "Qwen3ForCausalLM": "model_runner.models.llama:Qwen3",
    "Qwen3MoeForCausalLM": "model_runner.models.qwen3_moe:Qwen3Moe",
}


class Family(Protocol):
    """A model class: how it reads its config, how it is built, and how it spells its parts."""

    names: ClassVar[NameMap | None]

    @staticmethod
    def read_config(raw: dict[str, Any], folder: Path) -> ModelConfig:
        """config.json -> ModelConfig. Errors: ModelUnsupported naming the field."""
        ...

    def __call__(self, config: ModelConfig, reader: WeightReader, max_len: int) -> Decoder:
        """The loaded model; max_len positions at most."""
        ...


def find_family(architectures: list[str]) -> Family:
    """The class for the first known architecture. Errors: ModelUnsupported naming what the
    checkpoint asks for."""
    for name in architectures:
        if name in FAMILIES:
            module, _, attribute = FAMILIES[name].partition(":")
            family: Family = getattr(import_module(module), attribute)
            return family
    raise ModelUnsupported(f"architectures {architectures} are none of {sorted(FAMILIES)}")
