"""LoRA of a decode step, variant by variant, L2-cold under graph replay. Needs a GPU.

    python -m tests.bench.lora_decode [--tokens 1,8,16,32] [--seconds 95] [--quick]

The GPT-OSS-20B shape: 24 layers of q, k, v (one launch pair), o, gate_up and down of 32 experts,
eight adapters of rank 32. A graph
walks all layers with tables of their own, so that no factor is in the L2 when its turn comes. Every
variant is first checked against
the torch reference. Prints us a layer and the ms a step that 24 layers come to, beside the
bandwidth floor (distinct factors, once).
`none` is a batch without adapters: what the launches alone cost. What adapters add is the
difference to it.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.dense_lora import dense_lora_multi_reference
from kernels.fused_moe_lora import add_lora, moe_lora_reference
from kernels.lora_decode import DecodeTiles, add_pairs, add_rows
from kernels.lora_tables import LoraTables, Worklist
from kernels.moe_gate import build_worklist

LAYERS, SLOTS, RANK, EXPERTS, TOP_K, HIDDEN = 24, 8, 32, 32, 4, 2880
BYTES_PER_S = 4.3e12
REPLAYS = 20


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


PRODUCTS = (
    Product("qkv", HIDDEN, (4096, 512, 512), "dense"),
    Product("o", 4096, (HIDDEN,), "dense"),
    Product("gate_up", HIDDEN, (2 * HIDDEN,), "gate_up"),
    Product("down", HIDDEN, (HIDDEN,), "down"),
)
DISTRIBUTIONS = ("distinct", "zipf", "one_90", "none")


def make_tables(product: Product) -> LoraTables:
    """Every layer's tables in one memory: target = layer · parts + part."""
    parts = len(product.outs)
    sizes = [
        (product.experts * RANK * (product.in_ + out) + 127) // 128 * 128 for out in product.outs
    ]
    starts = torch.arange(LAYERS)[:, None] * sum(sizes) * SLOTS  # [layers, 1]
    offsets = torch.zeros(LAYERS * parts, SLOTS, dtype=torch.int64)  # [N, L]
    at = 0
    for part, size in enumerate(sizes):
        for slot in range(SLOTS):
            offsets[part::parts, slot] = starts[:, 0] + at
            at += size
    a_off = offsets.clone()
    a_stride = torch.full_like(a_off, RANK * product.in_ if product.experts > 1 else 0)
    b_off, b_stride = a_off + product.experts * RANK * product.in_, torch.zeros_like(a_off)
    for part, out in enumerate(product.outs):
        b_stride[part::parts] = RANK * out if product.experts > 1 else 0
    memory = torch.empty(LAYERS * sum(sizes) * SLOTS, dtype=torch.bfloat16, device="cuda")
    for piece in memory.split(1 << 28):
        piece.normal_(0, HIDDEN**-0.5)
    ranks = torch.full(a_off.shape, RANK, dtype=torch.int32, device="cuda")
    return LoraTables(memory, *(t.cuda() for t in (a_off, b_off, a_stride, b_stride)), ranks, RANK)


def slots_of(kind: str, tokens: int) -> Tensor:
    """Each token's slot. [T] int32"""
    generator = torch.Generator().manual_seed(tokens)
    if kind == "none":
        slots = torch.full((tokens,), -1)
    elif kind == "distinct":
        slots = torch.arange(tokens) % SLOTS
    elif kind == "zipf":
        odds = torch.arange(1, SLOTS + 1, dtype=torch.float32) ** -1.2
        slots = torch.multinomial(odds, tokens, replacement=True, generator=generator)
    else:
        slots = torch.where(
            torch.arange(tokens) % 10 == 9, torch.arange(tokens) // 10 % (SLOTS - 1) + 1, 0
        )
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

    def targets(self, layer: int) -> tuple[int, ...]:
        parts = len(self.product.outs)
        return tuple(range(layer * parts, (layer + 1) * parts))

    def ys(self) -> tuple[Tensor, ...]:
        return self.y.split(self.product.outs, 1)

    def floor_us(self) -> float:
        """Per layer: distinct factors once, x, and y twice."""
        slots = self.slots.cpu()
        total, live = 0, int((slots >= 0).sum())
        for layer in range(LAYERS):
            if self.product.kind == "dense":
                groups = slots[slots >= 0].unique().numel()
            else:
                key = slots[:, None] * EXPERTS + self.ids[layer].cpu()  # [T, K]
                groups = key[slots >= 0].unique().numel()
            total += groups * sum(RANK * (self.product.in_ + out) for out in self.product.outs)
            rows = live * (1 if self.product.kind == "dense" else TOP_K)
            total += rows * (self.product.in_ + 2 * self.y.shape[1])
        return 2e6 * total / LAYERS / BYTES_PER_S


