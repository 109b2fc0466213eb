"""Every family on a GPU: the tests of families at speed, then latent attention by tile sizes, then
decode of three more full shapes beside their floors.

    python -m tests.bench.families [--seconds 450] [--out DIR] [--steps tests,latent,decode]

The tests run side by side, one process a family and one for latent attention's kernels; beside them
one process a shape compiles its kernels, and the fp8 checkpoint is written. Then nothing else runs,
and one process after the other measures: tokens a second at each concurrency, base and with
adapters, a step's kernels beside the time that their bytes take. Prints it all; appends to
family_tests.csv, families.csv, kernels_step.csv and latent_tiles.csv. Exit code 1 if a test or a
process failed.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.client import ROOT
from tests.bench.family_shapes import FAMILY_SHAPES
from tests.bench.fp8_checkpoint import write_fp8_qwen3
from tests.bench.results import ABOUT, RESULTS, append_rows, describe_run
from tests.model_runner.family_world import NAMES, config_of

STEPS = ("tests", "latent", "decode")
TESTS = "tests/model_runner/test_families_at_speed.py"
TEST_S, LATENT_S = 220.0, 40.0
PYTEST = (
    "-m", "pytest", "-q", "-s", "--tb=short", "-p", "no:cacheprovider", f"--timeout={TEST_S:.0f}",
)  # fmt: skip
LATENT_TESTS = (*PYTEST, "-m", "gpu", "-k", "mla", "tests/kernels/test_ops.py")
SHM = Path("/dev/shm")
CHECKPOINT_BYTES = 52 << 30  # with the adapters in the host tier
SEED = 7
THREADS = "2"  # of a process: as many processes run side by side as there are families and shapes
TOLD = (
    r"^\W*(mean|own) |passed|skipped"  # what tests print of their numbers, and pytest's last line
)
# A family's own tests, in the order in which they run.
FAMILY_TESTS = (
    "graphs_equal_eager_steps",
    "adapters_in_the_arena_equal_merged_weights",
    "greedy_answers_are_the_references",
)
# Of its tests on a GPU: what they are, layers and width of its config (few beside what is
# published), how far logits are from the truth through the arena and with merged weights (of the
# adapter for which the former is largest beside the latter), what the adapter changes, the shares
# of greedy tokens within `bound` of the truth's best (another adapter's: `other`).
FAMILY_COLUMNS = (
    "family", "what", "layers", "hidden_size", "passed", "arena_mean", "merged_mean", "arena_max",
    "merged_max", "effect", "own", "other", "bound", *ABOUT,
)  # fmt: skip
_MERGED = re.compile(r"^\W*mean (\S+) (\S+) max (\S+) (\S+) effect (\S+)$", re.MULTILINE)
_ANSWERS = re.compile(r"^\W*own (\S+) other (\S+) bound (\S+)$", re.MULTILINE)
_PASSED = re.compile(r"\b(\d+) passed\b")


@dataclass
class Process:
    """One process, its output in a file."""

    name: str
    log: Path
    child: subprocess.Popen[bytes]

    def wait(self, end: float) -> bool:
        """Whether it ended well before `end` (time.monotonic); else it is ended."""
        try:
            code = self.child.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(self.child.pid, signal.SIGKILL)  # it leads a group of its own
            self.child.wait()
            print(f"{self.name}: not done in time", flush=True)
            return False
        if code:
            print(f"{self.name}: exit code {code}", flush=True)
        return code == 0

    def show(self, most: int, only: str = "") -> None:
        """The last lines of its output; only: those that match."""
        lines = self.log.read_text(errors="replace").splitlines()
        lines = [line for line in lines if re.search(only, line)]
        print(f"---- {self.name}", *lines[-most:], sep="\n", flush=True)


def start(name: str, words: list[str], folder: Path) -> Process:
    """Run Python with these words."""
    log = folder / f"{name.replace(' ', '-').replace('/', '-')}.log"
    with log.open("wb") as file:
        child = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": THREADS},
            start_new_session=True,
        )  # fmt: skip
    return Process(name, log, child)


def test_words(name: str) -> list[str]:
    """pytest over the tests of one family on a GPU."""
    at = f"{TESTS}::test_"
    graphs, *others = FAMILY_TESTS
    ids = [f"{at}{graphs}[{name}]", *(f"{at}{test}[{name}-cuda]" for test in others)]
    if name == "deepseek v2":
        halves = ("mla_query_lora", "mla_value_lora")
        ids += [f"{at}without_a_half_of_kv_b_proj_they_do_not[{half}-cuda]" for half in halves]
    return [*PYTEST, *ids]


def family_row(name: str, said: str) -> dict[str, Any]:
    """The row of one family's tests from what pytest said. Errors: ValueError if it lacks a number.

    Adapters after the answers are those of tests that break something on purpose.
    """
    answers, passed = _ANSWERS.search(said), _PASSED.search(said)
    merged = _MERGED.findall(said[: answers.start()] if answers else "")
    if not answers or not passed or not merged:
        raise ValueError(f"the tests of {name} told no numbers")
    config = config_of(name, "cuda", False)
    worst = max(merged, key=lambda found: float(found[0]) / float(found[1]))
    names = ("arena_mean", "merged_mean", "arena_max", "merged_max", "effect")
    return {
        "family": name,
        "what": " ".join(FAMILY_TESTS),
        "layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "passed": int(passed[1]),
        **{key: float(value) for key, value in zip(names, worst, strict=True)},
        **{key: float(answers[i]) for i, key in enumerate(("own", "other", "bound"), 1)},
    }


def family_words(label: str, args: argparse.Namespace, work: Path) -> list[str]:
    """The measurement of one shape."""
    words = ["-m", "tests.bench.family_steps", "--shape", label, "--out", args.out]
    return [*words, "--checkpoint", str(work / "fp8"), "--work", str(work)]


def prepare(args: argparse.Namespace, work: Path, end: float) -> bool:
    """The tests, the compiling and the checkpoint, side by side. Whether all went well."""
    beside: list[Process] = []
    if "tests" in args.steps:
        beside += [start(f"test {name}", test_words(name), work) for name in NAMES]
        beside.append(start("test latent kernels", list(LATENT_TESTS), work))
    if "decode" in args.steps:
        beside += [
            start(f"compile {label}", [*family_words(label, args, work), "--compile-only"], work)
            for label in args.shapes
        ]
        for label in args.shapes:
            shape = FAMILY_SHAPES[label]
            if shape.fp8:
                began = time.monotonic()
                write_fp8_qwen3(work / "fp8", shape.config, SEED)
                print(f"fp8 checkpoint written in {time.monotonic() - began:.1f} s", flush=True)
    good, rows = True, []
    for process in beside:
        fine = process.wait(end)
        name = process.name.removeprefix("test ")
        if fine and name in NAMES:
            try:
                rows.append(family_row(name, process.log.read_text(errors="replace")))
            except ValueError as error:
                print(error, flush=True)
                fine = False
        good &= fine
        if not fine:
            process.show(60)
        elif process.name.startswith("test"):
            process.show(12, TOLD)
    if rows:
        about = describe_run()
        path = Path(args.out) / "family_tests.csv"
        append_rows(path, FAMILY_COLUMNS, [row | about for row in rows])
    return good


def choose_folder() -> str | None:
    """Memory where it is large enough, else the default for temporary files."""
    if SHM.is_dir() and shutil.disk_usage(SHM).free > CHECKPOINT_BYTES:
        return str(SHM)
    return None


def main() -> None:
    """All that was asked for, within the time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=450.0, help="for all of it")
    parser.add_argument("--out", default=str(RESULTS), help="folder of the tables")
    parser.add_argument("--steps", default=",".join(STEPS))
    parser.add_argument("--shapes", default=",".join(FAMILY_SHAPES))
    args = parser.parse_args()
    args.steps, args.shapes = args.steps.split(","), args.shapes.split(",")
    if unknown := (set(args.steps) - set(STEPS)) | (set(args.shapes) - set(FAMILY_SHAPES)):
        parser.error(f"unknown {sorted(unknown)}; known are {STEPS} and {list(FAMILY_SHAPES)}")
    began = time.monotonic()
    end, good = began + args.seconds, True
    with tempfile.TemporaryDirectory(dir=choose_folder()) as folder:
        work = Path(folder)
        print(f"in {work}", flush=True)
        good &= prepare(args, work, min(end, began + TEST_S))
        print(f"==== prepared after {time.monotonic() - began:.0f} s", flush=True)
        parts = []
        if "latent" in args.steps:
            words = ["-m", "tests.bench.latent_tiles", "--out", args.out]
            parts.append(("latent", [*words, "--seconds", f"{LATENT_S:.0f}"]))
        if "decode" in args.steps:
            parts += [(label, family_words(label, args, work)) for label in args.shapes]
        for name, words in parts:
            process = start(name, words, work)
            good &= process.wait(end)
            process.show(160)
            print(f"==== {name} after {time.monotonic() - began:.0f} s", flush=True)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
