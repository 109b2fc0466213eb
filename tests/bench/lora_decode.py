"""LoRA of small batches: four operations, row by row, torch; L2-cold under graph replay. Needs a
GPU.

    python -m tests.bench.lora_decode [--tokens 1,8,16,32,33,48,64] [--ranks 32,64] [--seconds 150]

The GPT-OSS-20B shape: q, k, v (one launch pair), o, gate_up and down of 32 experts, 64 adapters.
Every layer has factors of its own, and the L2 is flushed before each replay. Every variant is first
checked against the torch reference. Prints a table for LOG.md, us a layer: the bandwidth floor
(distinct factors once), four operations (their worklist not counted), row by row, and torch as it
runs without a graph. `one_90`: one adapter owns 90 % of the rows. `none`: a batch without adapters,
what the launches alone cost. Then the ms that 24 layers come to; other forms of row by row stand in
the last column.
"""

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import triton
from torch import Tensor

from kernels.dense_lora import dense_lora_multi_reference
from kernels.fused_moe_lora import add_lora, moe_lora_reference
from kernels.lora_decode import DecodeTiles, add_pairs, add_rows
from kernels.lora_tables import LoraTables, Worklist
from kernels.tiling import moe_block_m, slot_block_m
from kernels.tune.compiling import compile_all, record_kernels
from kernels.tune.inputs import Batch as Calls
from kernels.tune.timing import GraphTimer
from kernels.worklist import build_worklist

LAYERS, SLOTS, FEW_SLOTS, EXPERTS, TOP_K, HIDDEN = 8, 64, 8, 32, 4, 2880
MODEL_LAYERS = 24
BYTES_PER_S = 4.3e12


@dataclass(frozen=True)
class Product:
    """One launch pair of a layer: widths, and whether its rows are tokens, (token, expert) pairs of
    x, or of y."""

    name: str
    in_: int
    outs: tuple[int, ...]
    kind: str  # "dense", "gate_up", "down"

    @property
    def experts(self) -> int:
        return 1 if self.kind == "dense" else EXPERTS

    @property
    def top_k(self) -> int:
        return 1 if self.kind == "dense" else TOP_K


PRODUCTS = (
    Product("qkv", HIDDEN, (4096, 512, 512), "dense"),
    Product("o", 4096, (HIDDEN,), "dense"),
    Product("gate_up", HIDDEN, (2 * HIDDEN,), "gate_up"),
    Product("down", HIDDEN, (HIDDEN,), "down"),
)
DISTRIBUTIONS = ("distinct", "zipf64", "one_90", "none")


def make_tables(
    product: Product, lora_rank: int, filled: bool = True, slots: int = SLOTS
) -> LoraTables:
    """Every layer's tables in one memory: target = layer · parts + part. filled: with values."""
    parts, layers = len(product.outs), LAYERS if filled else 1
    sizes = [
        (product.experts * lora_rank * (product.in_ + out) + 127) // 128 * 128
        for out in product.outs
    ]
    starts = torch.arange(layers) * sum(sizes) * slots  # [layers]
    a_off = torch.zeros(layers * parts, slots, dtype=torch.int64)  # [N, L]
    at = 0
    for part, size in enumerate(sizes):
        for slot in range(slots):
            a_off[part::parts, slot] = starts + at
            at += size
    several = int(product.experts > 1)
    a_stride = torch.full_like(a_off, several * lora_rank * product.in_)
    b_off, b_stride = a_off + product.experts * lora_rank * product.in_, torch.zeros_like(a_off)
    for part, out in enumerate(product.outs):
        b_stride[part::parts] = several * lora_rank * out
    used = layers * sum(sizes) * slots if filled else max(sizes)
    memory = torch.empty(used, dtype=torch.bfloat16, device="cuda")
    for piece in memory.split(1 << 28) if filled else ():
        piece.normal_(0, HIDDEN**-0.5)
    ranks = torch.full(a_off.shape, lora_rank, dtype=torch.int32, device="cuda")
    tables = [t.cuda() for t in (a_off, b_off, a_stride, b_stride)]
    return LoraTables(memory, tables[0], tables[1], tables[2], tables[3], ranks, lora_rank)