def make_batch(product: Product, tables: LoraTables, tokens: int, kind: str) -> Batch:
    generator = torch.Generator("cuda").manual_seed(tokens)
    slots = slots_of(kind, tokens)
    dense = product.kind == "dense"
    ids = [
        torch.rand(tokens, EXPERTS, device="cuda", generator=generator).argsort(-1)[:, :TOP_K].int()
        for _ in range(LAYERS)
    ]
    rows = tokens if dense else tokens * TOP_K
    x = torch.randn(
        rows if product.kind == "down" else tokens, product.in_, device="cuda", generator=generator
    ).bfloat16()
    # Small: the rounding of y must not hide the delta.
    y = (
        torch.randn(rows, sum(product.outs), device="cuda", generator=generator)
        .mul(0.05)
        .bfloat16()
    )
    weights = (
        torch.rand(tokens, TOP_K, device="cuda", generator=generator)
        if product.kind == "down"
        else None
    )
    if dense:
        work = [build_worklist(None, slots, 1, SLOTS, 16)] * LAYERS
    else:
        work = [build_worklist(i, slots, EXPERTS, SLOTS, 16) for i in ids]
    return Batch(product, tables, x, y, slots, ids, weights, work)


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
    "as chosen": decode(None),
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
PARTS = 3  # processes that compile for one product
ALL_CASES = 3  # so many variants run for every distribution, the others for `distinct` alone


def expected(b: Batch) -> Tensor:
    """The second layer's y by the reference."""
    exact = Batch(b.product, b.tables, b.x, b.y.clone(), b.slots, b.ids, b.weights, b.work)
    reference(exact, 1)
    return exact.y.float()


def fill_cache(name: str, part: int) -> None:
    """Compile one in PARTS of a product's variants; several such processes go at once."""
    product = next(p for p in PRODUCTS if p.name == name)
    tables = make_tables(product)
    for tokens in (1, 32):
        batch = make_batch(product, tables, tokens, "distinct")
        for step in list(VARIANTS.values())[part::PARTS]:
            try:
                step(batch, 1)
            except Exception:  # told when it is its turn to be measured
                continue
    torch.cuda.synchronize()


def check(b: Batch, step: Step, want: Tensor) -> None:
    """AssertionError unless the second layer's result is near the reference's, and base rows keep
    their bits."""
    before = b.y.clone()
    step(b, 1)
    got = b.y.to(torch.float32, copy=True)
    b.y.copy_(before)
    delta = (want - before.float()).norm().clamp(min=1e-6)
    error = float((got - want).norm() / delta)
    assert error < 3e-2 or int(b.slots.max()) < 0, f"off by {error:.1e} of the delta"
    base = b.slots < 0
    if b.product.kind != "dense":
        base = base.repeat_interleave(TOP_K)
    assert torch.equal(got[base], before.float()[base]), "base rows changed"


