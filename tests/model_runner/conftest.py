"""What tests of the engine share."""

import pytest

from tests.model_runner.speed_world import take_both_paths


@pytest.fixture
def both_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """See `take_both_paths`."""
    take_both_paths(monkeypatch)
