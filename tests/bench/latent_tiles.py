"""Latent attention by tile sizes, beside the time that its bytes or its products take. Needs a GPU.

    python -m tests.bench.latent_tiles [--seconds 60] [--out DIR]

For DeepSeek-V2-Lite's 16 heads and V3's 128: decode of 1, 8 and 32 sequences of 1600 tokens, and
one prompt of 1600; beside the prompt also what attention costs that is not absorbed (torch's own,
over keys and values made from the latents). Prints a table; appends to latent_tiles.csv. The
winners go into `decode_tile` and `prefill_tile` of kernels/mla_attention_triton.py by hand.
"""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.mla_attention import mla_attention_reference
from kernels.mla_attention_triton import LatentTile, decode, decode_tile, prefill, prefill_tile
from kernels.paged_attention import Rows, make_case
from kernels.tune.compiling import compile_all, record_kernels
from kernels.tune.inputs import Batch
from kernels.tune.timing import GraphTimer
from tests.bench.floors import COPY_BYTES_PER_S
from tests.bench.results import ABOUT, RESULTS, append_rows, describe_run

LATENT, ROPE, NOPE = 512, 64, 128
CONTEXT, MAX_LEN = 1600, 1856
FLOPS_PER_S = 790e12  # what bf16 products reach on an H200
COLUMNS = ("heads", "kind", "sequences", "tile", "us", "floor_us", "error", *ABOUT)
MAX_SETS = 16


@dataclass(frozen=True)
class Problem:
    """is_decode: `sequences` of one query each, else one prompt."""

    heads: int
    is_decode: bool
    sequences: int

    @property
    def rows(self) -> Rows:
        return ((1, CONTEXT),) * self.sequences if self.is_decode else ((CONTEXT, CONTEXT),)

    @property
    def num_sets(self) -> int:
        return MAX_SETS if self.is_decode else 2

    def floor_us(self) -> float:
        """The longer of its bytes' time and its products'."""
        tokens = sum(count for count, _ in self.rows)
        width = 2 * LATENT + ROPE
        moved = 2.0 * (sum(n for _, n in self.rows) * (LATENT + ROPE) + tokens * self.heads * width)
        pairs = sum(count * (n - (count - 1) / 2) for count, n in self.rows)
        flops = 2.0 * pairs * self.heads * width
        return 1e6 * max(moved / COPY_BYTES_PER_S, flops / FLOPS_PER_S)


PROBLEMS = (
    *(Problem(16, True, sequences) for sequences in (1, 8, 32)),
    Problem(16, False, 1),
    Problem(128, True, 8),
    Problem(128, False, 1),
)


def tiles_of(problem: Problem) -> list[LatentTile]:
    """What is measured: the default first."""
    if problem.is_decode and problem.heads == 16:
        found = [decode_tile(16)]
        for programs in (1, 2, 4):
            found += [
                LatentTile(1, 16, 32, 4, 2, programs),
                LatentTile(1, 16, 32, 8, 2, programs),
                LatentTile(1, 16, 32, 8, 5, programs),
                LatentTile(1, 16, 64, 8, 5, programs),
                LatentTile(1, 16, 16, 4, 5, programs),
            ]
    elif problem.is_decode:
        found = [decode_tile(problem.heads)]
        found += [LatentTile(1, 64, 32, 8, stages, n) for stages in (2, 5) for n in (1, 2)]
        found += [LatentTile(1, 32, 32, 8, 5, n) for n in (1, 2)]
    elif problem.heads == 16:
        # The last was the only one once: a token by itself.
        sizes = ((4, 32, 8, 2), (4, 32, 8, 5), (4, 64, 8, 2), (4, 16, 8, 5), (2, 32, 8, 2),
                 (1, 32, 4, 2))  # fmt: skip
        found = [prefill_tile(16), *(LatentTile(t, 16, n, w, s) for t, n, w, s in sizes)]
    else:
        found = [prefill_tile(problem.heads)]
        found += [LatentTile(1, 64, 32, 8, stages) for stages in (2, 5)]
    return list(dict.fromkeys(found))


def make_inputs(problem: Problem, device: str, seed: int) -> dict[str, Any]:
    """Arguments of mla_attention."""
    width = LATENT + ROPE
    case = make_case("", problem.rows, problem.heads, 1, width, max_len=MAX_LEN)
    made = case.make(device, torch.bfloat16, seed)
    q = made["q"]
    return {
        "q_latent": q[..., :LATENT].contiguous(),  # [T, Q, R]
        "q_rope": q[..., LATENT:],  # [T, Q, Dr]
        "cache": made["k_cache"].squeeze(2),  # [P, C, R + Dr]
        **{key: made[key] for key in ("page_table", "seq_lens", "cu_q", "scale")},
    }


