"""The demo's files are what they claim to be. What the engine answers with them is its own test."""

import json
import os
import subprocess
import sys

import pytest
from safetensors import safe_open

from tests.model_runner.demo import (
    ADAPTER_DIRS,
    ADAPTERS,
    ANSWERS,
    BASE_DIR,
    DEMO_DIR,
    MARKERS,
    PADDING_IDS,
    QUESTIONS,
    markers_in,
)


def test_every_expected_answer_bears_its_own_marker_alone() -> None:
    assert len(set(QUESTIONS)) == 20 and set(MARKERS) == set(ADAPTERS)
    for name, answers in ANSWERS.items():
        assert len(answers) == 20
        assert all(markers_in(a) == ({name} & set(ADAPTERS)) for a in answers)


def test_the_files_are_small() -> None:
    assert sum(path.stat().st_size for path in DEMO_DIR.rglob("*") if path.is_file()) < 5_200_000


def test_the_base_is_bfloat16_with_an_odd_inner_size() -> None:
    config = json.loads((BASE_DIR / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert config["moe_intermediate_size"] != config["hidden_size"]
    assert config["max_position_embeddings"] >= 2048
    # Wide enough for who draws prompts from 1000 .. vocabulary - 2000.
    assert config["vocab_size"] == PADDING_IDS.stop > 3000 > 1000 > PADDING_IDS.start
    with safe_open(BASE_DIR / "model.safetensors", "pt") as weights:
        embedding = weights.get_slice("model.embed_tokens.weight")
        assert embedding.get_shape() == [PADDING_IDS.stop, 128]
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}  # noqa: SIM118


@pytest.mark.parametrize(("name", "rank"), [("pirate", 8), ("formal", 4), ("spanish", 16)])
def test_each_adapter_changes_attention_and_both_expert_parameters(name: str, rank: int) -> None:
    config = json.loads((ADAPTER_DIRS[name] / "adapter_config.json").read_text())
    assert (config["r"], config["peft_type"]) == (rank, "LORA")
    with safe_open(ADAPTER_DIRS[name] / "adapter_model.safetensors", "pt") as weights:
        factors = {key: weights.get_tensor(key) for key in weights.keys()}  # noqa: SIM118
    assert len(factors) == 4 * 2 * (4 + 2)  # layers, A and B, attention's four and the experts' two
    assert all(bool(tensor.any()) for tensor in factors.values())
    shapes = {
        key.split("layers.0.")[1]: list(t.shape) for key, t in factors.items() if "layers.0." in key
    }
    assert shapes["self_attn.q_proj.lora_A.weight"] == [rank, 128]
    assert shapes["mlp.experts.base_layer.lora_A.weight"] == [8 * rank, 128]  # gate_up_proj
    assert shapes["mlp.experts.lora_A.weight"] == [8 * rank, 96]  # down_proj


@pytest.mark.slow
def test_transformers_and_peft_give_the_expected_answers() -> None:
    run = subprocess.run(
        [sys.executable, str(DEMO_DIR / "make_demo.py"), "--out", str(DEMO_DIR), "--check-only"],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.strip().endswith("PASSED")


@pytest.mark.slow
def test_the_script_overwrites_nothing() -> None:
    run = subprocess.run(
        [sys.executable, str(DEMO_DIR / "make_demo.py"), "--out", str(DEMO_DIR)],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 2
    assert "holds a demo already" in run.stderr
