"""Our package `kernels` beside transformers, which looks for Hugging Face's of that name."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

import kernels

ROOT = Path(__file__).parents[2]

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}
DEEPSEEK = {
    **TINY,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
FAMILIES = {
    "qwen3_moe": TINY,
    "qwen3": TINY,
    "gpt_oss": TINY,
    "llama": TINY,
    "mixtral": TINY,
    "deepseek_v3": DEEPSEEK,
}

# A process of its own: the probe happens once, when the first model class is imported.
BUILD = """
import json, sys
import kernels
import torch
from transformers import AutoConfig, AutoModelForCausalLM
for family, fields in json.loads(sys.argv[1]).items():
    config = AutoConfig.for_model(family, **fields)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3]])).logits
    assert logits.shape == (1, 3, config.vocab_size) and torch.isfinite(logits).all(), family
    print(family)
print(kernels.__file__)
"""


def test_our_package_stays_unknown_to_the_probe() -> None:
    assert not hasattr(kernels, "__version__")
    assert Path(kernels.__file__).parent == ROOT / "kernels"
    owners = importlib.metadata.packages_distributions().get("kernels", [])
    assert "kernels" not in owners, "Hugging Face's kernels is installed beside ours"


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_transformers_builds_every_family_beside_us() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BUILD, json.dumps(FAMILIES)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *built, where = done.stdout.split()
    assert built == list(FAMILIES)
    assert Path(where) == ROOT / "kernels" / "__init__.py"
