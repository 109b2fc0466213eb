"""No product of two numbers that are known only at run time reaches an address in 32 bits, but
those listed here, which stay small whatever the model and the step: told from Triton's own form.

So a row times its stride, an expert times its size are 64 bits wide. Not here: products with what
is compiled in, such as a page times its size (test_far_memory.py finds those by trying).
"""

import re
from pathlib import Path

import pytest

from kernels.op import AotSpec, interpreting
from kernels.registry import OPS
from tests.kernels.aot import compile_ttir
from tests.kernels.mutant import mutant

# By file and kernel, what such a product is made of: arguments, what is loaded through a pointer,
# "program" (its place in the grid, or the grid's sides), "loop" (a number that a loop counts).
_TARGETS = {"num_slots target", "num_slots target_0"}
_THREE = {"num_slots program target_0 target_1 target_2"}
_TILES = {"n_tiles per_row program"}
SMALL = {
    # Rows of the tables: targets by slots; groups: experts by slots.
    "dense_lora._embedding_kernel": _TARGETS,
    "worklist._count_kernel": {"num_experts num_slots", "num_experts slots_ptr"},
    "worklist._scatter_kernel": {"num_experts num_slots", "num_experts slots_ptr"},
    "worklist._sort_kernel": {"num_experts num_slots", "num_experts slots_ptr"},
    # The same, and a row's tiles; a decode step's rows by splits and targets.
    "lora_decode._shrink_kernel": _THREE,
    "lora_decode._expand_kernel": _TARGETS
    | _TILES
    | {
        "n_tiles per_row program programs_0 programs_1",
        "num_rows per_row program programs_0 programs_1",
        "num_slots per_row program programs_0 programs_1 target_0 target_1 target_2",
    },
    "lora_gated_act._expand_act_kernel": _TARGETS | _TILES,
    # The same, and places in the grid put into another order, which are no more than it has; a part
    # of the columns that one row has.
    "fused_moe_lora._expand_kernel": _TARGETS | _THREE,
    "fused_moe_lora._shrink_kernel": _THREE
    | {"max_rank program", "in_features max_rank num_segments program"},
    "fused_moe._grouped_kernel": {"out_features program"},
    "mxfp4_packed._packed_kernel": {"program"},
    "skinny_linear._linear_dot_kernel": {"in_features program"},
    # Heads of one token; rows of one factor.
    "mla_attention_triton.decode_kernel": {"program rope_head"},
    "mla_attention_triton.prefill_kernel": {"program rope_head"},
    "mla_kv._mla_kv_kernel": {"program q_head"},
    "mla_lora._mla_lora_kernel": _TARGETS | {"program x_head", "first_row loop", "loop second_row"},
    "mla_lora._mla_lora_tile_kernel": _TARGETS
    | {"program x_head", "first_row loop", "loop second_row"},
}
# One of each form: what an address is made of follows from what is on, off, or more than one.
SPECS = {
    (spec.fn, *(int(value) > 1 or value is True for value in spec.constexprs.values())):
        pytest.param(spec, id=f"{name}-{spec.name}")
    for name, op in OPS.items()
    for spec in ([] if interpreting() else op.aot())
}  # fmt: skip
_RESULT = re.compile(r"\s*(%[^=]+?)\s*=\s*([\w.]+)\s*(.*)")
_VALUE = re.compile(r"%\w+")
_IN_32_BITS = re.compile(r": (tensor<[\dx]*x)?i32>?$")


def products(spec: AotSpec) -> set[str]:
    """Of which numbers each such product is made."""
    text = compile_ttir(spec)
    named = [name for name in spec.fn.arg_names if name in spec.signature]
    given = re.findall(r"(%\w+): ", text[text.index("tt.func public") :].partition("\n")[0])
    arguments = dict(zip(given, named, strict=True))
    made: dict[str, tuple[str, list[str], str]] = {}
    for line in text.splitlines():
        found = _RESULT.match(re.sub(r"\s*loc\([^\n]*$", "", line))
        if found:
            for result in _VALUE.findall(found[1]):
                made[result] = found[2], _VALUE.findall(found[3]), found[3]

    def pointer(value: str) -> str:
        while value in made:
            value = made[value][1][0]
        return arguments.get(value, "loop")

    def roots(value: str, seen: set[str]) -> set[str]:
        if value in seen:
            return set()
        seen.add(value)
        if value not in made:
            return {arguments.get(value, "loop")}
        op, inputs, _ = made[value]
        if op in ("tt.get_program_id", "tt.get_num_programs"):
            return {"program"}
        if op == "tt.load":
            return {pointer(inputs[0])}
        return set().union(*(roots(one, seen) for one in inputs))

    addresses, todo = (
        set[str](),
        [inputs[1] for op, inputs, _ in made.values() if op == "tt.addptr"],
    )
    while todo:
        value = todo.pop()
        if value not in addresses:
            addresses.add(value)
            if value in made and made[value][0] != "tt.load":
                todo += made[value][1]
    found = set()
    for value in addresses & made.keys():
        op, inputs, rest = made[value]
        if op == "arith.muli" and _IN_32_BITS.search(rest):
            left, right = (roots(one, set()) for one in inputs[:2])
            if left and right:
                found.add(" ".join(sorted(left | right)))
    return found


def name_of(spec: AotSpec) -> str:
    return f"{spec.fn.fn.__module__.removeprefix('kernels.')}.{spec.fn.__name__}"


@pytest.mark.parametrize("spec", SPECS.values())
def test_only_small_products_have_32_bits(spec: AotSpec) -> None:
    assert products(spec) <= SMALL.get(name_of(spec), set())


@pytest.mark.skipif(interpreting(), reason="an interpreted function cannot be compiled")
@pytest.mark.parametrize(
    ("name", "line", "narrow", "made_of"),
    [
        ("norm", "tl.arange(0, ROWS)).to(tl.int64)", "tl.arange(0, ROWS))", "program stride_t"),
        ("gated_act", "(tl.program_id(0) // per_row).to(tl.int64)",
         "tl.program_id(0) // per_row", "inner program row_stride"),
        ("moe_gate_groups", "tl.program_id(0).to(tl.int64)", "tl.program_id(0)",
         "program row_stride"),
    ],
)  # fmt: skip
def test_a_row_of_32_bits_is_found_out(
    name: str, line: str, narrow: str, made_of: str, tmp_path: Path
) -> None:
    bad = mutant(name, {line: narrow}, tmp_path)
    spec = next(iter(bad.OPS[0].aot()))
    assert made_of in products(spec)
