"""MXFP4: every code and scale, the order of nibbles, rounding to the nearest."""

import pytest
import torch

from kernels.mxfp4 import CODES, dequantize_mxfp4, quantize_mxfp4

VALUES = [*CODES, *(-c for c in CODES)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_code_in_its_place(dtype: torch.dtype) -> None:
    """Value 2i is the low nibble of byte i, value 2i + 1 the high one; 16 bytes share a scale."""
    low = torch.arange(16)
    high = torch.arange(16).flip(0)
    blocks = (low | high << 4).to(torch.uint8).repeat(1, 2)  # [1, 32]
    scales = torch.tensor([[127, 130]], dtype=torch.uint8)  # [1, 2]
    got = dequantize_mxfp4(blocks, scales, dtype)[0]  # [64]
    assert got.dtype == dtype
    for i in range(16):
        for half, factor in ((0, 1.0), (32, 8.0)):
            assert got[half + 2 * i] == VALUES[i] * factor
            assert got[half + 2 * i + 1] == VALUES[15 - i] * factor


def test_scales_are_powers_of_two_about_127() -> None:
    for scale in (1, 64, 126, 127, 128, 200, 254):
        blocks = torch.full((1, 16), 0x22, dtype=torch.uint8)  # all ones
        got = dequantize_mxfp4(blocks, torch.tensor([[scale]], dtype=torch.uint8), torch.float32)
        assert got.tolist() == [[2.0 ** (scale - 127)] * 32]


def test_what_can_be_held_comes_back() -> None:
    g = torch.Generator().manual_seed(0)
    codes = torch.tensor(VALUES)[torch.randint(16, (3, 4, 96), generator=g)]  # [3, 4, 96]
    codes[..., 0::32] = 6.0  # or a smaller scale would do, too
    w = codes * torch.exp2(torch.randint(-9, 9, (3, 4, 3), generator=g)).repeat_interleave(32, -1)
    blocks, scales = quantize_mxfp4(w)
    assert blocks.shape == (3, 4, 48) and scales.shape == (3, 4, 3)
    assert blocks.dtype == scales.dtype == torch.uint8
    torch.testing.assert_close(dequantize_mxfp4(blocks, scales, torch.float32), w, rtol=0, atol=0)


def test_rounding_is_to_the_nearest() -> None:
    w = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    blocks, scales = quantize_mxfp4(w)
    got = dequantize_mxfp4(blocks, scales, torch.float32)
    factor = torch.exp2(scales.float() - 127).repeat_interleave(32, -1)  # [5, 64]
    nearest = (w[..., None] / factor[..., None] - torch.tensor(VALUES)).abs().amin(-1) * factor
    torch.testing.assert_close((got - w).abs(), nearest, rtol=1e-5, atol=1e-7)


def test_nothing_but_zeros() -> None:
    blocks, scales = quantize_mxfp4(torch.zeros(2, 32))
    assert not dequantize_mxfp4(blocks, scales, torch.float32).any()


def test_bad_shapes_and_values_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 32 columns, not 33"):
        quantize_mxfp4(torch.zeros(2, 33))
    with pytest.raises(ValueError, match="not finite"):
        quantize_mxfp4(torch.full((1, 32), float("nan")))
    blocks = torch.zeros(2, 16, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"blocks \(2, 16\) and scales \(2, 2\)"):
        dequantize_mxfp4(blocks, torch.zeros(2, 2, dtype=torch.uint8), torch.float32)
