"""RMS norm: the numerics of transformers, and the residual stream that it shares."""

import pytest
import torch

from kernels.norm import add_rms_norm, rms_norm

EPS = 1e-5
both = pytest.mark.parametrize("form", ["torch", pytest.param("triton", marks=pytest.mark.interp)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 96), (3, 4, 24), (0, 32)])
def test_numerics_of_transformers(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = (4 * torch.randn(shape)).to(dtype)
    weight = (1 + torch.randn(shape[-1])).to(dtype)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt()
    want = exact.to(dtype) * weight
    got = rms_norm(x, weight, EPS)
    assert got.dtype == dtype
    if dtype == torch.float32:
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    else:  # one rounding step apart where fp32 and fp64 fall on two sides of a half
        assert (got == want).float().mean() > 0.99 if got.numel() else got.shape == shape
        torch.testing.assert_close(got, want, rtol=2**-7, atol=0)


def test_eps_keeps_zero_rows_finite() -> None:
    got = rms_norm(torch.zeros(2, 8), torch.ones(8), EPS)
    assert torch.equal(got, torch.zeros(2, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_residual_is_written_and_normed_as_rounded(dtype: torch.dtype) -> None:
    x, residual = (torch.randn(6, 40).to(dtype) for _ in range(2))
    weight = torch.randn(40).to(dtype)
    total = residual + x
    before, kept = x.clone(), residual
    got = add_rms_norm(x, residual, weight, EPS)
    assert kept is residual and torch.equal(residual, total)
    assert torch.equal(x, before)
    assert torch.equal(got, rms_norm(total, weight, EPS))


@both
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_a_tokens_rows_are_summed_in_their_order(form: str, top_k: int) -> None:
    x, residual, weight = torch.randn(3 * top_k, 37), torch.randn(3, 37), torch.randn(37)
    rows = x.view(3, top_k, 37)
    total = rows[:, 0]
    for k in range(1, top_k):
        total = total + rows[:, k]
    want = residual + total
    got = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(residual, want), "to the bit: k ascending, the residual last"
    torch.testing.assert_close(got, rms_norm(want, weight, EPS), rtol=1e-6, atol=1e-6)


def test_a_sum_of_rows_is_rounded_once() -> None:
    x, residual = torch.randn(6, 2, 40).bfloat16(), torch.randn(6, 40).bfloat16()
    want = (residual.float() + (x[:, 0].float() + x[:, 1].float())).bfloat16()
    add_rms_norm(x.view(12, 40), residual, torch.ones(40).bfloat16(), EPS)
    assert torch.equal(residual, want)


@both
@pytest.mark.parametrize("top_k", [1, 3])
def test_a_row_does_not_see_its_neighbours(form: str, top_k: int) -> None:
    x, weight = torch.randn(9 * top_k, 130), torch.randn(130)
    own = slice(4 * top_k, 5 * top_k)
    alone = add_rms_norm(x[own], torch.ones(1, 130), weight, EPS)
    x[: own.start], x[own.stop :] = float("nan"), 1e30
    assert torch.equal(add_rms_norm(x, torch.ones(9, 130), weight, EPS)[4:5], alone)


def test_a_plain_row_does_not_see_its_neighbours() -> None:
    x, weight = torch.randn(9, 130), torch.randn(130)
    alone = rms_norm(x[4:5], weight, EPS)
    x[:4] = float("nan")
    x[5:] = 1e30
    assert torch.equal(rms_norm(x, weight, EPS)[4:5], alone)
