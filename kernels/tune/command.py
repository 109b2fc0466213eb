"""`python -m kernels.tune --shape gpt-oss-20b,qwen3-30b-a3b,qwen3-32b --ranks 8,16,32,64`

Measures, on this machine's GPU, the tiles of every op of the tiles folder for the models' products
and the ranks, checks each candidate's values, and writes <out>/<GPU name>.json, by default where
`tiles_for` reads it. Times go to <out>/<GPU name>.jsonl, where the next run finds them. Compiling
comes first, in as many processes as there are cores; then one candidate after the other runs in a
captured graph, L2-cold, all adapters distinct, tokens routed at random.

An op whose kernel needs the tiles of another (an expand those of its shrink) is measured in a
second round, beside the best of the first.
"""

import argparse
import hashlib
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from kernels.tiling import (
    FOLDER,
    MAX_LORA_RANK,
    Tiles,
    file_name,
    force_tiles,
    gpu_name,
    parse_tiles,
    read_json,
    tiles_for,
)
from kernels.tune.compiling import NO_TARGET, Recorded, compile_all, record_kernels
from kernels.tune.files import Log, Measured, Run, merge, write_tiles
from kernels.tune.inputs import Batch
from kernels.tune.ops import TUNED, TunedOp
from kernels.tune.problems import SHAPES, Problem, as_shape
from kernels.tune.timing import GraphTimer

# Of the time that is left, what compiling for one round may take.
COMPILE_SHARE = 0.55
WRITE_EVERY_S = 30.0


@dataclass
class Job:
    """A problem and the ops that it tells something about, in the order of their rounds."""

    problem: Problem
    ops: list[TunedOp]
    # The kernels that a candidate of an op needs, once they are recorded.
    needs: dict[tuple[str, Tiles], list[Recorded]] = field(default_factory=dict)


