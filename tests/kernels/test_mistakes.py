"""Mistakes that are known from public kernels for many adapters on a mixture of experts: each one
is a test, and each test names the line whose reversal makes it fail (`MISTAKES` below).

Checks run in the interpreter and on a GPU; where a column says otherwise, only there.

 no  mistake                                            check                       reversed in
  1  an index past the end is token 0, not no token     worklists                   moe_gate
  2  sorts and grids forget the base or a slot          worklists, four_operations  moe_gate,
                                                                                    fused_moe_lora
  3  two places compute a padded size apart             splits                      paged_attention_
                                                                                    triton
  4  operands cast to bf16 whatever the adapter's type  four_operations             fused_moe_lora
  5  buffers of unused entries are left unwritten       worklists_in_old_memory     moe_gate
  6  expert -1 or E lands in another adapter's rows     worklists, decode_kernels   moe_gate,
                                                                                    lora_decode
  7  a token-to-slot map of the step before             tests/model_runner/test_poison.py, and
                                                        test_poison_at_speed.py on a GPU
  8  a captured graph keeps the number of adapters      graphs_follow (GPU)         fused_moe_lora,
                                                                                    lora_decode
  9  rows in sorted order where pair order is meant     four_operations, products   fused_moe_lora,
                                                                                    fused_moe
 10  the router weight twice, or not on the input       four_operations,            fused_moe_lora,
                                                        decode_kernels,             lora_decode
                                                        weighted_inputs
 11  rank lanes past the adapter's own rank             four_operations,            fused_moe_lora,
                                                        decode_kernels              lora_decode
 12  a sort that holds too many experts at once         many_groups                 moe_gate
 13  LoRA reads the base's quantised activation         test_lora_reads_what_no_    layers/mlp.py
                                                        quantisation_touched
 14  dependent launches where no device knows them      test_no_dependent_launch_   lora_decode
                                                        without_the_probe (CPU: compiled for sm_80)
 15  a rank above a kernel's limit, found by a request  large_ranks                 lora_decode
 16  a worklist that can overflow                       worklists                   moe_gate
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import kernels.dense_lora
import kernels.fused_moe
import kernels.fused_moe_lora
import kernels.lora_decode
import kernels.moe_gate
import kernels.paged_attention
import kernels.paged_attention_triton
from kernels.fused_moe import ExpertWeights, random_experts
from kernels.fused_moe_lora import random_tables
from kernels.gated_act import gated_act_reference
from kernels.lora_tables import LoraTables
from kernels.moe_gate import build_worklist, moe_gate_reference
from kernels.mxfp4_packed import unpack_mxfp4
from model_runner.layers.linear import Linear
from model_runner.layers.mlp import MoeMlp
from tests.guards import take_out
from tests.kernels.aot import ptx_of
from tests.kernels.mutant import mutant
from tests.kernels.test_dense_lora import dense_delta as linear_delta
from tests.kernels.test_fused_moe import products_hold
from tests.kernels.test_fused_moe_lora import RANKS, E, K, batch, deltas_hold, tables_of
from tests.kernels.test_fused_moe_lora import dense_delta as expert_delta
from tests.kernels.test_lora_decode import SMALL
from tests.kernels.test_lora_decode import deltas_hold as decode_deltas_hold
from tests.kernels.test_moe_gate import check_worklist, worklists_hold
from tests.kernels.test_paged_attention_guards import SPLIT, rows_hold

devices = pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.interp), pytest.param("cuda", marks=pytest.mark.gpu)],
)
OWN = SimpleNamespace(
    moe_gate=kernels.moe_gate,
    fused_moe=kernels.fused_moe,
    fused_moe_lora=kernels.fused_moe_lora,
    lora_decode=kernels.lora_decode,
    paged_attention_triton=kernels.paged_attention_triton,
)
# What a broken kernel writes past the end must hurt nobody else in this process. And the memory
# is old: it holds sevens.
ROOM = {
    "some.new_empty(num_rows, dtype=torch.int32)": (
        "some.new_full((num_rows + 9999,), 7, dtype=torch.int32)[:num_rows]"
    ),
    "some.new_empty(num_segments, 4, dtype=torch.int32)": (
        "some.new_full((num_segments + 999, 4), 7, dtype=torch.int32)[:num_segments]"
    ),
}

Check = Callable[[SimpleNamespace, str], None]


def worklists(k: SimpleNamespace, device: str) -> None:
    worklists_hold(k.moe_gate, (5,), device)


def long_worklists(k: SimpleNamespace, device: str) -> None:
    worklists_hold(k.moe_gate, (65,), device)


def four_operations(k: SimpleNamespace, device: str) -> None:
    deltas_hold(k.fused_moe_lora, 9, device=device)


def decode_kernels(k: SimpleNamespace, device: str) -> None:
    decode_deltas_hold(k.lora_decode, 9, device=device)


def products(k: SimpleNamespace, device: str) -> None:
    products_hold(k.fused_moe, "dense", 3, device)


def splits(k: SimpleNamespace, device: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels.paged_attention, "decode", k.paged_attention_triton.decode)
        rows_hold(SPLIT, 0, float("nan"), device)


def weighted_inputs(k: SimpleNamespace, device: str) -> None:
    """As Llama 4 routes: the weight is on the input, and on nothing after it."""
    tables, b = tables_of(device=device), batch(6, True, device=device)
    x = b["x"] * b["weights"].reshape(-1, 1)  # [N, in]
    work = build_worklist(b["ids"], b["slots"], E, len(RANKS), 16)
    by_four, by_decode = b["y"].clone(), b["y"].clone()
    k.fused_moe_lora.moe_lora(by_four, x, tables, 0, b["ids"], b["slots"], work, True, None)
    k.lora_decode.add_pairs(by_decode, x, tables, 0, b["ids"], b["slots"], E, True, None, SMALL)
    for got in (by_four, by_decode):
        for pair in range(6 * K):
            slot, expert = int(b["slots"][pair // K]), int(b["ids"].flatten()[pair])
            delta = expert_delta(tables, 0, slot, expert)
            want = b["y"][pair].double()
            if delta is not None:
                want = want + delta @ x[pair].double()
            assert torch.allclose(got[pair].double(), want, rtol=1e-5, atol=1e-5), pair


def many_groups(k: SimpleNamespace, device: str) -> None:
    """512 experts and 4096 slots: two million groups, more than any tile holds."""
    g = torch.Generator().manual_seed(0)
    ids = torch.rand(100, 512, generator=g).argsort(-1)[:, :2].int().to(device)
    slots = torch.randint(-1, 4096, (100,), generator=g).int().to(device)
    work = k.moe_gate.build_worklist(ids, slots, 512, 4096, 16)
    check_worklist(work, ids, slots, 512, 4096)


def large_ranks(k: SimpleNamespace, device: str) -> None:
    """The engine asks once for its limit, and goes another way: no request finds out."""
    tables = random_tables([(1, 24, 16)], [72], 72, device, torch.float32, 0)
    slots = torch.zeros(2, dtype=torch.int32, device=device)
    x = torch.randn(2, 24, generator=torch.Generator().manual_seed(1)).to(device)
    y = torch.zeros(2, 16, device=device)
    few = k.lora_decode.tokens_suffice(2, tables)
    work = None if few else build_worklist(None, slots, 1, 1, 16)
    kernels.dense_lora.dense_lora(y, x, tables, 0, slots, work)
    delta = linear_delta(tables, 0, 0, 24, 16)
    assert delta is not None and torch.allclose(y.double(), x.double() @ delta, atol=1e-5)


class Mistake(NamedTuple):
    """file's `old` replaced by `new`: the check must fail with `error` (what Triton raises is
    wrapped differently in the interpreter and on a GPU)."""

    check: Check
    file: str
    old: str
    new: str
    error: type[Exception] = AssertionError


COMBINE = (
    "size = _blocks_per_split(num_keys, num_splits, BLOCK_N, MIN_BLOCKS) * BLOCK_N\n    split ="
)
CAPACITY = "(num_rows + min(num_groups, num_rows) * (block_m - 1)) // block_m"
MISTAKES = {
    "1": Mistake(worklists, "moe_gate", "other=-1)", "other=0)"),
    "2-base": Mistake(worklists, "moe_gate", "(slot >= 0) & ", ""),
    "2-every-slot": Mistake(worklists, "moe_gate", "& (slot < num_slots)",
                            "& (slot < num_slots - 1)"),
    "2-rows": Mistake(four_operations, "fused_moe_lora", "live = m < count",
                      "live = m < tl.minimum(BLOCK_M // 2, num_rows - tl.load(segment + 2))"),
    "3": Mistake(splits, "paged_attention_triton", COMBINE,
                 COMBINE.replace("* BLOCK_N", "* BLOCK_N * 2")),
    "4": Mistake(four_operations, "fused_moe_lora", "tl.dot(z.to(b.dtype), b, acc",
                 "tl.dot(z.to(tl.bfloat16).to(tl.float32), b, acc"),
    "5-short": Mistake(worklists, "moe_gate", "value, mask=mask)",
                       "value, mask=mask & (spare < 0))"),
    "5-long": Mistake(long_worklists, "moe_gate", "tl.where(unused, 0, left)", "left"),
    "6-none": Mistake(worklists, "moe_gate", "(expert >= 0) & ", ""),
    "6-shared": Mistake(worklists, "moe_gate", "(expert < num_experts) & ", ""),
    "6-none-decode": Mistake(decode_kernels, "lora_decode", "(expert >= 0) &", ""),
    "6-shared-decode": Mistake(decode_kernels, "lora_decode", "& (expert < num_experts)", ""),
    "9": Mistake(four_operations, "fused_moe_lora",
                 "row = tl.load(rows_ptr + tl.load(segment + 2) + m, mask=live, other=0)",
                 "row = tl.load(segment + 2) + m"),
    "9-base": Mistake(products, "fused_moe", "y_ptr + row[:, None]",
                      "y_ptr + (first + m)[:, None]"),
    "10-twice": Mistake(four_operations, "fused_moe_lora", "acc *= tl.load(weights_ptr",
                        "acc *= 0.5 + tl.load(weights_ptr"),
    "10-twice-decode": Mistake(decode_kernels, "lora_decode", "acc *= weight",
                               "acc *= 0.5 + weight"),
    "10-input": Mistake(weighted_inputs, "fused_moe_lora", "WEIGHTED=weights is not None",
                        "WEIGHTED=True"),
    "10-input-decode": Mistake(weighted_inputs, "lora_decode", "WEIGHTED=weights is not None",
                               "WEIGHTED=True"),
    "11": Mistake(four_operations, "fused_moe_lora", "r_live = r < rank", "r_live = r < max_rank"),
    "11-decode": Mistake(decode_kernels, "lora_decode", "r_live = r < rank",
                         "r_live = r < max_rank"),
    "12": Mistake(many_groups, "moe_gate", "(num_rows > SORT_ROWS and num_groups > SCATTER_GROUPS)",
                  "False", Exception),
    "15": Mistake(large_ranks, "lora_decode", "_TOKENS and tables.max_rank <= MAX_RANK", "_TOKENS"),
    "16": Mistake(worklists, "moe_gate", CAPACITY, "num_rows // block_m + 1"),
}  # fmt: skip
CHECKS = list(dict.fromkeys(m.check for m in MISTAKES.values()))


@devices
@pytest.mark.parametrize("check", CHECKS)
def test_it_is_not_made(check: Check, device: str) -> None:
    check(OWN, device)


@devices
@pytest.mark.parametrize("name", MISTAKES)
def test_made_it_is_found(name: str, device: str, tmp_path: Path) -> None:
    check, file, old, new, error = MISTAKES[name]
    room = ROOM if file == "moe_gate" else {}
    bad = mutant(file, room | {old: new}, tmp_path)
    with pytest.raises(error):
        check(SimpleNamespace(**{**vars(OWN), file: bad}), device)


@devices
def test_the_room_given_to_mutants_is_no_fault_of_theirs(device: str, tmp_path: Path) -> None:
    roomy = mutant("moe_gate", ROOM, tmp_path)
    worklists(SimpleNamespace(**{**vars(OWN), "moe_gate": roomy}), device)


# 8: a captured graph


def graphs_follow(module: Any, path: str) -> list[bool]:
    """Captured with one adapter active; is each replay what an eager call gives? First with that
    one, then with all of them and the base."""
    tables, b = tables_of(device="cuda"), batch(10, False, device="cuda")
    b["ids"], b["slots"] = torch.zeros_like(b["ids"][:, :1]), torch.full_like(b["slots"], -1)
    b["slots"][0] = 1
    y = b["y"][:10].clone()

    def call(module: Any, y: Tensor) -> Tensor:
        y.copy_(b["y"][:10])
        if path == "decode":
            module.add_pairs(y, b["x"], tables, 0, b["ids"], b["slots"], E, False, None, SMALL)
        else:
            work = build_worklist(b["ids"], b["slots"], E, len(RANKS), 16)
            module.add_lora((y,), b["x"], tables, (0,), work, 1, None, False)
        return y

    call(module, y)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(module, y)
    own, found = getattr(OWN, "lora_decode" if path == "decode" else "fused_moe_lora"), []
    for slots, ids in ((b["slots"].clone(), 0), ([-1, 0, 1, 2, 3, 4, 0, 1, 3, 4], 1)):
        b["slots"].copy_(torch.as_tensor(slots))
        b["ids"].copy_(torch.arange(10, device="cuda")[:, None] % (1 + 3 * ids))
        graph.replay()
        want = call(own, torch.empty_like(y))
        found.append(torch.allclose(y, want, rtol=1e-5, atol=1e-5))
    assert not torch.equal(want, b["y"][:10])
    return found


FROZEN = {  # path: (file, line, what the captured batch needed)
    "decode": ("lora_decode", "_shrink_kernel[(num_rows * splits, num_targets)]",
               "_shrink_kernel[(1 * splits, num_targets)]"),
    "four_operations": ("fused_moe_lora", "_expand_kernel[(num_segments * ",
                        "_expand_kernel[(1 * "),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("path", FROZEN)
def test_a_captured_graph_serves_whatever_adapters_come(path: str, tmp_path: Path) -> None:
    file, old, new = FROZEN[path]
    assert graphs_follow(getattr(OWN, file), path) == [True, True]
    assert graphs_follow(mutant(file, {old: new}, tmp_path), path) == [True, False]


# 13: a quantised base


def lora_reads_the_full_activation(device: str) -> None:
    """A MoE layer over MXFP4 experts against fp64: within 1 % of its length.

    In bf16 about eight values on the way are rounded, each by 2^-9 of itself at most and 2^-9 /
    sqrt(3) on average: 0.9 % if all added up one way. Eighths of the activation instead, as an
    eight-bit integer would hold it, make over 3 % where the adapter's part is the larger one.
    """
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tokens, experts, top_k = 3, 4, 2
    hidden = inner = 128 if device == "cuda" else 64  # the interpreter is slow
    g = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden, generator=g).to(device, dtype)
    gate = torch.randn(experts, hidden, generator=g).to(device, dtype)
    gate_up = random_experts(experts, 2 * inner, hidden, "packed", device, dtype, 1)
    down = random_experts(experts, hidden, inner, "packed", device, dtype, 2)
    shapes = [(experts, hidden, 2 * inner), (experts, inner, hidden)]
    tables = random_tables(shapes, [8, 16], 16, device, dtype, 3)
    tables.memory.mul_(2)  # so the adapters' part is four times as long
    slots = torch.tensor([1, -1, 0], dtype=torch.int32, device=device)
    mlp = MoeMlp(Linear(gate), gate_up, down, experts, top_k, True, "silu", 0, 1)
    ctx: Any = SimpleNamespace(
        lora=tables, slot_of_token=slots, slot_work=None, experts_hit=None, deterministic=False,
        seldom_lora=True,
    )  # fmt: skip
    got = mlp(x, ctx).double().cpu()
    weights, ids = moe_gate_reference(torch.nn.functional.linear(x, gate), top_k, True)
    for token in range(tokens):
        want = torch.zeros(hidden, dtype=torch.float64)
        for weight, expert in zip(weights[token].tolist(), ids[token].tolist(), strict=True):
            slot = int(slots[token])
            up = _effective(gate_up, tables, 0, slot, expert) @ x[token].double().cpu()
            up += _bias(gate_up, expert)
            h = gated_act_reference(up[None].float(), "silu")[0].double()
            out = _effective(down, tables, 1, slot, expert) @ h + _bias(down, expert)
            want += weight * out
        error = float((got[token] - want).norm() / want.norm())
        assert error < (0.01 if dtype == torch.bfloat16 else 1e-5), (token, error)


def _effective(
    experts: ExpertWeights, tables: LoraTables, target: int, slot: int, expert: int
) -> Tensor:
    """The expert's weight with its adapter merged in, [out, in] fp64."""
    assert experts.packed is not None
    weight = unpack_mxfp4(experts.packed, torch.float32)[expert].double().cpu()
    if slot < 0:
        return weight
    out, in_ = weight.shape
    rank = int(tables.lora_rank[target, slot])
    factors = []
    for off, stride, width in (
        (tables.a_off, tables.a_stride, in_),
        (tables.b_off, tables.b_stride, out),
    ):
        start = int(off[target, slot]) + expert * int(stride[target, slot])
        factors.append(tables.memory[start : start + rank * width].view(rank, width).double().cpu())
    return weight + factors[1].t() @ factors[0]


