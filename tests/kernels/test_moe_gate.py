"""The choice of experts: against the definition, written out row by row."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

import kernels.moe_gate as own
from kernels.moe_gate_groups import GateRule, moe_gate_groups
from tests.kernels.mutant import mutant

NAN = float("nan")
INF = float("inf")
# Every promise is kept by both forms; which one runs is decided by TRITON_INTERPRET.
both = pytest.mark.parametrize("form", ["torch", pytest.param("triton", marks=pytest.mark.interp)])


@both
@pytest.mark.parametrize("renormalize", [True, False])
def test_gate_is_the_softmax_of_the_best(form: str, renormalize: bool) -> None:
    logits = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    weights, ids = own.moe_gate(logits, 3, renormalize)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32
    for row in range(6):
        p = logits[row].double().softmax(0)
        best = sorted(range(9), key=lambda e: -float(p[e]))[:3]
        assert ids[row].tolist() == best
        want = p[best] / (p[best].sum() if renormalize else 1)
        torch.testing.assert_close(weights[row].double(), want, rtol=1e-6, atol=1e-7)


@both
def test_gate_ties_go_to_the_lower_id(form: str) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0], [0.0] * 5, [-INF] * 5, [-INF, 1, -INF, 1, 0]])
    assert own.moe_gate(logits, 3, False)[1].tolist() == [
        [1, 2, 3],
        [0, 1, 2],
        [0, 1, 2],
        [1, 3, 4],
    ]


def ids_are_lawful(module: ModuleType) -> None:
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    logits[0] = NAN
    logits[1, 2] = NAN
    logits[2, :6] = NAN
    logits[3] = INF
    logits[4] = -INF
    _, ids = module.moe_gate(logits, 4, True)
    for row in ids.tolist():
        assert len(set(row)) == 4 and all(0 <= e < 7 for e in row), row
    assert 2 not in ids[1].tolist(), "NaN counts as the lowest"


@both
def test_gate_never_gives_an_id_out_of_range(form: str) -> None:
    ids_are_lawful(own)


@pytest.mark.interp
def test_gate_without_the_nan_guard_fails(tmp_path: Path) -> None:
    bad = mutant("moe_gate", {'tl.where(x == x, x, float("-inf"))': "x"}, tmp_path)
    with pytest.raises(AssertionError):
        ids_are_lawful(bad)


@pytest.mark.parametrize("top_k", [0, 6])
def test_gate_refuses_a_top_k_that_cannot_be(top_k: int) -> None:
    with pytest.raises(ValueError, match="top_k must be in 1..5"):
        own.moe_gate(torch.zeros(1, 5), top_k, True)


@both
@pytest.mark.parametrize("row", [[16.0, 18.0, 20.0], [14.0, 14.0625, 1.0], [17.25, 17.5, 1.0]])
def test_sigmoids_that_are_equal_in_fp32_do_not_hide_the_larger_logit(
    form: str, row: list[float]
) -> None:
    logits = torch.tensor([row])
    weights, ids = moe_gate_groups(logits, None, 1, GateRule(sigmoid=True))
    assert ids.item() == max(range(3), key=row.__getitem__)
    assert weights.item() == pytest.approx(1.0, abs=1e-5)
