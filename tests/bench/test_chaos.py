"""How a campaign of kills is judged, with rounds that are made up. Not here: real kills
(tests/deployments/test_kills.py)."""

import csv
from pathlib import Path

import pytest

from model_runner.stats import EngineStats
from tests.bench.chaos import COLUMNS, KINDS, TOKENS, Round, adapter_load_s, plan, report
from tests.bench.results import append_rows

GOOD = Round("replica", 50, [0.2, 2.9], num_stopped=4)


@pytest.mark.parametrize(
    ("round", "code"),
    [
        (GOOD, 0),
        (Round("replica", 1, [0.2, 3.1]), 1),
        (Round("node", 1, [3.4], load_s=0.5), 0),
        (Round("node", 1, [3.6], load_s=0.5), 1),
        (Round("store", 0, [0.1], errors=["ReadError()"]), 1),
        (Round("store", 0, [0.1], num_wrong=1), 1),
    ],
)
def test_one_bad_kill_among_good_ones_fails_the_campaign(round: Round, code: int) -> None:
    assert report([GOOD, round, GOOD], 3.0) == code


def test_the_report_names_the_kind_that_was_late(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = [GOOD, Round("node", 0, [1.0, 9.0]), Round("node", 1, [2.0]), Round("node", 50, [5.0])]
    assert report(rounds, 3.0) == 1
    replica, node, total = capsys.readouterr().out.splitlines()
    assert replica.startswith("replica ") and "0 of 1 kills over 3 s" in replica
    assert node.startswith("node ") and "max 9.00 s, 2 of 3 kills over 3 s" in node
    assert total == "4 kills, 0 wrong answers, 0 errors at clients, 2 gaps too long"
    assert report(rounds, 9.5) == 0


def test_a_load_is_the_mean_of_each_tier_since_the_kill() -> None:
    def stats(number: int, remote_s: float, device_s: float) -> EngineStats:
        loads, seconds = {"remote": 1, "device": number}, {"remote": remote_s, "device": device_s}
        return EngineStats(loads=loads, load_seconds=seconds)

    before = {"killed": stats(9, 7.0, 9.0), "old": stats(1, 5.0, 0.1)}
    after = {"old": stats(3, 5.0, 0.7), "new": stats(1, 0.4, 0.3)}
    assert adapter_load_s(before, after) == pytest.approx(0.4 + 0.9 / 3)
    assert adapter_load_s(after, after) == 0.0


def test_a_kill_is_a_row(tmp_path: Path) -> None:
    about = {"commit": "abc", "utc": "2026-11-30T12:00:00Z"}
    bad = Round("node", 1, [3.6], ["ReadError()"], num_wrong=2, load_s=0.5)
    for found in (GOOD, bad):
        append_rows(tmp_path / "kills.csv", COLUMNS, [found.row(3.0, 7) | about])
    with (tmp_path / "kills.csv").open() as file:
        first, second = csv.DictReader(file)
    assert first["kind"] == "replica" and first["k"] == "50" and first["under_way"] == "4"
    assert (first["longest_gap_s"], first["limit_s"], first["errors"]) == ("2.900", "3.000", "0")
    assert (second["limit_s"], second["errors"], second["wrong"]) == ("3.500", "1", "2")
    assert second["commit"] == "abc" and second["seed"] == "7"


def test_every_kind_is_killed_at_every_k() -> None:
    dead = [kind for kind in KINDS if kind != "silent"]
    kills = list(plan(dead, 2 * len(dead) * len(TOKENS), seed=1))
    assert {kills.count((kind, tokens)) for kind in dead for tokens in TOKENS} == {2}
