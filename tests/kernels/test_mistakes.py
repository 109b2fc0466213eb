"""Mistakes that are known from public kernels for many adapters on a mixture of experts: each one
is a test, and each test names the line whose reversal makes it fail (`MISTAKES` below).

Checks run in the interpreter and on a GPU, `starts` on a CPU.

 no  mistake                                            check                       reversed in
  1  an index past the end is token 0, not no token     worklists, routes, places   worklist,
                                                                                    moe_route,
                                                                                    rope_kv
  2  sorts and grids forget the base or a slot          worklists, four_operations, worklist,
                                                        decode_kernels, activations fused_moe_lora,
                                                                                    lora_decode
  3  two places compute a padded size apart             splits, linears             paged_attention_
                                                                                    triton,
                                                                                    skinny_linear
  4  operands cast to bf16 whatever the adapter's type  four_operations,            fused_moe_lora,
                                                        decode_kernels, activations lora_decode,
                                                                                    lora_gated_act
  5  buffers of unused entries are left unwritten       worklists, long_worklists,  worklist,
                                                        routes, linears             moe_route,
                                                                                    skinny_linear
  6  expert -1 or E lands in another adapter's rows     worklists, decode_kernels,  worklist,
                                                        activations                 lora_decode
  7  a token-to-slot map of the step before             tests/model_runner/test_poison.py, and
                                                        test_poison_at_speed.py on a GPU
  8  a captured graph keeps the number of adapters      test_frozen_graphs.py (GPU)
  9  rows in sorted order where pair order is meant     four_operations, products,  fused_moe_lora,
                                                        routes, sums                fused_moe, norm,
                                                                                    moe_route
 10  the router weight twice, or not on the input       four_operations,            fused_moe_lora,
                                                        decode_kernels,             lora_decode
                                                        weighted_inputs
 11  rank lanes past the adapter's own rank             four_operations,            fused_moe_lora,
                                                        decode_kernels,             lora_decode,
                                                        activations                 lora_gated_act
 12  a sort that holds too many experts at once         many_groups, many_choices   worklist,
                                                                                    moe_route
 13  LoRA reads the base's quantised activation         test_full_activation.py
 14  dependent launches where no device knows them      test_launch_options.py
 15  a rank above a kernel's limit, found by a request  large_ranks, starts         lora_decode,
                                                                                    tiling
 16  a worklist that can overflow                       worklists, routes           worklist
"""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch

import kernels.dense_lora
import kernels.fused_moe
import kernels.fused_moe_lora
import kernels.lora_decode
import kernels.lora_gated_act
import kernels.moe_route
import kernels.norm
import kernels.paged_attention
import kernels.paged_attention_triton
import kernels.rope_kv
import kernels.skinny_linear
import kernels.worklist
import model_runner.assembly
from kernels.fused_moe_lora import random_tables
from kernels.tiling import MAX_LORA_RANK
from kernels.worklist import build_worklist
from tests.guards import take_out
from tests.kernels.mutant import mutant
from tests.kernels.test_dense_lora import dense_delta as linear_delta
from tests.kernels.test_fused_moe import products_hold
from tests.kernels.test_fused_moe_lora import RANKS, E, K, batch, deltas_hold, tables_of
from tests.kernels.test_fused_moe_lora import dense_delta as expert_delta
from tests.kernels.test_lora_decode import SMALL
from tests.kernels.test_lora_decode import deltas_hold as decode_deltas_hold
from tests.kernels.test_lora_gated_act import ROOM as ACTIVATION_ROOM
from tests.kernels.test_lora_gated_act import rows_hold as activations_hold
from tests.kernels.test_moe_route import ROOM as ROUTE_ROOM
from tests.kernels.test_moe_route import routes_hold
from tests.kernels.test_paged_attention_guards import SPLIT, padding_writes_nowhere, rows_hold
from tests.kernels.test_skinny_linear import products_hold as linears_hold
from tests.kernels.test_worklist import check_worklist, worklists_hold
from tests.model_runner.speed_world import engine_of, make_folders