def time_us(b: Batch, step: Step) -> float:
    """Median us a layer, over replays of a graph of all layers; y is as before afterwards."""
    before = b.y.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(LAYERS):
            step(b, layer)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    for _ in range(3):
        graph.replay()
    for mark in marks[:-1]:
        mark.record()
        graph.replay()
    marks[-1].record()
    torch.cuda.synchronize()
    b.y.copy_(before)
    times = sorted(a.elapsed_time(z) for a, z in zip(marks, marks[1:], strict=False))
    return 1e3 * times[REPLAYS // 2] / LAYERS


@torch.inference_mode()
def main() -> None:
    """A line a product, batch size and distribution; then the sums a step of the best and of the
    default."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="1,8,16,32")
    parser.add_argument(
        "--seconds", type=float, default=95, help="stop measuring then, and print what there is"
    )
    parser.add_argument("--quick", action="store_true", help="only the first variants")
    parser.add_argument(
        "--compile", nargs=2, metavar=("PRODUCT", "PART"), help="only fill Triton's cache"
    )
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    names = list(VARIANTS)[: ALL_CASES if args.quick else None]
    results: dict[tuple[str, int, str, str], float] = {}
    floors: dict[tuple[str, int, str], float] = {}
    sizes = [int(t) for t in args.tokens.split(",")]
    failed = set[str]()
    if args.compile:
        fill_cache(args.compile[0], int(args.compile[1]))
        return
    command = [sys.executable, "-m", "tests.bench.lora_decode", "--compile"]
    running = [
        subprocess.Popen([*command, p.name, str(part)]) for p in PRODUCTS for part in range(PARTS)
    ]
    for process in running:
        process.wait()
    print(f"compiled; {end - time.monotonic():.0f} s left", flush=True)
    for product in PRODUCTS:
        tables = make_tables(product)
        for tokens in sizes:
            for kind in DISTRIBUTIONS:
                batch = make_batch(product, tables, tokens, kind)
                want = expected(batch)
                floors[product.name, tokens, kind] = batch.floor_us()
                for number, name in enumerate(names):
                    if (number >= ALL_CASES and kind != "distinct") or time.monotonic() > end:
                        continue
                    try:
                        check(batch, VARIANTS[name], want)
                        results[product.name, tokens, kind, name] = time_us(batch, VARIANTS[name])
                    except Exception as error:  # one that cannot run must not hide the others
                        text = f"{type(error).__name__}: {error}".splitlines()[0][:90]
                        if f"{name} {text}" not in failed:
                            failed.add(f"{name} {text}")
                            print(
                                f"FAILED {product.name} T={tokens} {kind} {name}: {text}",
                                flush=True,
                            )
        del tables, batch
        torch.cuda.empty_cache()
    print_tables(results, floors, names, sizes)


def print_tables(
    results: dict[tuple[str, int, str, str], float], floors: dict[tuple[str, int, str], float],
    names: list[str], sizes: list[int],
) -> None:  # fmt: skip
    """us a layer by product; then ms a step."""
    for product in PRODUCTS:
        print(
            f"\n{product.name}, us a layer: "
            + "  ".join(f"T={t}: {', '.join(DISTRIBUTIONS)}" for t in sizes[:1])
        )
        columns = [(t, kind) for t in sizes for kind in DISTRIBUTIONS]
        print(
            f"{'':22}"
            + "|".join("".join(f"{f'{k[:4]}{t}':>7}" for t, k in columns if t == s) for s in sizes)
        )
        line = [f"{floors[product.name, t, k]:7.1f}" for t, k in columns]
        print(f"{'floor':22}" + "|".join("".join(line[i : i + 4]) for i in range(0, len(line), 4)))
        for name in names:
            cells = [results.get((product.name, t, k, name)) for t, k in columns]
            line = ["      -" if c is None else f"{c:7.1f}" for c in cells]
            print(
                f"{name:22}" + "|".join("".join(line[i : i + 4]) for i in range(0, len(line), 4)),
                flush=True,
            )
    print("\nms a step: total, and what adapters add to the same launches without any")
    for tokens in sizes:
        for kind in DISTRIBUTIONS:
            line = [f"floor {24e-3 * sum(floors[p.name, tokens, kind] for p in PRODUCTS):.2f}"]
            for name in names[:ALL_CASES]:
                cells = [results.get((p.name, tokens, kind, name)) for p in PRODUCTS]
                none = [results.get((p.name, tokens, "none", name)) for p in PRODUCTS]
                if all(c is not None for c in (*cells, *none)):
                    total, idle = 24e-3 * sum(cells), 24e-3 * sum(none)
                    line.append(f"{name} {total:.2f} (+{total - idle:.2f})")
            best = [
                min(
                    (
                        r
                        for (p, t, k, _), r in results.items()
                        if (p, t, k) == (q.name, tokens, kind)
                    ),
                    default=float("nan"),
                )
                for q in PRODUCTS
            ]
            print(
                f"T={tokens:2} {kind:9}",
                " | ".join(line),
                f"| best of each {24e-3 * sum(best):.2f}",
            )


if __name__ == "__main__":
    main()
