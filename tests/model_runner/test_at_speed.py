"""Correct at speed, on a GPU: graphs equal eager steps, base rows feel no adapter, one input gives
one output. Each check once more with its guard taken out, and then it fails.

Shapes are small; the paths are those of a full model: whole-step graphs, look-ahead, bf16. What a
CPU can do runs there too. Not here: merged weights (test_merged_weights.py), poison
(test_poison_at_speed.py), leases (test_leases.py), the demo's answers (test_isolation.py).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels.worklist
from adapter_store.ref import AdapterRef
from model_runner.engine import Engine
from model_runner.execution.cuda_graphs import GraphKey, StepGraphs
from model_runner.execution.inputs import HostBuffer
from model_runner.request import Request
from tests.guards import take_out
from tests.model_runner.speed_world import (
    Folders,
    both,
    engine_of,
    make_folders,
    put_in_decode_kernels,
    requests_of,
    same,
    steps_of,
)

pytestmark = pytest.mark.usefixtures("both_paths")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return make_folders(tmp_path_factory.mktemp("at_speed"))


# Graphs


def replays_equal_eager_steps(engine: Engine, requests: Sequence[Request]) -> list[GraphKey]:
    """Every replay beside the same step run eagerly, on the same columns and the same padding: the
    same kernels on the same numbers, so no bit may differ. Gives the graphs of those that do."""
    runner, replay = engine.runner, StepGraphs.replay
    wrong, kinds = list[GraphKey](), []

    def twice(graphs: StepGraphs, key: GraphKey, buffer: HostBuffer) -> tuple[Tensor, Tensor]:
        before = runner._previous.clone()
        got = tuple(x.clone() for x in replay(graphs, key, buffer))
        after = runner._previous.clone()
        runner._previous.copy_(before)
        step: Any = runner._decode_step if key.is_decode else runner._mixed_step
        want = step(runner._upload(buffer), buffer.shape)
        runner._previous.copy_(after)
        drawn = int((buffer.view["sample_rows"] < runner._max_num_seqs).sum())
        rows = int(buffer.view["num_rows"][0]) if key.is_decode else drawn
        if not all(torch.equal(x[:rows], y[:rows]) for x, y in zip(got, want, strict=True)):
            wrong.append(key)
        kinds.append(key.is_decode)
        return got[0], got[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepGraphs, "replay", twice)
        engine.generate(requests)
    assert kinds.count(True) > 5 and kinds.count(False) > 2, kinds
    return wrong


@pytest.mark.gpu
def test_graphs_equal_eager_steps(folders, monkeypatch) -> None:
    """In a fixed order of summation: that of split-K is not the same twice."""
    with engine_of(folders, "cuda", deterministic=True) as engine:
        refs = [None, *folders[1]]
        assert not replays_equal_eager_steps(engine, requests_of(refs, "a"))
        line = "captured.memory.copy_(buffer.memory, non_blocking=True)"
        take_out(monkeypatch, StepGraphs, "replay", line, "pass")
        wrong = replays_equal_eager_steps(engine, requests_of(refs, "b"))
        assert {key.is_decode for key in wrong} == {True, False}


# The base beside adapters


def base_rows_feel_no_adapter(engine: Engine, refs: Sequence[AdapterRef], name: str) -> None:
    """Bit by bit the same batches without any adapter; the other rows do change."""
    requests = requests_of([None, *refs], name)
    mixed = steps_of(engine, requests)
    bare = steps_of(
        engine, [dataclasses.replace(r, request_id=f"{r.request_id}-off") for r in requests], True
    )
    changed = 0
    for (slots, logits, tokens), (again, plain, plain_tokens) in zip(mixed, bare, strict=True):
        assert slots == again
        for row, slot in enumerate(slots):
            if slot < 0:
                assert torch.equal(logits[row], plain[row]), (slots, row)
                assert tokens[row] == plain_tokens[row]
            else:
                changed += not torch.equal(logits[row], plain[row])
    assert changed > 50


@both
def test_base_rows_feel_no_adapter(device: str, folders, tmp_path, monkeypatch) -> None:
    fields = {} if device == "cuda" else {"look_ahead": True}
    with engine_of(folders, device, **fields) as engine:
        base_rows_feel_no_adapter(engine, folders[1], "a")
        if device == "cpu":
            line, instead = "if 0 <= s < num_slots", "if s < num_slots"
            take_out(monkeypatch, kernels.worklist, "slot_groups", line, instead)
        else:
            engine.runner._graphs = None  # they were captured with the guard
            put_in_decode_kernels(monkeypatch, "(slot >= 0) &", "", tmp_path)
        with pytest.raises(AssertionError):
            base_rows_feel_no_adapter(engine, folders[1], "b")


# One input, one output


@both
def test_deterministic_runs_agree_bit_for_bit(device: str, folders) -> None:
    """In one engine twice, and in another engine. (That split-K without it differs is shown where
    it can be forced: tests/kernels/test_fused_moe_lora.py.)"""
    refs = [None, *folders[1]]
    runs = []
    for name in ("a", "b"):
        with engine_of(folders, device, deterministic=True) as engine:
            runs += [steps_of(engine, requests_of(refs, f"{name}{i}")) for i in range(2)]
    assert all(same(runs[0], run) for run in runs[1:])
    with engine_of(folders, device, deterministic=True) as engine:
        others = steps_of(engine, requests_of([*refs[1:], None], "c"))
    assert not same(runs[0], others)  # other adapters: the comparison sees something
