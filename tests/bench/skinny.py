"""Plain linears of a decode step: checked, then timed, form by form and tile by tile. Needs a GPU.

    python -m tests.bench.skinny [--tokens 1,8,16,32,64] [--seconds 85] [--model gpt-oss,qwen3-moe]

A captured graph walks over the layers, each with its own weights, so that none is in the L2: a norm
makes x, the product follows it. Times are us a layer of both together; `norm alone` and `floor`
(the weights at 4.3 TB/s) stand beside. Every variant's results are compared with torch in every
layer, after replays, so that a read of x before the norm has written it would show; and two replays
must agree in every bit. Last, the linears of a whole layer in their order, with norms as stand-ins
for what lies between.
"""

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from kernels.norm import rms_norm  # noqa: E402
from kernels.overlap import without_overlap  # noqa: E402
from kernels.skinny_linear import choose_form, product  # noqa: E402
from kernels.tiling import Tiles, gpu_name, tiles_for  # noqa: E402

BYTES_PER_S = 4.3e12
LARGEST_ERROR = 1e-2
REPLAYS = 15
BUDGET_BYTES = 1.5e9


@dataclass(frozen=True)
class Shape:
    """One linear of a model."""

    name: str
    in_: int
    out: int
    bias: bool = False

    @property
    def layers(self) -> int:
        return int(max(2, min(24, BUDGET_BYTES // (2 * self.in_ * self.out))))


MODELS = {
    "gpt-oss": (
        Shape("qkv", 2880, 5120, True), Shape("o", 4096, 2880, True),
        Shape("router", 2880, 32, True),
    ),
    "qwen3-moe": (Shape("qkv", 2048, 5120), Shape("o", 4096, 2048), Shape("router", 2048, 128)),
    "qwen3-32b": (
        Shape("qkv", 5120, 10240), Shape("o", 8192, 5120), Shape("gate_up", 5120, 51200),
        Shape("down", 25600, 5120),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """A form in its tiles; form "" is torch."""

    form: str = ""
    tiles: Tiles = Tiles()
    overlap: bool = True

    def label(self) -> str:
        if not self.form:
            return "torch" + ("" if self.overlap else ", all plain")
        t = self.tiles
        text = f"{self.form[7:]} {t.block_n}/{t.block_k}"
        text += f" /{t.split_k} w{t.num_warps}"
        if self.form == "linear_dot":
            text += f" s{t.num_stages}"
        return text + ("" if self.overlap else " plain")


def _dot(block_n: int, block_k: int, split: int, warps: int, stages: int) -> Variant:
    return Variant("linear_dot", Tiles(block_n, block_k, split, 1, warps, stages))


def _sum(block_n: int, block_k: int, warps: int) -> Variant:
    return Variant("linear_sum", Tiles(block_n, block_k, 1, 1, warps, 1))


TORCH, PLAIN_TORCH = Variant(), Variant(overlap=False)
FEW = (
    _dot(64, 64, 1, 4, 8), _dot(64, 128, 1, 4, 5), _dot(64, 64, 2, 4, 6), _dot(64, 128, 2, 4, 4),
    _dot(64, 64, 4, 4, 5), _dot(64, 128, 3, 4, 4), _dot(32, 128, 1, 4, 6), _dot(32, 128, 1, 2, 6),
    _dot(32, 64, 2, 2, 8), _dot(32, 128, 2, 4, 4), _dot(32, 256, 1, 4, 4), _dot(16, 128, 1, 1, 8),
    _dot(16, 256, 1, 1, 4), _dot(128, 64, 4, 4, 5), _dot(64, 64, 8, 4, 4),
)  # fmt: skip
MANY = (
    _dot(64, 64, 1, 4, 8), _dot(64, 64, 2, 4, 6), _dot(64, 128, 2, 4, 4), _dot(64, 64, 3, 4, 5),
    _dot(64, 64, 4, 4, 4), _dot(64, 128, 3, 4, 3), _dot(128, 64, 3, 8, 5), _dot(128, 64, 4, 8, 4),
    _dot(128, 64, 6, 8, 4), _dot(128, 128, 3, 8, 3), _dot(32, 128, 1, 4, 4), _dot(32, 128, 2, 4, 4),
)  # fmt: skip
SUMS = (
    _sum(4, 1024, 4), _sum(8, 1024, 4), _sum(4, 2048, 4), _sum(4, 4096, 4), _sum(2, 4096, 4),
    _sum(2, 1024, 2), _sum(4, 512, 2), _sum(8, 512, 4), _sum(8, 2048, 8), _sum(1, 4096, 2),
)  # fmt: skip
ROUTER = (
    _sum(1, 4096, 4), _sum(1, 4096, 8), _sum(2, 4096, 8), _sum(1, 1024, 4), _sum(1, 2048, 8),
    _dot(32, 64, 1, 4, 8), _dot(32, 64, 8, 4, 4), _dot(32, 64, 15, 4, 3), _dot(32, 128, 23, 4, 2),
    _dot(16, 128, 6, 1, 4), _dot(16, 128, 12, 1, 2), _dot(16, 256, 1, 1, 5),
)  # fmt: skip


def shipped(shape: Shape, rows: int) -> Variant:
    form = choose_form(rows, shape.out)
    key = {"rows": rows, "out": shape.out, "in": shape.in_}
    return Variant(form, tiles_for(form, key, gpu_name(torch.device("cuda"))))


def variants(shape: Shape, rows: int) -> tuple[Variant, ...]:
    """What to time for a shape and a number of rows."""
    if shape.out <= 256:
        return ROUTER
    return FEW + (SUMS if rows <= 4 else ()) if rows <= 16 else MANY


def plain(v: Variant) -> Variant:
    return Variant(v.form, v.tiles, overlap=False)


def apply(x: Tensor, weight: Tensor, bias: Tensor | None, v: Variant) -> Tensor:
    if not v.form:
        return torch.nn.functional.linear(x, weight, bias)
    return product(x, weight, bias, v.form, v.tiles, v.overlap)


def capture(run: Callable[[], list[Tensor]], overlap: bool) -> tuple[torch.cuda.CUDAGraph, list]:
    """A graph of `run`, norms overlapping or not, and what it returns."""
    with nullcontext() if overlap else without_overlap():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = run()
    return graph, results


def replay_us(graph: torch.cuda.CUDAGraph, layers: int) -> float:
    """Median us a layer."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    for _ in range(2):
        graph.replay()
    for mark in marks[:-1]:
        mark.record()
        graph.replay()
    marks[-1].record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(z) for a, z in zip(marks, marks[1:], strict=False))
    return 1e3 * times[REPLAYS // 2] / layers


class Bench:
    """One shape's weights and inputs."""

    def __init__(self, shape: Shape, rows: int, weights: list[Tensor]) -> None:
        self.shape, self.rows, self.weights = shape, rows, weights
        draw = torch.Generator("cuda").manual_seed(rows)
        size = (shape.layers, rows, shape.in_)
        self.h = torch.randn(size, generator=draw, device="cuda").bfloat16()  # [layers, T, in]
        self.gain = torch.ones(shape.in_, device="cuda", dtype=torch.bfloat16)
        bias = torch.randn(shape.out, generator=draw, device="cuda").bfloat16()
        self.bias = bias if shape.bias else None
        normed = torch.stack([rms_norm(h, self.gain, 1e-6) for h in self.h])
        wide = bias.float() if shape.bias else None
        self.want = [
            torch.nn.functional.linear(x.float(), w.float(), wide)
            for x, w in zip(normed, weights, strict=True)
        ]

    def time(self, v: Variant | None, hot: bool = False) -> float:
        """us a layer of norm and product; None: the norm alone; hot: one layer's weights for
        all."""

        def run() -> list[Tensor]:
            results = []
            for layer, h in enumerate(self.h):
                x = rms_norm(h, self.gain, 1e-6)
                if v is not None:
                    weight = self.weights[0 if hot else layer]
                    results.append(apply(x, weight, self.bias, v))
            return results

        graph, results = capture(run, v is None or v.overlap)
        us = replay_us(graph, self.shape.layers)
        if v is not None and not hot:
            kept = [y.clone() for y in results]
            for y in results:
                y.fill_(float("nan"))
            graph.replay()
            for layer, (y, first, want) in enumerate(zip(results, kept, self.want, strict=True)):
                assert not v.form or torch.equal(y, first), f"replays differ in layer {layer}"
                error = float((y.float() - want).norm() / want.norm())
                assert error < LARGEST_ERROR, f"layer {layer} is off by {error:.1e}"
        return us


def make_weights(shape: Shape) -> list[Tensor]:
    scale = shape.in_**-0.5
    make = [torch.empty(shape.out, shape.in_, dtype=torch.bfloat16, device="cuda")
            for _ in range(shape.layers)]  # fmt: skip
    return [w.normal_(0, scale) for w in make]


Job = tuple[int, int, bool, Variant]  # in, rows, bias, variant


def compile_jobs(jobs: list[Job]) -> list[str]:
    """In a worker process: one launch each, on few rows of weights; returns what failed."""
    failed = []
    for in_, rows, biased, v in jobs:
        x = torch.randn(rows, in_, device="cuda").bfloat16()
        weight = torch.randn(128, in_, device="cuda").bfloat16()
        bias = weight[:, 0].contiguous() if biased else None
        try:
            apply(x, weight, bias, v)
            torch.cuda.synchronize()
        except Exception as error:  # told when it is its turn to be measured, too
            failed.append(f"{v.label()} T={rows}: {type(error).__name__} {str(error)[:80]}")
    return failed


def layer_chain(shapes: tuple[Shape, ...], benches: list[Bench], chosen: list[Variant]) -> float:
    """us a layer: norm, qkv, three stand-ins, o, norm, router."""
    qkv, o, router = benches
    layers = min(b.shape.layers for b in benches)
    wide = torch.randn(qkv.rows, o.shape.in_, device="cuda").bfloat16()

    def run() -> list[Tensor]:
        results = []
        for layer in range(layers):
            x = rms_norm(qkv.h[layer], qkv.gain, 1e-6)
            results.append(apply(x, qkv.weights[layer], qkv.bias, chosen[0]))
            y = wide
            for _ in range(3):
                y = rms_norm(y, o.gain, 1e-6)
            y = apply(y, o.weights[layer], o.bias, chosen[1])
            x = rms_norm(y, router.gain, 1e-6)
            results.append(apply(x, router.weights[layer], router.bias, chosen[2]))
        return results

    graph, _ = capture(run, all(v.overlap for v in chosen))
    return replay_us(graph, layers)


@torch.inference_mode()
def main() -> None:
    """A table a shape, a column a number of rows; then the chains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="1,8,16,32,64")
    parser.add_argument("--model", default="gpt-oss")
    parser.add_argument("--seconds", type=float, default=85, help="start nothing new after that")
    parser.add_argument("--workers", type=int, default=14)
    args = parser.parse_args()
    start = time.monotonic()
    sizes = [int(t) for t in args.tokens.split(",")]
    models = args.model.split(",")
    jobs: dict[str, Job] = {}
    for shape in (s for m in models for s in MODELS[m]):
        for rows in sizes:
            ours = shipped(shape, rows)
            for v in (*variants(shape, rows), ours, plain(ours)):
                height = max(8, rows) if v.form == "linear_dot" else rows
                key = (v.label(), height, shape.in_ % v.tiles.block_k == 0, shape.bias,
                       shape.in_ <= v.tiles.block_k)  # fmt: skip
                jobs[str(key)] = (shape.in_, rows, shape.bias, v)
    todo = list(jobs.values())
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.workers, mp_context=context) as pool:
        parts = [pool.submit(compile_jobs, todo[i :: args.workers]) for i in range(args.workers)]
        for part in as_completed(parts):
            for line in part.result():
                print("FAILED to compile", line, flush=True)
    print(f"{len(todo)} kernels compiled after {time.monotonic() - start:.0f} s", flush=True)
    for model in models:
        measure(model, sizes, start + args.seconds)
    print(f"done after {time.monotonic() - start:.0f} s")


def measure(model: str, sizes: list[int], end: float) -> None:
    """All of one model."""
    benches: dict[int, list[Bench]] = {rows: [] for rows in sizes}
    winners: dict[int, list[Variant]] = {rows: [] for rows in sizes}
    for shape in MODELS[model]:
        floor = 2e6 * shape.in_ * shape.out / BYTES_PER_S
        print(f"\n{model} {shape.name} {shape.in_} -> {shape.out}, {shape.layers} layers, floor "
              f"{floor:.1f} us; us a layer with the norm")  # fmt: skip
        weights = make_weights(shape)
        for rows in sizes:
            bench = Bench(shape, rows, weights)
            benches[rows].append(bench)
            times: dict[Variant, float] = {}

            def note(v: Variant, bench: Bench = bench, times: dict[Variant, float] = times) -> None:
                if time.monotonic() > end:
                    return
                try:
                    times[v] = bench.time(v)
                except Exception as error:  # one that fails must not hide the others
                    print(f"FAILED T={bench.rows} {v.label()}: {str(error).splitlines()[0][:90]}")

            torch_us, late = bench.time(PLAIN_TORCH), bench.time(TORCH)
            ours = shipped(shape, rows)
            for v in dict.fromkeys((ours, *variants(shape, rows))):
                note(v)
            if not times:
                print(f"T={rows}: no time left")
                winners[rows].append(ours)
                continue
            best = min(times, key=lambda v: times[v])
            winners[rows].append(best)
            order = sorted(times.items(), key=lambda item: item[1])
            print(f"T={rows:2}: torch {torch_us:.1f} ({late:.1f} behind an early norm), norm alone "
                  f"{bench.time(None):.1f}, ships {times.get(ours, float('nan')):.1f}, "
                  f"best {times[best]:.1f}, its weights in the L2 "
                  f"{bench.time(best, hot=True):.1f}")  # fmt: skip
            print("      " + " | ".join(f"{v.label()} {t:.1f}" for v, t in order[:7]), flush=True)
    if len(MODELS[model]) != 3:
        return
    print(f"\n{model}: norm, qkv, three norms, o, norm, router; us a layer")
    for rows in sizes:
        mine = winners[rows]
        ships = [shipped(b.shape, rows) for b in benches[rows]]
        rows_of = (("torch", [PLAIN_TORCH] * 3), ("torch, early norms", [TORCH] * 3),
                   ("ships, plain", [plain(v) for v in ships]), ("ships", ships),
                   ("best", mine))  # fmt: skip
        line = [f"{name} {layer_chain(MODELS[model], benches[rows], v):.1f}" for name, v in rows_of]
        print(f"T={rows:2}: " + ", ".join(line), flush=True)


if __name__ == "__main__":
    main()
