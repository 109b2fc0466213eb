"""The reference's GPU ways, on a CPU: by expert, in fp32 from bf16 weights, logits in parts."""

import argparse
from pathlib import Path

import pytest
import torch

import kernels.fused_moe as fused_moe
import model_runner.execution.runner as runner
from adapter_store.ref import AdapterRef
from kernels.fused_moe import moe_gate_up_reference, random_experts
from model_runner.config import EngineConfig
from model_runner.engine import Engine
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
    write_adapter(tmp_path / "a", TINY, 8, 1, "cpu")
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


def test_the_projection_runs_on_a_tiny_shape(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SHAPES, "tiny", Shape(TINY, 8, 4))
    args = argparse.Namespace(
        shape="tiny", adapters=2, rank=8, jobs=6, tokens=60, scored=20, layers="1,2"
    )
    found = rescoring.time_cut(args, 2, tmp_path)
    assert found["score"] > 0 and found["steps"] >= 1
