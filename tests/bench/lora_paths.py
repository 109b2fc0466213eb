"""From how many rows on are the four operations faster than row by row? L2-cold under graph replay.
Needs a GPU.

    python -m tests.bench.lora_paths [--shapes gpt-oss-20b,...] [--seconds 300] [--out DIR]

What one layer's LoRA costs by either path, base products left out: `experts` is gate_up, the
activation and down, with the worklist that the four operations need, as a layer of the model has
them; `linears` is q, k, v and o (and a dense MLP's two), whose worklist is made once a step, so not
counted. The tiles are those of the tiles folder. Adapters, 64 in all, over the tokens by `MIXES`;
`none` is what the launches alone cost.

Both paths' values are checked against torch first. Appends to lora_paths.csv (torch: as it runs
without a graph, its own time alone), prints a table of floor / four operations / row by row, and
the limits that follow for kernels/lora_decode.py: the most rows at which row by row is the better
choice for whichever mix is worst.
"""

import argparse
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.dense_lora import dense_lora_multi, dense_lora_multi_reference
from kernels.fused_moe_lora import moe_lora, moe_lora_reference
from kernels.gated_act import gated_act, gated_act_reference
from kernels.lora_gated_act import lora_gated_act
from kernels.lora_tables import LoraTables, Worklist
from kernels.tiling import moe_block_m, slot_block_m
from kernels.tune.compiling import compile_all, record_kernels
from kernels.tune.inputs import Batch, make_tables
from kernels.tune.problems import SHAPES, ModelShape, expert_products, linear_widths
from kernels.tune.timing import GraphTimer
from kernels.worklist import build_worklist
from tests.bench.floors import COPY_BYTES_PER_S
from tests.bench.results import ABOUT, RESULTS, append_rows, describe_run

LAYERS, SLOTS, FEW_SLOTS = 4, 64, 8
MIXES = ("eight", "distinct", "zipf64", "one_90", "none")
# Those that the limits follow from.
JUDGED = MIXES[:-1]
PATHS = ("four", "row")
COLUMNS = ("shape", "part", "rank", "tokens", "rows", "mix", "path", "us", "floor_us", *ABOUT)
# Error allowed, of the norm of what adapters add.
BOUND = 3e-2


