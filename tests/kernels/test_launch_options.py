"""Dependent launches only where the device knows them: no instruction in what is compiled for
another one, no option at a launch (the fourteenth of the mistakes in test_mistakes.py).

Not here: what a kernel that starts early may do (test_overlap.py, test_early_reads.py).
"""

import dataclasses
from pathlib import Path
from types import ModuleType

import pytest
import torch

import kernels.overlap
from kernels.mxfp4_packed import _packed_kernel
from kernels.op import AotSpec, Op, interpreting
from kernels.registry import OPS
from tests.kernels.aot import compile_ptx
from tests.kernels.launches import recording
from tests.kernels.mutant import mutant

# Its packed multiplications are Hopper's, whatever starts when.
HOPPER_ONLY = (_packed_kernel,)
SPECS = {
    spec.fn: pytest.param(spec, id=f"{name}-{spec.name}")
    for name, op in OPS.items()
    for spec in ([] if interpreting() else op.aot())
    if spec.constexprs.get("OVERLAP") and spec.fn not in HOPPER_ONLY
}


def no_dependent_launch_before_hopper(overlap: ModuleType, spec: AotSpec, capability: int) -> None:
    """What is launched on a device of this capability compiles for it and knows no such launch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device: divmod(capability, 10))
        known = overlap._knows.__wrapped__(torch.device("cuda"))
    assert known == (capability >= 90)
    spec = dataclasses.replace(spec, constexprs=spec.constexprs | {"OVERLAP": known})
    assert ("griddepcontrol" in compile_ptx(spec, capability)) == known


@pytest.mark.parametrize("spec", SPECS.values())
@pytest.mark.parametrize("capability", [80, 90])
def test_no_dependent_launch_without_the_probe(spec: AotSpec, capability: int) -> None:
    no_dependent_launch_before_hopper(kernels.overlap, spec, capability)


@pytest.mark.skipif(interpreting(), reason="an interpreted function cannot be compiled")
def test_a_device_that_is_not_asked_gets_what_it_does_not_know(tmp_path: Path) -> None:
    line = "torch.cuda.get_device_capability(device)[0] >= 9"
    bad = mutant("overlap", {line: line.replace(">= 9", ">= 0")}, tmp_path)
    with pytest.raises(AssertionError):
        no_dependent_launch_before_hopper(bad, next(iter(OPS["moe_route"].aot())), 80)


@pytest.mark.skipif(interpreting(), reason="an interpreted function is no JITFunction")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_the_launch_says_so_only_where_it_may(op: Op, overlap: bool) -> None:
    """Other backends refuse the option itself; and a kernel that waits must be launched so."""
    cases = [case.make("cpu", torch.bfloat16, 0) for case in op.cases() if case.small]
    with recording(overlap) as told:
        for inputs in cases:
            op.run(**inputs)
    assert told or not tuple(op.aot())
    for name, given in told:
        assert given.get("launch_pdl", False) is bool(given.get("OVERLAP", False)), name
        assert given.get("OVERLAP", overlap) is overlap, name
