"""Dependent launches only where the device knows them: no instruction in what is compiled for
another one, no option at a launch (the fourteenth of the mistakes in test_mistakes.py).

Not here: what a kernel that starts early may do (test_overlap.py, test_early_reads.py).
"""

import dataclasses
from pathlib import Path
from types import ModuleType

import pytest
import torch
from triton.runtime.errors import PTXASError

import kernels.lora_decode
import kernels.overlap
from kernels.dense_lora import embedding_lora
from kernels.fused_moe import moe_down, moe_gate_up, random_experts
from kernels.fused_moe_lora import moe_lora, random_tables
from kernels.gated_act import gated_act
from kernels.mla_attention import mla_attention
from kernels.mla_kv import mla_kv_write
from kernels.mla_lora import mla_query_lora, mla_value_lora
from kernels.moe_gate import moe_gate
from kernels.moe_gate_groups import V3, moe_gate_groups
from kernels.mxfp4_packed import _packed_kernel
from kernels.norm import add_rms_norm
from kernels.op import AotSpec, Op, interpreting
from kernels.overlap import can_overlap
from kernels.paged_attention import paged_attention
from kernels.registry import OPS
from kernels.rope_kv import rope_kv_write
from kernels.worklist import build_worklist
from model_runner.config import MAX_STEP_TOKENS
from tests.kernels.aot import compile_ptx
from tests.kernels.launches import recording
from tests.kernels.mutant import mutant
from tests.kernels.test_fused_moe_lora import batch, tables_of
from tests.kernels.test_lora_decode import deltas_hold as decode_deltas_hold
from tests.kernels.test_lora_decode import run as run_decode

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
    spec = next(iter(OPS["moe_route"].aot()))
    with pytest.raises(AssertionError):
        no_dependent_launch_before_hopper(bad, spec, 80)
    assert spec.constexprs["OVERLAP"]
    with pytest.raises(PTXASError, match="'griddepcontrol' requires .target sm_90"):
        compile_ptx(spec, 80)


@pytest.mark.gpu
def test_what_the_probe_says_changes_no_bit(monkeypatch) -> None:
    """A decode step's LoRA on the device itself, launched as the probe says and as where it says
    no."""
    device = torch.device("cuda")
    known = can_overlap(device)
    assert known == (torch.cuda.get_device_capability(device)[0] >= 9)
    tables, b = tables_of(device="cuda"), batch(9, True, device="cuda")
    found = []
    for answer in (known, False):
        monkeypatch.setattr(kernels.overlap, "_knows", lambda device, answer=answer: answer)
        assert can_overlap(device) == answer
        decode_deltas_hold(kernels.lora_decode, 9, device="cuda")
        found.append(run_decode(kernels.lora_decode, tables, 0, True, b))
    assert torch.equal(*found)


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
    for name, given, _ in told:
        assert given.get("launch_pdl", False) is bool(given.get("OVERLAP", False)), name
        assert given.get("OVERLAP", overlap) is overlap, name


# Blocks along the second and the third side of a grid; along the first 2^31 - 1.
MAX_SIDE = 65535
EXPERTS, TOP_K = 128, 8


def launch_the_largest_step(tokens: int) -> None:
    """The ops of a step of so many tokens, each with TOP_K experts; as narrow as can be."""
    half = torch.bfloat16
    ids = torch.zeros(tokens, TOP_K, dtype=torch.int32)
    slots, places = torch.zeros(tokens, dtype=torch.int32), torch.zeros(tokens, dtype=torch.int64)
    tables = random_tables([(1, 16, 16)], [8], 8, "cpu", half, 0)
    x, y = torch.empty(tokens, 16, dtype=half), torch.empty(tokens * TOP_K, 16, dtype=half)
    experts, weights = random_experts(EXPERTS, 16, 16, "dense", "cpu", half, 0), ids.float()
    add_rms_norm(y, x, x[0], 1e-5)
    embedding_lora(x, places, tables, 0, slots, 16)
    gated_act(y, "silu")
    moe_gate(x, TOP_K, True)
    moe_gate_groups(torch.empty(tokens, 256, dtype=half), None, TOP_K, V3)
    for work in (build_worklist(ids, None, EXPERTS, 0, 128),
                 build_worklist(ids, slots, EXPERTS, 1, 128)):  # fmt: skip
        moe_gate_up(x, experts, ids, work)
        moe_down(y, experts, ids, work, weights)
        moe_lora(y, x, tables, 0, ids, slots, work, False, None)
    q = x.view(tokens, 1, 16)
    cache = torch.empty(1, 16, 1, 16, dtype=half)
    rope_kv_write(q, q, q, None, places, cache, cache, places)
    starts, table = torch.tensor([0, tokens], dtype=torch.int32), torch.zeros(1, 1).int()
    step = {"max_q": tokens, "max_len": tokens, "scale": 1.0}
    paged_attention(q, cache, cache, table, starts[1:], starts, **step)
    latent = torch.empty(1, 16, 32, dtype=half)
    mla_attention(q, q, latent, table, starts[1:], starts, **step)
    kv, angles = torch.empty(tokens, 32, dtype=half), torch.zeros(1, 16)
    mla_kv_write(q, kv, angles, places, latent, places, x[0], 1e-5, True)
    mla_query_lora(q, q, tables, 0, slots, 16)
    mla_value_lora(q, q, tables, 0, slots, 16)


@pytest.mark.skipif(interpreting(), reason="an interpreted function is no JITFunction")
def test_the_largest_step_fits_into_every_grid() -> None:
    with recording(overlap=True) as told:
        launch_the_largest_step(MAX_STEP_TOKENS)
    assert len({launch.kernel for launch in told}) >= 16
    for name, _, grid in told:
        assert max(grid[1:], default=1) <= MAX_SIDE, f"{name}: {grid}"
