"""The reference's GPU ways, on a CPU: by expert, in fp32 from bf16 weights, logits in parts."""

import argparse
import dataclasses
from pathlib import Path

import pytest
import torch

import kernels.fused_moe as fused_moe
import model_runner.execution.runner as runner
from adapter_store.ref import AdapterRef
from kernels.fused_moe import moe_gate_up_reference, random_experts
from model_runner.config import EngineConfig
from model_runner.engine import Engine
from model_runner.logits_command import add_parser, plan_scoring
from tests.bench import rescoring
from tests.bench.shapes import SHAPES, Shape, write_adapter, write_model

TINY = SHAPES["gpt-oss-20b"].config | {
    "hidden_size": 64,
    "intermediate_size": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "vocab_size": 1000,
    "head_dim": 16,
}


@pytest.mark.parametrize("kind", ["dense", "bias", "mxfp4", "packed"])
def test_products_by_expert_are_the_products(kind):
    experts = random_experts(6, 72, 160, kind, "cpu", torch.float32, 2)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(50, 160, generator=g)
    ids = torch.rand(50, 5, generator=g).argsort(-1)[:, :2].int()  # expert 5 gets no row
    got = fused_moe._by_expert(x, experts, ids, 2)
    want = moe_gate_up_reference(x, experts, ids, None)
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)


def score(folder: Path, ids: tuple[int, ...], ref: AdapterRef, **fields: str) -> torch.Tensor:
    config = EngineConfig(
        str(folder / "model"),
        load_format="random:7",
        device="cpu",
        prefix_cache=False,
        max_model_len=512,
        lora_bytes=8 << 20,
        host_cache_dir=str(folder / "host"),
        look_ahead=True,  # as on a GPU: no position may come twice
        **fields,
    )
    engine, parts = Engine(config), []
    try:
        engine.score(
            [(ids, ref, lambda first, logits: parts.append((first, logits.float().clone())))],
            lambda number, why: why and pytest.fail(why),
        )
    finally:
        engine.close()
    firsts = [first for first, _ in parts]
    assert firsts == sorted(firsts)
    return torch.cat([logits for _, logits in parts])


def test_weights_in_bf16_under_fp32_sums_and_logits_in_parts(tmp_path, monkeypatch):
    write_model(tmp_path / "model", TINY)
    write_adapter(tmp_path / "a", TINY, 8, 1, "cpu", 0.12)
    ref, ids = AdapterRef("a", str(tmp_path / "a")), tuple(range(100, 340))
    narrow = score(tmp_path, ids, ref, dtype="bfloat16")
    wide = score(tmp_path, ids, ref, dtype="float32", weight_dtype="bfloat16")
    monkeypatch.setattr(runner, "SCORE_ROWS", 100)
    parts = score(tmp_path, ids, ref, dtype="float32", weight_dtype="bfloat16")
    other = score(tmp_path, ids, ref, dtype="float32")
    assert parts.shape == wide.shape == (240, 1000)
    assert torch.allclose(parts, wide, rtol=0, atol=1e-5)
    error = (narrow - wide).abs().median() / wide.std()
    assert 0 < error < 0.02, "the same weights, summed in another dtype"
    assert not torch.allclose(other, wide, rtol=0, atol=1e-4), "weights that were never rounded"


def test_what_a_gpu_scores_with(tmp_path):
    write_model(tmp_path / "model", SHAPES["gpt-oss-20b"].config)
    (tmp_path / "run.json").write_text('{"max_num_seqs": 20, "max_lora_rank": 32}')
    parser = add_parser(argparse.ArgumentParser().add_subparsers())
    words = ["--jobs", "-", "--out", "-", "--device", "cuda", "--load-format", "random:7"]
    words += ["--config", str(tmp_path / "run.json")]
    refs = [AdapterRef(f"a{i}", f"/a{i}") for i in range(8)]
    jobs = rescoring.make_jobs(48, 2200, 201088, refs, 600)
    assert len({job.adapter for job in jobs[:3]}) == 3 and len(jobs) == 48
    model = str(tmp_path / "model")
    fast = plan_scoring(parser.parse_args(words), model, jobs)
    slow = plan_scoring(parser.parse_args([*words, "--kernels", "reference"]), model, jobs)
    assert (fast.dtype, fast.weight_dtype, fast.kv_bytes) == ("", "", 0)
    assert (slow.dtype, slow.weight_dtype, slow.max_loras) == ("float32", "bfloat16", 8)
    assert slow.max_step_tokens >= 8192 and slow.max_lora_rank == 32
    # Two groups of pages, 2200 tokens of 20 sequences in each, 12 layers of a page in fp32.
    page = 2 * 12 * 16 * 8 * 64 * 4
    assert 2 * 20 * (2200 / 16) * page < slow.kv_bytes < 1.03 * 2 * 20 * (2200 / 16) * page
    # What no engine takes is refused, and asks for nothing; one long job asks for itself alone.
    words += ["--kernels", "reference"]
    for length, more in ((10_000_000, 0), (131_071, 131_072 - 2200)):
        odd = [*jobs, dataclasses.replace(jobs[0], input_ids=(1,) * length)]
        asked = plan_scoring(parser.parse_args(words), model, odd).kv_bytes
        assert asked == pytest.approx(slow.kv_bytes + 2 * more / 16 * page, rel=1e-3)


def test_the_projection_runs_on_a_tiny_shape(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SHAPES, "tiny", Shape(TINY, 8, 4, 0.12))
    args = argparse.Namespace(
        shape="tiny", adapters=2, rank=8, jobs=6, tokens=60, scored=20, layers="1,2"
    )
    found = rescoring.time_cut(args, 2, tmp_path)
    assert found["score"] > 0 and found["steps"] >= 1
