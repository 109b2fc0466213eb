"""LoRA on plain linears and embeddings: against dense deltas in fp64; nobody feels another slot."""

import dataclasses
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import kernels.dense_lora as own
import kernels.worklist
from kernels.dense_lora import dense_lora, dense_lora_multi
from kernels.fused_moe_lora import random_tables
from kernels.lora_tables import LoraTables
from kernels.worklist import build_worklist
from tests.guards import take_out
from tests.kernels.mutant import mutant

both = pytest.mark.parametrize("form", ["torch", pytest.param("triton", marks=pytest.mark.interp)])
IN, OUTS, RANKS = 37, (40, 24, 17), [4, 16, 0, 8]
SLOTS = torch.tensor([-1, 0, 1, 2, 3, 4, 1, -1, 3]).int()  # slot 2 is empty, slot 4 is none


def tables_of() -> LoraTables:
    shapes = [(1, IN, out) for out in OUTS]
    return random_tables(shapes, RANKS, 16, "cpu", torch.float32, 0, missing=((1, 3),))


def dense_delta(tables: LoraTables, target: int, slot: int, in_: int, out: int) -> Tensor | None:
    """[in, out] in fp64, read from the memory as its contract says."""
    if not 0 <= slot < tables.num_slots or int(tables.a_off[target, slot]) < 0:
        return None
    rank = int(tables.lora_rank[target, slot])
    a_off, b_off = int(tables.a_off[target, slot]), int(tables.b_off[target, slot])
    a = tables.memory[a_off : a_off + rank * in_].view(rank, in_).double()
    return a.t() @ tables.memory[b_off : b_off + rank * out].view(rank, out).double()


def rows_hold(
    got: Tensor, y: Tensor, x: Tensor, slots: Tensor, tables: LoraTables, target: int
) -> None:
    for row, slot in enumerate(slots.tolist()):
        delta = dense_delta(tables, target, slot, x.shape[1], y.shape[1])
        if delta is None:
            assert torch.equal(got[row], y[row]), "bits of a row without adapter"
        else:
            want = y[row].double() + x[row].double() @ delta
            torch.testing.assert_close(got[row].double(), want, rtol=1e-5, atol=1e-5)


def inputs(seed: int = 1) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(len(SLOTS), IN, generator=g), torch.randn(len(SLOTS), sum(OUTS), generator=g)


@both
@pytest.mark.parametrize("with_work", [True, False])
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_column_slice_gets_its_delta(form: str, with_work: bool, deterministic: bool) -> None:
    tables = tables_of()
    work = build_worklist(None, SLOTS, 1, len(RANKS), 16) if with_work else None
    for target in (0, 1):
        x, whole = inputs()
        before = whole.clone()
        y = whole[:, 7 : 7 + OUTS[target]]
        dense_lora(y, x, tables, target, SLOTS, work, deterministic)
        rows_hold(y, before[:, 7 : 7 + OUTS[target]], x, SLOTS, tables, target)
        assert torch.equal(whole[:, :7], before[:, :7])
        assert torch.equal(whole[:, 7 + OUTS[target] :], before[:, 7 + OUTS[target] :])


@both
@pytest.mark.parametrize("targets", [(0, 1, 2), (0, -1, 2), (-1, -1, -1)])
def test_projections_that_share_x_each_get_theirs(form: str, targets: tuple[int, ...]) -> None:
    tables, (x, whole) = tables_of(), inputs()
    before = whole.clone().split(OUTS, 1)
    work = build_worklist(None, SLOTS, 1, len(RANKS), 16)
    dense_lora_multi(whole.split(OUTS, 1), x, tables, targets, SLOTS, work)
    for got, y, target in zip(whole.split(OUTS, 1), before, targets, strict=True):
        if target < 0:
            assert torch.equal(got, y)
        else:
            rows_hold(got, y, x, SLOTS, tables, target)


@both
def test_one_adapter_for_everyone(form: str) -> None:
    """The usual step of a single tenant: no row is left out."""
    slots = torch.full((len(SLOTS),), 1, dtype=torch.int32)
    tables, (x, whole) = tables_of(), inputs()
    y = whole[:, : OUTS[0]].clone()
    work = build_worklist(None, slots, 1, len(RANKS), 16)
    dense_lora(y, x, tables, 0, slots, work)
    rows_hold(y, whole[:, : OUTS[0]], x, slots, tables, 0)


