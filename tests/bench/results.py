"""The tables that benchmarks keep in results/, and what every row says of where it comes from."""

import csv
import hashlib
import os
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.bench.client import ROOT

RESULTS = Path(__file__).parent / "results"
ABOUT = ("gpu", "torch", "commit", "diff", "utc")
ENGINE = (
    "shape", "adapters", "rank", "concurrency", "open_rate", "otps_per_user", "total_tok_s",
    "ttft_p50_ms", "ttft_p99_ms", "kernel_ms", "added_by_adapters_ms", "launches",
    "host_ms_exposed", "compiles_after_warmup", "distinct_experts", "rescored_own",
    "rescored_other", "rescored_none", "startup_s", "valid", *ABOUT,
)  # fmt: skip
KERNELS = (
    "shape", "adapters", "rank", "concurrency", "kernels", "us", "launches", "floor_bytes",
    "floor_us", "floor_share", "distinct_experts", *ABOUT,
)  # fmt: skip
START = ("shape", "adapters", "rank", "compile_cache", "startup_s", "limit_s", *ABOUT)


def describe_run() -> dict[str, Any]:
    """GPU, torch, commit, hash of what was changed since ("" = nothing), UTC time.

    A copy of the tree, whose git does not know it, is told both by the variables COMMIT and DIFF.
    """
    import torch

    def git(*words: str) -> str:
        found = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return found.stdout.strip() if found.returncode == 0 else ""

    commit = git("rev-parse", "--short", "HEAD")
    changes = git("diff", "HEAD", "--", ".", ":!tests/bench/results")
    diff = hashlib.sha256(changes.encode()).hexdigest()[:12] if changes else ""
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "commit": os.environ.get("COMMIT") or commit or "unknown",
        "diff": os.environ.get("DIFF", diff if commit else "unknown"),
        "utc": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def append_rows(path: Path, columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    """Append rows to a table, with its head if it is new. Errors: ValueError if the table there has
    other columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    if not new:
        head = path.read_text().partition("\n")[0].split(",")
        if head != list(columns):
            raise ValueError(f"{path} has the columns {head}")
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)
