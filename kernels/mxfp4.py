"""MXFP4: groups of 32 four-bit floats (e2m1) under one power of two. What the bits mean, both ways.

Not here: the product with MXFP4 weights (fused_moe.py).
"""

import torch
from torch import Tensor

from kernels.op import Case, Inputs, Op

GROUP = 32
SCALE_BIAS = 127
CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST = CODES[-1]


def dequantize_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The values that the codes stand for.

    Shapes:  blocks [..., out, in / 2] uint8, the low nibble first;  scales [..., out, in / 32]
             uint8, exponent bias 127
    Result:  [..., out, in] in `dtype` (exact in fp32; in bf16 too, within its range of exponents)
    Errors:  ValueError when scales and blocks do not belong together.
    """
    if blocks.shape[:-1] != scales.shape[:-1] or blocks.shape[-1] * 2 != scales.shape[-1] * GROUP:
        raise ValueError(f"blocks {tuple(blocks.shape)} and scales {tuple(scales.shape)} differ")
    table = torch.tensor([*CODES, *(-c for c in CODES)], device=blocks.device)  # [16] fp32
    # One look-up gives both values of a byte.
    pairs = torch.stack([table.repeat(16), table.repeat_interleave(16)], -1)  # [256, 2]
    values = pairs[blocks.int()].unflatten(-2, (-1, GROUP // 2))  # [..., out, in / 32, 16, 2]
    factor = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - SCALE_BIAS)
    values *= factor[..., None, None]
    return values.flatten(-3).to(dtype)  # [..., out, in]


def dequantize_mxfp4_reference(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The same from the meaning of the bits (sign, two of exponent, one of mantissa), not a table.

    Source: OCP Microscaling Formats (MX) specification 1.0, section 5.3.3.
    """
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).int()  # [..., out, in]
    exponent, mantissa = (codes >> 1) & 3, (codes & 1).float()
    normal = torch.ldexp(1 + mantissa / 2, exponent - 1)
    magnitude = torch.where(exponent > 0, normal, mantissa / 2)  # [..., out, in]
    signed = torch.where(codes > 7, -magnitude, magnitude)
    shift = (scales.int() - SCALE_BIAS).repeat_interleave(GROUP, -1)  # [..., out, in]
    return torch.ldexp(signed, shift).to(dtype)


def quantize_mxfp4(w: Tensor) -> tuple[Tensor, Tensor]:
    """Round to MXFP4, each group under the smallest power of two that keeps it within 6.

    Shapes:  w [..., out, in], in a multiple of 32  ->  blocks [..., out, in / 2] uint8, scales
             [..., out, in / 32] uint8
    Errors:  ValueError if `in` is no multiple of 32 or a value is not finite.
    """
    if w.shape[-1] % GROUP:
        raise ValueError(f"MXFP4 needs a multiple of {GROUP} columns, not {w.shape[-1]}")
    groups = w.float().unflatten(-1, (-1, GROUP))  # [..., out, in / 32, 32]
    largest = groups.abs().amax(-1)  # [..., out, in / 32]
    if not bool(torch.isfinite(largest).all()):
        raise ValueError("MXFP4 cannot hold a value that is not finite")
    exponent = torch.ceil(torch.log2(largest / LARGEST)).clamp(-SCALE_BIAS, SCALE_BIAS)
    exponent = torch.where(largest > 0, exponent, torch.zeros_like(exponent)).int()
    magnitude = torch.ldexp(groups.abs(), -exponent[..., None])
    # Midpoints between neighbours; `right` sends a tie to the smaller one.
    limits = torch.tensor([(a + b) / 2 for a, b in zip(CODES, CODES[1:], strict=False)])
    code = torch.bucketize(magnitude, limits.to(w.device))  # [..., out, in / 32, 32]
    code = (code + 8 * (groups < 0)).to(torch.uint8).flatten(-2)  # [..., out, in]
    blocks = code[..., 0::2] | (code[..., 1::2] << 4)  # [..., out, in / 2]
    return blocks, (exponent + SCALE_BIAS).to(torch.uint8)


def _case(name: str, shape: tuple[int, ...], small: bool = True) -> Case:
    def make(device: str, dtype: torch.dtype, seed: int) -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        *lead, width = shape
        blocks = torch.randint(0, 256, (*lead, width // 2), generator=generator)
        scales = torch.randint(100, 150, (*lead, width // GROUP), generator=generator)
        bytes_ = [x.to(device, torch.uint8) for x in (blocks, scales)]
        return {"blocks": bytes_[0], "scales": bytes_[1], "dtype": dtype}

    return Case(name, make, small)


OPS = (
    Op(
        name="dequantize_mxfp4",
        run=dequantize_mxfp4,
        reference=dequantize_mxfp4_reference,
        cases=lambda: (
            _case("one_group", (1, GROUP)),
            _case("experts", (3, 5, 3 * GROUP)),
            _case("gpt_oss", (2, 5760, 2880), small=False),
        ),
        outputs=lambda inputs, result: [result],
        bytes=lambda inputs: inputs["blocks"].numel() * (1 + 2 * inputs["dtype"].itemsize),
    ),
)
