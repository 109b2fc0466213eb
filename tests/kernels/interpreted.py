"""Runs the tests marked `interp` in a process of their own: TRITON_INTERPRET counts at import.

By shares, so that two workers take one each: together they are the longest part of the suite.
"""

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
SHARES = 2


def run_share(number: int) -> None:
    """Every SHARES-th test file from `number` on. Errors: AssertionError with what pytest said."""
    files = sorted(p for p in FOLDER.glob("test_*.py") if "pytest.mark.interp" in p.read_text())
    mine = [str(path) for path in files[number::SHARES]]
    assert mine, files
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-m", "interp", *mine],
        cwd=FOLDER.parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout, done.stdout[-2000:]
