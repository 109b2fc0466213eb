"""The gated activations between an MLP's two products. Not here: the products themselves."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import silu
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.op import AotSpec, Case, Inputs, Op, use_triton
from kernels.overlap import can_overlap, follow

KINDS = ("silu", "gpt_oss")
GPT_OSS_LIMIT = 7.0
GPT_OSS_ALPHA = 1.702
BLOCK = 512


def gated_act(gate_up: Tensor, kind: str) -> Tensor:
    """Join gate and up: silu(gate)·up, or GPT-OSS's clamped form.

    Shapes:  gate_up [N, 2I], the I gate columns first, then the I up columns;  result [N, I] in
             the same dtype
    kind     "silu", or "gpt_oss": gate <= 7, up in [-7, 7], (up + 1)·gate·sigmoid(1.702·gate)
    Errors:  ValueError for another kind.      Cost:  reads gate_up once.
    """
    if kind not in KINDS:
        raise ValueError(f"activation must be one of {KINDS}, not {kind!r}")
    if not use_triton(gate_up):
        return gated_act_reference(gate_up, kind)
    num_rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1, "columns must lie side by side"
    out = gate_up.new_empty(num_rows, inner)  # [N, I]
    if num_rows:
        overlap = can_overlap(gate_up.device)
        # Along one side: a prefill has more rows than a grid's second side takes.
        _gated_act_kernel[(num_rows * triton.cdiv(inner, BLOCK),)](
            gate_up, out, gate_up.stride(0), inner, kind == "gpt_oss", BLOCK, overlap,
            **follow(overlap),
        )  # fmt: skip
    return out


def gated_act_reference(gate_up: Tensor, kind: str) -> Tensor:
    """The same in torch; rounds to the input's dtype once, at the end."""
    gate, up = gate_up.float().chunk(2, dim=-1)  # [N, I] twice
    if kind == "silu":
        return silu(gate).mul_(up).to(gate_up.dtype)
    gate = gate.clamp(max=GPT_OSS_LIMIT)
    up = up.clamp(-GPT_OSS_LIMIT, GPT_OSS_LIMIT)
    return ((gate * GPT_OSS_ALPHA).sigmoid_().mul_(gate).mul_(up.add_(1))).to(gate_up.dtype)


@triton.jit
def activate(gate, up, GPT_OSS: tl.constexpr):
    """The activation of fp32 gate and up."""
    if GPT_OSS:
        # A plain minimum drops NaN; a poisoned row must stay poisoned.
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        return (up + 1.0) * gate * tl.sigmoid(1.702 * gate)
    else:
        return gate * tl.sigmoid(gate) * up


@triton.jit
def _gated_act_kernel(
    gate_up_ptr, out_ptr, row_stride, inner, GPT_OSS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
    per_row = tl.cdiv(inner, BLOCK)
    row = (tl.program_id(0) // per_row).to(tl.int64)
    col = tl.program_id(0) % per_row * BLOCK + tl.arange(0, BLOCK)
    live = col < inner
    gate_ptrs = gate_up_ptr + row * row_stride + col
    if OVERLAP:
        gdc_wait()
    gate = tl.load(gate_ptrs, mask=live, other=0.0, cache_modifier=".cg").to(tl.float32)
    up = tl.load(gate_ptrs + inner, mask=live, other=0.0, cache_modifier=".cg").to(tl.float32)
    y = activate(gate, up, GPT_OSS)
    tl.store(out_ptr + row * inner + col, y.to(out_ptr.dtype.element_ty), mask=live)


def _cases() -> Iterator[Case]:
    def case(name: str, rows: int, inner: int, kind: str, small: bool = True) -> Case:
        def make(device: str, dtype: torch.dtype, seed: int) -> Inputs:
            g = torch.Generator().manual_seed(seed)
            x = 6 * torch.randn(rows, 2 * inner, generator=g)  # [N, 2I]
            return {"gate_up": x.bfloat16().to(device, dtype), "kind": kind}

        return Case(name, make, small)

    for kind in KINDS:
        yield case(f"{kind}_odd", 5, 77, kind)
        yield case(f"{kind}_one", 1, 1, kind)
        yield case(f"{kind}_decode", 128, 2880, kind, small=False)


def _aot() -> Iterator[AotSpec]:
    signature = {
        "gate_up_ptr": "*bf16",
        "out_ptr": "*bf16",
        "row_stride": "i32:16",
        "inner": "i32:16",
    }
    for kind in KINDS:
        constants = {"GPT_OSS": kind == "gpt_oss", "BLOCK": BLOCK, "OVERLAP": True}
        yield AotSpec(f"gated_act_{kind}", _gated_act_kernel, signature, constants)


OPS = (
    Op(
        name="gated_act",
        run=gated_act,
        reference=gated_act_reference,
        cases=_cases,
        outputs=lambda inputs, result: [result],
        aot=_aot,
        bytes=lambda i: i["gate_up"].nbytes * 3 // 2,
        flops=lambda i: i["gate_up"].numel() * 3,
    ),
)