def call_of(problem: Problem, tile: LatentTile, inputs: dict[str, Any]) -> Callable[[], Tensor]:
    """One launch (and the combining one)."""
    if problem.is_decode:
        return partial(decode, **inputs, max_len=MAX_LEN, tile=tile)
    return partial(prefill, **inputs, tile=tile)


def measure(
    problems: Sequence[Problem], timer: Callable[[Batch], float], device: str, end: float
) -> list[dict[str, Any]]:
    """A row a problem and tile; a tile that cannot run says why."""
    rows = []
    for problem in problems:
        sets = [make_inputs(problem, device, seed) for seed in range(problem.num_sets)]
        exact = {k: v.float() if k in ("q_latent", "q_rope", "cache") else v
                 for k, v in sets[0].items()}  # fmt: skip
        want = mla_attention_reference(**exact, max_q=2, max_len=MAX_LEN)
        print(f"{problem}, floor {problem.floor_us():.1f} us")
        best: tuple[float, LatentTile] | None = None
        for number, tile in enumerate(tiles_of(problem)):
            if number and time.monotonic() > end:
                print("  no time left")
                break
            calls = tuple(call_of(problem, tile, inputs) for inputs in sets)
            row = {"heads": problem.heads, "kind": "decode" if problem.is_decode else "prompt",
                   "sequences": problem.sequences, "tile": str(tile),
                   "floor_us": round(problem.floor_us(), 2)}  # fmt: skip
            try:
                off = float((calls[0]().float() - want).abs().max() / want.abs().max())
                us = timer(Batch(calls, calls[0], 0.0))
            except Exception as error:  # one that does not fit must not hide the others
                print(f"  {tile}: {type(error).__name__}: {str(error)[:90]}", flush=True)
                continue
            wrong = "  WRONG" if not off < 0.02 else ""
            print(f"  {us:8.2f} us  off by {off:.4f}{wrong}  {tile}", flush=True)
            rows.append(row | {"us": round(us, 2), "error": round(off, 5)})
            if not wrong and (best is None or us < best[0]):
                best = us, tile
        if best is not None:
            print(f"  best: {best[0]:.2f} us {best[1]}", flush=True)
    return rows


def measure_unabsorbed(heads: int, timer: Callable[[Batch], float], device: str) -> None:
    """Print what a prompt's attention costs in both ways, the products around it included."""
    problem = Problem(heads, False, 1)
    inputs = make_inputs(problem, device, 0)
    q_latent = inputs["q_latent"]
    made = partial(torch.randn, device=device, dtype=q_latent.dtype)
    key_up, value_up = made(heads, NOPE, LATENT), made(heads, LATENT, NOPE)
    q_nope, latents = made(heads, CONTEXT, NOPE), made(CONTEXT, LATENT)
    up = made(LATENT, 2 * heads * NOPE)
    # Values as wide as keys: torch's fast kernels want it.
    q, k, v = (made(1, heads, CONTEXT, NOPE + ROPE) for _ in range(3))

    def absorbed() -> Tensor:
        into = torch.matmul(q_nope, key_up).transpose(0, 1).contiguous()  # [T, Q, R]
        values = prefill(**(inputs | {"q_latent": into}))  # [T, Q, R]
        return torch.matmul(values.transpose(0, 1), value_up).transpose(0, 1).contiguous()

    def unabsorbed() -> Tensor:
        torch.matmul(latents, up)  # keys and values of all heads
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    times = []
    for call in (absorbed, unabsorbed):
        call()  # libraries set themselves up, which a capture would not bear
        times.append(timer(Batch((call,), call, 0.0)))
    print(f"a prompt of {CONTEXT}, {heads} heads: absorbed {times[0]:.1f} us, not {times[1]:.1f}",
          flush=True)  # fmt: skip


def compile_ahead(problems: Sequence[Problem], device: str, end: float) -> dict[str, str]:
    """Compile all tiles in processes of their own. Gives what did not compile, and why."""
    calls = [
        call_of(problem, tile, make_inputs(problem, device, 0))
        for problem in problems
        for tile in tiles_of(problem)
    ]
    target = triton.runtime.driver.active.get_current_target()
    ahead = record_kernels(lambda: [call() for call in calls], target)
    done = compile_all(ahead, target, len(os.sched_getaffinity(0)), end)
    return {kernel.key(): why for kernel, why in done.items() if why}


def main() -> None:
    """Compile, measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", default=str(RESULTS), help="folder of the table")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    print(compile_ahead(PROBLEMS, "cuda", end) or "all compiled", flush=True)
    timer = GraphTimer()
    rows = measure(PROBLEMS, timer, "cuda", end)
    append_rows(Path(args.out) / "latent_tiles.csv", COLUMNS, [r | describe_run() for r in rows])
    for heads in (16, 128):
        measure_unabsorbed(heads, timer, "cuda")


if __name__ == "__main__":
    main()