@dataclass
class Tuner:
    """Everything that one run works with.

    measure  gives a batch's microseconds a call;  end  by time.monotonic, when to stop
    """

    log: Log
    measure: Callable[[Batch], float]
    device: torch.device
    end: float
    target: GPUTarget = NO_TARGET
    save: Callable[[], None] = lambda: None

    def candidates(self, op: TunedOp, problem: Problem) -> list[Tiles]:
        """What the file has now, then the others."""
        now = tiles_for(op.name, as_shape(op.key(problem)), gpu_name(self.device))
        return list(dict.fromkeys((now, *op.candidates(problem))))

    def best(self, job: Job, before: int) -> dict[str, Tiles]:
        """The fastest of the job's ops before this round."""
        found = {}
        for op in job.ops[:before]:
            right = [m for m in self.tried(op, job.problem) if not m.wrong]
            if right:
                found[op.name] = min(right, key=lambda m: m.us).tiles
        return found

    def tried(self, op: TunedOp, problem: Problem) -> list[Measured]:
        """What is known of this op's candidates, in their order."""
        found = [self.log.find(op.name, str(problem), t) for t in self.candidates(op, problem)]
        return [m for m in found if m is not None]

    def missing(self, job: Job, round_idx: int) -> list[Tiles]:
        """Candidates of this round without a time."""
        if round_idx >= len(job.ops):
            return []
        op = job.ops[round_idx]
        known = {m.tiles for m in self.tried(op, job.problem)}
        return [t for t in self.candidates(op, job.problem) if t not in known]

    def record(self, jobs: Sequence[Job], round_idx: int) -> Iterator[Recorded]:
        """The kernels that this round needs, each once."""
        seen: set[Recorded] = set()
        for job in jobs:
            wanted = self.missing(job, round_idx)
            if not wanted or time.monotonic() > self.end:
                continue
            op, made = job.ops[round_idx], list[Batch]()
            first = record_kernels(
                lambda: made.append(op.make(job.problem, self.device, False)),  # noqa: B023
                self.target,
            )
            for tiles in wanted:
                with force_tiles({**self.best(job, round_idx), op.name: tiles}):
                    needs = record_kernels(made[0].calls[0], self.target)
                job.needs[op.name, tiles] = needs
                for kernel in (*first, *needs):
                    if kernel not in seen:
                        seen.add(kernel)
                        yield kernel

    def measure_round(
        self, jobs: Sequence[Job], round_idx: int, compiled: dict[Recorded, str]
    ) -> None:
        """Every candidate whose kernels are there, until the time is up."""
        written = time.monotonic()
        for job in jobs:
            ready: dict[Tiles, list[str]] = {}
            for tiles in self.missing(job, round_idx):
                needs = job.needs.get((job.ops[round_idx].name, tiles))
                if needs is not None and all(kernel in compiled for kernel in needs):
                    ready[tiles] = [compiled[kernel] for kernel in needs]
            if not ready:
                continue
            if time.monotonic() > self.end:
                return
            op, forced = job.ops[round_idx], self.best(job, round_idx)
            batch = op.make(job.problem, self.device, True)
            want = batch.reference()
            for tiles, told in ready.items():
                if time.monotonic() > self.end:
                    break
                wrong, us = next((error for error in told if error), ""), math.inf
                with force_tiles({**forced, op.name: tiles}):
                    if not wrong:
                        wrong, us = self._try(batch, want)
                key = op.key(job.problem)
                self.log.add(Measured(op.name, str(job.problem), key, tiles, us, wrong))
                if "CUDA error" in wrong:
                    self.save()
                    sys.exit(f"{op.name} {job.problem} {tiles}: {wrong}; run again to go on")
            if time.monotonic() > written + WRITE_EVERY_S:
                self.save()
                written = time.monotonic()

    def _try(self, batch: Batch, want: Tensor) -> tuple[str, float]:
        """(what is wrong, microseconds)"""
        try:
            # What a call leaves unwritten lies where NaN lay.
            poison = torch.full_like(want, float("nan"))
            del poison
            error = batch.error(batch.calls[0](), want)
            batch.restore()
            if not error <= batch.bound:
                return f"off by {error:.1e}", math.inf
            return "", self.measure(batch)
        except Exception as error:  # a candidate that cannot run must not end the others
            return f"{type(error).__name__}: {error}".splitlines()[0][:120], math.inf


def plan(shapes: Sequence[str], ranks: Sequence[int], ops: Sequence[str]) -> list[Job]:
    """The work, an op's `make` and a problem each; problems with equal tensors side by side."""
    jobs: dict[tuple[object, Problem], Job] = {}
    for shape in shapes:
        for op in TUNED:
            for problem in op.problems(SHAPES[shape], ranks) if op.name in ops else ():
                job = jobs.setdefault((op.make, problem), Job(problem, []))
                if op not in job.ops:  # two models may share a problem
                    job.ops.append(op)
    return list(jobs.values())


def complete_ops(tuner: Tuner, jobs: Sequence[Job]) -> list[str]:
    """Ops of which every candidate of every job has been tried."""
    names = {op.name for job in jobs for op in job.ops}
    for job in jobs:
        for round_idx, op in enumerate(job.ops):
            if tuner.missing(job, round_idx):
                names.discard(op.name)
    return sorted(names)


def summarize(tuner: Tuner, jobs: Sequence[Job]) -> list[str]:
    """A line an op: how many keys, how much faster than what the file had before, what failed."""
    lines = []
    for name in dict.fromkeys(op.name for job in jobs for op in job.ops):
        gains, failed, tried = [], 0, 0
        for job in jobs:
            for op in job.ops:
                if op.name != name:
                    continue
                there = tuner.tried(op, job.problem)
                tried, failed = tried + len(there), failed + sum(bool(m.wrong) for m in there)
                if there and there[0].tiles == tuner.candidates(op, job.problem)[0]:
                    best = min(m.us for m in there)
                    if math.isfinite(there[0].us):
                        gains.append(there[0].us / best)
        mean = math.exp(sum(map(math.log, gains)) / len(gains)) if gains else 1.0
        most = max(gains, default=1.0)
        lines.append(
            f"{name:16} {len(gains):4} problems {tried:5} times {failed:4} failed   "
            f"best over the file's: x{mean:.2f} in the mean, x{most:.2f} at most"
        )
    return lines


