"""Caches, adapter memory and expert weights of more elements than 32 bits count: what lies past
them is read and written as what lies in front.

Each check moves what a small case has to the far end of a large one and wants the same numbers.
Not here: rows far apart (test_layouts.py); products of numbers that no small case can make large
(test_wide_offsets.py).
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kernels.paged_attention
from kernels.fused_moe import ExpertWeights
from kernels.lora_tables import LoraTables
from kernels.op import Case, Inputs, Op
from kernels.registry import OPS
from kernels.worklist import build_worklist
from tests.kernels.far_memory import FAR, far_empty
from tests.kernels.mutant import mutant
from tests.kernels.test_ops import assert_fp32_close, copy_of, outputs_of


def at_the_end(x: Tensor) -> tuple[Tensor, int]:
    """A tensor of FAR elements more, x being the last of its rows; and how many lie before."""
    num_before = -(-FAR // x[0].numel())
    far = far_empty(num_before + len(x), *x.shape[1:], dtype=x.dtype)
    far[num_before:] = x
    return far, num_before


def move_caches(inputs: Inputs) -> Inputs:
    moved = dict(inputs)
    num_pages = num_places = 0
    for name in {"cache", "k_cache", "v_cache"} & set(inputs):
        moved[name], num_pages = at_the_end(inputs[name])
        num_places = num_pages * inputs[name].shape[1]
    if "page_table" in inputs:
        moved["page_table"] = inputs["page_table"] + num_pages
    if "write_idx" in inputs:
        places = inputs["write_idx"]
        moved["write_idx"] = torch.where(places < 0, places, places + num_places)
    return moved


def move_adapters(inputs: Inputs) -> Inputs:
    """Factors lie from FAR on, the last expert's FAR behind the first's."""
    tables: LoraTables = inputs["tables"]
    experts = inputs.get("num_experts", 1)
    step = -(-FAR // max(1, experts - 1) // 8) * 8 + 8
    memory = far_empty(FAR + (experts - 1) * step + len(tables.memory))
    memory[FAR : FAR + len(tables.memory)] = tables.memory
    new = {"memory": memory}
    for which in "ab":
        offs, strides = (getattr(tables, f"{which}_{kind}") for kind in ("off", "stride"))
        for off, stride in zip(offs.flatten().tolist(), strides.flatten().tolist(), strict=True):
            for e in range(experts if off >= 0 and stride else 0):
                factor = tables.memory[off + e * stride : off + (e + 1) * stride]
                memory[FAR + off + e * step :][:stride] = factor
        new[f"{which}_off"] = torch.where(offs < 0, offs, offs + FAR)
        new[f"{which}_stride"] = torch.where(strides > 0, step, 0)
    return inputs | {"tables": dataclasses.replace(tables, **new)}


def move_experts(inputs: Inputs) -> Inputs:
    """The chosen experts come last."""
    held: ExpertWeights = inputs["experts"]
    main = held.packed.words if held.packed is not None else held._rows
    _, num_before = at_the_end(main)

    def move(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        far = far_empty(num_before + len(x), *x.shape[1:], dtype=x.dtype)
        far[num_before:] = x
        return far

    packed = held.packed
    if packed is not None:
        names = ("words", "scales", "tails", "tail_scales")
        packed = dataclasses.replace(packed, **{n: move(getattr(packed, n)) for n in names})
    moved = ExpertWeights(
        move(held.weight), move(held.blocks), move(held.scales), move(held.bias), packed
    )
    ids, block_m = inputs["ids"] + num_before, inputs["work"].block_m
    work = build_worklist(ids, None, moved.num_experts, 0, block_m)
    return inputs | {"experts": moved, "ids": ids, "work": work}


def small_case(op: str, name: str) -> Case:
    return next(case for case in OPS[op].cases() if case.name == name)


Move = Callable[[Inputs], Inputs]
MOVES: list[tuple[str, str, Move]] = [
    ("paged_attention", "mixed_d64", move_caches),
    ("rope_kv_write", "t7_q10_k2_d64_skip3", move_caches),
    ("mla_attention", "mixed", move_caches),
    ("mla_kv_write", "t7_q9_r40_d12_skip3_halves", move_caches),
    ("moe_lora", "down_odd", move_adapters),
    ("moe_lora", "decode_down_odd", move_adapters),
    ("lora_gated_act", "odd", move_adapters),
    ("embedding_lora", "odd", move_adapters),
    ("mla_query_lora", "odd", move_adapters),
    ("mla_value_lora", "tiles", move_adapters),
    ("moe_down", "bias_odd", move_experts),
    ("moe_down", "mxfp4_odd", move_experts),
    ("moe_gate_up", "packed_crowded", move_experts),
]
# Other forms of kernels that are tried above.
MORE: list[tuple[str, str, Move]] = [
    ("paged_attention", "decode_captured", move_caches),
    ("mla_attention", "decode_split", move_caches),
    ("dense_lora_multi", "odd", move_adapters),
    ("dense_lora_multi", "single_odd", move_adapters),
]
CHECKS = [
    pytest.param(*check, id="-".join(check[:2]), marks=[pytest.mark.slow] if slow else [])
    for some, slow in ((MOVES, False), (MORE, True))
    for check in some
]


def far_equals_near(op: Op, case: Case, move: Move) -> None:
    inputs = case.make("cpu", torch.float32, 7)
    want = outputs_of(op, op.run, copy_of(inputs))
    got = outputs_of(op, op.run, move(inputs))
    for x, y in zip(got, want, strict=True):
        assert_fp32_close(x[-len(y) :], y)


@pytest.mark.interp
@pytest.mark.parametrize(("op", "name", "move"), CHECKS)
def test_what_lies_far_is_found(op: str, name: str, move: Move) -> None:
    far_equals_near(OPS[op], small_case(op, name), move)


@pytest.mark.interp
def test_an_offset_of_32_bits_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "other=0).to(tl.int64)  # [N]"
    bad = mutant("paged_attention_triton", {line: "other=0)"}, tmp_path)
    for name in ("decode", "prefill"):
        monkeypatch.setattr(kernels.paged_attention, name, getattr(bad, name))
    case = small_case("paged_attention", "mixed_d64")
    with pytest.raises(AssertionError):
        far_equals_near(OPS["paged_attention"], case, move_caches)
