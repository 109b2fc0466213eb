"""Plain linears of decode steps: y = x W^T + b for few rows, at the speed at which W can be read.

Two forms. The dot keeps W on the tensor core's long side (Y^T = W X^T), so a tile of eight tokens
wastes nothing; parts of a split K are added in their order by the last one to arrive. The sum, for
a token or two and for routers, multiplies whole rows of W in registers: no parts, no pipeline.
Both start before the kernel that makes x has ended (overlap.py has the rule), and the sum has its
first weights in registers by then. Asking the L2 for the dot's was measured: it gained nothing.
The order of summation follows from the padded number of rows alone. Not here: more than 64 rows and
heads too wide to gain, which torch serves, and LoRA.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear as linear_reference
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.op import AotSpec, Case, Inputs, Op, interpreting, require_contiguous, use_triton
from kernels.overlap import can_overlap, follow
from kernels.tiling import Tiles, gpu_name, power_of_two, tiles_for

MAX_ROWS = 64
# A vocabulary's head: torch's product is at its floor there.
MAX_OUT = 1 << 16
# The sum form: up to so many rows, or so many results (routers).
SUM_ROWS = 2
SUM_RESULTS = 1 << 11
# Rows of x that one program of it takes.
SUM_BLOCK_T = 4
NUM_COUNTERS = 1 << 14


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x W^T + b.

    Shapes:  x [T, in], any row stride;  weight [out, in], contiguous;  bias [out] or None;  returns
             [T, out], contiguous
    Numerics: products and sums in fp32, rounded once.
    Cost:    reads weight once, x once a tile of it.
    """
    if not _fits(x, weight):
        return linear_reference(x, weight, bias)
    form = choose_form(len(x), weight.shape[0])
    shape = {"rows": len(x), "out": weight.shape[0], "in": weight.shape[1]}
    return product(x, weight, bias, form, tiles_for(form, shape, gpu_name(x.device)))


def choose_form(num_rows: int, out: int) -> str:
    """The op of tiling.py that serves this shape."""
    rows = power_of_two(num_rows)
    return "linear_sum" if rows <= SUM_ROWS or rows * out <= SUM_RESULTS else "linear_dot"


def _fits(x: Tensor, weight: Tensor) -> bool:
    if not use_triton(x) or not 0 < len(x) <= MAX_ROWS or weight.shape[0] > MAX_OUT:
        return False
    known = x.dtype == weight.dtype and (x.dtype == torch.bfloat16 or interpreting())
    return known and x.dim() == 2 and x.stride(1) == 1 and weight.is_contiguous()


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, form: str, tiles: Tiles,
    overlap: bool | None = None,
) -> Tensor:  # fmt: skip
    """`linear` by one form in these tiles.

    overlap  for benchmarks; None = if the device can
    """
    num_rows, in_ = x.shape
    out = weight.shape[0]
    assert weight.shape[1] == in_ and (bias is None or bias.shape == (out,)), weight.shape
    y = x.new_empty(num_rows, out)  # [T, out]
    require_contiguous(bias=bias)
    if overlap is None:
        overlap = can_overlap(x.device)
    operands = (x, weight, bias if bias is not None else x, y)
    num_n = triton.cdiv(out, tiles.block_n)
    if form == "linear_sum":
        constants = _sum_constants(num_rows, in_, bias is not None, overlap, tiles)
        _linear_sum_kernel[(num_n, triton.cdiv(num_rows, constants["BLOCK_T"]))](
            *operands, num_rows, x.stride(0), out, in_, **constants, num_warps=tiles.num_warps,
            **follow(overlap),
        )  # fmt: skip
        return y
    split = tiles.split_k
    assert split == 1 or num_n <= NUM_COUNTERS, (split, num_n)
    partial = y.new_empty((split, num_rows, out), dtype=torch.float32) if split > 1 else y
    _linear_dot_kernel[(num_n, split)](
        *operands, partial, _counters(x.device) if split > 1 else y, num_rows, x.stride(0), out,
        in_, **_dot_constants(num_rows, in_, bias is not None, overlap, tiles),
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, **follow(overlap),
    )  # fmt: skip
    return y


def _sum_constants(
    num_rows: int, in_: int, bias: bool, overlap: bool, tiles: Tiles
) -> dict[str, int]:
    return {
        "HAS_BIAS": bias, "ONCE": in_ <= tiles.block_k, "OVERLAP": overlap,
        "BLOCK_T": min(SUM_BLOCK_T, power_of_two(num_rows)), "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
    }  # fmt: skip