def describe_run() -> Run:
    """This machine and this source."""
    digest = hashlib.sha256()
    for path in sorted(FOLDER.parent.glob("*.py")):
        digest.update(path.read_bytes())
    return Run(
        gpu=torch.cuda.get_device_name(),
        torch=torch.__version__,
        triton=triton.__version__,
        source=digest.hexdigest()[:12],
        commit=os.environ.get("COMMIT", "") or _commit(),
        utc=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        told = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return told.stdout.strip()


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Errors: SystemExit that says what is not known."""
    parser = argparse.ArgumentParser(prog="python -m kernels.tune", description=__doc__)
    names = [op.name for op in TUNED]
    parser.add_argument("--shape", default=",".join(SHAPES), help="models, by name")
    parser.add_argument("--ranks", default="8,16,32,64", help="LoRA ranks, multiples of 8")
    parser.add_argument("--ops", default=",".join(names), help="ops of the tiles folder")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder to write into")
    parser.add_argument("--seconds", type=float, default=360, help="stop then, with what there is")
    parser.add_argument("--workers", type=int, default=0, help="compiling processes; 0 = cores")
    args = parser.parse_args(argv)
    args.shape, args.ops = args.shape.split(","), args.ops.split(",")
    for given, known in ((args.shape, list(SHAPES)), (args.ops, names)):
        unknown = [name for name in given if name not in known]
        if unknown:
            parser.error(f"no such name: {', '.join(unknown)}; there are {', '.join(known)}")
    try:
        args.ranks = [int(rank) for rank in args.ranks.split(",")]
    except ValueError:
        parser.error(f"--ranks are numbers, not {args.ranks!r}")
    bad = [rank for rank in args.ranks if rank % 8 or not 8 <= rank <= MAX_LORA_RANK]
    if bad:
        parser.error(f"a rank is a multiple of 8 in 8..{MAX_LORA_RANK}, not {bad[0]}")
    return args


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    args = parse_arguments(argv)
    begin = time.monotonic()
    if not torch.cuda.is_available():
        sys.exit("kernels.tune measures a GPU, and torch sees none here")
    run, device = describe_run(), torch.device("cuda", torch.cuda.current_device())
    path = args.out / file_name(run.gpu)
    shipped = FOLDER / file_name(run.gpu)
    old = read_json(next(p for p in (path, shipped, FOLDER / file_name("")) if p.is_file()))
    parse_tiles(old, path.name)
    jobs = plan(args.shape, args.ranks, args.ops)
    log = Log(path.with_suffix(".jsonl"), run)
    target = triton.runtime.driver.active.get_current_target()
    tuner = Tuner(log, GraphTimer(), device, begin + args.seconds, target)
    tuner.save = lambda: write_tiles(path, merge(old, log, complete_ops(tuner, jobs)))
    workers = args.workers or len(os.sched_getaffinity(0))
    for round_idx in range(max(len(job.ops) for job in jobs)):
        start = time.monotonic()
        end = start + COMPILE_SHARE * (tuner.end - start)
        compiled = compile_all(tuner.record(jobs, round_idx), target, workers, end)
        middle = time.monotonic()
        tuner.measure_round(jobs, round_idx, compiled)
        print(
            f"round {round_idx + 1}: {len(compiled)} kernels compiled in {middle - start:.0f} s, "
            f"measured in {time.monotonic() - middle:.0f} s",
            flush=True,
        )
    tuner.save()
    print("\n".join(summarize(tuner, jobs)))
    left = sum(len(tuner.missing(job, i)) for job in jobs for i in range(len(job.ops)))
    print(f"{path}: {path.stat().st_size} bytes; {time.monotonic() - begin:.0f} s", end="")
    print(f"; {left} candidates left: run again to go on" if left else "")
