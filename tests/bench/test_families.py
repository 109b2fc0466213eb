"""The families' benchmark on tiny shapes: all of it but the profiler and the GPU's clocks. Floors
against numbers worked out by hand."""

import csv
import json
import re
import sys

import pytest
import torch
from safetensors.torch import load_file

from kernels.mla_attention import mla_attention_reference
from model_runner.assembly import read_model_config
from model_runner.execution.checkpoint import SafetensorsReader
from model_runner.models.lora_targets import list_lora_targets
from tests.bench import families, family_steps
from tests.bench.family_shapes import (
    DEEPSEEK_V2_LITE,
    FAMILY_SHAPES,
    LLAMA4_SCOUT,
    QWEN3_30B_A3B_FP8,
    FamilyShape,
    floor_bytes,
    plain_products,
)
from tests.bench.fp8_checkpoint import write_fp8_qwen3
from tests.bench.latent_tiles import CONTEXT, PROBLEMS, Problem, make_inputs, measure, tiles_of
from tests.bench.results import ABOUT, describe_run
from tests.bench.shapes import write_model
from tests.model_runner import test_families_at_speed
from tests.model_runner.family_world import make_world

TINY = {"vocab_size": 4000, "num_hidden_layers": 2, "hidden_size": 160, "num_attention_heads": 4}
DEEPSEEK = DEEPSEEK_V2_LITE | TINY | {
    "intermediate_size": 96, "kv_lora_rank": 32, "moe_intermediate_size": 48, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "num_key_value_heads": 4, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
QWEN = QWEN3_30B_A3B_FP8 | TINY | {
    "head_dim": 32, "moe_intermediate_size": 136, "num_experts": 4, "num_experts_per_tok": 2,
    "num_key_value_heads": 2,
}  # fmt: skip


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(FAMILY_SHAPES, "tiny-latent", FamilyShape(DEEPSEEK))
    monkeypatch.setitem(FAMILY_SHAPES, "tiny-fp8", FamilyShape(QWEN, fp8=True))


def run(monkeypatch, tmp_path, *words):
    told = ["family_steps", *words, "--concurrency", "1,3", "--adapters", "2", "--rank", "8"]
    told += ["--tokens-in", "20", "--steps", "3", "--out", str(tmp_path), "--work", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", told)
    family_steps.main()


@pytest.mark.parametrize("shape", ["tiny-latent", "tiny-fp8"])
def test_a_shape_is_measured(tiny, shape, tmp_path, monkeypatch, capsys):
    fp8 = tmp_path / "fp8"
    if shape == "tiny-fp8":
        write_fp8_qwen3(fp8, QWEN, 3)
    run(monkeypatch, tmp_path, "--shape", shape, "--compile-only")
    run(monkeypatch, tmp_path, "--shape", shape, "--checkpoint", str(fp8))
    assert not fp8.exists()
    with (tmp_path / "families.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["adapters"], r["concurrency"]) for r in rows] == [
        (adapters, clients) for clients in "13" for adapters in "02"
    ]
    assert all(float(r["total_tok_s"]) > 0 for r in rows)
    with (tmp_path / "kernels_step.csv").open() as file:
        kernels = [(r["kernels"], r["adapters"]) for r in csv.DictReader(file)
                   if int(r["floor_bytes"]) > 0]  # fmt: skip
    for group in ("experts", "attention", "router", "head"):
        assert kernels.count((group, "0")) == kernels.count((group, "2")) == 2
    assert ("lora", "2") in kernels and ("lora", "0") not in kernels


def test_the_fp8_checkpoint_reads_as_its_blocks_say(tmp_path):
    write_fp8_qwen3(tmp_path, QWEN, 3)
    with SafetensorsReader(tmp_path, torch.device("cpu"), torch.float32) as reader:
        name = "model.layers.1.mlp.experts.2.gate_proj.weight"
        stored = load_file(tmp_path / "model-00002.safetensors")
        assert stored[name].dtype == torch.float8_e4m3fn
        assert stored[f"{name}_scale_inv"].shape == (2, 2)
        got = reader.read(name, (136, 160))
        for rows, row in ((slice(0, 128), 0), (slice(128, 136), 1)):
            for columns, column in ((slice(0, 128), 0), (slice(128, 160), 1)):
                scale = stored[f"{name}_scale_inv"][row, column].float()
                assert torch.equal(got[rows, columns], stored[name][rows, columns].float() * scale)
        assert 0.01 < got.std() < 0.03
        other = reader.read("model.layers.1.mlp.experts.3.gate_proj.weight", (136, 160))
        assert not torch.equal(got, other)
        assert (reader.read("model.norm.weight", (160,)) == 1).all()
        assert 6 < reader.read("model.embed_tokens.weight", (4000, 160)).std() < 10


def config_of(raw, folder):
    write_model(folder, raw)
    family, config = read_model_config(folder)
    return config, family_steps.adapted(list_lora_targets(config, family.names))


def test_floors_count_each_weight_in_use_once(tmp_path):
    config, targets = config_of(DEEPSEEK_V2_LITE, tmp_path / "a")
    roles = [role for role, _ in plain_products(config)]
    latent = ["qkv", "key_up", "value_up", "o"]
    routed = [*latent, "shared_gate_up", "shared_down", "router"]
    assert roles == [*latent, "gate_up", "down", *routed * 26, "head"]
    found = floor_bytes(config, 32, 1600, 64.0, targets, 0, 32)
    # All experts hit: what the model weighs, but for embeddings and norms, twice 15.5e9 bytes.
    weights = sum(found.values()) - found["attention"]
    assert weights == pytest.approx(2 * 15.5e9, rel=0.01)
    assert found["attention"] == 27 * 32 * 1600 * 576 * 2
    one = floor_bytes(config, 1, 1600, 6.0, targets, 8, 32)
    # Two plain kinds of layer, six experts each of 26; a token uses one adapter.
    attention = 2048 * 2 + 3072 + 576 + 512 + 4096 + 2048 + 2048
    shared = 2 * (2048 + 2816) + 2816 + 2048
    experts = 6 * (2048 + 2816 + 1408 + 2048)
    dense = 2 * (2048 + 10944) + 10944 + 2048
    assert one["lora"] == 2 * 32 * (27 * attention + 26 * (shared + experts) + dense)
    scout, _ = config_of(LLAMA4_SCOUT, tmp_path / "b")
    layer = floor_bytes(scout, 32, 1600, 16.0, (), 0, 32)["experts"] / scout.num_layers
    assert layer == 16 * 3 * 5120 * 8192 * 2
    assert sum(r == "router" for r, _ in plain_products(scout)) == 4


def test_a_tile_that_is_wrong_or_breaks_is_not_the_best(monkeypatch, capsys):
    problem = Problem(2, False, 1)
    monkeypatch.setattr("tests.bench.latent_tiles.CONTEXT", 20)
    told = iter([3.0, 2.0, RuntimeError("out of resource")])

    def timer(batch):
        said = next(told)
        if isinstance(said, Exception):
            raise said
        return said

    def call(problem, tile, inputs):
        wide = {k: v.float() if k in ("q_latent", "q_rope", "cache") else v
                for k, v in inputs.items()}  # fmt: skip
        wide["cache"] = wide["cache"] * (1 if tile.heads == 16 else 2)  # the second is wrong
        return lambda: mla_attention_reference(**wide, max_q=2, max_len=20)

    monkeypatch.setattr("tests.bench.latent_tiles.call_of", call)
    rows = measure([problem], timer, "cpu", float("inf"))
    assert [row["us"] for row in rows] == [3.0, 2.0]
    out = capsys.readouterr().out
    assert "best: 3.00 us" in out and "out of resource" in out and out.count("WRONG") == 1
    assert rows[0]["error"] < 1e-3


def test_tiles_of_all_problems_fit(monkeypatch):
    assert CONTEXT == 1600
    for problem in PROBLEMS:
        tiles = tiles_of(problem)
        assert len(set(tiles)) == len(tiles) > 2
        assert all(tile.tokens == 1 for tile in tiles) or not problem.is_decode
        # Queries and one block of latents, rope included, in bf16.
        for tile in tiles:
            assert (tile.tokens * tile.heads + tile.keys) * 576 * 2 < 227 << 10
    bytes_us = PROBLEMS[2].floor_us()
    assert bytes_us == pytest.approx(1e6 * (32 * 1600 * 576 + 32 * 16 * 1088) * 2 / 4.3e12)
    prompt = PROBLEMS[3].floor_us()
    assert prompt == pytest.approx(1e6 * 2 * 1600 * 800.5 * 16 * 1088 / 790e12)
    inputs = make_inputs(Problem(2, True, 1), "cpu", 0)
    assert inputs["q_latent"].shape == (1, 2, 512) and inputs["cache"].shape[2] == 576


SAID = """mean 0.01210 0.01100 max 0.0900 0.1000 effect 0.740
mean 0.02000 0.01000 max 0.1200 0.1300 effect 0.810
mean 0.01000 0.01100 max 0.3000 0.2000 effect 0.660
..own 0.995 other 0.203 bound 0.0712
.mean 9.00000 0.01000 max 9.0000 0.1000 effect 9.000
.
5 passed, 1 warning in 61.02s (0:01:01)
"""


def test_what_the_tests_of_a_family_told_is_a_row():
    row = families.family_row("deepseek v3", SAID)
    assert set(row) | set(ABOUT) == set(families.FAMILY_COLUMNS)
    what = row.pop("what").split()
    assert what == list(families.FAMILY_TESTS)
    for test in what:
        assert callable(getattr(test_families_at_speed, f"test_{test}"))
    assert row == {
        "family": "deepseek v3", "layers": 3, "hidden_size": 1024, "passed": 5,
        "arena_mean": 0.02, "merged_mean": 0.01, "arena_max": 0.12, "merged_max": 0.13,
        "effect": 0.81, "own": 0.995, "other": 0.203, "bound": 0.0712,
    }  # fmt: skip
    for start in ("mean", "..own", "5 passed"):
        said = "\n".join(line for line in SAID.splitlines() if not line.startswith(start))
        with pytest.raises(ValueError, match="deepseek v3 told no numbers"):
            families.family_row("deepseek v3", said)


def test_the_tests_tell_what_is_looked_for(capsys, tmp_path):
    world = make_world("llama", tmp_path, "cpu", True)
    test_families_at_speed.arena_equals_merged(world)
    test_families_at_speed.answers_are_the_references(world)
    said = capsys.readouterr().out
    row = families.family_row("llama", said + "2 passed in 1.00s")
    assert row["passed"] == 2 and row["effect"] > 10 * row["merged_mean"] > 0
    assert row["arena_mean"] <= 2 * row["merged_mean"] and row["own"] >= 0.98 > row["other"]
    assert len(re.findall(families.TOLD, said, re.MULTILINE)) == 4


class FakeRun:
    """Stands for subprocesses: notes their words, ends at once."""

    told: list[list[str]] = []

    def __init__(self, words, **options):
        FakeRun.told.append(words)
        options["stdout"].write(SAID.encode() if "[mixtral" in str(words) else b"said something\n")
        self.pid = 0

    def wait(self, timeout=None):
        return 1 if "tests.bench.latent_tiles" in FakeRun.told[-1] else 0


def test_all_of_it_is_started_in_order(tiny, tmp_path, monkeypatch, capsys):
    FakeRun.told, about = [], describe_run()  # which asks git, before nothing is run any more
    monkeypatch.setattr("tests.bench.families.describe_run", lambda: about)
    monkeypatch.setattr("tests.bench.families.subprocess.Popen", FakeRun)
    words = ["families", "--out", str(tmp_path), "--shapes", "tiny-latent,tiny-fp8"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        families.main()
    assert ended.value.code == 1, "one of them failed"
    kinds = [words[2].rpartition(".")[2] for words in FakeRun.told]
    assert kinds == ["pytest"] * 10 + ["family_steps"] * 2 + ["latent_tiles"] + ["family_steps"] * 2
    compiling = ["--compile-only" in words for words in FakeRun.told]
    assert compiling == [False] * 10 + [True] * 2 + [False] * 3
    out = capsys.readouterr().out
    assert "latent: exit code 1" in out and "said something" in out
    assert "the tests of llama told no numbers" in out and "of mixtral told" not in out
    with (tmp_path / "family_tests.csv").open() as file:
        [row] = csv.DictReader(file)
    assert (row["family"], row["layers"], row["own"]) == ("mixtral", "3", "0.995")
    assert row["gpu"] and row["torch"] == torch.__version__ and row["utc"]
    assert json.dumps(FakeRun.told[0]).count("[gpt-oss") == 3
