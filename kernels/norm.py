"""RMS norm over the last dimension, alone or with the residual addition in front of it, and before
that the sum over a token's experts.

Not here: layer norm with a mean, or a norm fused into a product.
"""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.op import AotSpec, Case, Inputs, Op, require_contiguous, use_triton
from kernels.overlap import can_overlap, follow

# Values that one program holds: short rows (the heads of a q/k norm) share a program.
_TILE = 2048


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide every row by its root mean square, then scale it.

    Shapes:  x [T, H] or [T, Q, D], any row strides, the last dimension contiguous;
             weight [H] or [D];  returns the shape of x, contiguous.
    Numerics: as transformers' RMS norms: the quotient in fp32, rounded to x's dtype, times weight.
    Cost:    reads and writes x once.
    """
    if not use_triton(x):
        return rms_norm_reference(x, weight, eps)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)  # as x
    _launch(x, None, weight, out, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x to the residual stream in place, and return the normed sum.

    Shapes:  x [T, H], or [T·K, H]: a token's K rows are summed first, k ascending, in fp32;
             residual [T, H] (written: residual += x, rounded to its dtype once);  weight [H];
             returns [T, H].
    Cost:    reads x and residual, writes residual and the result, once each.
    """
    if not use_triton(x):
        return add_rms_norm_reference(x, residual, weight, eps)
    out = torch.empty(residual.shape, dtype=x.dtype, device=x.device)  # [T, H]
    _launch(x, residual, weight, out, eps)
    return out


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` in torch."""
    if x.dtype == weight.dtype == torch.float32:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)  # the same, in one call
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))  # [.., 1]
    return (wide * scale).to(x.dtype) * weight


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`add_rms_norm` in torch."""
    if x.shape == residual.shape:
        residual += x
        return rms_norm_reference(residual, weight, eps)
    # One addition after the other: a reduction's order would depend on the shape.
    parts = x.view(len(residual), -1, x.shape[1]).float()  # [T, K, H]
    total = parts[:, 0] + parts[:, 1]  # [T, H]
    for k in range(2, parts.shape[1]):
        total += parts[:, k]
    residual += total
    return rms_norm_reference(residual, weight, eps)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None:
    """Start the kernel over all rows of out, seen as [T, heads, width]."""
    width = x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    num_rows = out.shape[0] * heads
    assert x.stride(-1) == 1, f"the last dimension of x must be contiguous, strides {x.stride()}"
    assert weight.shape == (width,), f"weight {tuple(weight.shape)} for rows of {width}"
    assert residual is None or residual.stride(1) == 1, f"residual's strides {residual.stride()}"
    require_contiguous(weight=weight)
    if num_rows == 0:
        return
    parts = x.shape[0] // out.shape[0]
    assert residual is None or x.shape == (parts * len(residual), residual.shape[1])
    block = triton.next_power_of_2(width)
    rows = max(1, _TILE // block)
    overlap = can_overlap(x.device)
    _rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        x,
        x if residual is None else residual,
        weight,
        out,
        num_rows,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        0 if residual is None else residual.stride(0),
        eps,
        HEADS=heads,
        PARTS=parts,
        WIDTH=width,
        BLOCK=block,
        ROWS=rows,
        ADD=residual is not None,
        OVERLAP=overlap,
        num_warps=4 if block <= _TILE else 8,
        **follow(overlap),
    )


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    num_rows,
    stride_t,
    stride_h,
    residual_stride,
    eps,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)  # [ROWS]
    col = tl.arange(0, BLOCK)  # [BLOCK]
    live = (row < num_rows)[:, None] & (col < WIDTH)[None, :]  # [ROWS, BLOCK]
    at = (row // HEADS) * PARTS * stride_t + (row % HEADS) * stride_h  # [ROWS]
    source = x + at[:, None] + col[None, :]  # [ROWS, BLOCK]
    factor = tl.load(weight + col, mask=col < WIDTH, other=0.0).to(tl.float32)  # [BLOCK]
    if OVERLAP:
        gdc_wait()
    value = tl.load(source, mask=live, other=0.0, cache_modifier=".cg")  # [ROWS, BLOCK]
    if ADD:
        place = residual + (row * residual_stride)[:, None] + col[None, :]  # [ROWS, BLOCK]
        old = tl.load(place, mask=live, other=0.0, cache_modifier=".cg")  # [ROWS, BLOCK]
        total = value.to(tl.float32)
        for part in tl.static_range(1, PARTS):
            total += tl.load(source + part * stride_t, mask=live, other=0.0, cache_modifier=".cg")
        # The norm sees the sum as the residual stream keeps it: rounded.
        value = (old.to(tl.float32) + total).to(old.dtype)
        tl.store(place, value, mask=live)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + eps)  # [ROWS]
    normed = (wide * scale[:, None]).to(out.dtype.element_ty).to(tl.float32) * factor[None, :]
    tl.store(
        out + (row * WIDTH)[:, None] + col[None, :], normed.to(out.dtype.element_ty), mask=live
    )


def _make(shape: tuple[int, ...], fused: bool, sliced: bool = False, parts: int = 1) -> Case:
    """A case of this shape; sliced: x is a column slice of a wider buffer, as q is of qkv.

    parts  rows of x that become one
    """

    def make(device: str, dtype: torch.dtype, seed: int) -> Inputs:
        draw = torch.Generator(device).manual_seed(seed)
        heads = shape[1] if len(shape) == 3 else 1
        width = shape[-1]
        total = heads * width + (24 if sliced else 0)
        rows = parts * shape[0]
        buffer = torch.randn(rows, total, generator=draw, device=device)  # [T·K, total]
        x = buffer.to(dtype)[:, : heads * width].view(rows, *shape[1:])  # as shape
        weight = 1 + 0.1 * torch.randn(width, generator=draw, device=device)  # [H]
        inputs: Inputs = {"x": x, "weight": weight.to(dtype), "eps": 1e-6}
        if fused:
            residual = torch.randn(shape, generator=draw, device=device)  # [T, H]
            inputs["residual"] = residual.to(dtype)
        return inputs

    name = "x".join(map(str, shape)) + ("_sliced" if sliced else "")
    name += f"_of_{parts}" if parts > 1 else ""
    return Case(name, make, small=parts * shape[0] * shape[-1] <= 10000)


def _cases() -> Iterable[Case]:
    yield _make((5, 96), False)
    yield _make((1, 2880), False)
    yield _make((3, 5, 24), False, sliced=True)
    yield _make((32, 2880), False)
    yield _make((64, 32, 128), False, sliced=True)
    yield _make((4096, 2048), False)


def _add_cases() -> Iterable[Case]:
    yield _make((5, 96), True)
    yield _make((1, 2880), True)
    yield _make((32, 2880), True)
    yield _make((4096, 2048), True)
    yield _make((5, 96), True, parts=3)
    yield _make((1, 2880), True, parts=4)
    yield _make((32, 2880), True, parts=4)
    yield _make((1600, 2880), True, parts=4)


def _aot(add: bool) -> Iterable[AotSpec]:
    """GPT-OSS-20B's stream, and (not added) the head norm of Qwen3-30B-A3B."""
    shapes = ((1, 2880, 1), (1, 2880, 4)) if add else ((1, 2880, 1), (32, 128, 1))
    for heads, width, parts in shapes:
        block = triton.next_power_of_2(width)
        yield AotSpec(
            name=f"{heads}x{width}_of_{parts}",
            fn=_rms_norm_kernel,
            signature={
                "x": "*bf16",
                "residual": "*bf16",
                "weight": "*bf16",
                "out": "*bf16",
                "num_rows": "i32",
                "stride_t": "i32:16",
                "stride_h": "i32:16",
                "residual_stride": "i32:16",
                "eps": "fp32",
            },
            constexprs={
                "HEADS": heads,
                "PARTS": parts,
                "WIDTH": width,
                "BLOCK": block,
                "ROWS": max(1, _TILE // block),
                "ADD": add,
                "OVERLAP": True,
            },
            num_warps=4 if block <= _TILE else 8,
        )


def _added_bytes(inputs: Inputs) -> int:
    return int(inputs["x"].nbytes + 3 * inputs["residual"].nbytes)


OPS = (
    Op(
        name="rms_norm",
        run=rms_norm,
        reference=rms_norm_reference,
        cases=_cases,
        outputs=lambda inputs, result: [result],
        aot=lambda: _aot(False),
        bytes=lambda inputs: 2 * inputs["x"].nbytes,
    ),
    Op(
        name="add_rms_norm",
        run=add_rms_norm,
        reference=add_rms_norm_reference,
        cases=_add_cases,
        outputs=lambda inputs, result: [result, inputs["residual"]],
        aot=lambda: _aot(True),
        bytes=_added_bytes,
    ),
)
