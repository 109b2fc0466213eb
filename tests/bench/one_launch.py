"""LoRA of decode steps in one launch instead of two, for comparison. Needs a GPU.

    python -m tests.bench.one_launch [--seconds 60]

The programs of a row each sum their slice of x A, wait for each other at a counter in memory, and
then each add their slice of (x A) B. Blocks are given out in order and a row's lie side by side, so
none waits for one that cannot start. Prints us a layer, L2-cold under graph replay, beside the
shipped pair (kernels/lora_decode.py) with and without the overlap of its launches; every candidate
is checked against torch. Not for serving.
"""

import argparse
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.fused_moe_lora import moe_lora_reference
from kernels.lora_decode import UNSPECIALISED, add_pairs, find_factor, find_source
from kernels.lora_tables import LoraTables
from kernels.tune.inputs import Batch, make_tables
from kernels.tune.problems import SHAPES, expert_products
from kernels.tune.timing import GraphTimer
from tests.bench.lora_parts import BOUND, FEW_SLOTS, slots_of
from tests.bench.lora_paths import compile_ahead

LAYERS = 8
TOKENS, RANKS = (1, 8, 32), (16, 32, 64)
LOOSE = (*UNSPECIALISED, "num_slots", "num_experts", "k_tiles")


@dataclass(frozen=True)
class Form:
    """parts: programs of a row, each with as large a slice of x and of y."""

    parts: int
    block_k: int
    block_n: int
    num_warps: int


def forms(num_rows: int, in_: int, out: int, max_rank: int) -> Iterator[Form]:
    """Candidates: no more programs than are on the GPU at once, 16 to 128 values a thread."""
    for parts in (4, 8, 16, 32, 64):
        if num_rows * parts > 4224 or in_ < 32 * parts:
            continue
        for block_k, block_n in ((64, 64), (128, 64), (128, 128), (256, 128)):
            for warps in (1, 2, 4):
                values = max(block_k, block_n) * triton.next_power_of_2(max_rank) // (32 * warps)
                if 16 <= values <= 128 and block_n * parts < 2 * out:
                    yield Form(parts, block_k, block_n, warps)


def add_in_one(
    y: Tensor, x: Tensor, tables: LoraTables, target: int, ids: Tensor, slots: Tensor,
    num_experts: int, x_rows_per_pair: bool, weights: Tensor | None, form: Form, counters: Tensor,
) -> None:  # fmt: skip
    """As lora_decode.add_pairs.  counters [2, N] int32: zeros, and zeros again afterwards"""
    num_rows, in_, out, parts = ids.numel(), x.shape[1], y.shape[1], form.parts
    z = torch.empty(num_rows, parts, tables.max_rank, dtype=torch.float32, device=x.device)
    _add_kernel[(num_rows * parts,)](
        x, z, y, counters, tables.memory, tables.a_off, tables.a_stride, tables.b_off,
        tables.b_stride, tables.lora_rank, weights if weights is not None else z, slots, ids,
        target, tables.num_slots, num_experts, num_rows, x.stride(0), y.stride(0), in_, out,
        triton.cdiv(triton.cdiv(in_, form.block_k), parts), tables.max_rank,
        X_DIV=1 if x_rows_per_pair else ids.shape[1], TOP_K=ids.shape[1],
        WEIGHTED=weights is not None, BLOCK_R=triton.next_power_of_2(tables.max_rank),
        BLOCK_K=form.block_k, BLOCK_N=form.block_n, PARTS=parts, num_warps=form.num_warps,
    )  # fmt: skip


