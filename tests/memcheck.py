"""Every Triton kernel, and a small engine, under compute-sanitizer's memcheck; then a verdict.

`python -m tests.memcheck` starts itself twice under the sanitizer, torch's caching of memory off so
that each tensor is an allocation of its own: once with a write one place past the end, which must
be found, and once with the kernels' small cases and an engine that serves three adapters. Around
the adapter memory lie bands of NaN: results must not feel them and nobody may write there.
Not here: what the kernels compute (tests/kernels), races.

Exits with 0 if all is clean.
"""

import argparse
import dataclasses
import itertools
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import adapter_store.arena
from adapter_store.ref import AdapterRef
from kernels.lora_tables import LoraTables
from kernels.op import Case, Op, compiled_kernels
from kernels.registry import OPS
from kernels.rope_kv import rope_kv_write
from model_runner.config import EngineConfig
from model_runner.engine import Engine
from model_runner.request import FinishReason, Request, SamplingParams
from tests.model_runner.demo import ADAPTER_DIRS, BASE_DIR
from tests.model_runner.speed_world import take_both_paths

BAND = 4096  # elements on each side
BUDGET_S = 120.0  # for the kernels' cases; each kernel must have had its turn by then
LIMIT_S = 220.0  # for one run under the sanitizer
ARENA_BYTES = 4 << 20
DONE = "memcheck inside: done"
ALL = ", which is all of them"
PADDING_BYTES = 4096  # between two allocations: a read past the end of one is not in the next
SANITIZER = "/usr/local/cuda/bin/compute-sanitizer"


class Bands:
    """A tensor's copy between two bands of NaN."""

    def __init__(self, x: Tensor) -> None:
        self._whole = torch.full((x.numel() + 2 * BAND,), torch.nan, dtype=x.dtype, device=x.device)
        self.inner = self._whole[BAND : BAND + x.numel()]
        self.inner.copy_(x)

    def check(self) -> None:
        """AssertionError if somebody wrote into a band."""
        for band in (self._whole[:BAND], self._whole[BAND + self.inner.numel() :]):
            assert bool(band.isnan().all()), "the band around the adapter memory was written to"


def run_case(op: Op, case: Case, device: str, dtype: torch.dtype) -> None:
    """One case alone, and with bands if it reads adapters. AssertionError if they are felt."""

    def results(banded: bool) -> tuple[list[Tensor], list[Bands]]:
        inputs, bands = case.make(device, dtype, 0), []
        if banded:
            bands = [Bands(inputs["tables"].memory)]
            inputs["tables"] = dataclasses.replace(inputs["tables"], memory=bands[0].inner)
        return op.outputs(inputs, op.run(**inputs)), bands

    plain, _ = results(False)
    if isinstance(case.make("cpu", dtype, 0).get("tables"), LoraTables):
        banded, bands = results(True)
        for x, y in zip(plain, banded, strict=True):
            # Split sums may come in another order: a rounding step of bf16.
            torch.testing.assert_close(x, y, rtol=0.01, atol=0.01, equal_nan=True)
        bands[0].check()


@contextmanager
def banded_arena() -> Iterator[list[Bands]]:
    """Adapter memory that is made meanwhile lies between bands."""
    found: list[Bands] = []
    zeros = torch.zeros

    def make(*shape: Any, **options: Any) -> Tensor:
        fresh = zeros(*shape, **options)
        if fresh.dim() == 1 and fresh.nbytes == ARENA_BYTES:
            found.append(Bands(fresh))
            return found[-1].inner
        return fresh

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter_store.arena.torch, "zeros", make)
        yield found


def run_engine(device: str) -> None:
    """Three adapters take turns in two slots of an arena between bands; prompts in chunks, decode,
    by both of LoRA's paths.

    No graphs: a capture may not allocate, and here nothing is kept to allocate from.
    """
    config = EngineConfig(
        str(BASE_DIR), device=device, max_model_len=64, kv_bytes=1 << 20, lora_bytes=ARENA_BYTES,
        max_loras=2, max_num_seqs=8, max_step_tokens=16, cuda_graphs=False,
    )  # fmt: skip
    refs = [None, *(AdapterRef(name, str(folder)) for name, folder in ADAPTER_DIRS.items())]
    with banded_arena() as bands:
        engine = Engine(config)
    patch = pytest.MonkeyPatch()
    take_both_paths(patch, 8)
    try:
        sampling = SamplingParams(temperature=1.0, seed=1, max_tokens=6, ignore_eos=True)
        done = engine.generate(
            Request(f"r{i}", tuple(range(5, 10 + 5 * i)), sampling, refs[i % 4]) for i in range(8)
        )
        assert all(c.finish_reason is FinishReason.LENGTH for c in done), done
        assert engine.stats().evictions > 0
        (band,) = bands
        band.check()
    finally:
        patch.undo()
        engine.close()