devices = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=[pytest.mark.interp, pytest.mark.slow]),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
OWN = SimpleNamespace(
    worklist=kernels.worklist,
    fused_moe=kernels.fused_moe,
    fused_moe_lora=kernels.fused_moe_lora,
    lora_decode=kernels.lora_decode,
    lora_gated_act=kernels.lora_gated_act,
    moe_route=kernels.moe_route,
    norm=kernels.norm,
    rope_kv=kernels.rope_kv,
    skinny_linear=kernels.skinny_linear,
    paged_attention_triton=kernels.paged_attention_triton,
)
# What a broken kernel writes past the end must hurt nobody else in this process. And the memory
# is old: it holds sevens.
WORKLIST_ROOM = {
    "some.new_empty(num_rows, dtype=torch.int32)": (
        "some.new_full((num_rows + 9999,), 7, dtype=torch.int32)[:num_rows]"
    ),
    "some.new_empty(num_segments, 4, dtype=torch.int32)": (
        "some.new_full((num_segments + 999, 4), 7, dtype=torch.int32)[:num_segments]"
    ),
}
ROOM = {
    "worklist": WORKLIST_ROOM, "moe_route": ROUTE_ROOM, "lora_gated_act": ACTIVATION_ROOM,
}  # fmt: skip
# Who has a mutant's functions inside: a mutant too, built on that one.
USERS = {"worklist": "moe_route", "lora_decode": "lora_gated_act"}

Check = Callable[[SimpleNamespace, str], None]


def worklists(k: SimpleNamespace, device: str) -> None:
    worklists_hold(k.worklist, (5,), device)


def long_worklists(k: SimpleNamespace, device: str) -> None:
    worklists_hold(k.worklist, (65,), device)


def four_operations(k: SimpleNamespace, device: str) -> None:
    deltas_hold(k.fused_moe_lora, 9, device=device)


def decode_kernels(k: SimpleNamespace, device: str) -> None:
    decode_deltas_hold(k.lora_decode, 9, device=device)


def activations(k: SimpleNamespace, device: str) -> None:
    activations_hold(k.lora_gated_act, device=device)


def routes(k: SimpleNamespace, device: str) -> None:
    routes_hold(k.moe_route, device)


def linears(k: SimpleNamespace, device: str) -> None:
    """New memory holds NaN: what nobody wrote is not what was there by chance."""
    torch.use_deterministic_algorithms(True)
    try:
        linears_hold(k.skinny_linear, device)
    finally:
        torch.use_deterministic_algorithms(False)


def places(k: SimpleNamespace, device: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels.rope_kv, "rope_kv_write", k.rope_kv.rope_kv_write)
        padding_writes_nowhere(float("nan"), device)


def sums(k: SimpleNamespace, device: str) -> None:
    """The norm behind the experts adds the rows t·K + k of token t."""
    more = torch.randn(20 * K, 37, generator=torch.Generator().manual_seed(0)).to(device)
    x = more[: 5 * K]  # [T·K, H]
    residual = torch.zeros(5, 37, device=device)  # [T, H]
    k.norm.add_rms_norm(x, residual, torch.ones(37, device=device), 1e-5)
    assert torch.allclose(residual, x.view(5, K, 37).sum(1), rtol=1e-6, atol=1e-6)


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
    work = k.worklist.build_worklist(ids, slots, 512, 4096, 16)
    check_worklist(work, ids, slots, 512, 4096)


