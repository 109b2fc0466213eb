"""The rule of kernels/overlap.py, read from the machine code that the H200 gets.

Every kernel that can be a follower has a constexpr OVERLAP; its specifications turn it on.
"""

import re

import pytest
import torch

from kernels.op import AotSpec, interpreting
from kernels.overlap import can_overlap, follow
from kernels.registry import OPS
from tests.kernels.aot import disassemble

WAIT, TRIGGER = "ACQBULK", "PREEXIT"
SPECS = [
    pytest.param(spec, id=f"{name}-{spec.name}")
    for name, op in OPS.items()
    for spec in ([] if interpreting() else op.aot())
    if spec.constexprs.get("OVERLAP")
]


def opcodes(spec: AotSpec) -> list[str]:
    """Of every instruction, in the order of their addresses, modifiers and predicates left out."""
    lines = re.findall(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)", disassemble(spec))
    assert len(lines) > 20, spec.name
    return lines


@pytest.mark.parametrize("spec", SPECS)
def test_a_follower_waits_before_it_writes_triggers_or_ends(spec: AotSpec) -> None:
    codes = opcodes(spec)
    before = codes[: codes.index(WAIT)]
    assert not {"STG", "RED", "ATOMG", "ATOM", "EXIT"} & set(before), before
    settled_shrink = "K_TILES" in spec.constexprs
    assert settled_shrink == (TRIGGER in before), "only the shrink may trigger first"
    assert TRIGGER in codes, "whoever comes next would wait for the end"


def test_launch_options_follow_the_device() -> None:
    assert not can_overlap(torch.device("cpu"))
    assert follow(True) == {"launch_pdl": True} and follow(False) == {}
