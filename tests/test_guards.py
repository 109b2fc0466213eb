"""A guard that is taken out is out, and comes back; one that is not found any more is an error."""

from pathlib import Path

import pytest
import torch

import kernels.worklist
from tests.guards import take_out
from tests.kernels.mutant import mutant


def test_out_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = torch.tensor([-1, 0, 5])
    with monkeypatch.context() as patch:
        take_out(patch, kernels.worklist, "slot_groups", "if 0 <= s < num_slots", "if s < 9")
        assert [slot for slot, _ in kernels.worklist.slot_groups(slots, 2, 1)] == [-1, 0, 5]
    assert [slot for slot, _ in kernels.worklist.slot_groups(slots, 2, 1)] == [0]


@pytest.mark.parametrize("line", ["if 0 <= s < no_slots", "slots"])
def test_a_line_that_is_not_there_once_is_an_error(
    line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="times, not once"):
        take_out(monkeypatch, kernels.worklist, "slot_groups", line, "")
    with pytest.raises(AssertionError, match="any more"):
        mutant("worklist", {"if 0 <= s < no_slots": ""}, tmp_path)
