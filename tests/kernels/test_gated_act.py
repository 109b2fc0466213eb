"""The gated activations, written out in fp64."""

import pytest
import torch
from torch import Tensor

from kernels.gated_act import gated_act

both = pytest.mark.parametrize("form", ["torch", pytest.param("triton", marks=pytest.mark.interp)])


def plain(x: Tensor, kind: str) -> Tensor:
    inner = x.shape[1] // 2
    gate, up = x.double()[:, :inner], x.double()[:, inner:]
    if kind == "silu":
        return gate / (1 + (-gate).exp()) * up
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate / (1 + (-1.702 * gate).exp())


@both
@pytest.mark.parametrize("kind", ["silu", "gpt_oss"])
def test_activation_is_its_formula(form: str, kind: str) -> None:
    x = 6 * torch.randn(4, 26, generator=torch.Generator().manual_seed(0))
    x[0, 0], x[0, 13], x[1, 13] = 50.0, 50.0, -50.0  # past every limit
    got = gated_act(x, kind)
    assert got.shape == (4, 13) and got.dtype == torch.float32
    torch.testing.assert_close(got.double(), plain(x, kind), rtol=1e-5, atol=1e-6)


@both
@pytest.mark.parametrize("kind", ["silu", "gpt_oss"])
def test_a_poisoned_value_stays_poisoned(form: str, kind: str) -> None:
    """A limit that swallows NaN would turn a broken row into a plausible one."""
    x = torch.zeros(3, 4)
    x[0, 0] = x[1, 2] = float("nan")
    nan = torch.isnan(gated_act(x, kind))
    assert nan.tolist() == [[True, False], [True, False], [False, False]]


def test_bf16_rounds_once() -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    for kind in ("silu", "gpt_oss"):
        assert torch.equal(gated_act(x, kind), gated_act(x.float(), kind).bfloat16())


def test_the_input_is_left_alone() -> None:
    x = torch.full((2, 4), 9.0)
    gated_act(x, "gpt_oss")
    gated_act(x, "silu")
    assert torch.equal(x, torch.full((2, 4), 9.0))


def test_another_kind_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="not 'gelu'"):
        gated_act(torch.zeros(1, 2), "gelu")
