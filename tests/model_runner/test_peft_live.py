"""Adapters that the installed PEFT writes now, on every family: attention (latent projections too),
experts, shared experts, dense layers, the head; the logits are those of PEFT's own model.

Not here: files of older versions (test_golden.py), broken files (tests/adapter_store).
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from adapter_store.ref import AdapterRef
from model_runner.config import EngineConfig
from model_runner.engine import Engine
from tests.golden import MAX_ABS_DIFF
from tests.model_runner.test_against_transformers import save_model

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
SHARED = [f"shared_experts.{part}_proj" for part in ("gate", "up", "down")]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
LLAMA4 = ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"]
# (model of test_against_transformers, what is adapted)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek v2": ("deepseek v2, groups, q latent", {
        "target_modules": LATENT + SHARED, "target_parameters": EXPERTS}),
    "deepseek v2, kv_b_proj alone": ("deepseek v2, greedy", {"target_modules": ["kv_b_proj"]}),
    "deepseek v3": ("deepseek v3", {
        "target_modules": LATENT + SHARED, "target_parameters": EXPERTS}),
    "deepseek v3, dense layer": ("deepseek v3", {
        "target_modules": r"model\.layers\.0\.mlp\.(gate|up|down)_proj"}),
    "gpt-oss": ("gpt-oss", {"target_modules": ATTENTION, "target_parameters": EXPERTS}),
    "llama": ("llama", {"target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj"]}),
    "llama, the head": ("llama", {"target_modules": ["lm_head", "q_proj"]}),
    "llama4": ("llama4, two chunks and more", {
        "target_modules": [*ATTENTION, "shared_expert.gate_proj", "shared_expert.up_proj",
                           "shared_expert.down_proj"],
        "target_parameters": LLAMA4}),
    "mixtral": ("mixtral", {"target_modules": ATTENTION, "target_parameters": EXPERTS}),
    "olmoe": ("olmoe", {"target_modules": ATTENTION, "target_parameters": EXPERTS}),
    "qwen3-moe": ("qwen3-moe, a dense layer", {
        "target_modules": ATTENTION, "target_parameters": EXPERTS}),
}  # fmt: skip


def save_adapter(model: torch.nn.Module, folder: Path, fields: dict[str, Any]) -> torch.nn.Module:
    """PEFT's adapter over the model, its factors random (B is zero when PEFT makes it)."""
    config = LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **fields)
    wrapped = get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if "lora_" in name:
                weight.normal_(0, 0.15)
    wrapped.save_pretrained(folder, save_embedding_layers=False)
    return wrapped


QUICK = ("deepseek v3", "gpt-oss", "llama4", "mixtral")
SLOW = [name for name in CASES if name not in QUICK]


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)])
def test_logits_are_those_of_peft(name: str, tmp_path: Path) -> None:
    shape, fields = CASES[name]
    model = save_model(shape, tmp_path / "base", seed=7)
    prompt = torch.randint(96, (1, 50), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        plain = model(prompt).logits[0]
        want = save_adapter(model, tmp_path / "adapter", fields)(prompt).logits[0]
    assert (want - plain).abs().max() > 0.05
    engine = Engine(
        EngineConfig(
            model=str(tmp_path / "base"),
            max_model_len=128,
            max_step_tokens=24,
            max_num_seqs=4,
            kv_bytes=4 << 20,
            prefix_cache=False,
        )
    )
    ref = AdapterRef("a", str(tmp_path / "adapter"))
    parts: list[dict[int, torch.Tensor]] = [{}, {}, {}]

    def done(number: int, why: str) -> None:
        assert not why, why

    def keep(number: int):
        return lambda first, x: parts[number].update({first: x.clone()})

    ids = tuple(prompt[0].tolist())
    try:
        engine.score([(ids, r, keep(i)) for i, r in enumerate((ref, None, ref))], done)
        engine.check()
    finally:
        engine.close()
    found = [torch.cat([x for _, x in sorted(part.items())]) for part in parts]
    for got, right in zip(found, (want, plain, want), strict=True):
        assert (got - right).abs().max() < MAX_ABS_DIFF
