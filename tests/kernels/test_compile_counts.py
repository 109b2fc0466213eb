"""One compilation serves all lengths: fifty token counts after a warm-up need no new kernel.

The warm-up is that of a serving process: every power of two (the largest alone where no tile
follows the length). On a CPU it is counted what launches would compile (Triton's own keys, nothing
is launched); on a GPU what was compiled. Each file is also tried with its `do_not_specialize` taken
out, where the same count must find new kernels.
"""

import importlib
import os
import random
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import triton
from torch import Tensor

import kernels.paged_attention as paged
from kernels.dense_lora import embedding_lora
from kernels.fused_moe import random_experts
from kernels.fused_moe_lora import random_tables
from kernels.gated_act import gated_act
from kernels.lora_decode import MAX_PAIRS, MAX_TOKENS
from kernels.lora_tables import LoraTables, Worklist
from kernels.moe_gate import moe_gate
from kernels.op import compiled_kernels, interpreting
from kernels.sample_token import sample_token
from kernels.tiling import Tiles, moe_block_m, slot_block_m
from kernels.tune.compiling import compile_all, record_kernels
from kernels.worklist import build_worklist
from tests.kernels.mutant import KERNELS, mutant

E, K, L, H = 8, 2, 4, 64
LONGEST = 2048
WARM = tuple(1 << i for i in range(12))
# Odd ones, multiples of 2, 8, 16 and 1024, one, and the most.
LENGTHS = (1, 3, 16, 48, 127, 1024, 1536, 2047, LONGEST, *range(17, 800, 19))
assert len(LENGTHS) == len(set(LENGTHS)) == 51
Call = Callable[[ModuleType, int, str], None]


def rows(count: int, width: int, device: str) -> Tensor:
    return torch.randn(count, width, device=device).bfloat16()