@triton.jit(do_not_specialize=LOOSE)
def _add_kernel(
    x_ptr, z_ptr, y_ptr, counters_ptr, memory_ptr, a_off_ptr, a_stride_ptr, b_off_ptr,
    b_stride_ptr, rank_ptr, weights_ptr, slots_ptr, ids_ptr,
    target, num_slots, num_experts, num_rows, x_stride, y_stride, in_features, out_features,
    k_tiles, max_rank,
    X_DIV: tl.constexpr, TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    slot, expert, live = find_source(row, slots_ptr, ids_ptr, num_slots, num_experts, TOP_K, True)
    at = target * num_slots + tl.maximum(slot, 0)
    a_start, rank = find_factor(
        a_off_ptr + at, a_stride_ptr + at, b_off_ptr + at, rank_ptr + at, expert, live, max_rank
    )
    b_start, _ = find_factor(
        b_off_ptr + at, b_stride_ptr + at, a_off_ptr + at, rank_ptr + at, expert, live, max_rank
    )
    if a_start < 0:
        return
    r = tl.arange(0, BLOCK_R)
    r_live = r < rank
    a_rows = memory_ptr + a_start + r.to(tl.int64)[:, None] * in_features
    b_rows = memory_ptr + b_start + r.to(tl.int64)[:, None] * out_features
    z = tl.zeros([BLOCK_R], tl.float32)
    for tile in range(k_tiles):
        k = (part * k_tiles + tile) * BLOCK_K + tl.arange(0, BLOCK_K)
        k_live = k < in_features
        a = tl.load(a_rows + k[None, :], mask=r_live[:, None] & k_live[None, :], other=0.0)
        x = tl.load(x_ptr + row // X_DIV * x_stride + k, mask=k_live, other=0.0)
        z += tl.sum(a.to(tl.float32) * x.to(tl.float32)[None, :], 1)
    z_row = z_ptr + row * PARTS * max_rank
    tl.store(z_row + part * max_rank + r, z, mask=r < max_rank)
    # What is read of B first is under way while this program waits for the others of its row.
    num_n = tl.cdiv(out_features, BLOCK_N)
    per_part = tl.cdiv(num_n, PARTS)
    first = part * per_part * BLOCK_N
    end = tl.minimum(first + per_part * BLOCK_N, out_features)
    n = first + tl.arange(0, BLOCK_N)
    b = tl.load(b_rows + n[None, :], mask=r_live[:, None] & (n < end)[None, :], other=0.0)
    y_row = y_ptr + row * y_stride
    y = tl.load(y_row + n, mask=n < end, other=0.0)
    # All threads' parts of z are written before one of them says so.
    tl.debug_barrier()
    arrived = tl.atomic_add(counters_ptr + row, 1, sem="acq_rel") + 1
    while arrived < PARTS:
        arrived = tl.atomic_add(counters_ptr + row, 0, sem="acquire")
    parts = tl.arange(0, PARTS)
    z_ptrs = z_row + parts[:, None] * max_rank + r[None, :]
    kept = (parts >= 0)[:, None] & (r < max_rank)[None, :]
    z = tl.sum(tl.load(z_ptrs, mask=kept, other=0.0, cache_modifier=".cg"), 0)
    weight = 1.0
    if WEIGHTED:
        weight = tl.load(weights_ptr + row)
    for first_n in range(first, end, BLOCK_N):
        n = first_n + tl.arange(0, BLOCK_N)
        ahead = n + BLOCK_N
        mask = r_live[:, None] & (ahead < end)[None, :]
        b_ahead = tl.load(b_rows + ahead[None, :], mask=mask, other=0.0)
        y_ahead = tl.load(y_row + ahead, mask=ahead < end, other=0.0)
        acc = tl.sum(z[:, None] * b.to(tl.float32), 0) * weight + y.to(tl.float32)
        tl.store(y_row + n, acc.to(y_ptr.dtype.element_ty), mask=n < end)
        b, y = b_ahead, y_ahead
    # The last that has passed the counter makes it zero for the next launch.
    if tl.atomic_add(counters_ptr + num_rows + row, 1, sem="acq_rel") == PARTS - 1:
        tl.store(counters_ptr + row, 0)
        tl.store(counters_ptr + num_rows + row, 0)


@dataclass(frozen=True)
class Inputs:
    """One product of experts, the same rows for every layer."""

    y: Tensor
    x: Tensor
    tables: LoraTables
    ids: tuple[Tensor, ...]
    slots: Tensor
    num_experts: int
    down: bool
    weights: Tensor | None

    def args(self, layer: int) -> tuple[object, ...]:
        """Of add_pairs."""
        return (self.y, self.x, self.tables, layer, self.ids[layer], self.slots, self.num_experts,
                self.down, self.weights)  # fmt: skip


def make_inputs(
    product: str, in_: int, out: int, lora_rank: int, tokens: int, device: torch.device,
    filled: bool,
) -> Inputs:  # fmt: skip
    """GPT-OSS-20B's, eight adapters in turn."""
    shape, down = SHAPES["gpt-oss-20b"], product == "down"
    layers = LAYERS if filled else 1
    experts, top_k = shape.num_experts, shape.top_k
    tables = make_tables(in_, (out,), experts, lora_rank, layers, FEW_SLOTS, device, filled)
    generator, dtype = torch.Generator(device).manual_seed(tokens), tables.memory.dtype
    random = partial(torch.randn, device=device, generator=generator)
    ids = [random(tokens, experts).argsort(-1)[:, :top_k].int().contiguous() for _ in range(layers)]
    x = random(tokens * top_k if down else tokens, in_).to(dtype)
    y = random(tokens * top_k, out).mul(0.02).to(dtype)
    weights = random(tokens, top_k).sigmoid() if down else None
    slots = slots_of("eight", tokens).to(device)
    return Inputs(y, x, tables, tuple(ids), slots, experts, down, weights)


def time_of(inputs: Inputs, call: partial[None], timer: GraphTimer) -> float:
    """us a layer. Errors: AssertionError unless the values are torch's."""
    before = inputs.y.clone()
    moe_lora_reference(
        inputs.y, inputs.x, inputs.tables, 0, inputs.ids[0], inputs.slots, None, inputs.down,
        inputs.weights, num_experts=inputs.num_experts,
    )  # fmt: skip
    want = inputs.y.clone()
    for _ in range(2):  # the second finds what the first has left in the counters
        inputs.y.copy_(before)
        call(*inputs.args(0))
        error = (inputs.y - want).float().norm() / (want - before).float().norm()
        assert float(error) < BOUND, f"off by {float(error):.1e}"
    calls = tuple(partial(call, *inputs.args(layer)) for layer in range(LAYERS))
    us = timer(Batch(calls, lambda: want, BOUND))
    inputs.y.copy_(before)
    return us


def cases(device: torch.device, filled: bool) -> Iterator[tuple[str, Inputs, Tensor, list[Form]]]:
    """(name, inputs, counters, forms) of every product, rank and size."""
    for name, in_, out in expert_products(SHAPES["gpt-oss-20b"]):
        for lora_rank, tokens in itertools.product(RANKS, TOKENS):
            inputs = make_inputs(name, in_, out, lora_rank, tokens, device, filled)
            rows = inputs.ids[0].numel()
            counters = torch.zeros(2, rows, dtype=torch.int32, device=device)
            some = list(forms(rows, in_, out, lora_rank))
            yield f"{name} r{lora_rank} T={tokens}", inputs, counters, some


def launch_all(device: torch.device) -> None:
    """Every kernel once, on memory without values: for the compiler."""
    for _, inputs, counters, some in cases(device, False):
        for overlap in (True, False):
            add_pairs(*inputs.args(0), overlap=overlap, settled=True)
        for form in some:
            add_in_one(*inputs.args(0), form=form, counters=counters)


@torch.inference_mode()
def main() -> None:
    """A line a product, rank and size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="stop measuring then")
    args = parser.parse_args()
    begin, device = time.monotonic(), torch.device("cuda", torch.cuda.current_device())
    compile_ahead(partial(launch_all, device), begin + args.seconds / 2)
    print(f"{torch.cuda.get_device_name()}: compiled in {time.monotonic() - begin:.0f} s")
    timer = GraphTimer()
    print("us a layer: pair / pair without overlap / one launch (its best form)")
    for name, inputs, counters, some in cases(device, True):
        pair = [
            time_of(inputs, partial(add_pairs, overlap=overlap, settled=True), timer)
            for overlap in (True, False)
        ]
        found: dict[Form, float] = {}
        for form in some:
            if time.monotonic() < begin + args.seconds:
                call = partial(add_in_one, form=form, counters=counters)
                found[form] = time_of(inputs, call, timer)
                assert not counters.any(), "counters are not as they were found"
        best = min(found, key=lambda form: found[form]) if found else None
        one = f"{found[best]:.1f} ({best}, of {len(found)})" if best else "-"
        print(f"{name}: {pair[0]:.1f} / {pair[1]:.1f} / {one}", flush=True)
    print(f"{time.monotonic() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
