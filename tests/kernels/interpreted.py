"""Runs the tests marked `interp` in a process of their own: TRITON_INTERPRET counts at import.

By shares, so that two workers take one each: together they are the longest part of the suite. Those
marked `slow` too, and the files in FULL_RUN, are one more share, of the full run.
"""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
FOLDERS = (TESTS / "kernels", TESTS / "bench")
SHARES = 2
FULL_RUN = (
    "far_memory",
    "full_activation",
    "layouts",
    "lora_decode",
    "lora_gated_act",
    "mla_attention",
    "mxfp4_packed",
    "skinny_linear",
)


def run_share(number: int) -> None:
    """Every SHARES-th test file from `number` on. Errors: AssertionError with what pytest said."""
    files = [path for path in _files() if not _is_for_full_run(path)]
    run("interp and not slow", files[number::SHARES])


def run_slow() -> None:
    """What the shares leave out. Errors: AssertionError with what pytest said."""
    run("interp and slow", _files())
    run("interp and not slow", [path for path in _files() if _is_for_full_run(path)])


def _files() -> list[Path]:
    found = (path for folder in FOLDERS for path in folder.glob("test_*.py"))
    return sorted(path for path in found if "pytest.mark.interp" in path.read_text())


def _is_for_full_run(path: Path) -> bool:
    return path.stem.removeprefix("test_") in FULL_RUN


def run(marks: str, files: list[Path]) -> None:
    """Tests with these marks. Errors: AssertionError with what pytest said."""
    mine = [str(path) for path in files]
    assert mine
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-m", marks, *mine],
        cwd=TESTS.parent,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout, done.stdout[-2000:]