def slots_of(mix: str, tokens: int) -> Tensor:
    """Each token's slot. [T] int32

    eight     eight adapters in turn;  distinct  as many as there are tokens, up to 64
    zipf64    Zipf's law of 1.2 over 64;  one_90  one adapter owns 90 % of the rows
    """
    at = torch.arange(tokens)
    if mix == "none":
        slots = torch.full((tokens,), -1)
    elif mix == "eight":
        slots = at % FEW_SLOTS
    elif mix == "distinct":
        slots = at % SLOTS
    elif mix == "zipf64":
        generator = torch.Generator().manual_seed(tokens)
        odds = torch.arange(1, SLOTS + 1, dtype=torch.float32) ** -1.2
        slots = torch.multinomial(odds, tokens, replacement=True, generator=generator)
    else:
        slots = torch.where(at % 10 == 9, at // 10 % (FEW_SLOTS - 1) + 1, 0)
    return slots.int()


@dataclass(frozen=True)
class Product:
    """A product of a layer with its factors, and y [rows, out] that its LoRA is added to."""

    tables: LoraTables
    in_: int
    outs: tuple[int, ...]
    y: Tensor

    def targets(self, layer: int) -> tuple[int, ...]:
        parts = len(self.outs)
        return tuple(range(layer * parts, (layer + 1) * parts))

    def ys(self) -> tuple[Tensor, ...]:
        return self.y.split(self.outs, 1)


@dataclass(frozen=True)
class Experts:
    """gate_up, activation and down of every layer. ids [T, K], one a layer.

    down's own input, h, is made beforehand: in a model the base's product lies between, and what is
    read early (`settled`) is older than that.
    """

    gate_up: Product
    down: Product
    x: Tensor
    h: Tensor
    slots: Tensor
    ids: tuple[Tensor, ...]
    weights: Tensor
    num_experts: int
    activation: str

    @property
    def rows(self) -> int:
        return self.ids[0].numel()

    def row(self, layer: int) -> tuple[Tensor, ...]:
        """As MoE layers of decode steps do it."""
        ids, experts = self.ids[layer], self.num_experts
        activated = lora_gated_act(
            self.gate_up.y, self.x, self.gate_up.tables, layer, ids, self.slots, experts,
            self.activation, settled=True,
        )  # fmt: skip
        moe_lora(
            self.down.y, self.h, self.down.tables, layer, ids, self.slots, None, True,
            self.weights, False, experts, settled=True,
        )  # fmt: skip
        return activated, self.down.y

    def four(self, layer: int) -> tuple[Tensor, ...]:
        """As those of prefills do."""
        ids, slots, tables = self.ids[layer], self.slots, self.gate_up.tables
        tokens, top_k = ids.shape
        block_m = moe_block_m(tokens, top_k, self.num_experts)
        work = build_worklist(ids, slots, self.num_experts, tables.num_slots, block_m)
        moe_lora(self.gate_up.y, self.x, tables, layer, ids, slots, work, False, None)
        activated = gated_act(self.gate_up.y, self.activation)
        moe_lora(self.down.y, self.h, self.down.tables, layer, ids, slots, work, True, self.weights)
        return activated, self.down.y

    def reference(self, layer: int) -> tuple[Tensor, ...]:
        """The same in torch, and nothing is written."""
        given = (layer, self.ids[layer], self.slots, None)
        gate_up, down = self.gate_up.y.clone(), self.down.y.clone()
        moe_lora_reference(
            gate_up, self.x, self.gate_up.tables, *given, False, None, num_experts=self.num_experts
        )
        moe_lora_reference(
            down, self.h, self.down.tables, *given, True, self.weights,
            num_experts=self.num_experts,
        )  # fmt: skip
        return gated_act_reference(gate_up, self.activation), down

    def without(self) -> tuple[Tensor, ...]:
        """What would be there without an adapter."""
        return gated_act(self.gate_up.y, self.activation), self.down.y.clone()

    def written(self) -> tuple[Tensor, ...]:
        return self.gate_up.y, self.down.y

    def floor_bytes(self) -> float:
        """A layer's: distinct factors once; x and h; what is activated, and what that gives; down's y
        twice."""
        live, total = int((self.slots >= 0).sum()), 0.0
        for ids in self.ids:
            key = self.slots[:, None] * self.num_experts + ids  # [T, K]
            factors = key[self.slots >= 0].unique().numel()
            for product in (self.gate_up, self.down):
                total += factors * product.tables.max_rank * (product.in_ + sum(product.outs))
        widths = self.down.in_ + 2 * sum(self.down.outs)
        activated = self.rows * sum(self.gate_up.outs) * 3 / 2
        moved = live * self.ids[0].shape[1] * widths + activated
        return 2 * (total / len(self.ids) + moved + live * self.gate_up.in_)


@dataclass(frozen=True)
class Linears:
    """The plain linears of every layer, an x for each."""

    products: tuple[Product, ...]
    xs: tuple[Tensor, ...]
    slots: Tensor
    work: Worklist

    @property
    def rows(self) -> int:
        return len(self.slots)

    def row(self, layer: int) -> tuple[Tensor, ...]:
        """As in decode steps."""
        return self._add(layer, None)

    def four(self, layer: int) -> tuple[Tensor, ...]:
        """As in prefills."""
        return self._add(layer, self.work)

    def _add(self, layer: int, work: Worklist | None) -> tuple[Tensor, ...]:
        for product, x in zip(self.products, self.xs, strict=True):
            at = product.targets(layer)
            dense_lora_multi(product.ys(), x, product.tables, at, self.slots, work, settled=True)
        return self.written()

    def reference(self, layer: int) -> tuple[Tensor, ...]:
        """The same in torch, and nothing is written."""
        ys = self.without()
        for product, x, y in zip(self.products, self.xs, ys, strict=True):
            at, parts = product.targets(layer), y.split(product.outs, 1)
            dense_lora_multi_reference(parts, x, product.tables, at, self.slots, None)
        return ys

    def without(self) -> tuple[Tensor, ...]:
        """What would be there without an adapter."""
        return tuple(product.y.clone() for product in self.products)

    def written(self) -> tuple[Tensor, ...]:
        return tuple(product.y for product in self.products)

    def floor_bytes(self) -> float:
        """A layer's: distinct factors and x once, y twice."""
        live = self.slots[self.slots >= 0]
        factors, total = live.unique().numel(), 0.0
        for product in self.products:
            out = sum(product.outs)
            total += factors * product.tables.max_rank * (len(product.outs) * product.in_ + out)
            total += len(live) * (product.in_ + 2 * out)
        return 2 * total


Part = Experts | Linears


@dataclass(frozen=True)
class Memory:
    """The factors of one part of a layer at one rank: (in, outs, tables) a product."""

    products: tuple[tuple[int, tuple[int, ...], LoraTables], ...]

    @classmethod
    def make(
        cls, shape: ModelShape, part: str, lora_rank: int, device: torch.device, filled: bool
    ) -> "Memory":
        """filled: with values; else one layer of memory, for the compiler."""
        widths = [(in_, outs) for _, in_, outs in linear_widths(shape)]
        if part == "experts":
            widths = [(in_, (out,)) for _, in_, out in expert_products(shape)]
        experts = shape.num_experts if part == "experts" else 1
        layers, slots = (LAYERS, SLOTS) if filled else (1, SLOTS)
        return cls(
            tuple(
                (i, o, make_tables(i, o, experts, lora_rank, layers, slots, device, filled))
                for i, o in widths
            )
        )


def make_part(shape: ModelShape, part: str, memory: Memory, tokens: int, mix: str) -> Part:
    """One batch: the same rows for every layer; expert ids differ from layer to layer."""
    tables = memory.products[0][2]
    device, dtype = tables.memory.device, tables.memory.dtype
    layers = tables.a_off.shape[0] // len(memory.products[0][1])
    generator = torch.Generator(device).manual_seed(tokens)
    rows = tokens * (shape.top_k if part == "experts" else 1)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, device=device, generator=generator)

    # Small: the rounding of y must not hide the delta.
    products = tuple(
        Product(tables, in_, outs, random(rows, sum(outs)).mul(0.02).to(dtype))
        for in_, outs, tables in memory.products
    )
    slots = slots_of(mix, tokens).to(device)
    if part == "linears":
        xs = tuple(random(tokens, product.in_).to(dtype) for product in products)
        work = build_worklist(None, slots, 1, tables.num_slots, slot_block_m(tokens))
        return Linears(products, xs, slots, work)
    ids = tuple(
        random(tokens, shape.num_experts).argsort(-1)[:, : shape.top_k].int().contiguous()
        for _ in range(layers)
    )
    gate_up, down = products
    x, h = random(tokens, gate_up.in_).to(dtype), random(rows, down.in_).to(dtype)
    weights = random(tokens, shape.top_k).sigmoid()
    activation = "gpt_oss" if shape.experts == "packed" else "silu"
    return Experts(gate_up, down, x, h, slots, ids, weights, shape.num_experts, activation)