def cases() -> Iterator[tuple[Op, Case]]:
    """The first case of each op, then the second of each, and so on."""
    # The long worklists too: short ones are sorted by another kernel.
    by_op = [
        [(op, case) for case in op.cases() if case.small or op.name == "build_worklist"]
        for op in OPS.values()
    ]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*by_op))
    return (pair for pair in turns if pair is not None)


def run_inside(device: str) -> None:
    """What runs under the sanitizer."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    begin, left_out, count = time.monotonic(), 0, 0
    compiled = compiled_kernels()
    for op, case in cases():
        if time.monotonic() - begin > BUDGET_S:
            left_out += 1
            continue
        run_case(op, case, device, dtype)
        if device == "cuda":
            torch.cuda.synchronize()
        count += 1
    took = time.monotonic() - begin
    rest = f", {left_out} not" if left_out else ALL
    print(f"{count} cases of {len(OPS)} ops in {took:.0f} s{rest}", flush=True)
    if device == "cuda":
        wanted = {spec.fn.__name__ for op in OPS.values() for spec in op.aot()}
        never = {name for name in wanted if not any(name in told for told in compiled)}
        assert not never, f"no case that ran uses {sorted(never)}"
    run_engine(device)
    print(f"an engine with three adapters, after {time.monotonic() - begin:.0f} s", flush=True)
    print(DONE, flush=True)


def run_planted() -> None:
    """A key written one place past the end of its cache."""
    cache = torch.zeros(2, 16, 1, 16, device="cuda")  # [P, C, G, D]
    k = torch.ones(1, 1, 16, device="cuda")  # [T, G, D]
    first, place = torch.tensor([[0], [32]], device="cuda")  # [T] each
    cos_sin = torch.ones(1, 16, device="cuda")  # [1, D]
    rope_kv_write(k.clone(), k, k, cos_sin, first, cache, cache.clone(), place)
    torch.cuda.synchronize()
    print(DONE, flush=True)


def sanitize(what: str) -> tuple[int | None, str]:
    """Number of errors that the sanitizer counts in a run of this file, None if it did not say; and
    all that was printed."""
    tool = shutil.which("compute-sanitizer") or SANITIZER
    command = [
        tool, "--tool", "memcheck", "--padding", str(PADDING_BYTES), "--report-api-errors", "no",
        "--print-limit", "20", sys.executable, "-m", "tests.memcheck", what,
    ]  # fmt: skip
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        told = done.stdout + done.stderr
    except subprocess.TimeoutExpired as late:
        told = f"{late.stdout!r}\n{late.stderr!r}\nstopped after {LIMIT_S} s"
    found = re.search(r"ERROR SUMMARY: (\d+) error", told)
    return (int(found.group(1)) if found else None), told


def judge() -> int:
    """Both runs, and the verdict on one line each."""
    verdicts: list[tuple[str, Callable[[int, str], bool]]] = [
        ("--planted", lambda errors, told: errors > 0),
        ("--inside", lambda errors, told: errors == 0 and DONE in told and ALL in told),
    ]
    good = True
    for what, passes in verdicts:
        begin = time.monotonic()
        errors, told = sanitize(what)
        ok = errors is not None and passes(errors, told)
        good &= ok
        if not ok:
            print(told[-6000:])
        print(
            f"memcheck {what.removeprefix('--')}: {errors} errors in "
            f"{time.monotonic() - begin:.0f} s: {'as it must be' if ok else 'FAILED'}",
            flush=True,
        )
    print(f"memcheck: {'clean' if good else 'NOT CLEAN'}")
    return 0 if good else 1


def main() -> int:
    """The command line; see the head of the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inside", action="store_true", help="run the cases here and now")
    parser.add_argument("--planted", action="store_true", help="make a fault here and now")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    if args.planted:
        run_planted()
    elif args.inside:
        run_inside(args.device)
    else:
        return judge()
    return 0


if __name__ == "__main__":
    sys.exit(main())