def slots_of(kind: str, tokens: int) -> Tensor:
    """Each token's slot. [T] int32"""
    generator = torch.Generator().manual_seed(tokens)
    if kind == "none":
        slots = torch.full((tokens,), -1)
    elif kind == "distinct":
        slots = torch.arange(tokens) % FEW_SLOTS
    elif kind == "zipf64":
        odds = torch.arange(1, SLOTS + 1, dtype=torch.float32) ** -1.2
        slots = torch.multinomial(odds, tokens, replacement=True, generator=generator)
    else:
        rest = torch.arange(tokens) // 10 % (FEW_SLOTS - 1) + 1
        slots = torch.where(torch.arange(tokens) % 10 == 9, rest, 0)
    return slots.int().cuda()


@dataclass
class Batch:
    """One product's inputs, the same rows for every layer; expert ids differ from layer to
    layer."""

    product: Product
    tables: LoraTables
    x: Tensor
    y: Tensor
    slots: Tensor
    ids: list[Tensor]
    weights: Tensor | None
    work: list[Worklist]

    @property
    def layers(self) -> int:
        return len(self.ids)

    def targets(self, layer: int) -> tuple[int, ...]:
        parts = len(self.product.outs)
        return tuple(range(layer * parts, (layer + 1) * parts))

    def ys(self) -> tuple[Tensor, ...]:
        return self.y.split(self.product.outs, 1)

    def floor_us(self) -> float:
        """Per layer: distinct factors once, x, and y twice."""
        slots = self.slots.cpu()
        total, live = 0, int((slots >= 0).sum())
        for layer in range(self.layers):
            if self.product.kind == "dense":
                groups = slots[slots >= 0].unique().numel()
            else:
                key = slots[:, None] * EXPERTS + self.ids[layer].cpu()  # [T, K]
                groups = key[slots >= 0].unique().numel()
            widths = sum(self.product.in_ + out for out in self.product.outs)
            total += groups * self.tables.max_rank * widths
            rows = live * self.product.top_k
            total += rows * (self.product.in_ + 2 * self.y.shape[1])
        return 2e6 * total / self.layers / BYTES_PER_S


def make_worklist(product: Product, ids: Tensor, slots: Tensor, num_slots: int) -> Worklist:
    """As the layers of the model make it."""
    tokens = len(slots)
    if product.kind == "dense":
        return build_worklist(None, slots, 1, num_slots, slot_block_m(tokens))
    block_m = moe_block_m(tokens, TOP_K, EXPERTS)
    return build_worklist(ids, slots, EXPERTS, num_slots, block_m)


def make_batch(product: Product, tables: LoraTables, tokens: int, kind: str) -> Batch:
    generator = torch.Generator("cuda").manual_seed(tokens)
    slots = slots_of(kind, tokens)
    layers = tables.a_off.shape[0] // len(product.outs)
    ids = [
        torch.rand(tokens, EXPERTS, device="cuda", generator=generator).argsort(-1)[:, :TOP_K].int()
        for _ in range(layers)
    ]
    rows = tokens * product.top_k
    x = torch.randn(
        rows if product.kind == "down" else tokens, product.in_, device="cuda", generator=generator
    ).bfloat16()
    # Small: the rounding of y must not hide the delta.
    y = torch.randn(rows, sum(product.outs), device="cuda", generator=generator)
    weights = (
        torch.rand(tokens, TOP_K, device="cuda", generator=generator)
        if product.kind == "down"
        else None
    )
    ids = [i.contiguous() for i in ids]
    work = [make_worklist(product, i, slots, tables.num_slots) for i in ids]
    return Batch(product, tables, x, y.mul(0.02).bfloat16(), slots, ids, weights, work)


Step = Callable[[Batch, int], None]


def four_operations(b: Batch, layer: int) -> None:
    x_div = TOP_K if b.product.kind == "gate_up" else 1
    add_lora(b.ys(), b.x, b.tables, b.targets(layer), b.work[layer], x_div, b.weights, False)


