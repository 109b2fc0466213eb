"""Every tensor that an op is given, laid out in another way: it computes the same, or says which
one it cannot read. Nothing is read as if it lay otherwise.

With gaps between the elements, and with rows so far apart that 32 bits do not count their elements.
Not here: what lies in far memory by its nature (test_far_memory.py).
"""

from collections.abc import Callable, Iterator
from itertools import islice

import pytest
import torch
from torch import Tensor

from kernels.op import Inputs, Op
from kernels.registry import OPS
from tests.kernels.far_memory import far_rows
from tests.kernels.test_ops import assert_fp32_close, copy_of, outputs_of

TORCH = {"dequantize_mxfp4"}  # no kernel of ours
# They launch what another one does: moe_lora and dense_lora_multi, moe_down, mla_query_lora.
LIKE_OTHERS = {"dense_lora", "moe_gate_up", "mla_value_lora"}
CHECKED = [
    pytest.param(op, id=name, marks=[pytest.mark.slow] if name in LIKE_OTHERS else [])
    for name, op in OPS.items()
    if name not in TORCH
]


def gaps(x: Tensor) -> Tensor:
    """The same values, something else after each."""
    other = float("nan") if x.is_floating_point() else 77
    wide = torch.full((*x.shape, 2), other, dtype=x.dtype)
    return wide[..., 0].copy_(x)


def layouts(value: object) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    if isinstance(value, Tensor) and value.numel() > 1:
        yield "gaps", gaps
        if value.dim() > 1 and len(value) > 1:
            yield "far", far_rows


def smallest_cases(op: Op) -> dict[tuple[str, str], Inputs]:
    """For each tensor argument and way to lay it out, the smallest inputs that allow it: of the
    first small cases, among which every op has all its arguments."""
    found: dict[tuple[str, str], tuple[int, Inputs]] = {}
    for case in islice((case for case in op.cases() if case.small), 3):
        inputs = case.make("cpu", torch.float32, 6)
        size = sum(x.numel() for x in inputs.values() if isinstance(x, Tensor))
        for name, value in inputs.items():
            for way, _ in layouts(value):
                if (name, way) not in found or size < found[name, way][0]:
                    found[name, way] = size, inputs
    return {key: inputs for key, (_, inputs) in found.items()}


@pytest.mark.interp
@pytest.mark.parametrize("op", CHECKED)
def test_no_layout_is_taken_for_another(op: Op) -> None:
    wanted: dict[int, list[Tensor]] = {}
    computed = 0
    for (name, way), inputs in smallest_cases(op).items():
        if id(inputs) not in wanted:
            wanted[id(inputs)] = outputs_of(op, op.run, copy_of(inputs))
        given = copy_of(inputs)
        given[name] = dict(layouts(given[name]))[way](given[name])
        try:
            got = outputs_of(op, op.run, given)
        except AssertionError:
            continue  # refused
        computed += 1
        for x, y in zip(got, wanted[id(inputs)], strict=True):
            assert_fp32_close(x, y)
    assert computed, "something may lie otherwise"
