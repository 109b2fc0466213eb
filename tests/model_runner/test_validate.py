"""The validate command: its verdict on every golden adapter is the engine's, its bytes are the
arena's, and it reads nothing of the model but config.json.

Not here: single rules of the formats (tests/adapter_store/test_formats.py).
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from adapter_store.__main__ import main
from model_runner.engine import Engine
from tests.adapter_store.test_formats_golden import EITHER
from tests.golden import GOLDEN, NAMED_IN_REFUSAL, GoldenCase, load_cases
from tests.model_runner.test_golden import make_engine, score_all
from tests.s3_server import start_s3_server

ROOT = Path(__file__).resolve().parents[2]
LLAMA = GOLDEN / "models" / "llama"
ATTENTION = GOLDEN / "adapters" / "llama" / "attn_r8"
CASES = {case.id: case for case in load_cases() if case.adapter}


def judge(capsys: Any, adapter: Path | str, model: Path, *options: str) -> tuple[int, Any]:
    """Exit code and JSON of the command, in this process."""
    code = main(["validate", str(adapter), "--model", str(model), "--json", *options])
    return code, json.loads(capsys.readouterr().out)


def expected_layout(case: GoldenCase) -> str:
    """How the experts of a case lie in its file, by what its name and its line say."""
    if case.layout:
        return case.layout
    marks = {"shared_outer": "shared outer", "3d": "3-D", "per_expert": "per expert"}
    marks["gate_up_projs"] = "per expert"
    return next((word for mark, word in marks.items() if mark in case.id), "plain")


SERVED = [c for c in load_cases("logits") if c.adapter]
QUICK = {case.family: case for case in SERVED}.values()  # one of each family


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=c.id, marks=[] if c in QUICK else pytest.mark.slow) for c in SERVED],
)
def test_what_is_served_is_reported_whole(case: GoldenCase, capsys) -> None:
    assert case.adapter is not None
    code, report = judge(capsys, case.adapter, case.model)
    assert code == 0 and report["served"] and not report["refused"], report["refused"]
    assert expected_layout(case) in report["layouts"]
    assert set(report["layouts"]) <= {expected_layout(case), "plain"}
    with safe_open(case.adapter / "adapter_model.safetensors", "pt") as file:
        names = sorted(file.keys())
    assert sorted([*report["bound"], *report["skipped"]]) == names
    assert all(report["skipped"].values())
    assert report["gpus"] == 1 and report["bytes_per_gpu"] % 256 == 0 < report["bytes_per_gpu"]
    assert sum(target["adapted"] for target in report["targets"]) <= len(report["bound"]) // 2


@pytest.mark.parametrize("case", load_cases("refuse"), ids=lambda case: case.id)
def test_what_is_refused_is_named(case: GoldenCase, capsys) -> None:
    assert case.adapter is not None
    code, report = judge(capsys, case.adapter, case.model)
    (refusal,) = report["refused"]
    assert code == 1 and not report["served"]
    assert refusal["reason"] in EITHER.get(case.id, {case.reason})
    assert NAMED_IN_REFUSAL[case.id] in refusal["message"]
    assert not report["bound"] and report["bytes_per_gpu"] is None


def test_the_text_says_what_the_json_says(capsys) -> None:
    words = ["validate", str(ATTENTION), "--model", str(LLAMA)]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "would be served" in text and "plain (8 pairs)" in text
    assert "self_attn.q_proj  2 of 2, rank 8, scale 2, plain" in text
    assert "40,960 bytes in float32 on each of 1 GPU" in text and "16 bound, 0 skipped" in text
    assert main([*words, "--device", "cpu"]) == 0
    assert "40,960 bytes in float32 without a GPU" in capsys.readouterr().out
    copies = CASES["llama-embed_head_copies_r4"].adapter
    assert main(["validate", str(copies), "--model", str(LLAMA)]) == 0
    assert "skipped   base_model.model.lm_head.base_layer.weight: a copy" in capsys.readouterr().out
    assert main([*words, "--max-lora-rank", "4"]) == 0, "memory holds ranks in steps of 8"
    refused = CASES["llama-refuse_nan"].adapter
    capsys.readouterr()
    assert main(["validate", str(refused), "--model", str(LLAMA)]) == 1
    assert "refused   not_finite: " in capsys.readouterr().out


def test_ranks_and_scales_are_the_files_own(capsys) -> None:
    case = CASES["qwen3_moe-v4_names_r4_peft021"]
    _, report = judge(capsys, case.adapter, case.model)
    ranks = {target["name"]: target["ranks"] for target in report["targets"]}
    assert ranks["mlp.experts.gate_up_proj"] == [8] and ranks["mlp.experts.down_proj"] == [4]
    case = CASES["llama-rslora_r8"]
    _, report = judge(capsys, case.adapter, case.model)
    config = json.loads((case.adapter / "adapter_config.json").read_text())
    assert report["targets"][0]["scales"] == [pytest.approx(config["lora_alpha"] / 8**0.5)]


@pytest.mark.parametrize("name", ["gpt_oss-experts_r24", "gpt_oss-synth_shared_outer"])
def test_bytes_and_the_half_of_the_memory_are_the_engines(name: str, capsys) -> None:
    case = CASES[name]
    _, report = judge(capsys, case.adapter, case.model)
    needed = report["bytes_per_gpu"]
    for pool, code in ((2 * needed, 0), (2 * needed - 256, 1)):
        options = "--lora-bytes", str(pool), "--device", "cpu"
        found, report = judge(capsys, case.adapter, case.model, *options)
        assert found == code and report["largest_adapter_bytes"] == pool // 2
        engine: Engine = make_engine(case.model, lora_bytes=pool)
        try:
            _, refused = score_all(engine, [case])
            used = engine.stats().arena_used_bytes
        finally:
            engine.close()
        if code:
            (refusal,) = report["refused"]
            assert refusal["reason"] == "too_large" and report["layouts"], "still described"
            assert str(needed) in refusal["message"] and str(needed) in refused[case.id]
        else:
            assert not refused and used == needed and report["share_of_memory"] == 0.5


def test_limits_are_the_engines_settings(tmp_path: Path, capsys) -> None:
    settings = tmp_path / "engine.yaml"
    settings.write_text("max_lora_rank: 7\nlora_bytes: 60000\ndtype: bfloat16\n")
    code, report = judge(capsys, ATTENTION, LLAMA, "--config", str(settings))
    assert code == 0 and report["bytes_per_gpu"] == 20480 and report["dtype"] == "bfloat16"
    assert report["adapter_memory_bytes"] == 60000 // 256 * 256
    options = "--config", str(settings), "--dtype", "float32"
    assert judge(capsys, ATTENTION, LLAMA, *options)[0] == 1
    wide = CASES["llama-r24"].adapter
    _, report = judge(capsys, wide, LLAMA, "--max-lora-rank", "16")
    assert report["refused"][0]["reason"] == "rank_limit"
    settings.write_text("host_cache_bytes: 1000")
    _, report = judge(capsys, ATTENTION, LLAMA, "--config", str(settings))
    assert report["refused"][0]["reason"] == "too_large" and "1000" in str(report["refused"])
    settings.write_text("max_loras: 0")
    _, report = judge(capsys, ATTENTION, LLAMA, "--config", str(settings))
    assert report["refused"][0]["reason"] == "too_large" and report["adapter_memory_bytes"] == 0


def test_a_lone_square_down_is_read_as_the_setting_says(tmp_path: Path, capsys) -> None:
    case = CASES["gpt_oss_square-down_r4_peft021"]
    settings = tmp_path / "engine.yaml"
    for release, layout, words in (
        (0, "natural", "does not record"),
        (4, "swapped", "transformers 4 (assume_transformers)"),
        (5, "natural", "transformers 5 (assume_transformers)"),
    ):
        settings.write_text(f"assume_transformers: {release}\n")
        code, report = judge(capsys, case.adapter, case.model, "--config", str(settings))
        assert code == 0 and list(report["layouts"]) == [layout]
        assert words in report["warnings"][0]


def test_a_value_that_does_not_survive_the_cast_is_refused(tmp_path: Path, capsys) -> None:
    shutil.copytree(ATTENTION, tmp_path / "a")
    tensors = load_file(ATTENTION / "adapter_model.safetensors")
    name = next(name for name in tensors if "lora_A" in name)
    tensors[name][0, 0] = torch.finfo(torch.float32).max
    save_file(tensors, tmp_path / "a" / "adapter_model.safetensors")
    assert judge(capsys, tmp_path / "a", LLAMA)[0] == 0
    code, report = judge(capsys, tmp_path / "a", LLAMA, "--dtype", "bfloat16")
    assert code == 1 and report["refused"][0]["reason"] == "not_finite"


def test_neither_weights_nor_a_gpu_are_asked_for(tmp_path: Path, capsys, monkeypatch) -> None:
    shutil.copy(LLAMA / "config.json", tmp_path)
    for name in ("is_available", "device_count", "init"):
        monkeypatch.setattr(torch.cuda, name, lambda: pytest.fail("a GPU was asked for"))
    code, report = judge(capsys, ATTENTION, tmp_path)
    assert code == 0 and report["adapter_memory_bytes"] == 8 << 30
    assert tmp_path.name in " ".join(report["warnings"]), "another base is a warning"


@pytest.mark.parametrize(
    "words",
    [
        ["validate", str(ATTENTION)],
        ["validate", str(ATTENTION), "--model", str(GOLDEN)],
        ["validate", str(ATTENTION), "--model", str(LLAMA), "--config", str(LLAMA / "config.json")],
        ["validate", str(ATTENTION), "--model", str(LLAMA), "--lora-bytes", "-1"],
        ["convert", str(ATTENTION)],
    ],
    ids=["no model", "no such model", "unknown fields", "negative", "unknown command"],
)
def test_a_question_without_sense_is_2(words: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize("uri", ["no/such/folder", str(GOLDEN), "ftp://host/adapter"])
def test_what_is_not_there_is_1(uri: str, capsys) -> None:
    code, report = judge(capsys, uri, LLAMA)
    assert code == 1 and report["refused"][0]["reason"] == "not_found"
    assert uri in report["refused"][0]["message"]
    assert main(["validate", uri, "--model", str(LLAMA)]) == 1
    assert "): could not be read\n" in capsys.readouterr().out


def test_a_reader_that_leaves_early_changes_no_verdict(monkeypatch) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert main(["validate", str(ATTENTION), "--model", str(LLAMA)]) == 0


def test_the_command_itself_over_a_folder_and_s3() -> None:
    def run(uri: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "adapter_store", "validate", uri, "--model", str(LLAMA)]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environment
        return subprocess.run(
            [*words, *options], cwd=ROOT, env=environment, capture_output=True, text=True,
            timeout=100,
        )  # fmt: skip

    local = run(str(ATTENTION))
    assert local.returncode == 0 and "would be served" in local.stdout, local.stderr
    with start_s3_server() as server:
        server.client().create_bucket(Bucket="tenants")
        server.put_folder("tenants", "good", ATTENTION)
        refused = CASES["llama-refuse_nan"].adapter
        assert refused is not None
        server.put_folder("tenants", "bad", refused)
        reach = {
            "AWS_ENDPOINT_URL": server.endpoint_url,
            "AWS_ACCESS_KEY_ID": server.access_key,
            "AWS_SECRET_ACCESS_KEY": server.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        good = run("s3://tenants/good", "--json", **reach)
        bad = run("s3://tenants/bad", "--json", **reach)
    assert good.returncode == 0, good.stdout + good.stderr
    report = json.loads(good.stdout)
    assert report["layouts"] == {"plain": 8} and len(report["bound"]) == 16
    assert bad.returncode == 1 and "lora_B" in json.loads(bad.stdout)["refused"][0]["message"]
    assert not bad.stderr, bad.stderr
