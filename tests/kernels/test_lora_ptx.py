"""What the compiler makes of LoRA's four operations where no result would tell: partial sums are
added without an order between programs, and neighbouring segments share columns of the weights.

Not here: what they compute (test_fused_moe_lora.py), how fast that is (tests/bench).
"""

import dataclasses
import re
from pathlib import Path
from types import ModuleType

import pytest

import kernels.fused_moe as fused_moe
import kernels.fused_moe_lora as lora
import kernels.mxfp4_packed as packed
from kernels.op import AotSpec, interpreting
from tests.kernels.aot import compile_ptx
from tests.kernels.mutant import mutant

pytestmark = pytest.mark.skipif(interpreting(), reason="interpreted functions do not compile")


def shrink(module: ModuleType, **constants: object) -> AotSpec:
    """Of gate_up at 32 tokens and rank 32, its sum divided by four."""
    spec = next(module.aot_specs("gate_up", 128, 2880, (5760,), 32, 16, 4, False))
    given = {"SPLIT_K": 4, "ATOMIC": True, "EVEN_K": False} | constants
    return dataclasses.replace(spec, constexprs=spec.constexprs | given)


def partial_sums_are_relaxed(module: ModuleType) -> None:
    adds = re.findall(r"\b(?:atom|red)\.\S*add\S*", compile_ptx(shrink(module)))
    assert adds and all(".relaxed." in add for add in adds), adds


def test_partial_sums_are_added_relaxed(tmp_path: Path) -> None:
    partial_sums_are_relaxed(lora)
    with pytest.raises(AssertionError):
        partial_sums_are_relaxed(mutant("fused_moe_lora", {', sem="relaxed"': ""}, tmp_path))


def test_a_fixed_order_adds_nothing_in_memory() -> None:
    assert not re.search(r"\b(?:atom|red)\.", compile_ptx(shrink(lora, ATOMIC=False)))


@pytest.mark.parametrize(
    "spec",
    [
        shrink(lora),
        next(s for s in fused_moe.OPS[0].aot() if "GROUP_M" in s.constexprs),
        next(packed.packed_specs(False, 5760)),
    ],
    ids=["shrink", "grouped", "packed"],
)
def test_neighbouring_segments_take_turns_at_a_column(spec: AotSpec) -> None:
    """GROUP_M says how many: programs that follow each other differ by it."""
    in_turn, by_four = (
        compile_ptx(dataclasses.replace(spec, constexprs=spec.constexprs | {"GROUP_M": n}))
        for n in (1, 4)
    )
    assert in_turn != by_four
