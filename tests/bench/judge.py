"""Hands the engine to an outside judge: makes model and adapters from seeds, and prints (or runs)
the judge's command line.

    python -m tests.bench.judge --harness FILE --work DIR [--run] [--shape ...] [-- more options]

FILE is a program that takes --engine, --logits, --adapters, --vocab, --experts, --top-k and --out.
Other seeds than the benchmark's own: --model-seed here, `-- --seed N` for its prompts.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from tests.bench.client import ROOT
from tests.bench.shapes import SHAPES
from tests.bench.workload import Wishes, Workload, as_line, prepare


def command_of(harness: str, work: Workload, out: Path, more: list[str]) -> list[str]:
    """The judge's command line."""
    words = [sys.executable, harness, "--engine", as_line(work.serve)]
    words += ["--logits", as_line(work.logits), "--vocab", str(work.config["vocab_size"])]
    words += ["--experts", str(work.experts), "--top-k", str(work.top_k)]
    words += ["--tokens-in", str(work.wishes.tokens_in)]
    words += ["--tokens-out", str(work.wishes.tokens_out), "--out", str(out)]
    if work.names:
        words += ["--adapters", ",".join(work.names)]
    return words + more


def main() -> int:
    """Print the command, and run it if asked to; gives its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--harness", required=True)
    parser.add_argument("--work", required=True, help="folder for model, adapters and results")
    parser.add_argument("--run", action="store_true", help="run it, do not only print it")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="gpt-oss-20b")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--model-seed", type=int, default=7)
    parser.add_argument("--tokens-in", type=int, default=1600)
    parser.add_argument("--tokens-out", type=int, default=600)
    parser.add_argument("--max-clients", type=int, default=32)
    parser.add_argument("--config", default="{}", help="JSON fields of EngineConfig")
    parser.add_argument("more", nargs="*", help="further options of the judge, after --")
    args = parser.parse_args()
    wishes = Wishes(
        args.shape,
        args.adapters,
        args.rank,
        args.layers,
        args.model_seed,
        args.tokens_in,
        args.tokens_out,
        args.max_clients,
        args.config,
    )
    folder = Path(args.work).absolute()
    work = prepare(wishes, folder)
    command = command_of(
        str(Path(args.harness).absolute()), work, folder / "judged.json", args.more
    )
    print(as_line(command), flush=True)
    return subprocess.run(command, cwd=ROOT).returncode if args.run else 0


if __name__ == "__main__":
    sys.exit(main())