def _dot_constants(
    num_rows: int, in_: int, bias: bool, overlap: bool, tiles: Tiles
) -> dict[str, int]:
    return {
        "HAS_BIAS": bias, "EVEN_K": in_ % tiles.block_k == 0, "SPLIT_K": tiles.split_k,
        "OVERLAP": overlap, "BLOCK_T": max(8, power_of_two(num_rows)), "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
    }  # fmt: skip


@lru_cache(maxsize=16)
def _counters(device: torch.device) -> Tensor:
    """[C] int32, all 0 between launches. One for all: no two products of a device run at once."""
    return torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["num_rows"])
def _linear_dot_kernel(
    x_ptr, w_ptr, bias_ptr, y_ptr, partial_ptr, counters_ptr, num_rows, x_stride, out_features,
    in_features, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, SPLIT_K: tl.constexpr,
    OVERLAP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    pid_n, split = tl.program_id(0), tl.program_id(1)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    n_live = n < out_features
    # Rows of weights past the end read one that exists; their result is not stored.
    n_read = tl.where(n_live, n, out_features - 1).to(tl.int64)
    num_chunks = tl.cdiv(in_features, BLOCK_K)
    chunk, end = 0, num_chunks
    if SPLIT_K > 1:
        per_split = tl.cdiv(num_chunks, SPLIT_K)
        chunk = split * per_split
        end = tl.minimum(chunk + per_split, num_chunks)
    t = tl.arange(0, BLOCK_T)
    t_live = t < num_rows
    k = tl.arange(0, BLOCK_K)
    w_ptrs = w_ptr + n_read[:, None] * in_features + chunk * BLOCK_K + k[None, :]
    x_ptrs = x_ptr + t.to(tl.int64)[None, :] * x_stride + chunk * BLOCK_K + k[:, None]
    bias = tl.zeros([BLOCK_N], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + n_read).to(tl.float32)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()  # not before: LoRA behind reads x early
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for c in range(chunk, end):
        if EVEN_K:
            w = tl.load(w_ptrs)
            x = tl.load(x_ptrs, mask=t_live[None, :], other=0.0, cache_modifier=".cg")
        else:
            k_live = k < in_features - c * BLOCK_K
            w = tl.load(w_ptrs, mask=k_live[None, :], other=0.0)
            x_live = k_live[:, None] & t_live[None, :]
            x = tl.load(x_ptrs, mask=x_live, other=0.0, cache_modifier=".cg")
        acc = tl.dot(w, x, acc, input_precision="ieee")
        w_ptrs += BLOCK_K
        x_ptrs += BLOCK_K
    stored = n_live[:, None] & t_live[None, :]
    at = t.to(tl.int64)[None, :] * out_features + n[:, None]
    if SPLIT_K > 1:
        # The last part to arrive adds all of them in their order, so who is last changes no bit.
        part_size = num_rows.to(tl.int64) * out_features
        tl.store(partial_ptr + split * part_size + at, acc, mask=stored)
        # All threads' parts must be written before one thread tells so.
        tl.debug_barrier()
        if tl.atomic_add(counters_ptr + pid_n, 1, sem="acq_rel") != SPLIT_K - 1:
            return
        acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        for part in tl.static_range(SPLIT_K):
            ptrs = partial_ptr + part * part_size + at
            acc += tl.load(ptrs, mask=stored, other=0.0, cache_modifier=".cg")
        tl.store(counters_ptr + pid_n, 0)
    acc += bias[:, None]
    tl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["num_rows"])
def _linear_sum_kernel(
    x_ptr, w_ptr, bias_ptr, y_ptr, num_rows, x_stride, out_features, in_features,
    HAS_BIAS: tl.constexpr, ONCE: tl.constexpr, OVERLAP: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_live = n < out_features
    n_read = tl.where(n_live, n, out_features - 1).to(tl.int64)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    t_live = t < num_rows
    k = tl.arange(0, BLOCK_K)[None, None, :]
    w_ptrs = w_ptr + (n_read * in_features)[None, :, None] + k  # [1, N, K]
    x_ptrs = x_ptr + (t.to(tl.int64) * x_stride)[:, None, None] + k  # [T, 1, K]
    w = tl.load(w_ptrs, mask=k < in_features, other=0.0)
    bias = tl.zeros([BLOCK_N], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + n_read).to(tl.float32)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()  # not before: LoRA behind reads x early
    acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for first in range(0, in_features, BLOCK_K):
        x_live = t_live[:, None, None] & (k < in_features - first)
        x = tl.load(x_ptrs + first, mask=x_live, other=0.0, cache_modifier=".cg")
        following = w
        if not ONCE:
            # On its way while this turn computes; the last turn loads nothing.
            then = first + BLOCK_K
            following = tl.load(w_ptrs + then, mask=k < in_features - then, other=0.0)
        acc += tl.sum(w.to(tl.float32) * x.to(tl.float32), 2)
        w = following
    acc += bias[None, :]
    at = t.to(tl.int64)[:, None] * out_features + n[None, :]
    tl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), mask=t_live[:, None] & n_live[None, :])


