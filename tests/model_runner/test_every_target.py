"""Every family times everything that an adapter may change, in every way that files spell it: one
small adapter for each, all in one batch, and the logits are those of transformers with the deltas
added to its weights. What a family does not have is refused by the tensor's name.

The deltas are made here from the factors by PEFT's own formulas, so this trusts no reader of files.
Not here: files that PEFT wrote (test_golden.py, test_peft_live.py).
"""

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from adapter_store.errors import AdapterInvalid
from adapter_store.formats.registry import load_adapter
from adapter_store.ref import AdapterRef
from adapter_store.weights import AdapterManifest, LoraTarget
from model_runner.assembly import read_model_config
from model_runner.config import EngineConfig
from model_runner.engine import Engine
from model_runner.models.lora_targets import list_lora_targets
from tests.golden import MAX_ABS_DIFF
from tests.model_runner.test_against_transformers import save_model

# Family -> its shape in test_against_transformers.
FAMILIES = {
    "gpt-oss": "gpt-oss",
    "qwen3-moe": "qwen3-moe, a dense layer",
    "deepseek v2": "deepseek v2, groups, q latent",
    "deepseek v3": "deepseek v3",
    "llama4": "llama4, two chunks and more",
    "mixtral": "mixtral",
    "olmoe": "olmoe",
    "llama": "llama",
    "qwen3": "qwen3",
}
EXPERTS = ("experts, natural", "experts, swapped", "experts, 3-D", "experts, one by one")
PARTS = ("attention", "latent", *EXPERTS, "shared expert", "dense MLP", "router", "embedding",
         "lm_head")  # fmt: skip
DENSE = {"latent", *EXPERTS, "shared expert", "router"}
LACKS = {
    "gpt-oss": {"latent", "shared expert", "dense MLP"},
    "qwen3-moe": {"latent", "shared expert"},
    "deepseek v2": set(),
    "deepseek v3": set(),
    "llama4": {"latent"},
    "mixtral": {"latent", "shared expert", "dense MLP"},
    "olmoe": {"latent", "shared expert", "dense MLP"},
    "llama": DENSE,
    "qwen3": DENSE,
}
CELLS = [(family, part) for family in FAMILIES for part in PARTS if part not in LACKS[family]]
RANK, SCALE = 4, 2.0
PROMPT = torch.randint(96, (30,), generator=torch.Generator().manual_seed(5)).tolist()


@dataclass(frozen=True)
class Found:
    """What came out for one adapter: logits [T, V] of the engine and of merged weights, and how
    far the adapter moves them."""

    ours: Tensor
    merged: Tensor
    moved: float


def part_of(target: LoraTarget, gate: str) -> str:
    """The part that a weight belongs to; one of experts goes by the first of them."""
    name = target.name
    if target.kind == "experts":
        return EXPERTS[0]
    if name.endswith(("embed_tokens", "lm_head")):
        return "embedding" if target.kind == "embedding" else "lm_head"
    if ".self_attn." in name:
        return "latent" if ".kv_" in name else "attention"
    if gate and name.endswith(gate):
        return "router"
    return "shared expert" if ".shared_expert" in name else "dense MLP"


_PART_OF_LAYOUT = {
    "natural": EXPERTS[0],
    "swapped": EXPERTS[1],
    "3-D": EXPERTS[2],
    "shared outer": EXPERTS[2],
    "per expert": EXPERTS[3],
}


def parts_of(manifest: AdapterManifest, targets: Sequence[LoraTarget], gate: str) -> set[str]:
    """The parts of which a file has tensors, by what the loader made of them."""
    by_name = {target.name: target for target in targets}
    found = set()
    for pair in manifest.pairs:
        plain = by_name[pair.target].kind != "experts"
        part = part_of(by_name[pair.target], gate)
        found.add(part if plain else _PART_OF_LAYOUT[pair.layout])
    return found


def draw(random: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=random) * 0.15


def linear_pair(target: LoraTarget, random: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors of a plain pair, and the delta as transformers stores the weight."""
    a, b = draw(random, RANK, target.in_features), draw(random, target.out_features, RANK)
    at = f"base_model.model.{target.name}."
    if target.kind == "embedding":
        named = {f"{at}lora_embedding_A": a, f"{at}lora_embedding_B": b}
        return named, SCALE * (b @ a).T  # [V, H]
    return {f"{at}lora_A.weight": a, f"{at}lora_B.weight": b}, SCALE * b @ a  # [out, in]


def expert_pairs(
    target: LoraTarget, part: str, random: torch.Generator
) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors of an experts target in one of the four spellings, and the delta as it is stored."""
    e, width, out = target.num_experts, target.in_features, target.out_features
    module, _, param = target.name.rpartition(".")
    at = f"base_model.model.{module}."
    if part == "experts, one by one":
        tensors, delta = {}, torch.zeros(e, out, width)
        parts, size = target.expert_parts, out // len(target.expert_parts)
        for expert in range(e):
            for i, name in enumerate(parts):
                a, b = draw(random, RANK, width), draw(random, size, RANK)
                tensors[f"{at}{expert}.{name}.lora_A.weight"] = a
                tensors[f"{at}{expert}.{name}.lora_B.weight"] = b
                step = len(parts) if target.interleaved else 1
                first = i if target.interleaved else i * size
                delta[expert, first : first + size * step : step] = SCALE * b @ a
    else:
        a, b = draw(random, e, RANK, width), draw(random, e, RANK, out)
        delta = SCALE * torch.einsum("ero,eri->eoi", b, a)  # [E, out, in]
        rows, columns = (b, a) if part == "experts, swapped" else (a, b)
        if part == "experts, 3-D":
            named = f"{at}{param}."
            first, second = a, b.transpose(1, 2).contiguous()
        else:
            named = at if param == "down_proj" else f"{at}base_layer."
            first = rows.flatten(0, 1)  # [E r, x]: row e r + k
            second = columns.permute(2, 1, 0).flatten(1).contiguous()  # [y, r E]: column k E + e
        tensors = {f"{named}lora_A.weight": first, f"{named}lora_B.weight": second}
    return tensors, delta.transpose(1, 2) if target.weight_is_in_out else delta


def write_adapter(folder: Path, tensors: dict[str, Tensor], **fields: Any) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK * SCALE, **fields}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Callable[[str], dict[str, Found]]:
    """What comes out for all parts of a family, computed once."""
    return functools.cache(lambda family: run_family(family, tmp_path_factory.mktemp("family")))