def _bias(experts: ExpertWeights, expert: int) -> Tensor:
    assert experts.bias is not None
    return experts.bias[expert].double().cpu()


@devices
def test_lora_reads_what_no_quantisation_touched(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora_reads_the_full_activation(device)
    line = "y, x, lora, self.gate_up_target"
    quantised = "y, (x * 8).round() / 8, lora, self.gate_up_target"
    take_out(monkeypatch, MoeMlp, "__call__", line, quantised)
    with pytest.raises(AssertionError):
        lora_reads_the_full_activation(device)


# 14: programmatic dependent launches


def no_dependent_launch_before_hopper(module: Any, capability: int) -> None:
    """What is launched on a device of this capability compiles for it and knows no such launch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device: divmod(capability, 10))
        overlap = module.can_overlap.__wrapped__(torch.device("cuda"))
    assert overlap == (capability >= 90)
    for spec in module.aot_specs("probe", 2, 64, (64,), 16, 0, 1, False):
        spec = dataclasses.replace(spec, constexprs=spec.constexprs | {"OVERLAP": overlap})
        assert ("griddepcontrol" in ptx_of(spec, capability)) == overlap, spec.name


def test_no_dependent_launch_without_the_probe(tmp_path: Path) -> None:
    for capability in (80, 90):
        no_dependent_launch_before_hopper(kernels.lora_decode, capability)
    line = "torch.cuda.get_device_capability(device)[0] >= 9"
    bad = mutant("lora_decode", {line: line.replace(">= 9", ">= 0")}, tmp_path)
    with pytest.raises(AssertionError):
        no_dependent_launch_before_hopper(bad, 80)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_launch_says_so_only_where_it_may(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other backends refuse the option itself."""
    told: dict[str, dict[str, Any]] = {}

    class Recorder:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *args, **options: told.update({self.name: options})

    for name in ("_shrink_kernel", "_expand_kernel"):
        monkeypatch.setattr(kernels.lora_decode, name, Recorder(name))
    tables, x, y = tables_of(), torch.zeros(2, 45), torch.zeros(2, 50)
    slots = torch.zeros(2, dtype=torch.int32)
    kernels.lora_decode.add_rows((y,), x, tables, (0,), slots, SMALL, overlap)
    assert told["_expand_kernel"].get("launch_pdl", False) is overlap
    assert "launch_pdl" not in told["_shrink_kernel"]
    assert all(options["OVERLAP"] is overlap for options in told.values())


@pytest.mark.gpu
def test_a_dependent_launch_changes_no_bit() -> None:
    tables, b = tables_of(device="cuda"), batch(9, True, device="cuda")
    found = []
    for overlap in (False, True):
        y = b["y"].clone()
        kernels.lora_decode.add_pairs(
            y, b["x"], tables, 0, b["ids"], b["slots"], E, True, b["weights"], SMALL, overlap
        )
        found.append(y)
    assert torch.equal(*found) and not torch.equal(found[0], b["y"])
