"""What each kernel that starts early reads before it has waited: told from its PTX, pointer by
pointer, and for those that may read nothing from the machine code as well.

Not here: that it waits at all before it writes, triggers or ends on the way (test_overlap.py).
"""

from pathlib import Path

import pytest

from kernels import gated_act, lora_decode, lora_gated_act, moe_route, mxfp4_packed, norm, rope_kv
from kernels import paged_attention_triton as attention
from kernels import skinny_linear as skinny
from kernels.op import AotSpec, interpreting
from kernels.registry import OPS
from tests.kernels.aot import disassemble
from tests.kernels.mutant import mutant
from tests.kernels.ptx import before_the_wait

TABLES = {"memory_ptr", "a_off_ptr", "b_off_ptr", "rank_ptr", "slots_ptr", "ids_ptr"}
# Weights and the step's inputs; of the shrink and the expands also what is settled.
EARLY = {
    attention.combine_kernel: {"cu_q", "seq_lens"},
    attention.decode_kernel: {"cu_q", "seq_lens"},
    gated_act._gated_act_kernel: set(),
    lora_decode._expand_kernel: TABLES | {"b_stride_ptr", "weights_ptr"},
    lora_decode._shrink_kernel: TABLES | {"a_stride_ptr", "x_ptr"},
    lora_gated_act._expand_act_kernel: TABLES | {"b_stride_ptr"},
    moe_route._route_kernel: set(),
    mxfp4_packed._packed_kernel: set(),
    norm._rms_norm_kernel: {"weight"},
    rope_kv._rope_kv_kernel: {"cos_sin", "positions", "write_idx"},
    skinny._linear_dot_kernel: {"bias_ptr"},
    skinny._linear_sum_kernel: {"bias_ptr", "w_ptr"},
}
SPECS = {
    spec.fn: pytest.param(spec, id=f"{name}-{spec.name}")
    for name, op in OPS.items()
    for spec in ([] if interpreting() else op.aot())
    if spec.constexprs.get("OVERLAP")
}


@pytest.mark.parametrize("spec", SPECS.values())
def test_a_follower_reads_no_more_than_this_before_it_waits(spec: AotSpec) -> None:
    early = before_the_wait(spec)
    assert not early.faults
    assert early.reads == EARLY[spec.fn]
    if not early.reads:
        before = disassemble(spec).split("ACQBULK")[0]
        assert "LDG" not in before


@pytest.mark.skipif(interpreting(), reason="an interpreted function cannot be compiled")
def test_a_kernel_that_does_not_wait_is_found_out(tmp_path: Path) -> None:
    bad = mutant("moe_route", {"        gdc_wait()\n": "        pass\n"}, tmp_path)
    early = before_the_wait(next(iter(bad.OPS[0].aot())))
    assert early.reads == {"logits_ptr"} and {"ret", "st.global.b32"} <= early.faults


@pytest.mark.skipif(interpreting(), reason="an interpreted function cannot be compiled")
def test_a_read_on_one_path_alone_is_found_out(tmp_path: Path) -> None:
    """Where a row has an adapter, y is read too early; a row without one waits first."""
    wait = "    if OVERLAP:\n        gdc_wait()\n"
    read = (
        "    y_row = y_ptr + row * y_stride\n"
        '    y = tl.load(y_row + n, mask=n < end, other=0.0, cache_modifier=".cg")\n'
    )
    bad = mutant("lora_decode", {wait + read: read + wait}, tmp_path)
    specs = bad.aot_specs("bad", 8, 2880, (2880,), 32, 0, 1, False)
    early = [before_the_wait(spec) for spec in specs if spec.fn is bad._expand_kernel]
    assert [e.reads & {"y_0_ptr", "z_ptr"} for e in early] == [{"y_0_ptr"}]