def check(part: Part, path: str, want: tuple[Tensor, ...]) -> None:
    """want  what the reference makes of layer 0

    Errors: AssertionError unless the path's values are those, and rows without an adapter keep
    their bits."""
    old = [y.clone() for y in part.written()]
    before = part.without()
    found = [y.clone() for y in getattr(part, path)(0)]
    restore(part, old)
    base = (part.slots < 0).repeat_interleave(part.rows // len(part.slots))
    for got, wanted, was in zip(found, want, before, strict=True):
        delta = (wanted.float() - was.float()).norm().clamp(min=1e-6)
        error = float((got.float() - wanted.float()).norm() / delta)
        assert error < BOUND or bool(base.all()), f"{path}: off by {error:.1e} of the delta"
        assert torch.equal(got[base], was[base]), f"{path}: base rows changed"


def restore(part: Part, old: Sequence[Tensor]) -> None:
    for y, was in zip(part.written(), old, strict=True):
        y.copy_(was)


def time_path(part: Part, path: str, timer: Callable[[Batch], float]) -> float:
    """us a layer."""
    old = [y.clone() for y in part.written()]
    call: Callable[[int], Any] = getattr(part, path)
    us = timer(Batch(tuple(partial(call, i) for i in range(LAYERS)), lambda: old[0], BOUND))
    restore(part, old)  # the calls have added to it again and again
    return us


def torch_us(part: Part) -> float:
    """Median of three, as the host launches it, L2-warm: it cannot be captured."""
    times = []
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        part.reference(0)
        torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - start))
    return sorted(times[1:])[1]


def parts_of(shape: ModelShape) -> tuple[str, ...]:
    return ("experts", "linears") if shape.num_experts else ("linears",)


def compile_ahead(launches: Callable[[], None], end: float) -> None:
    """Compile in parallel all that `launches` would launch."""
    target = triton.runtime.driver.active.get_current_target()
    kernels = record_kernels(launches, target)
    done = compile_all(kernels, target, len(os.sched_getaffinity(0)), end)
    for error in sorted({error for error in done.values() if error}):
        print(f"FAILED to compile: {error}", flush=True)


def launch_all(args: argparse.Namespace, device: torch.device) -> None:
    """Every path at every size once, on memory without values: for the compiler."""
    for name in args.shapes:
        shape = SHAPES[name]
        for part in parts_of(shape):
            for lora_rank in args.ranks:
                memory = Memory.make(shape, part, lora_rank, device, False)
                for tokens in args.tokens:
                    made = make_part(shape, part, memory, tokens, "eight")
                    for path in PATHS:
                        getattr(made, path)(0)