@both
@pytest.mark.parametrize("value", [float("nan"), 1e4, -1e4])
def test_nobody_feels_another_slot(form: str, value: float) -> None:
    tables, (x, whole) = tables_of(), inputs()
    memory = torch.full_like(tables.memory, value)
    for target, out in enumerate(OUTS):
        for off, width in ((tables.a_off, IN), (tables.b_off, out)):
            start = int(off[target, 1])
            end = start + int(tables.lora_rank[target, 1]) * width
            memory[start:end] = tables.memory[start:end]
    poisoned = dataclasses.replace(tables, memory=memory)
    slots = torch.where(SLOTS == 1, 1, -1).int()
    work = build_worklist(None, slots, 1, len(RANKS), 16)
    results = []
    for t in (tables, poisoned):
        y = whole.clone()
        dense_lora_multi(y.split(OUTS, 1), x, t, (0, 1, 2), slots, work)
        results.append(y)
    assert torch.isfinite(results[0]).all() and torch.equal(*results)
    assert torch.equal(results[0][slots < 0], whole[slots < 0])


def test_a_base_row_without_its_guard_gets_the_last_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    line, instead = "if 0 <= s < num_slots", "if s < num_slots"
    take_out(monkeypatch, kernels.worklist, "slot_groups", line, instead)
    with pytest.raises(AssertionError, match="bits of a row without adapter"):
        test_a_column_slice_gets_its_delta("torch", True, False)


def embeddings_hold(module: ModuleType) -> None:
    """Each token gets the column of its id; ids outside the table, and slots outside, get nothing.
    Between the factors lies NaN."""
    vocab, hidden = 29, 300
    tables = random_tables([(1, vocab, hidden)] * 2, RANKS, 16, "cpu", torch.float32, 2)
    token_ids = torch.tensor([0, 28, 5, 5, 7, 1, 0, 2, 28])
    y = torch.randn(len(SLOTS), hidden, generator=torch.Generator().manual_seed(3))
    for target in (0, 1):
        got = y.clone()
        module.embedding_lora(got, token_ids, tables, target, SLOTS, vocab)
        rows_hold(got, y, torch.eye(vocab)[token_ids], SLOTS, tables, target)
    slots = torch.ones(3, dtype=torch.int32)
    got = torch.zeros(3, hidden)
    module.embedding_lora(got, torch.tensor([vocab, -1, 7]), tables, 1, slots, vocab)
    assert not got[:2].any() and got[2].any()


@both
def test_an_embedding_gets_the_column_of_its_token(form: str) -> None:
    embeddings_hold(own)


@pytest.mark.interp
@pytest.mark.parametrize(
    "guard",
    [
        pytest.param("mask=r_live, other", id="rank lanes of A"),
        pytest.param("(slot < 0) | ", id="base rows"),
        pytest.param("| (slot >= num_slots)", id="slots of elsewhere"),
        pytest.param("| (token_id < 0)", id="ids below the table"),
        pytest.param("| (token_id >= num_embeddings)", id="ids above the table"),
    ],
)
def test_embeddings_without_a_guard_fail(guard: str, tmp_path: Path) -> None:
    instead = "mask=r >= 0, other" if guard.startswith("mask") else ""
    bad = mutant("dense_lora", {guard: instead}, tmp_path)
    with pytest.raises(AssertionError):
        embeddings_hold(bad)


@both
def test_a_reloaded_slot_is_read_anew(form: str) -> None:
    tables, (x, whole) = tables_of(), inputs()
    slots = torch.zeros(len(SLOTS), dtype=torch.int32)
    work = build_worklist(None, slots, 1, len(RANKS), 16)
    for name in ("a_off", "b_off", "a_stride", "b_stride", "lora_rank"):
        getattr(tables, name)[:, 0] = getattr(tables, name)[:, 1]
    y = whole[:, : OUTS[0]].clone()
    dense_lora(y, x, tables, 0, slots, work)
    rows_hold(y, whole[:, : OUTS[0]], x, slots, tables, 0)
    tables.b_off[:, 0] = -1
    again = y.clone()
    dense_lora(again, x, tables, 0, slots, work)
    assert torch.equal(again, y)
