"""What a checkpoint's files mean: fields that config.json leaves out, contradictions, how long
sequences may be, which file holds the weights.

The arithmetic behind each field is held against transformers in test_against_transformers.py.
"""

import json
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import transformers
from safetensors.torch import save_file

from model_runner.assembly import read_model_config
from model_runner.context_length import count_positions
from model_runner.execution.checkpoint import SafetensorsReader
from model_runner.layers import attention
from model_runner.models.base import ModelConfig, ModelUnsupported, RopeConfig, read_rope
from model_runner.models.registry import find_family

NOWHERE = Path("/nowhere")
CONFIGS = {
    "LlamaForCausalLM": transformers.LlamaConfig,
    "Qwen3ForCausalLM": transformers.Qwen3Config,
    "Qwen3MoeForCausalLM": transformers.Qwen3MoeConfig,
    "MixtralForCausalLM": transformers.MixtralConfig,
    "OlmoeForCausalLM": transformers.OlmoeConfig,
    "GptOssForCausalLM": transformers.GptOssConfig,
    "DeepseekV2ForCausalLM": transformers.DeepseekV2Config,
    "DeepseekV3ForCausalLM": transformers.DeepseekV3Config,
    "Llama4ForCausalLM": transformers.Llama4TextConfig,
}


def read(raw: dict[str, Any]) -> ModelConfig:
    return find_family(raw["architectures"]).read_config(raw, NOWHERE)


def defaults_of(architecture: str) -> dict[str, Any]:
    """Every field of a family's config, each with the value that transformers gives it."""
    raw = CONFIGS[architecture]().to_dict()
    if architecture.startswith("Deepseek"):  # none of its own
        raw["num_experts_per_tok"] = raw["num_experts_per_tok"] or 6
        raw["head_dim"] = raw["qk_rope_head_dim"]
    return {**raw, "architectures": [architecture]}


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_field_left_out_is_what_transformers_takes(architecture: str) -> None:
    raw = defaults_of(architecture)
    whole, left_out = read(raw), []
    for name in raw.keys() - {"architectures", "eos_token_id"}:
        try:
            found = read({key: value for key, value in raw.items() if key != name})
        except (ModelUnsupported, KeyError):
            continue  # it must be there
        left_out.append(name)
        assert found == whole, name
    assert {"head_dim", "tie_word_embeddings"} & raw.keys() <= set(left_out)


def test_what_cannot_be_left_out_is_named(tmp_path: Path) -> None:
    raw = defaults_of("Qwen3MoeForCausalLM")
    del raw["moe_intermediate_size"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelUnsupported, match="config.json: 'moe_intermediate_size' is missing"):
        read_model_config(tmp_path)


def test_no_layer_of_experts_is_not_all_of_them() -> None:
    raw = defaults_of("Llama4ForCausalLM") | {"moe_layers": []}
    assert not any(read(raw).experts_of_layer)
    assert all(read(raw | {"moe_layers": None}).experts_of_layer)


def test_what_the_whole_of_a_llama_4_says_counts_for_its_text() -> None:
    text = defaults_of("Llama4ForCausalLM")
    del text["architectures"], text["dtype"]
    raw = {"architectures": ["Llama4ForConditionalGeneration"], "text_config": text}
    assert read(raw | {"dtype": "float32"}).dtype == "float32"
    with pytest.raises(ModelUnsupported, match="compressed-tensors"):
        read(raw | {"quantization_config": {"quant_method": "compressed-tensors"}})


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        ({}, RopeConfig(1e4)),
        ({"rope_theta": 1e6}, RopeConfig(1e6)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, RopeConfig(5e5)),
        ({"rope_scaling": {"type": "linear", "factor": 2}},
         RopeConfig(1e4, "linear", {"factor": 2})),
        (
            {"rope_parameters": YARN | {"rope_theta": 1e6}, "rope_scaling": YARN},
            RopeConfig(1e6, "yarn", {k: v for k, v in YARN.items() if k != "rope_type"}),
        ),
    ],
)  # fmt: skip
def test_rope_in_the_words_of_both_versions(raw: dict[str, Any], found: RopeConfig) -> None:
    assert read_rope(raw) == found


def test_rope_in_contradicting_words_is_refused() -> None:
    """As somebody writes it by hand into a file that transformers 5 saved."""
    new = {"rope_type": "default", "rope_theta": 1e6}
    with pytest.raises(ModelUnsupported, match="rope_scaling .* and rope_parameters .* differ"):
        read_rope({"rope_parameters": new, "rope_scaling": YARN})


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({}, 40960),
        ({"rope_scaling": YARN}, 131072),
        ({"rope_parameters": YARN}, 131072),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, 81920),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 1.0}}, 40960),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 40960),
    ],
)
def test_yarn_stretches_a_model(rope: dict[str, Any], positions: int) -> None:
    raw = defaults_of("Qwen3ForCausalLM") | {"max_position_embeddings": 40960}
    del raw["rope_parameters"]
    assert count_positions(raw | rope) == positions
    kind = (rope.get("rope_scaling") or {}).get("rope_type")
    if kind != "llama3":  # whose other fields are missing here
        assert read(raw | rope).max_positions == positions


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("float16", "float16"), ("torch.bfloat16", "bfloat16"), (None, "bfloat16")],
)
def test_dtypes(name: str | None, dtype: str) -> None:
    assert read(defaults_of("LlamaForCausalLM") | {"dtype": name}).dtype == dtype


def test_a_dtype_of_no_weights_is_refused() -> None:
    with pytest.raises(ModelUnsupported, match="dtype 'float8_e4m3fn' is not supported"):
        read(defaults_of("LlamaForCausalLM") | {"dtype": "float8_e4m3fn"})


def test_one_file_counts_more_than_a_former_saves_index(tmp_path: Path) -> None:
    """As transformers looks: it leaves the index there when it saves again in one file."""
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"a": torch.zeros(2)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    reader = SafetensorsReader(tmp_path, torch.device("cpu"), torch.float32)
    assert reader.read("a", (2,)).tolist() == [1, 1]


def test_queries_are_scaled_before_they_are_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(attention, "rope_kv_write", lambda q, *_, **__: seen.append(q))
    monkeypatch.setattr(attention, "paged_attention", lambda q, *_, **__: q)
    positions, scale = torch.arange(64), torch.linspace(1, 1.4, 64)
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    context: Any = MagicMock(positions=positions, caches=[(None, None)])
    layer: Any = attention.Attention(
        0, 2, 1, 4, qkv=lambda x, _: x.clone(), out=lambda y, _: y, rope=None, eps=1e-5,
        q_scale=scale,
    )  # fmt: skip
    layer(x, context)
    q = x.view(64, 4, 4)[:, :2]  # of [T, 2 + 1 + 1, 4]
    assert torch.equal(seen[0], (q.float() * scale[:, None, None]).bfloat16())
    assert not torch.equal(seen[0], q * scale[:, None, None].bfloat16()), "the test can fail"