def _make(rows: int, in_: int, out: int, bias: bool, sliced: bool = False) -> Case:
    """sliced: x is some columns of a wider buffer, weights lie anywhere in memory but whole."""

    def make(device: str, dtype: torch.dtype, seed: int) -> Inputs:
        draw = torch.Generator(device).manual_seed(seed)
        wide = in_ + (24 if sliced else 0)
        x = torch.randn(rows, wide, generator=draw, device=device).to(dtype)  # [T, wide]
        weight = torch.randn(out, in_, generator=draw, device=device) * in_**-0.5  # [out, in]
        offset = torch.randn(out, generator=draw, device=device)  # [out]
        return {
            "x": x[:, :in_], "weight": weight.to(dtype), "bias": offset.to(dtype) if bias else None
        }  # fmt: skip

    name = f"{rows}x{in_}x{out}" + ("_bias" if bias else "") + ("_sliced" if sliced else "")
    return Case(name, make, small=in_ * out <= 1 << 18)


def _cases() -> Iterable[Case]:
    # The sum form: a row or two, routers.
    yield _make(1, 2880, 32, True)
    yield _make(1, 75, 37, False)
    yield _make(2, 328, 70, True, sliced=True)
    yield _make(33, 200, 24, True)
    # The dot form, which needs more than SUM_RESULTS results.
    yield _make(3, 328, 600, True)
    yield _make(33, 200, 75, True, sliced=True)
    yield _make(64, 75, 50, False)
    yield _make(8, 64, 300, False)
    for rows in (1, 2, 3, 8, 16, 24, 33, 64):
        for out, in_ in ((5120, 2880), (2880, 4096), (32, 2880)):
            yield _make(rows, in_, out, True)
    for out, in_ in ((5120, 2048), (2048, 4096), (128, 2048)):
        yield _make(16, in_, out, False)
    yield _make(4, 25600, 5120, False)


# (out, in): GPT-OSS-20B's qkv, o and router, the router of Qwen3-30B-A3B, down of Qwen3-32B.
_AOT_SHAPES = ((5120, 2880), (2880, 4096), (32, 2880), (128, 2048), (5120, 25600))


def _aot() -> Iterator[AotSpec]:
    signature = {name: "*bf16" for name in ("x_ptr", "w_ptr", "bias_ptr", "y_ptr")}
    signature |= {"num_rows": "i32"}
    signature |= dict.fromkeys(("x_stride", "out_features", "in_features"), "i32:16")
    for out, in_ in _AOT_SHAPES:
        for rows in (1, 8, 16, 32, 64):
            form = choose_form(rows, out)
            tiles = tiles_for(form, {"rows": rows, "out": out, "in": in_}, "NVIDIA H200")
            name = f"{rows}x{in_}x{out}"
            if form == "linear_sum":
                constants = _sum_constants(rows, in_, True, True, tiles)
                yield AotSpec(
                    name, _linear_sum_kernel, signature, constants, tiles.num_warps, num_stages=1
                )
                continue
            constants = _dot_constants(rows, in_, True, True, tiles)
            parts = ("*fp32", "*i32") if tiles.split_k > 1 else ("*bf16", "*bf16")
            own = {"partial_ptr": parts[0], "counters_ptr": parts[1]}
            yield AotSpec(
                name,
                _linear_dot_kernel,
                signature | own,
                constants,
                tiles.num_warps,
                tiles.num_stages,
            )


def _bytes(inputs: Inputs) -> int:
    x, weight = inputs["x"], inputs["weight"]
    return x.element_size() * (weight.numel() + x.numel() + len(x) * weight.shape[0])


OPS = (
    Op(
        name="linear",
        run=linear,
        reference=linear_reference,
        cases=_cases,
        outputs=lambda inputs, result: [result],
        aot=_aot,
        bytes=_bytes,
        flops=lambda inputs: 2 * len(inputs["x"]) * inputs["weight"].numel(),
    ),
)