def many_choices(k: SimpleNamespace, device: str) -> None:
    """129 tokens of 5000 experts: two million places, more than one program may have."""
    g = torch.Generator().manual_seed(0)
    logits = torch.rand(129, 5000, generator=g)  # [T, E]
    _, ids, work = k.moe_route.moe_route(logits.to(device), 1, True, 16)
    assert torch.equal(ids.cpu().long(), logits.topk(1).indices)
    check_worklist(work, ids, None, 5000, 0)


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
    assert delta is not None
    want = (x.double() @ delta).cpu()
    assert torch.allclose(y.cpu().double(), want, atol=1e-5)
    ids, y = torch.zeros(2, 1, dtype=torch.int32, device=device), torch.zeros_like(y)
    if k.lora_decode.pairs_suffice(2, tables):
        kernels.lora_gated_act.lora_gated_act(y, x, tables, 0, ids, slots, 1, "silu")
    work = build_worklist(ids, slots, 1, 1, 16)
    kernels.fused_moe_lora.moe_lora(y, x, tables, 0, ids, slots, work, False, None)
    assert torch.allclose(y.cpu().double(), want, atol=1e-5)


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
    "1": Mistake(worklists, "worklist", "other=-1)", "other=0)"),
    "1-choice": Mistake(routes, "moe_route", "(token < num_tokens) & ", ""),
    "1-keys": Mistake(places, "rope_kv", "elif place >= 0:", "elif place >= -1:"),
    "2-base": Mistake(worklists, "worklist", "(slot >= 0) & ", ""),
    "2-every-slot": Mistake(worklists, "worklist", "& (slot < num_slots)",
                            "& (slot < num_slots - 1)"),
    "2-base-decode": Mistake(decode_kernels, "lora_decode", "(slot >= 0) & ", ""),
    "2-every-slot-decode": Mistake(decode_kernels, "lora_decode", "& (slot < num_slots)",
                                   "& (slot < num_slots - 1)"),
    "2-base-activation": Mistake(activations, "lora_decode", "(slot >= 0) & ", ""),
    "2-every-slot-activation": Mistake(activations, "lora_decode", "& (slot < num_slots)",
                                       "& (slot < num_slots - 1)"),
    "2-rows": Mistake(four_operations, "fused_moe_lora", "live = m < count",
                      "live = m < tl.minimum(BLOCK_M // 2, num_rows - tl.load(segment + 2))"),
    "3": Mistake(splits, "paged_attention_triton", COMBINE,
                 COMBINE.replace("* BLOCK_N", "* BLOCK_N * 2")),
    "3-linear": Mistake(linears, "skinny_linear", "tl.cdiv(num_chunks, SPLIT_K)",
                        "num_chunks // SPLIT_K"),
    "4": Mistake(four_operations, "fused_moe_lora", "tl.dot(z.to(b.dtype), b, acc",
                 "tl.dot(z.to(tl.bfloat16).to(tl.float32), b, acc"),
    "4-decode": Mistake(decode_kernels, "lora_decode", "x.to(tl.float32)[None, :]",
                        "x.to(tl.bfloat16).to(tl.float32)[None, :]"),
    "4-decode-expand": Mistake(decode_kernels, "lora_decode", "tl.sum(z[:, None] *",
                               "tl.sum(z.to(tl.bfloat16).to(tl.float32)[:, None] *"),
    "4-activation-shrink": Mistake(activations, "lora_decode", "x.to(tl.float32)[None, :]",
                                   "x.to(tl.bfloat16).to(tl.float32)[None, :]"),
    "4-activation": Mistake(activations, "lora_gated_act", "tl.sum(z[:, None] *",
                            "tl.sum(z.to(tl.bfloat16).to(tl.float32)[:, None] *"),
    "5-short": Mistake(worklists, "worklist", "value, mask=mask)",
                       "value, mask=mask & (spare < 0))"),
    "5-long": Mistake(long_worklists, "worklist", "tl.where(unused, 0, left)", "left"),
    "5-choice": Mistake(routes, "moe_route", "range(total, num_segments",
                        "range(total + 1, num_segments"),
    "5-counters": Mistake(linears, "skinny_linear", "tl.store(counters_ptr + pid_n, 0)", "pass"),
    "6-none": Mistake(worklists, "worklist", "(expert >= 0) & ", ""),
    "6-shared": Mistake(worklists, "worklist", "(expert < num_experts) & ", ""),
    "6-none-decode": Mistake(decode_kernels, "lora_decode", "(expert >= 0) &", ""),
    "6-shared-decode": Mistake(decode_kernels, "lora_decode", "& (expert < num_experts)", ""),
    "6-none-activation": Mistake(activations, "lora_decode", "(expert >= 0) &", ""),
    "6-shared-activation": Mistake(activations, "lora_decode", "& (expert < num_experts)", ""),
    "9": Mistake(four_operations, "fused_moe_lora",
                 "row = tl.load(rows_ptr + tl.load(segment + 2) + m, mask=live, other=0)",
                 "row = tl.load(segment + 2) + m"),
    "9-base": Mistake(products, "fused_moe", "y_ptr + row[:, None]",
                      "y_ptr + (first + m)[:, None]"),
    "9-choice": Mistake(routes, "moe_route", "row = token * TOP_K + place",
                        "row = place * num_tokens + token"),
    "9-sum": Mistake(sums, "norm", "part * stride_t", "part * stride_t * num_rows"),
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
    "11-activation": Mistake(activations, "lora_gated_act", "(r < rank) & adapted",
                             "(r < max_rank) & adapted"),
    "12-choice": Mistake(many_choices, "moe_route", "cells > MAX_CELLS", "cells < 0", Exception),
    "12": Mistake(many_groups, "worklist", "(num_rows > SORT_ROWS and num_groups > SCATTER_GROUPS)",
                  "False", Exception),
    "15": Mistake(large_ranks, "lora_decode", "_TOKENS, tables.max_rank", "_TOKENS, MAX_RANK"),
    "15-pairs": Mistake(large_ranks, "lora_decode", "_PAIRS, tables.max_rank", "_PAIRS, MAX_RANK"),
    "16-choice": Mistake(routes, "worklist", CAPACITY, "num_rows // block_m + 1"),
    "16": Mistake(worklists, "worklist", CAPACITY, "num_rows // block_m + 1"),
}  # fmt: skip
CHECKS = list(dict.fromkeys(m.check for m in MISTAKES.values()))


