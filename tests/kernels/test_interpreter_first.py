"""The first share of the interpreter's tests (see interpreted.py)."""

import pytest

from tests.kernels.interpreted import run_share


@pytest.mark.timeout(900)
def test_the_interpreter_agrees() -> None:
    run_share(0)