def measure(
    args: argparse.Namespace, timer: Callable[[Batch], float], device: torch.device, end: float
) -> list[dict[str, Any]]:
    """A row a shape, part, rank, size, mix and path."""
    rows: list[dict[str, Any]] = []
    for name in args.shapes:
        shape = SHAPES[name]
        for part in parts_of(shape):
            for lora_rank in args.ranks:
                memory = Memory.make(shape, part, lora_rank, device, True)
                for tokens in args.tokens:
                    for mix in args.mixes:
                        if time.monotonic() > end:
                            print(f"no time left for {name} {part} r{lora_rank} T={tokens} {mix}")
                            continue
                        made = make_part(shape, part, memory, tokens, mix)
                        about = {
                            "shape": name, "part": part, "rank": lora_rank, "tokens": tokens,
                            "rows": made.rows, "mix": mix,
                            "floor_us": round(1e6 * made.floor_bytes() / COPY_BYTES_PER_S, 2),
                        }  # fmt: skip
                        want = made.reference(0)
                        for path in PATHS:
                            check(made, path, want)
                            us = time_path(made, path, timer)
                            rows.append(about | {"path": path, "us": round(us, 2)})
                        if mix == "eight":
                            us = torch_us(made)
                            rows.append(about | {"path": "torch", "us": round(us, 1)})
                del memory
                torch.cuda.empty_cache()
    return rows


def choose_limit(rows: Iterable[Mapping[str, Any]]) -> tuple[int, list[str]]:
    """The most rows that go row by row, and a line a size that says why.

    At every size both paths have a worst case: the largest slowdown to the other over shapes and
    mixes. The limit is the last size before the first at which row by row's is the larger one.
    """
    times: dict[int, dict[tuple[str, str], dict[str, float]]] = {}
    for row in rows:
        if row["mix"] in JUDGED and row["path"] in PATHS:
            cases = times.setdefault(int(row["rows"]), {})
            cases.setdefault((row["shape"], row["mix"]), {})[row["path"]] = float(row["us"])
    limit, lines, ended = 0, [], False
    for size, cases in sorted(times.items()):
        ratios = {case: us["row"] / us["four"] for case, us in cases.items()}
        worst, best = max(ratios.values()), min(ratios.values())
        ended = ended or worst > 1 / best
        limit = limit if ended else size
        mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
        at = max(ratios, key=lambda case: ratios[case])
        lines.append(
            f"{size:5} rows: row by row takes {best:.2f} to {worst:.2f} of four operations' time "
            f"({mean:.2f} in the mean; most for {at[0]}, {at[1]})"
        )
    return limit, lines


def print_tables(rows: Sequence[Mapping[str, Any]]) -> None:
    """us a layer; then the limits."""
    us = {tuple(r[k] for k in ("shape", "part", "rank", "mix", "tokens", "path")): r for r in rows}
    sizes = sorted({r["tokens"] for r in rows})
    print("\nus a layer: floor / four operations / row by row, and torch where it was timed")
    print(f"| shape, part, rank, mix | {' | '.join(f'T={t}' for t in sizes)} |")
    print("|" + "---|" * (len(sizes) + 1))
    for at in dict.fromkeys(key[:4] for key in us):
        cells = []
        for tokens in sizes:
            found = [us.get((*at, tokens, path)) for path in (*PATHS, "torch")]
            texts = [f"{r['us']:.1f}" if r["us"] < 1000 else f"{r['us']:.0f}" for r in found if r]
            cells.append(" / ".join([f"{found[0]['floor_us']:.1f}", *texts]) if found[0] else "-")
        print(f"| {at[0]} {at[1]} r{at[2]} {at[3]} | {' | '.join(cells)} |")
    for part, name in (("experts", "MAX_PAIRS"), ("linears", "MAX_TOKENS")):
        for lora_rank in sorted({r["rank"] for r in rows}):
            some = [r for r in rows if r["part"] == part and r["rank"] == lora_rank]
            limit, lines = choose_limit(some)
            print(f"\n{name} at rank {lora_rank}: {limit}\n" + "\n".join(lines), flush=True)


@torch.inference_mode()
def main() -> None:
    """Measure, print, append."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--ranks", default="16,32,64")
    parser.add_argument("--tokens", default="1,8,16,32,64,128,256")
    parser.add_argument("--mixes", default=",".join(MIXES))
    parser.add_argument("--seconds", type=float, default=300, help="stop measuring then")
    parser.add_argument("--out", default=str(RESULTS), help="folder of the table")
    args = parser.parse_args()
    args.shapes, args.mixes = args.shapes.split(","), args.mixes.split(",")
    args.ranks, args.tokens = ([int(n) for n in s.split(",")] for s in (args.ranks, args.tokens))
    begin, device = time.monotonic(), torch.device("cuda", torch.cuda.current_device())
    compile_ahead(partial(launch_all, args, device), begin + args.seconds / 2)
    print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
    about = describe_run()
    rows = measure(args, GraphTimer(), device, begin + args.seconds)
    append_rows(Path(args.out) / "lora_paths.csv", COLUMNS, [about | row for row in rows])
    print_tables(rows)
    print(f"{time.monotonic() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