def with_users(file: str, module: ModuleType, folder: Path) -> SimpleNamespace:
    """`OWN` with this module in the place of the file's, also for those who take from it."""
    found = {**vars(OWN), file: module}
    if user := USERS.get(file):
        found[user] = mutant(user, ROOM[user], folder, on=module)
    return SimpleNamespace(**found)


@devices
@pytest.mark.parametrize("check", CHECKS)
def test_it_is_not_made(check: Check, device: str) -> None:
    check(OWN, device)


@devices
@pytest.mark.parametrize("name", MISTAKES)
def test_made_it_is_found(name: str, device: str, tmp_path: Path) -> None:
    check, file, old, new, error = MISTAKES[name]
    broken = with_users(file, mutant(file, ROOM.get(file, {}) | {old: new}, tmp_path), tmp_path)
    with pytest.raises(error):
        check(broken, device)


@devices
@pytest.mark.parametrize(
    ("file", "check"),
    [("worklist", worklists), ("worklist", routes), ("moe_route", routes),
     ("lora_gated_act", activations), ("lora_decode", activations)],
)  # fmt: skip
def test_what_is_done_to_all_mutants_is_no_fault_of_theirs(
    file: str, check: Check, device: str, tmp_path: Path
) -> None:
    check(with_users(file, mutant(file, ROOM.get(file, {}), tmp_path), tmp_path), device)


def starts(max_lora_rank: int, folder: Path) -> None:
    """An engine, and its adapters loaded."""
    with engine_of(make_folders(folder), "cpu", max_lora_rank=max_lora_rank):
        pass


def test_a_rank_above_the_limit_is_refused_at_start(tmp_path: Path, monkeypatch) -> None:
    """Without the line in tiling.py's `check_start` nobody minds before a request does."""
    folders = [tmp_path / name for name in ("most", "more", "unchecked")]
    for folder in folders:
        folder.mkdir()
    starts(MAX_LORA_RANK, folders[0])
    with pytest.raises(ValueError, match=f"max_lora_rank {MAX_LORA_RANK + 8} is above"):
        starts(MAX_LORA_RANK + 8, folders[1])
    line = "max_lora_rank > MAX_LORA_RANK"
    take_out(monkeypatch, model_runner.assembly, "check_start", line, "False")
    starts(MAX_LORA_RANK + 8, folders[2])
