"""Adapters that the installed PEFT writes now, on every family: attention (latent projections too),
experts, shared experts, dense layers, the head; the logits are those of PEFT's own model.

Not here: files of other releases (test_golden.py, test_peft_versions.py), broken files
(tests/adapter_store).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from adapter_store.formats.registry import load_adapter
from adapter_store.ref import AdapterRef
from model_runner.assembly import read_model_config
from model_runner.config import EngineConfig
from model_runner.engine import Engine
from model_runner.models.lora_targets import list_lora_targets
from tests.golden import MAX_ABS_DIFF
from tests.model_runner.peft_cases import ATTENTION, DENSE, LATENT
from tests.model_runner.test_against_transformers import save_model
from tests.model_runner.test_every_target import parts_of

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
LLAMA4 = ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"]
NATURAL, SWAPPED = "experts, natural", "experts, swapped"


@dataclass(frozen=True)
class Case:
    """model: of test_against_transformers;  fields: of PEFT's LoraConfig

    parts  what its tensors must be, in the words of test_every_target.PARTS
    """

    model: str
    parts: frozenset[str]
    fields: dict[str, Any]


def case(model: str, parts: set[str], modules: Any, params: list[str] | None = None) -> Case:
    fields = {"target_modules": modules} | ({"target_parameters": params} if params else {})
    return Case(model, frozenset(parts), fields)


CASES = {
    "deepseek v2": case("deepseek v2, groups, q latent", {"attention", "latent", NATURAL},
                        LATENT, EXPERTS),
    "deepseek v2, kv_b_proj alone": case("deepseek v2, greedy", {"latent"}, ["kv_b_proj"]),
    "deepseek v3": case("deepseek v3", {"attention", "latent", NATURAL}, LATENT, EXPERTS),
    # The names of transformers 4, which PEFT takes for those of the experts wherever they are.
    "deepseek v3, old names": case("deepseek v3", {NATURAL}, ["shared_experts.down_proj"]),
    "gpt-oss": case("gpt-oss", {"attention", NATURAL}, ATTENTION, EXPERTS),
    "llama": case("llama", {"attention", "dense MLP"}, [*ATTENTION, *DENSE]),
    "llama, the head": case("llama", {"attention", "lm_head"}, ["lm_head", "q_proj"]),
    "llama4": case("llama4, two chunks and more", {"attention", "shared expert", SWAPPED},
                   [*ATTENTION, *(f"shared_expert.{name}" for name in DENSE)], LLAMA4),
    "mixtral": case("mixtral", {"attention", NATURAL}, ATTENTION, EXPERTS),
    "olmoe": case("olmoe", {"attention", NATURAL}, ATTENTION, EXPERTS),
    "qwen3-moe": case("qwen3-moe, a dense layer", {"attention", NATURAL}, ATTENTION, EXPERTS),
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
    wanted = CASES[name]
    model = save_model(wanted.model, tmp_path / "base", seed=7)
    prompt = torch.randint(96, (1, 50), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        plain = model(prompt).logits[0]
        want = save_adapter(model, tmp_path / "adapter", wanted.fields)(prompt).logits[0]
    assert (want - plain).abs().max() > 0.05
    family, config = read_model_config(tmp_path / "base")
    targets = list_lora_targets(config, family.names)
    manifest = load_adapter(tmp_path / "adapter", targets).manifest
    gate = family.names.gate if family.names else ""
    assert parts_of(manifest, targets, gate) == wanted.parts
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