def routing(tokens: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """ids [T, K], slots [T], weights [T, K]"""
    ids = torch.rand(tokens, E, device=device).argsort(-1)[:, :K].int().contiguous()
    slots = torch.arange(tokens, device=device).remainder(L + 1).sub(1).int()
    return ids, slots, torch.rand(tokens, K, device=device)


_made: dict[tuple[object, ...], Any] = {}


def tables(device: str, experts: int = E, count: int = 1) -> LoraTables:
    """Made once: what does not follow the length."""
    key = ("tables", device, experts, count)
    if key not in _made:
        shapes = [(experts, H, H)] * count
        _made[key] = random_tables(shapes, [8] * L, 8, device, torch.bfloat16, 0)
    return _made[key]


def experts(kind: str, device: str) -> Any:
    key = ("experts", device, kind)
    if key not in _made:
        _made[key] = random_experts(E, H, H, kind, device, torch.bfloat16, 0)
    return _made[key]


def pair_work(ids: Tensor, slots: Tensor | None) -> Worklist:
    return build_worklist(ids, slots, E, L, moe_block_m(len(ids), K, E))


def decode_lora(m: ModuleType, tokens: int, device: str) -> None:
    ids, slots, weights = routing(tokens, device)
    if tokens * K <= MAX_PAIRS[16]:
        x, y = rows(tokens, H, device), rows(tokens * K, H, device)
        m.add_pairs(y, x, tables(device), 0, ids, slots, E, False, None)
        m.add_pairs(y, y.clone(), tables(device), 0, ids, slots, E, True, weights)
    if tokens <= MAX_TOKENS[16]:
        x, y = rows(tokens, H, device), rows(tokens, 3 * H, device)
        m.add_rows(y.split(H, 1), x, tables(device, 1, 3), (0, 1, 2), slots)


def activated_lora(m: ModuleType, tokens: int, device: str) -> None:
    ids, slots, _ = routing(tokens, device)
    if tokens * K <= MAX_PAIRS[16]:
        x, y = rows(tokens, H, device), rows(tokens * K, H, device)
        m.lora_gated_act(y, x, tables(device), 0, ids, slots, E, "silu")


def four_operations(m: ModuleType, tokens: int, device: str) -> None:
    ids, slots, weights = routing(tokens, device)
    x, y, work = rows(tokens, H, device), rows(tokens * K, H, device), pair_work(ids, slots)
    for fixed in (False, True):
        m.add_lora((y,), x, tables(device), (0,), work, K, None, fixed)
        m.add_lora((y,), y.clone(), tables(device), (0,), work, 1, weights, fixed)
    work = build_worklist(None, slots, 1, L, slot_block_m(tokens))
    y = rows(tokens, 3 * H, device)
    m.add_lora(y.split(H, 1), x, tables(device, 1, 3), (0, 1, 2), work, 1, None, False)


def grouped_products(m: ModuleType, tokens: int, device: str) -> None:
    ids, _, weights = routing(tokens, device)
    x, work = rows(tokens, H, device), pair_work(ids, None)
    for kind in ("dense", "mxfp4"):
        y = m.moe_gate_up(x, experts(kind, device), ids, work)
        m.moe_down(y, experts(kind, device), ids, work, weights)


def packed_product(m: ModuleType, tokens: int, device: str) -> None:
    ids, _, weights = routing(tokens, device)
    work, held = pair_work(ids, None), experts("packed", device)
    for split in (1, 2) if tokens <= 64 else (1,):
        tiles = Tiles(block_n=64, split_k=split, group_m=1 if tokens <= 64 else 4)
        given = (held.bias, tokens, ids.numel(), work)
        y = m.packed_product(rows(tokens, H, device), held.packed, *given, K, None, tiles)
        m.packed_product(y, held.packed, *given, 1, weights, tiles)


def worklists(m: ModuleType, tokens: int, device: str) -> None:
    ids, slots, _ = routing(tokens, device)
    m.build_worklist(ids, None, E, 0, moe_block_m(tokens, K, E))
    m.build_worklist(ids, slots, E, L, moe_block_m(tokens, K, E))
    m.build_worklist(None, slots, 1, L, slot_block_m(tokens))


def routes(m: ModuleType, tokens: int, device: str) -> None:
    m.moe_route(rows(tokens, E, device), K, True, moe_block_m(tokens, K, E))


def linears(m: ModuleType, tokens: int, device: str) -> None:
    """A router, and what is wide enough for the dot."""
    x, bias = rows(tokens, H, device), torch.zeros(600, device=device).bfloat16()
    for out in (E, 600):
        m.linear(x, rows(out, H, device), bias[:out])
        m.linear(x, rows(out, H, device))


def positions(m: ModuleType, tokens: int, device: str) -> None:
    """Of odd numbers the columns of the input begin unaligned."""
    begin = tokens % 2
    places = torch.arange(-begin, tokens, device=device)[begin:]
    heads = rows(tokens, 2 * H, device).view(tokens, 4, H // 2)
    cache = torch.zeros(LONGEST // 16, 16, 1, H // 2, device=device, dtype=heads.dtype)
    table = torch.randn(LONGEST, H // 2, device=device)
    q, k, v = heads.split((2, 1, 1), 1)
    m.rope_kv_write(q, k, v, table, places, cache, cache.clone(), places)


def latents(m: ModuleType, tokens: int, device: str) -> None:
    # The positions' second half is aligned for every other length alone.
    places = torch.arange(2 * LONGEST, device=device)[tokens : 2 * tokens]
    q_rope, both = (
        rows(tokens, 4 * 24, device).view(tokens, 4, 24)[..., 8:],
        rows(tokens, H, device),
    )
    cache = torch.zeros(2 * LONGEST // 16, 16, H, device=device).bfloat16()
    table, norm = torch.randn(2 * LONGEST, 16, device=device), torch.ones(H - 16).bfloat16()
    m.mla_kv_write(q_rope, both, table, places, cache, places, norm.to(device), 1e-6, True)


def latent_attention(m: ModuleType, tokens: int, device: str) -> None:
    """A prompt of so many tokens; and so many sequences, up to 32, that decode."""
    for batch in (((tokens, tokens + 1), (1, 3)), ((1, 1 + tokens % 50),) * min(tokens, 32)):
        i = paged.make_case("", batch, 3, 1, 40, max_len=4096).make(device, torch.bfloat16, 0)
        q = i["q"]
        args = (
            q[..., :32].contiguous(), q[..., 32:], i["k_cache"].squeeze(2), i["page_table"],
            i["seq_lens"], i["cu_q"], i["scale"],
        )  # fmt: skip
        if i["max_q"] > 1:
            m.prefill(*args)
        else:
            m.decode(*args, i["max_len"])


def latent_lora(m: ModuleType, tokens: int, device: str) -> None:
    """Two heads, their keys and values H / 4 wide each, in latents of H."""
    _, slots, _ = routing(tokens, device)
    narrow, wide = (rows(tokens, 2 * w, device).view(tokens, 2, w) for w in (H // 4, H))
    m.mla_query_lora(wide, narrow, tables(device, 1), 0, slots, H // 4)
    m.mla_value_lora(narrow, wide, tables(device, 1), 0, slots, H // 4)


def norms(m: ModuleType, tokens: int, device: str) -> None:
    x, weight = rows(tokens, H, device), torch.ones(H, device=device).bfloat16()
    m.rms_norm(x, weight, 1e-5)
    m.add_rms_norm(x, x.clone(), weight, 1e-5)
    m.add_rms_norm(rows(tokens * K, H, device), x.clone(), weight, 1e-5)
    m.rms_norm(rows(tokens, 2 * H, device).view(tokens, 2, H), weight, 1e-5)


def attention(m: ModuleType, tokens: int, device: str) -> None:
    """A prompt of so many tokens; and so many sequences, up to 32, that decode."""
    shape = {"max_len": 4096, "sinks": True}
    batches = [((tokens, tokens + 1), (1, 3)), ((1, 1 + tokens % 50),) * min(tokens, 32)]
    with patch.object(paged, "decode", m.decode), patch.object(paged, "prefill", m.prefill):
        for batch in batches:
            case = paged.make_case("lengths", batch, 4, 2, 64, **shape)
            paged.paged_attention(**case.make(device, torch.bfloat16, 0))


def without_lengths(m: ModuleType, tokens: int, device: str) -> None:
    """Kernels that no length is an argument of."""
    ids, slots, _ = routing(tokens, device)
    x = rows(tokens, 2 * H, device)
    gated_act(x, "silu")
    moe_gate(x[:, :E], K, True)
    chance = torch.full((tokens,), 0.5, device=device)
    sample_token(x.float(), chance, chance)
    token_ids = torch.arange(tokens, device=device) % H
    embedding_lora(rows(tokens, H, device), token_ids, tables(device, 1, 3), 0, slots, H)


CALLS: dict[str, Call] = {
    "lora_decode": decode_lora,
    "lora_gated_act": activated_lora,
    "fused_moe_lora": four_operations,
    "fused_moe": grouped_products,
    "mxfp4_packed": packed_product,
    "moe_route": routes,
    "mla_attention_triton": latent_attention,
    "mla_kv": latents,
    "mla_lora": latent_lora,
    "norm": norms,
    "rope_kv": positions,
    "skinny_linear": linears,
    "worklist": worklists,
    "paged_attention_triton": attention,
}
# Where a file's tiles do not follow the length, one run compiles all there is.
WARM_OF = dict.fromkeys(("mla_kv", "norm", "rope_kv", "without_lengths"), (LONGEST,))
compiled_alone = pytest.mark.skipif(interpreting(), reason="interpreted functions do not compile")


def new_kernels(
    name: str, module: ModuleType, warm_up: Sequence[int] = WARM, lengths: Sequence[int] = LENGTHS
) -> set[tuple[str, str]]:
    """What launches of these lengths would compile beyond the warm-up. Nothing is launched."""

    call = CALLS.get(name, without_lengths)

    def needed(tokens: int) -> set[tuple[str, str]]:
        found = record_kernels(lambda: call(module, tokens, "cpu"))
        return {(kernel.function, kernel.key()) for kernel in found}

    warm = set().union(*(needed(tokens) for tokens in warm_up))
    assert warm
    return set().union(*(needed(tokens) for tokens in lengths)) - warm


@compiled_alone
@pytest.mark.usefixtures("h200_host")
@pytest.mark.parametrize("name", [*CALLS, "without_lengths"])
def test_fifty_lengths_compile_nothing(name: str) -> None:
    module = importlib.import_module(f"kernels.{name}") if name in CALLS else paged
    assert not new_kernels(name, module, WARM_OF.get(name, WARM))


@compiled_alone
@pytest.mark.usefixtures("h200_host")
@pytest.mark.parametrize("name", CALLS)
def test_without_do_not_specialize_they_do(name: str, tmp_path: Path) -> None:
    text = (KERNELS / f"{name}.py").read_text()
    found = re.findall(r"do_not_specialize\w*=(?:\[[^\]]*\]|\w+)", text)
    assert found
    bad = mutant(name, {part: part.partition("=")[0] + "=[]" for part in found}, tmp_path)
    # Up to one power of two each, so that no tiles differ.
    spans = {64: range(33, 64, 7), 1024: range(520, 1024, 100)}
    assert any(new_kernels(name, bad, (top,), span) for top, span in spans.items())


@compiled_alone
def test_every_kernel_that_takes_a_length_is_counted() -> None:
    """A file with `do_not_specialize` has lengths among its arguments, or targets alone."""
    files = {p.stem for p in KERNELS.glob("*.py") if "do_not_specialize" in p.read_text()}
    assert files - {"dense_lora"} == set(CALLS)


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_fifty_lengths_compile_nothing_on_the_gpu() -> None:
    modules = {name: importlib.import_module(f"kernels.{name}") for name in CALLS}
    lengths = [*LENGTHS]
    random.Random(0).shuffle(lengths)

    def run(tokens: int) -> None:
        for name, call in CALLS.items():
            call(modules[name], tokens, "cuda")
        without_lengths(paged, tokens, "cuda")
        torch.cuda.synchronize()

    # Side by side first: one after the other the warm-up would take minutes.
    target = triton.runtime.driver.active.get_current_target()
    ahead = record_kernels(lambda: [run(tokens) for tokens in WARM], target)
    compile_all(ahead, target, len(os.sched_getaffinity(0)), time.monotonic() + 300)
    for tokens in WARM:
        run(tokens)
    compiled = compiled_kernels()
    before = len(compiled)
    for tokens in lengths:
        run(tokens)
    assert compiled[before:] == []
