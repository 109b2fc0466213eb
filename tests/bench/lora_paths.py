"""From how many rows on are the four operations faster than row by row? L2-cold under graph replay.
Needs a GPU.

    python -m tests.bench.lora_paths [--shapes gpt-oss-20b,...] [--seconds 300] [--out DIR]

What one layer's LoRA costs by either path, base products left out: `experts` is gate_up, the
activation and down, with the worklist that the four operations need, as a layer of the model has
them; `linears` is q, k, v and o (and a dense MLP's two), whose worklist is made once a step, so not
counted. The tiles are those of the tiles folder. Adapters, 64 in all, are dealt to
the tokens in the ways of `slots_of`; `none` is what the launches alone cost.

Both paths' values are checked against torch first. Appends to lora_paths.csv (torch: as it runs
without a graph, its own time alone), prints a table of floor / four operations / row by row, and
the limits that follow for kernels/lora_decode.py: the most rows at which row by row is the better
choice for whichever mix is worst.
"""

import argparse
import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from kernels.tune.compiling import compile_all, record_kernels
from kernels.tune.inputs import Batch
from kernels.tune.problems import SHAPES
from kernels.tune.timing import GraphTimer
from tests.bench.floors import COPY_BYTES_PER_S
from tests.bench.lora_parts import (
    BOUND,
    LAYERS,
    MIXES,
    PATHS,
    Memory,
    Part,
    check,
    make_part,
    parts_of,
    restore,
)
from tests.bench.results import ABOUT, RESULTS, append_rows, describe_run

# Those that the limits follow from.
JUDGED = MIXES[:-1]
COLUMNS = ("shape", "part", "rank", "tokens", "rows", "mix", "path", "us", "floor_us", *ABOUT)


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


def compile_ahead(launches: Callable[[], None], end: float) -> None:
    """Compile in parallel all that `launches` would launch."""
    target = triton.runtime.driver.active.get_current_target()
    kernels = record_kernels(launches, target)
    done = compile_all(kernels, target, len(os.sched_getaffinity(0)), end)
    for error in sorted({error for error in done.values() if error}):
        print(f"FAILED to compile: {error}", flush=True)


def memories(
    args: argparse.Namespace, device: torch.device, filled: bool
) -> Iterator[tuple[str, str, int, Memory]]:
    """(shape, part, rank, factors), one after the other. filled: as in Memory.make"""
    for name in args.shapes:
        for part in parts_of(SHAPES[name]):
            for lora_rank in args.ranks:
                yield (
                    name,
                    part,
                    lora_rank,
                    Memory.make(SHAPES[name], part, lora_rank, device, filled),
                )


def launch_all(args: argparse.Namespace, device: torch.device) -> None:
    """Every path at every size once, on memory without values: for the compiler."""
    for name, part, _, memory in memories(args, device, False):
        for tokens in args.tokens:
            made = make_part(SHAPES[name], part, memory, tokens, "eight")
            for path in PATHS:
                getattr(made, path)(0)


def measure(
    args: argparse.Namespace, timer: Callable[[Batch], float], device: torch.device, end: float
) -> list[dict[str, Any]]:
    """A row a shape, part, rank, size, mix and path; none for what is wrong or fails."""
    rows: list[dict[str, Any]] = []
    for name, part, lora_rank, memory in memories(args, device, True):
        for tokens, mix in itertools.product(args.tokens, args.mixes):
            at = f"{name} {part} r{lora_rank} T={tokens} {mix}"
            if time.monotonic() > end:
                print(f"no time left for {at}", flush=True)
                continue
            try:
                made = make_part(SHAPES[name], part, memory, tokens, mix)
                about = {"shape": name, "part": part, "rank": lora_rank, "tokens": tokens}
                about |= {"rows": made.rows, "mix": mix}
                about["floor_us"] = round(1e6 * made.floor_bytes() / COPY_BYTES_PER_S, 2)
                rows += [about | found for found in measure_part(made, mix, timer)]
            except Exception as error:  # one must not hide the others
                text = f"{type(error).__name__}: {error}".splitlines()[0][:120]
                print(f"FAILED {at}: {text}", flush=True)
    return rows


def measure_part(made: Part, mix: str, timer: Callable[[Batch], float]) -> list[dict[str, Any]]:
    """Each path, checked and timed. Errors: AssertionError if one computes wrong."""
    want, rows = made.reference(0), []
    for path in PATHS:
        check(made, path, want)
        rows.append({"path": path, "us": round(time_path(made, path, timer), 2)})
    if mix == "eight":
        rows.append({"path": "torch", "us": round(torch_us(made), 1)})
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