def decode(tiles: DecodeTiles | None, overlap: bool | None = None, settled: bool = True) -> Step:
    """Whatever the kernels read but y was there long before: so it is settled."""

    def step(b: Batch, layer: int) -> None:
        if b.product.kind == "dense":
            add_rows(b.ys(), b.x, b.tables, b.targets(layer), b.slots, tiles, overlap, settled)
            return
        down = b.product.kind == "down"
        add_pairs(
            b.y, b.x, b.tables, layer, b.ids[layer], b.slots, EXPERTS, down, b.weights,
            tiles, overlap, settled,
        )  # fmt: skip

    return step


def reference(b: Batch, layer: int) -> None:
    if b.product.kind == "dense":
        dense_lora_multi_reference(b.ys(), b.x, b.tables, b.targets(layer), b.slots, None)
        return
    down = b.product.kind == "down"
    moe_lora_reference(b.y, b.x, b.tables, layer, b.ids[layer], b.slots, None, down, b.weights)


VARIANTS: dict[str, Step] = {
    "row by row": decode(None),
    "not settled": decode(None, settled=False),
    "no overlap": decode(None, overlap=False),
    "128/64 w2": decode(DecodeTiles(128, 64, 2, 2)),
    "128/64 w1": decode(DecodeTiles(128, 64, 1, 1)),
    "256/64 w1": decode(DecodeTiles(256, 64, 1, 1)),
    "1056 programs w1": decode(DecodeTiles(128, 64, 1, 1, 1056)),
    "4224 programs w1": decode(DecodeTiles(128, 64, 1, 1, 4224)),
    "no limit w1": decode(DecodeTiles(128, 64, 1, 1, 1 << 30)),
    "four operations": four_operations,
}
TABLE = ("four operations", "row by row")  # these run for every distribution, others for one


def expected(b: Batch) -> Tensor:
    """The first layer's y by the reference."""
    before = b.y.clone()
    reference(b, 0)
    want = b.y.to(torch.float32, copy=True)
    b.y.copy_(before)
    return want


def check(b: Batch, step: Step, want: Tensor) -> None:
    """AssertionError unless the first layer's result is near the reference's, and base rows keep
    their bits."""
    before = b.y.clone()
    step(b, 0)
    got = b.y.to(torch.float32, copy=True)
    b.y.copy_(before)
    delta = (want - before.float()).norm().clamp(min=1e-6)
    error = float((got - want).norm() / delta)
    assert error < 3e-2 or int(b.slots.max()) < 0, f"off by {error:.1e} of the delta"
    base = (b.slots < 0).repeat_interleave(b.product.top_k)
    assert torch.equal(got[base], before.float()[base]), "base rows changed"


def _run(b: Batch, step: Step, layer: int) -> Tensor:
    step(b, layer)
    return b.y


def as_calls(b: Batch, step: Step) -> Calls:
    """A call a layer, for the timer."""
    calls = tuple(partial(_run, b, step, layer) for layer in range(b.layers))
    return Calls(calls, lambda: b.y, 3e-2, b.y.clone(), b.y)


