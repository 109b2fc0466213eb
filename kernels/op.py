"""What a kernel declares of itself, so that tests and benchmarks run over all of them alike.

Not here: the list of kernels (registry.py) and any kernel.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One set of inputs: `make(device, dtype, seed)` returns the keyword arguments of `run` and
    `reference`.

    odd cases have shapes that divide by nothing; small ones are fit for the interpreter.
    """

    name: str
    make: Callable[[str, torch.dtype, int], Inputs]
    small: bool = True


@dataclass(frozen=True)
class AotSpec:
    """One compilation of one `@triton.jit` function for sm_90, as the H200 gets it: a test compiles
    it without a GPU.

    signature  argument name -> Triton type ("*bf16", "i32", ...), constexprs left out;  constexprs
               name -> value
    max_registers  of a thread, 0 = as the compiler likes;  max_spills  bytes of spilled registers
                   that are known and accepted
    """

    name: str
    fn: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int = 0
    max_spills: int = 0


@dataclass(frozen=True)
class Op:
    """A kernel with its slow truth.

    run        the fast form (Triton on a GPU or under TRITON_INTERPRET, the reference on a CPU
               tensor)
    reference  torch, the same arguments; computes in the dtype that it is given, with fp32
               accumulation
    outputs    the tensors that a call wrote or returned: (inputs, result) -> list
    bound      largest |kernel - truth| allowed, as a multiple of |reference in the same dtype -
               fp32 truth|
    aot    its compilations for sm_90 (empty: torch serves on the GPU too);  bytes, flops  of one
           call: for the roofline
    """

    name: str
    run: Callable[..., Any]
    reference: Callable[..., Any]
    cases: Callable[[], Iterable[Case]]
    outputs: Callable[[Inputs, Any], list[Tensor]]
    bound: float = 2.0
    aot: Callable[[], Iterable[AotSpec]] = tuple
    bytes: Callable[[Inputs], int] | None = None
    flops: Callable[[Inputs], int] | None = None


# Read once: `@triton.jit` reads it when a kernel is defined, so a later change would change nothing
# but the dispatch.
_INTERPRETING = os.environ.get("TRITON_INTERPRET", "0") == "1"


def interpreting() -> bool:
    """True under TRITON_INTERPRET=1, where `@triton.jit` functions run on CPU tensors (fp32
    only)."""
    return _INTERPRETING


_reference_only = False


def use_reference_kernels(on: bool) -> None:
    """Make every op of this process use its torch reference, also on a GPU: to judge the kernels
    by. Their fp32 products are then true fp32 ones, without TF32."""
    global _reference_only
    _reference_only = on
    if on:
        torch.set_float32_matmul_precision("highest")


def references_only() -> bool:
    """Whether `use_reference_kernels` is on."""
    return _reference_only


def use_triton(x: Tensor) -> bool:
    """Whether an op should launch its Triton kernel for this tensor."""
    return (x.is_cuda or interpreting()) and not _reference_only


def require_contiguous(**tensors: Tensor | None) -> None:
    """For tensors that a kernel walks without strides. Errors: AssertionError that names the one
    whose elements do not lie side by side: it would be read wrong, and nobody told."""
    for name, x in tensors.items():
        assert x is None or x.is_contiguous(), f"{name} must be contiguous, strides {x.stride()}"


_compiled: list[str] = []


def compiled_kernels() -> list[str]:
    """Names of the kernels compiled (or fetched from the compile cache) in this process since the
    first call, one a variant.

    A serving process wants none after its warm-up: a request would wait for the compiler.
    """
    import triton

    if triton.knobs.runtime.jit_cache_hook is None:

        def note(*args: Any, **kwargs: Any) -> None:
            _compiled.append(str(kwargs.get("repr", "")))

        triton.knobs.runtime.jit_cache_hook = note
    return _compiled
