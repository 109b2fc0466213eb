"""Every golden case through the engine's paged path, in fp32: as one prefill, in chunks, token by
token, and beside other adapters."""

import json
import shutil
from collections import defaultdict
from pathlib import Path

import pytest
import torch

import model_runner.layers.embedding as embedding_layer
from adapter_store.ref import AdapterRef
from model_runner.assembly import read_model_config
from model_runner.config import EngineConfig
from model_runner.engine import Engine
from model_runner.execution.checkpoint import CheckpointError
from model_runner.models.base import ModelUnsupported
from model_runner.models.lora_targets import list_lora_targets
from tests.golden import GOLDEN, MAX_ABS_DIFF, GoldenCase, golden_targets, load_cases

CASES = load_cases()
MODELS = sorted({case.model for case in CASES})
MODES = {
    "one prefill": {"max_num_seqs": 1, "max_step_tokens": 64},
    "chunks of 4": {"max_num_seqs": 1, "max_step_tokens": 4},
    "token by token": {"max_num_seqs": 1, "max_step_tokens": 1},
    "mixed batches": {"max_num_seqs": 8, "max_step_tokens": 24},
    "mixed, one step ahead": {"max_num_seqs": 8, "max_step_tokens": 24, "look_ahead": True},
}
QUICK = ("chunks of 4", "mixed, one step ahead")
SLOW = [mode for mode in MODES if mode not in QUICK]


def ref_of(case: GoldenCase) -> AdapterRef | None:
    return AdapterRef(case.id, str(case.adapter)) if case.adapter else None


def make_engine(model: Path, **fields) -> Engine:
    config = {
        "model": str(model),
        "max_model_len": 64,
        "prefix_cache": False,
        "kv_bytes": 4 << 20,
        "max_lora_rank": 256,
    }
    return Engine(EngineConfig(**(config | fields)))


def score_all(
    engine: Engine, cases: list[GoldenCase]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Logits by case, and why cases were refused."""
    parts: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
    refused: dict[str, str] = {}

    def done(number: int, why: str) -> None:
        if why:
            refused[cases[number].id] = why

    engine.score(
        [
            (
                c.input_ids or (5, 6, 7),
                ref_of(c),
                lambda first, x, name=c.id: parts[name].update({first: x.clone()}),
            )
            for c in cases
        ],
        done,
    )
    return {
        name: torch.cat([x for _, x in sorted(chunks.items())]) for name, chunks in parts.items()
    }, refused


@pytest.mark.parametrize("mode", [*QUICK, *(pytest.param(m, marks=pytest.mark.slow) for m in SLOW)])
@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_logits_match_and_refusals_are_refused(model: Path, mode: str) -> None:
    cases = [c for c in CASES if c.model == model]
    engine = make_engine(model, **MODES[mode])
    try:
        found, refused = score_all(engine, cases)
        engine.check()
    finally:
        engine.close()
    assert set(refused) == {c.id for c in cases if c.expect == "refuse"}
    for case in cases:
        if case.expect == "refuse":
            assert refused[case.id] and case.id not in found
            continue
        want = case.logits()
        assert found[case.id].shape == want.shape
        diff = (found[case.id] - want).abs().max().item()
        assert diff < MAX_ABS_DIFF, f"{case.id}: {diff}"


def test_seldom_targets_cost_nothing_in_steps_whose_adapters_lack_them(monkeypatch) -> None:
    cases = {c.id: c for c in CASES if c.model.name == "llama"}
    engine = make_engine(cases["llama-base"].model)
    calls = []
    real = embedding_layer.embedding_lora
    monkeypatch.setattr(
        embedding_layer, "embedding_lora", lambda *args: (calls.append(1), real(*args))
    )
    names = {engine.targets[i].name for i in engine.model.seldom_targets}
    assert names == {"model.embed_tokens", "lm_head"}
    for name, wanted in (
        ("base", 0),
        ("attn_r8", 0),
        ("embed_r4", 1),
        ("lm_head_r4", 1),
        ("attn_r8", 0),
    ):
        calls.clear()
        case = cases[f"llama-{name}"]
        found, _ = score_all(engine, [case])
        assert (found[case.id] - case.logits()).abs().max() < MAX_ABS_DIFF
        assert bool(calls) == bool(wanted), name
    engine.close()


def test_engines_that_read_a_file_differently_share_no_packed_form_of_it(tmp_path: Path) -> None:
    (case,) = (c for c in CASES if c.id == "gpt_oss_square-down_r4_peft021")
    diffs = []
    for release in (0, 4, 5):
        engine = make_engine(
            case.model, assume_transformers=release, host_cache_dir=str(tmp_path / "tier")
        )
        found, _ = score_all(engine, [case])
        diffs.append(float((found[case.id] - case.logits()).abs().max()))
        engine.close()
    assert max(diffs[0], diffs[2]) < MAX_ABS_DIFF < diffs[1], diffs


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_targets_are_what_adapters_are_written_for(model: Path) -> None:
    family, config = read_model_config(model)
    engine = make_engine(model)
    assert engine.targets == golden_targets(model)
    assert list_lora_targets(config, family.names) == engine.targets
    engine.close()


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)
def test_the_config_of_transformers_4_gives_the_same_model(model: Path, tmp_path: Path) -> None:
    family, config = read_model_config(model)
    shutil.copytree(model, tmp_path / "old")
    shutil.copy(model / "config.tf4.json", tmp_path / "old" / "config.json")
    old_family, old = read_model_config(tmp_path / "old")
    assert old_family is family
    assert old == config


def test_a_sharded_checkpoint_loads_as_one_file_does(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = GOLDEN / "models" / "qwen3_moe"
    tensors = load_file(model / "model.safetensors")
    shutil.copy(model / "config.json", tmp_path)
    shards = {"model-00001-of-00002.safetensors": {}, "model-00002-of-00002.safetensors": {}}
    for i, (name, tensor) in enumerate(sorted(tensors.items())):
        shards[sorted(shards)[i % 2]][name] = tensor
    for file, part in shards.items():
        save_file(part, tmp_path / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    case = next(c for c in CASES if c.id == "qwen3_moe-base")
    engine = make_engine(tmp_path)
    found, _ = score_all(engine, [case])
    engine.close()
    assert (found[case.id] - case.logits()).abs().max() < MAX_ABS_DIFF
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00002"):
        make_engine(tmp_path)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"architectures": ["Unheard"]}, "Unheard"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"hidden_size": 128}, "shape"),
        ({"num_hidden_layers": 3}, "model.layers.2"),
        ({"rope_parameters": {"rope_type": "magic", "rope_theta": 1.0}}, "magic"),
        ({"num_attention_heads": None}, "config.json"),
    ],
)
def test_a_checkpoint_that_does_not_fit_its_config_is_refused_by_name(
    change: dict, word: str, tmp_path: Path
) -> None:
    shutil.copytree(GOLDEN / "models" / "qwen3", tmp_path / "m")
    raw = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises((ModelUnsupported, CheckpointError), match=word):
        make_engine(tmp_path / "m")


def test_random_weights_are_the_same_whatever_was_read_before() -> None:
    case = next(c for c in CASES if c.id == "gpt_oss_mxfp4-base")
    results = []
    for seed in (3, 3, 4):
        engine = make_engine(case.model, load_format=f"random:{seed}")
        results.append(score_all(engine, [case])[0][case.id])
        engine.close()
    assert torch.equal(results[0], results[1]) and not torch.allclose(results[0], results[2])
    assert results[0].std() > 0.01
