"""Every kernel of the registry against its slow truth: on the CPU, interpreted, on a GPU.

Not here: what one kernel alone promises (test_<kernel>.py).
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.op import AotSpec, Case, Inputs, Op, interpreting
from kernels.registry import OPS
from tests.kernels.aot import SHARED_LIMIT_BYTES, compile_spec

ROOT = Path(__file__).parents[2]
PAIRS = [
    pytest.param(op, case, id=f"{name}-{case.name}")
    for name, op in OPS.items()
    for case in op.cases()
]
SMALL = [pair for pair in PAIRS if pair.values[1].small]
# Seconds each in the interpreter, beside others of their kind.
LONG = {"linear-64x2880x32_bias", "linear-33x2880x32_bias", "linear-16x2048x128"}
# An interpreted function cannot be compiled, so there the list is empty.
SPECS = [
    pytest.param(spec, id=f"{name}-{spec.name}")
    for name, op in OPS.items()
    for spec in ([] if interpreting() else op.aot())
]


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure of dicts, tuples, lists and dataclasses with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(item, change) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        new = {field.name: map_tensors(getattr(value, field.name), change) for field in fields}
        return dataclasses.replace(value, **new)
    return value


def copy_of(inputs: Inputs, dtype: torch.dtype | None = None) -> Inputs:
    """Inputs of one's own, strides kept; bf16 tensors in `dtype` if that is given."""

    def copy(x: Tensor) -> Tensor:
        kind = dtype if dtype is not None and x.dtype == torch.bfloat16 else x.dtype
        if 0 in x.stride():
            return x.to(kind, copy=True)
        fresh = torch.empty_strided(x.shape, x.stride(), dtype=kind, device=x.device)  # as x
        return fresh.copy_(x)

    return map_tensors(inputs, copy)


def outputs_of(op: Op, call: Callable[..., Any], inputs: Inputs) -> list[Tensor]:
    return op.outputs(inputs, call(**inputs))


def largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def finite_part(x: Tensor, truth: Tensor) -> Tensor:
    """x where the truth is a number, in fp32, after checking that both agree on where that is."""
    known = torch.isfinite(truth)
    assert torch.equal(torch.isfinite(x), known), "infinite or NaN where the truth is not"
    return x[known].float()


def assert_fp32_close(got: Tensor, want: Tensor) -> None:
    """Both sum the same fp32 products in different orders.

    A sum of n terms is off by about sqrt(n) rounding steps of 6e-8 of its largest partial sums:
    2e-5 of the largest value covers the few thousand terms of the longest sum here.
    """
    assert got.shape == want.shape and got.dtype == want.dtype
    if not want.is_floating_point():
        assert torch.equal(got, want)
        return
    got, want = finite_part(got, want), finite_part(want, want)
    assert largest(got - want) <= 2e-5 * max(1.0, largest(want))


def test_registry_holds_every_kernel_file() -> None:
    named = {op.run.__module__ for op in OPS.values()}
    texts = {path: path.read_text() for path in (ROOT / "kernels").glob("*.py")}
    files = [path for path, text in texts.items() if "\nOPS = (\n" in text and " Op(" in text]
    assert {f"kernels.{path.stem}" for path in files} == named
    assert all(name == op.name for name, op in OPS.items())


@pytest.mark.parametrize(("op", "case"), SMALL)
def test_cpu_runs_the_reference(op: Op, case: Case) -> None:
    inputs = case.make("cpu", torch.float32, 1)
    given, again = copy_of(inputs), copy_of(inputs)
    got = outputs_of(op, op.run, given)
    want = outputs_of(op, op.reference, again)
    assert len(got) == len(want) > 0
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
    for figure in (op.bytes, op.flops):
        assert figure is None or figure(inputs) > 0


@pytest.mark.parametrize(("op", "case"), SMALL)
def test_inputs_are_left_alone(op: Op, case: Case) -> None:
    inputs = case.make("cpu", torch.float32, 2)
    before = copy_of(inputs)
    written = {id(x) for x in outputs_of(op, op.run, inputs)}
    for name, value in inputs.items():
        if isinstance(value, Tensor) and id(value) not in written:
            torch.testing.assert_close(value, before[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("op", "case"), SMALL)
def test_cases_are_repeatable(op: Op, case: Case) -> None:
    first, second = (case.make("cpu", torch.float32, 3) for _ in range(2))
    tensors: list[Tensor] = []
    map_tensors(first, lambda x: tensors.append(x) or x)
    others = iter(tensors)
    map_tensors(second, lambda x: _same(x, next(others)))
    assert tensors


def _same(x: Tensor, y: Tensor) -> Tensor:
    torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
    return x


@pytest.mark.interp
@pytest.mark.parametrize(
    ("op", "case"),
    [
        pytest.param(*pair.values, id=pair.id, marks=[pytest.mark.slow] * (pair.id in LONG))
        for pair in SMALL
    ],
)
def test_interpreted_kernel_equals_reference(op: Op, case: Case) -> None:
    inputs = case.make("cpu", torch.float32, 4)
    got = outputs_of(op, op.run, copy_of(inputs))
    want = outputs_of(op, op.reference, copy_of(inputs))
    for x, y in zip(got, want, strict=True):
        assert_fp32_close(x, y)


@pytest.mark.parametrize("spec", SPECS)
def test_compiles_for_the_h200(spec: AotSpec) -> None:
    usage = compile_spec(spec)
    assert usage.spill_bytes <= spec.max_spills, usage
    assert usage.shared_bytes <= SHARED_LIMIT_BYTES, usage
    assert usage.registers * 32 * spec.num_warps <= 65536, usage


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "case"), PAIRS)
def test_gpu_kernel_is_within_the_bound(op: Op, case: Case) -> None:
    """|kernel - truth| <= bound · |torch in bf16 - truth|, by the largest element.

    Half a rounding step of the output's dtype at its largest value is always allowed: an output
    that is exact but for its own rounding is off by so much, and the reference may be lucky.
    A float32 output has no wider truth beside it: exp, sum and quotient may round by two steps
    each.
    """
    inputs = case.make("cuda", torch.bfloat16, 5)
    truth = outputs_of(op, op.reference, copy_of(inputs, torch.float32))
    plain = outputs_of(op, op.reference, copy_of(inputs))
    got = outputs_of(op, op.run, copy_of(inputs))
    for exact, theirs, ours in zip(truth, plain, got, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        if not ours.is_floating_point():
            assert torch.equal(ours, theirs)
            continue
        want = finite_part(exact, exact)
        allowed = op.bound * largest(finite_part(theirs, exact) - want)
        steps = 6 if ours.dtype == torch.float32 else 0.5
        floor = steps * torch.finfo(ours.dtype).eps * largest(want)
        error = largest(finite_part(ours, exact) - want)
        assert error <= max(allowed, floor), f"{error} > {op.bound} x {allowed / op.bound}"
