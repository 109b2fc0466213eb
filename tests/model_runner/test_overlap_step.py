"""Whole steps whose kernels start early give the bits of steps whose kernels do not: captured
graphs of four layers of GPT-OSS-20B with random weights, adapters on everything, replayed often.

Not here: what one kernel reads early (tests/kernels/test_early_reads.py).
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.fused_moe_lora import random_tables
from kernels.overlap import can_overlap, without_overlap
from model_runner.assembly import assemble
from model_runner.config import EngineConfig
from model_runner.execution.cuda_graphs import GraphKey, StepGraphs
from model_runner.execution.inputs import HostBuffer, fill_blank
from model_runner.execution.runner import ModelRunner
from tests.bench.shapes import GPT_OSS_20B, write_model

CONFIG = GPT_OSS_20B | {
    "num_hidden_layers": 4,
    "layer_types": GPT_OSS_20B["layer_types"][:4],
    "vocab_size": 4096,
}
SLOTS, RANK, PAGE = 3, 16, 16
INPUTS, REPLAYS = 4, 300
MOST_ROWS, MOST_TOKENS, MAX_LEN = 32, 256, 512


def make_runner(folder: Path, config: dict[str, Any], device: str) -> ModelRunner:
    """A runner with random weights, random factors for every target, and random old keys."""
    write_model(folder, config)
    settings = EngineConfig(
        str(folder), "random:7", device, max_num_seqs=MOST_ROWS, max_step_tokens=MOST_TOKENS,
        max_model_len=MAX_LEN, page_tokens=PAGE, kv_bytes=1 << 30, lora_bytes=1 << 20,
        cuda_graphs=False, deterministic=True,
    )  # fmt: skip
    parts = assemble(settings, None)
    shapes = [(t.num_experts, t.in_features, t.out_features) for t in parts.model.lora_targets]
    runner = parts.runner
    runner._lora = random_tables(shapes, [RANK] * SLOTS, RANK, device, parts.dtype, 1)
    draw = torch.Generator(parts.device).manual_seed(2)
    for cache in caches_of(runner):
        cache.normal_(generator=draw)
    return runner


def caches_of(runner: ModelRunner) -> list[Tensor]:
    """Each once: layers of different groups share them."""
    return list({id(c): c for pair in runner._caches for c in pair}.values())


def make_buffers(runner: ModelRunner, key: GraphKey, counts: tuple[int, ...]) -> list[HostBuffer]:
    """Steps of rows with so many new tokens, all on pages of their own: in any order, and however
    often, they leave the same behind."""
    shape, rows = runner._shape_of(key), len(counts)
    draw = np.random.default_rng(len(counts))
    needed = (INPUTS, shape.groups, rows, shape.pages)
    order = draw.permutation(len(caches_of(runner)[0]) - 1)[: np.prod(needed)] + 1
    pages = order.reshape(needed)
    starts = np.cumsum((0, *counts))
    row_of = np.repeat(np.arange(rows), counts)  # [T]
    buffers = []
    for number in range(INPUTS):
        buffer = HostBuffer(shape, pinned=runner.device.type == "cuda")
        fill_blank(buffer, key.is_decode, MOST_ROWS)
        v = buffer.view
        lengths = np.maximum(draw.integers(1, MAX_LEN, rows), counts)  # [S]
        tokens = starts[-1]
        at = lengths[row_of] - np.asarray(counts)[row_of] + np.arange(tokens) - starts[row_of]
        v["token_ids"][:tokens] = draw.integers(0, runner.model.config.vocab_size, tokens)
        v["positions"][:tokens] = at
        v["slot_of_token"][:tokens] = draw.integers(-1, SLOTS, rows)[row_of]
        v["seq_lens"][:rows], v["num_rows"][:] = lengths, rows
        v["cu_q"][:] = tokens
        v["cu_q"][:rows] = starts[:-1]
        v["logit_rows"][:rows], v["sample_rows"][:rows] = starts[1:] - 1, np.arange(rows)
        for group in range(shape.groups):
            table = pages[number, group]  # [S, M]
            v[f"page_table{group}"][:rows] = table
            v[f"write_idx{group}"][:tokens] = table[row_of, at // PAGE] * PAGE + at % PAGE
        buffers.append(buffer)
    return buffers


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return make_runner(tmp_path_factory.mktemp("model"), CONFIG, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "counts", [(1,), (1,) * 8, (1,) * 32, (1, 70, 1, 33, 1, 100)], ids=["1", "8", "32", "mixed"]
)
@torch.inference_mode()
def test_a_step_that_overlaps_has_the_bits_of_one_that_does_not(
    counts: tuple[int, ...], runner: ModelRunner
) -> None:
    """Each replay has other inputs than the last: whoever reads too early meets the one before."""
    assert can_overlap(runner.device)
    decode = max(counts) == 1
    key = GraphKey(decode, len(counts) if decode else MOST_TOKENS, True)
    buffers = make_buffers(runner, key, counts)
    step: Any = runner._decode_step if decode else runner._mixed_step
    step = partial(step, shape=buffers[0].shape)
    plain, early = StepGraphs(), StepGraphs()
    with without_overlap():
        plain.capture(key, buffers[0], step)
    early.capture(key, buffers[0], step)
    n = len(counts)
    want = [plain.replay(key, buffer)[0][:n].clone() for buffer in buffers]
    for buffer, logits in zip(buffers, want, strict=True):
        assert torch.isfinite(logits).all()
        assert torch.equal(plain.replay(key, buffer)[0][:n], logits), "the plain step varies"
    assert not torch.equal(want[0], want[1])
    kept = [cache.clone() for cache in caches_of(runner)]
    wrong = torch.zeros(REPLAYS, dtype=torch.int64, device="cuda")
    for turn in range(REPLAYS):
        logits, _ = early.replay(key, buffers[turn % INPUTS])
        wrong[turn] = (logits[:n] != want[turn % INPUTS]).sum()
    assert not wrong.any(), f"{int((wrong > 0).sum())} replays differ, first {wrong.argmax()}"
    assert all(torch.equal(a, b) for a, b in zip(kept, caches_of(runner), strict=True))