def run_family(name: str, root: Path) -> dict[str, Found]:
    """All parts of one family, each with an adapter of its own, in one engine."""
    model = save_model(FAMILIES[name], root / "base", seed=11)
    family, config = read_model_config(root / "base")
    targets = list_lora_targets(config, family.names)
    gate = family.names.gate if family.names else ""
    assert {part_of(t, gate) for t in targets} | LACKS[name] | set(EXPERTS) == set(PARTS)
    params = dict(model.named_parameters())
    random = torch.Generator().manual_seed(3)
    prompt = torch.tensor([PROMPT])
    merged: dict[str, Tensor] = {}
    with torch.no_grad():
        plain = model(prompt).logits[0]
        for part in (part for family, part in CELLS if family == name):
            tensors, kept = {}, {}
            for target in targets:
                if part_of(target, gate) != (EXPERTS[0] if part in EXPERTS else part):
                    continue
                made, delta = (
                    expert_pairs(target, part, random)
                    if target.kind == "experts"
                    else linear_pair(target, random)
                )
                tensors |= made
                path = target.name if target.kind == "experts" else f"{target.name}.weight"
                kept[path] = params[path].clone()
                params[path] += delta
            write_adapter(root / part, tensors)
            merged[part] = model(prompt).logits[0]
            for path, before in kept.items():
                params[path].copy_(before)
    ours = score(root, list(merged))
    return {
        part: Found(ours[part], want, float((want - plain).abs().max()))
        for part, want in merged.items()
    }


def score(root: Path, parts: list[str]) -> dict[str, Tensor]:
    """Logits of the prompt under each adapter, side by side."""
    engine = Engine(
        EngineConfig(
            model=str(root / "base"),
            max_model_len=64,
            max_num_seqs=8,
            max_step_tokens=100,
            kv_bytes=4 << 20,
            prefix_cache=False,
        )
    )
    chunks: dict[str, dict[int, Tensor]] = {part: {} for part in parts}

    def keep(part: str):
        return lambda first, logits: chunks[part].update({first: logits.clone()})

    def done(number: int, why: str) -> None:
        assert not why, why

    jobs = [(tuple(PROMPT), AdapterRef(part, str(root / part)), keep(part)) for part in parts]
    try:
        engine.score(jobs, done)
        engine.check()
    finally:
        engine.close()
    return {part: torch.cat([x for _, x in sorted(chunks[part].items())]) for part in parts}


@pytest.mark.parametrize(("family", "part"), CELLS, ids=[f"{f}-{p}" for f, p in CELLS])
def test_an_adapter_is_its_merged_weights(
    family: str, part: str, results: Callable[[str], dict[str, Found]]
) -> None:
    result = results(family)[part]
    assert result.moved > 100 * MAX_ABS_DIFF, "an adapter that does nothing would pass"
    assert (result.ours - result.merged).abs().max() < MAX_ABS_DIFF


ABSENT = [(family, part) for family in FAMILIES for part in PARTS if part in LACKS[family]]
# What such tensors are called in the families that have them.
FOREIGN = {
    "latent": "self_attn.kv_b_proj",
    "experts, natural": "mlp.experts",
    "experts, swapped": "mlp.experts",
    "experts, 3-D": "mlp.experts.gate_up_proj",
    "experts, one by one": "mlp.experts.0.gate_proj",
    "shared expert": "mlp.shared_expert.up_proj",
    "dense MLP": "mlp.down_proj",
    "router": "mlp.gate",
}


@pytest.mark.parametrize(("family", "part"), ABSENT, ids=[f"{f}-{p}" for f, p in ABSENT])
def test_what_a_family_lacks_is_refused(family: str, part: str, tmp_path: Path) -> None:
    save_model(FAMILIES[family], tmp_path / "base", seed=1)
    model_class, config = read_model_config(tmp_path / "base")
    at = f"base_model.model.model.layers.0.{FOREIGN[part]}"
    tensors = {
        f"{at}.lora_A.weight": torch.ones(RANK, 32),
        f"{at}.lora_B.weight": torch.ones(8, RANK),
    }
    folder = write_adapter(tmp_path / "a", tensors)
    with pytest.raises(AdapterInvalid, match=FOREIGN[part]) as refusal:
        load_adapter(folder, list_lora_targets(config, model_class.names))
    assert refusal.value.reason == "unbound_tensor"