def eager_us(b: Batch, step: Step) -> float:
    """Median us a layer as the host launches it, L2-warm: for what cannot be captured."""
    before, times = b.y.clone(), []
    for layer in (0, *range(b.layers)):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step(b, layer)
        torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - start))
    b.y.copy_(before)
    return sorted(times[1:])[len(times) // 2]


def compile_ahead(calls: Callable[[], None], seconds: float) -> None:
    """Compile in parallel all that `calls` would launch."""
    target = triton.runtime.driver.active.get_current_target()
    workers, end = len(os.sched_getaffinity(0)), time.monotonic() + seconds
    kernels = record_kernels(calls, target)
    done = compile_all(kernels, target, workers, end)
    for error in sorted({error for error in done.values() if error}):
        print(f"FAILED to compile: {error}", flush=True)


def sizes_of(product: Product, sizes: list[int]) -> list[int]:
    """33 to 64 tokens are asked of plain linears; experts go to 128 pairs, and one beyond."""
    odd = (33, 48)
    return [t for t in sizes if product.kind == "dense" or t not in odd]


@torch.inference_mode()
def main() -> None:
    """A line a product, rank and batch size; then the sums a step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="1,8,16,32,33,48,64")
    parser.add_argument("--ranks", default="32,64")
    parser.add_argument(
        "--seconds", type=float, default=150, help="stop measuring then, and print what there is"
    )
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    sizes, ranks = ([int(n) for n in text.split(",")] for text in (args.tokens, args.ranks))

    def everything() -> None:
        for product in PRODUCTS:
            for lora_rank in ranks:
                tables = make_tables(product, lora_rank, filled=False)
                for tokens in sizes_of(product, sizes):
                    batch = make_batch(product, tables, tokens, "distinct")
                    for step in VARIANTS.values():
                        step(batch, 0)

    compile_ahead(everything, args.seconds / 2)
    print(f"compiled; {end - time.monotonic():.0f} s left", flush=True)
    timer, results = GraphTimer(), dict[tuple[str, int, int, str, str], float]()
    for product in PRODUCTS:
        for lora_rank in ranks:
            tables = make_tables(product, lora_rank)
            for tokens in sizes_of(product, sizes):
                for kind in DISTRIBUTIONS:
                    if time.monotonic() > end:
                        continue
                    batch = make_batch(product, tables, tokens, kind)
                    want, at = expected(batch), (product.name, lora_rank, tokens, kind)
                    results[(*at, "floor")] = batch.floor_us()
                    results[(*at, "torch")] = eager_us(batch, reference)
                    for name, step in VARIANTS.items():
                        if name not in TABLE and kind != "distinct":
                            continue
                        try:
                            check(batch, step, want)
                            results[(*at, name)] = timer(as_calls(batch, step))
                        except Exception as error:  # one must not hide the others
                            text = f"{type(error).__name__}: {error}".splitlines()[0][:90]
                            print(f"FAILED {at} {name}: {text}", flush=True)
            del tables, batch
            torch.cuda.empty_cache()
    print_tables(results, sizes, ranks)


def print_tables(
    results: dict[tuple[str, int, int, str, str], float], sizes: list[int], ranks: list[int]
) -> None:
    """us a layer by product; then ms a step."""

    def show(*key: object) -> str:
        us = results.get(key)  # type: ignore[call-overload]
        return "-" if us is None else f"{us:.1f}" if us < 1000 else f"{us:.0f}"

    columns = ("floor", *TABLE, "torch")
    others = [name for name in VARIANTS if name not in TABLE]
    print(f"\nus a layer: {' / '.join(columns)}; last, distinct: {' / '.join(others)}")
    print(f"| product, rank | T | {' | '.join(DISTRIBUTIONS)} | others |")
    print("|" + "---|" * (len(DISTRIBUTIONS) + 3))
    for product in PRODUCTS:
        for lora_rank in ranks:
            for tokens in sizes_of(product, sizes):
                at = (product.name, lora_rank, tokens)
                cells = [
                    " / ".join(show(*at, kind, name) for name in columns) for kind in DISTRIBUTIONS
                ]
                cells.append(" / ".join(show(*at, "distinct", name) for name in others))
                print(f"| {product.name} r{lora_rank} | {tokens} | {' | '.join(cells)} |")
    print(f"\nms a step of {MODEL_LAYERS} layers: {' / '.join(columns[:-1])}")
    for lora_rank in ranks:
        for tokens in [t for t in sizes if all(t in sizes_of(p, sizes) for p in PRODUCTS)]:
            cells = []
            for kind in DISTRIBUTIONS:
                sums = []
                for name in columns[:-1]:
                    us = [
                        results.get((p.name, lora_rank, tokens, kind, name), float("nan"))
                        for p in PRODUCTS
                    ]
                    sums.append(f"{MODEL_LAYERS * sum(us) / 1e3:.2f}")
                cells.append(f"{kind} {' / '.join(sums)}")
            print(f"r{lora_rank} T={tokens}: " + "   ".join(cells), flush=True)


if __name__ == "__main__":
    main()
