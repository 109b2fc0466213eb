"""What a test does where the machine lacks a thing that it needs: see `lack`. Not for anything
else."""

import os
from typing import NoReturn

import pytest


def lack(words: str) -> NoReturn:
    """Skip; in CI that is a failure: what is needed is there, or nothing has been proved."""
    if os.environ.get("CI"):
        pytest.fail(f"in CI nothing may be missing: {words}")
    pytest.skip(words)
