"""Usage records: what is written survives, nothing is doubled, sums are exact.

Real S3 (SeaweedFS) whose answer gets lost, real files, a writer that is killed. Not here: what a
request counts (test_meter.py).
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from botocore.exceptions import ConnectionClosedError

from deployments import metrics, turns, usage
from deployments.config import load_config
from deployments.metrics import MetricLog
from deployments.usage import MOVED, RUNNING, UsageLog, UsageRecord, UsageWriter
from deployments.usage_report import main, read_records, settle, sum_by_tenant
from deployments.usage_store import FolderStore, S3Store, StoreError, UsageStore, open_store
from tests.s3_server import S3Server, start_s3_server

RECORD = UsageRecord(
    request="chatcmpl-1",
    attempt=1,
    connection="c1",
    tenant="pirate",
    model="demo",
    adapter="pirate/pirate",
    status="200",
    prompt=10,
    cached=4,
    delivered=5,
    discarded=2,
    recomputed=0,
    started="2026-01-31T23:59:59.000+00:00",
    ended="2026-02-01T00:00:01.000+00:00",
)


class Running:
    """A request that goes on: each record of it has one token more."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.delivered = 0

    def usage(self, status: str) -> Sequence[UsageRecord]:
        self.delivered += 1
        record = replace(RECORD, request=self.name, status=status, delivered=self.delivered)
        return [replace(record, ended=f"2026-02-01T00:00:{self.delivered:02d}.000+00:00")]


class FlakyStore(FolderStore):
    """Fails so many times, before it has written or after."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.failures: list[str] = []
        self.puts: list[str] = []

    def put_new(self, name: str, body: bytes) -> None:
        self.puts.append(name)
        when = self.failures.pop(0) if self.failures else ""
        if when != "before":
            super().put_new(name, body)
        if when:
            raise StoreError(f"failed {when}")


@pytest.fixture
def store(tmp_path: Path) -> FlakyStore:
    return FlakyStore(tmp_path / "usage")


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with start_s3_server() as server:
        server.client().create_bucket(Bucket="usage")
        yield server


def s3_store(s3: S3Server, prefix: str, endpoint_url: str = "") -> S3Store:
    endpoint = endpoint_url or s3.endpoint_url
    found = open_store(
        f"s3://usage/{prefix}", (endpoint, "us-east-1", s3.access_key, s3.secret_key)
    )
    assert isinstance(found, S3Store)
    return found


def end(log: UsageLog, *records: UsageRecord) -> None:
    request = Running("short")
    log.begin(request)
    log.end(request, records)


def records_of(store: UsageStore) -> list[UsageRecord]:
    return list(read_records(store))


def test_stores_keep_what_they_have(tmp_path: Path, s3: S3Server) -> None:
    for store in (open_store(str(tmp_path / "usage"), ("",) * 4), s3_store(s3, "kept/there")):
        assert list(store.names("")) == []
        store.put_new("2026-01-31/a-1.jsonl", b"first")
        store.put_new("2026-01-31/a-1.jsonl", b"second")
        store.put_new("2026-02-01/a-2.jsonl", b"third")
        assert list(store.names("")) == ["2026-01-31/a-1.jsonl", "2026-02-01/a-2.jsonl"]
        assert list(store.names("2026-02")) == ["2026-02-01/a-2.jsonl"]
        assert store.read("2026-01-31/a-1.jsonl") == b"first"
        with pytest.raises(StoreError, match="absent"):
            store.read("2026-01-31/absent.jsonl")
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")]


def test_stores_say_what_is_wrong(tmp_path: Path, s3: S3Server) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file/2026"):
        FolderStore(str(tmp_path / "file")).put_new("2026-01-31/a.jsonl", b"")
    wrong = S3Store("s3://nowhere", s3.endpoint_url, "us-east-1", "nobody", "wrong")
    with pytest.raises(StoreError, match="s3://nowhere/2026-01-31/a.jsonl: .*InvalidAccessKeyId"):
        wrong.put_new("2026-01-31/a.jsonl", b"")
    with pytest.raises(StoreError):
        list(wrong.names(""))
    deaf = S3Store("s3://usage", "http://127.0.0.1:9", "us-east-1", "k", "s")
    with pytest.raises(StoreError, match="127.0.0.1:9"):
        deaf.put_new("2026-01-31/a.jsonl", b"")


async def test_a_batch_is_written_once_whenever_its_write_fails(store: FlakyStore) -> None:
    log, counts = UsageLog(), MetricLog()
    writer = UsageWriter(log, store, counts)
    end(log, RECORD)
    store.failures = ["after", "before", "after"]
    for number in range(3):
        with pytest.raises(StoreError):
            await writer.flush()
        end(log, replace(RECORD, request=f"later-{number}"))
    await writer.flush()
    assert len(set(store.puts[:4])) == 1 and len(set(store.puts)) == 2
    found = [record.request for record in records_of(store)]
    assert sorted(found) == ["chatcmpl-1", "later-0", "later-1", "later-2"]
    assert counts.counters[(metrics.USAGE_RECORDS.name, ())] == 4
    assert counts.counters[(metrics.USAGE_FAILURES.name, ())] == 3
    puts = len(store.puts)
    await writer.flush()
    assert len(store.puts) == puts, "nothing new, nothing written"


async def test_an_answer_that_s3_lost_doubles_nothing(s3: S3Server) -> None:
    """The object is there and its writer does not know: the same put again is refused, and done."""
    store = s3_store(s3, "lost")
    put, puts = store._client.put_object, []

    def put_and_lose_the_answer(**kwargs: Any) -> Any:
        puts.append(kwargs["Key"])
        answer = put(**kwargs)
        if len(puts) < 2:
            raise ConnectionClosedError(endpoint_url=s3.endpoint_url)
        return answer

    store._client.put_object = put_and_lose_the_answer
    log, counts = UsageLog(), MetricLog()
    writer = UsageWriter(log, store, counts)
    end(log, RECORD, replace(RECORD, request="another"))
    with pytest.raises(StoreError, match="Connection was closed"):
        await writer.flush()
    assert len(records_of(store)) == 2
    end(log, replace(RECORD, request="later"))
    await writer.flush()
    assert len(puts) == 3 and len(set(puts)) == 2
    assert [r.request for r in records_of(store)] == ["chatcmpl-1", "another", "later"]
    assert counts.counters[(metrics.USAGE_RECORDS.name, ())] == 3


async def test_two_writers_share_a_root(store: FlakyStore) -> None:
    for _ in range(2):  # an ingress that began again numbers its batches from one, too
        log = UsageLog()
        end(log, RECORD)
        await UsageWriter(log, store, MetricLog()).flush()
    assert len(list(store.names(""))) == 2
    assert sum_by_tenant(records_of(store))["pirate"]["billed"] == 5, "one request is billed once"


async def test_a_store_that_is_away_costs_bounded_memory(
    store: FlakyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "MAX_WAITING", 3)
    log, counts = UsageLog(), MetricLog()
    writer = UsageWriter(log, store, counts)
    store.failures = ["before"] * 2
    for number in range(2):
        end(log, *(replace(RECORD, request=f"{number}-{i}") for i in range(5)))
        with pytest.raises(StoreError):
            await writer.flush()
    assert [record.request for record in log.ended] == ["1-2", "1-3", "1-4"], "the newest are kept"
    assert counts.counters[(metrics.USAGE_LOST.name, ())] == 2


async def test_what_runs_is_written_as_it_goes(store: FlakyStore) -> None:
    log = UsageLog()
    writer = UsageWriter(log, store, MetricLog())
    request = Running("long")
    log.begin(request)
    await writer.flush(min_age_s=60)
    assert records_of(store) == [], "it may end any moment"
    for _ in range(3):
        await writer.flush(min_age_s=0)
    statuses = [record.status for record in records_of(store)]
    assert statuses == [RUNNING] * 3
    (latest,) = settle(records_of(store))
    assert (latest.status, latest.delivered) == (RUNNING, 3)
    log.end(request, request.usage("200"))
    await writer.flush(min_age_s=0)
    await writer.flush(min_age_s=0)
    (last,) = settle(reversed(records_of(store)))
    assert (last.status, last.delivered) == ("200", 4)


async def test_closing_writes_all(store: FlakyStore, caplog: pytest.LogCaptureFixture) -> None:
    log = UsageLog()
    writer = UsageWriter(log, store, MetricLog())
    log.begin(Running("cut off"))
    end(log, RECORD)
    await writer.close()
    assert {record.request for record in records_of(store)} == {"cut off", "chatcmpl-1"}
    store.failures = ["before"]
    end(log, replace(RECORD, request="at last"))
    await writer.close()
    assert "at last" in {record.request for record in records_of(store)}, "S3 said no just once"
    store.failures = ["before"] * 1000
    end(log, replace(RECORD, request="never"))
    await writer.close(timeout_s=0.3)
    assert "never" not in {record.request for record in records_of(store)}
    assert "not written in 0.3 s" in caplog.text


MOST_LOST_S = 5.0
"""What a crash may take of the records, by the project's own promise."""


class TimeIsOver(BaseException):
    """Ends a writer that writes for ever."""


class World:
    """A writer with a clock of its own, and requests that begin ten times a second; every other one
    ends a little later. most_lost_s  what a crash at the worst moment would have taken"""

    def __init__(self, store: FlakyStore, write_s: float) -> None:
        self.now = self.most_lost_s = 0.0
        self.log = UsageLog()
        self._put_new = store.put_new
        self._write_s = write_s
        self._kept_until: dict[str, float] = {}  # of what is not known to its end
        self._ending: list[Clocked] = []

    def live(self, seconds: float) -> None:
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            losses = (self.now - since for since in self._kept_until.values())
            self.most_lost_s = max(self.most_lost_s, *losses, 0.0)
            request = Clocked(f"{self.now:.1f}", self)
            self.log.begin(request)
            self._kept_until[request.name] = self.now
            if len(self._kept_until) % 2:
                self._ending.append(request)
            if len(self._ending) > 7:
                over = self._ending.pop(0)
                self.log.end(over, over.usage("200"))

    def put_new(self, name: str, body: bytes) -> None:
        self.live(self._write_s)
        self._put_new(name, body)
        for record in map(json.loads, body.splitlines()):
            self._kept_until[record["request"]] = record["delivered"] / 1000
            if record["status"] != RUNNING:
                del self._kept_until[record["request"]]

    async def sleep(self, seconds: float) -> None:
        self.live(seconds)
        if self.now > 20:
            raise TimeIsOver


@dataclass(eq=False)
class Clocked:
    """A request that has one token for each ms of its world."""

    name: str
    world: World

    def usage(self, status: str) -> Sequence[UsageRecord]:
        delivered = round(self.world.now * 1000)
        return [replace(RECORD, request=self.name, status=status, delivered=delivered)]


@pytest.mark.parametrize("write_s", [0.1, 0.4, 0.9])
async def test_a_crash_at_any_moment_takes_less_than_five_seconds(
    store: FlakyStore, monkeypatch: pytest.MonkeyPatch, write_s: float
) -> None:
    """With the periods that ship, whether a request runs or has just ended."""
    world = World(store, write_s)
    monkeypatch.setattr(store, "put_new", world.put_new)
    monkeypatch.setattr(usage, "time", SimpleNamespace(monotonic=lambda: world.now))
    monkeypatch.setattr(turns, "asyncio", SimpleNamespace(sleep=world.sleep))
    with pytest.raises(TimeIsOver):
        await UsageWriter(world.log, store, MetricLog()).run()
    assert usage.FLUSH_S < world.most_lost_s < MOST_LOST_S


KILLED = """
import asyncio, os, sys, time
from dataclasses import replace
from deployments import usage
from deployments.metrics import MetricLog
from deployments.usage_store import FolderStore
from tests.deployments.test_usage import RECORD, end

class Store(FolderStore):
    def put_new(self, name, body):
        super().put_new(name, body)
        os.write(1, b"kept %d\\n" % body.count(b"\\n"))  # whole: another thread writes, too

async def main():
    usage.FLUSH_S = float(sys.argv[2])
    log = usage.UsageLog()
    running = asyncio.create_task(usage.UsageWriter(log, Store(sys.argv[1]), MetricLog()).run())
    for number in range(100_000):
        end(log, replace(RECORD, request=str(number)))
        os.write(1, b"ended %d\\n" % time.monotonic_ns())
        await asyncio.sleep(0.001)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("flush_s", "num_batches"),
    [(0.05, 1), (0.05, 2), (0.05, 5), pytest.param(usage.FLUSH_S, 2, marks=pytest.mark.slow)],
)
def test_a_killed_writer_loses_what_came_last_and_doubles_nothing(
    tmp_path: Path, flush_s: float, num_batches: int
) -> None:
    """Killed late in its turn, or in a write: what it knew to be kept is there, once, in whole
    batches from the first on; and what is not came in the last seconds."""
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path), str(flush_s)],
        cwd=root,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    lines: list[str] = []
    kept_at = 0.0
    while not kept_at or time.monotonic() < kept_at + 0.9 * flush_s:
        lines.append(process.stdout.readline())
        assert lines[-1], "it ended by itself"
        if not kept_at and sum(line.startswith("kept") for line in lines) == num_batches:
            kept_at = time.monotonic()
    killed_ns = time.monotonic_ns()
    process.kill()
    lines += process.stdout.readlines()
    process.wait()
    told = [line.split() for line in lines if line.endswith("\n")]
    ended_ns = [int(number) for word, number in told if word == "ended"]
    num_known = sum(int(number) for word, number in told if word == "kept")
    kept = sorted(int(record.request) for record in records_of(FolderStore(str(tmp_path))))
    assert kept == list(range(len(kept)))
    assert 0 < num_known <= len(kept) <= len(ended_ns) + 1
    lost = ended_ns[len(kept) :]
    assert not lost or killed_ns - lost[0] < MOST_LOST_S * 1e9


def test_sums_pass_over_doubles_and_days(store: FlakyStore) -> None:
    moved = replace(RECORD, status=MOVED, delivered=3, discarded=0)
    resumed = replace(
        RECORD, attempt=2, prompt=0, cached=0, delivered=4, discarded=0, recomputed=13
    )
    other = replace(RECORD, request="o", tenant="formal", started="2026-02-01T08:00:00.000+00:00")
    lines = [moved.line(), resumed.line(), other.line(), resumed.line()]
    store.put_new("2026-02-01/a-1.jsonl", ("\n".join(lines) + "\n").encode())
    store.put_new("2026-02-02/a-2.jsonl", (other.line() + "\n").encode())
    totals = sum_by_tenant(read_records(store))
    assert totals["pirate"] == {
        "requests": 1, "prompt": 10, "cached": 4, "billed": 7,
        "delivered": 7, "discarded": 0, "recomputed": 13,
    }  # fmt: skip
    assert totals["formal"]["requests"] == 1 and totals["formal"]["billed"] == 5
    assert set(sum_by_tenant(read_records(store, "2026-01-31"))) == {"pirate"}
    assert set(sum_by_tenant(read_records(store, "2026-02-01"))) == {"formal"}
    assert sum_by_tenant(read_records(store, "2026-02-02")) == {}


def put(store: FlakyStore, day: str, *records: UsageRecord) -> None:
    name = f"{day}/w-{len(store.puts):03d}.jsonl"
    store.put_new(name, "".join(record.line() + "\n" for record in records).encode())


def at(day: int, time_: str) -> str:
    return f"2026-03-{day:02d}T{time_}.000+00:00"


def test_days_add_up_to_the_bill(store: FlakyStore) -> None:
    """Whatever runs, or is asked for again, over midnight is one day's, and only once."""
    began = replace(RECORD, request="again", started=at(1, "23:59:50"), delivered=400)
    resumed = replace(began, connection="c2", started=at(2, "00:00:06"), delivered=450)
    put(store, "2026-03-01", replace(began, status=RUNNING, delivered=300))
    put(store, "2026-03-02", replace(began, status="499"), replace(resumed, status=RUNNING))
    put(store, "2026-03-02", replace(resumed, delivered=500))
    moved = replace(RECORD, request="moved", status=MOVED, started=at(1, "23:00:00"), delivered=30)
    attempt = replace(moved, attempt=2, prompt=0, status="200", started=at(2, "01:00:00"))
    put(store, "2026-03-02", moved, attempt)
    long = replace(RECORD, request="long", started=at(1, "12:00:00"), status=RUNNING)
    for day in (1, 2, 3, 5):  # one day the store was away
        put(store, f"2026-03-{day:02d}", replace(long, delivered=day, ended=at(day, "13:00:00")))
    put(store, "2026-03-06", replace(long, status="200", delivered=77))
    plain = replace(RECORD, request="plain", started=at(2, "15:00:00"), delivered=1000)
    put(store, "2026-03-02", plain)
    put(store, "2026-03-09", replace(plain, request="late", started=at(9, "00:00:00")))
    bills = {
        day: sum_by_tenant(read_records(store, f"2026-03-{day:02d}")).get("pirate", {})
        for day in range(1, 12)
    }
    assert {day: bill["billed"] for day, bill in bills.items() if bill} == {
        1: 500 + 60 + 77, 2: 1000, 9: 1000,
    }  # fmt: skip
    whole = sum_by_tenant(read_records(store))["pirate"]
    for name, total in whole.items():
        assert total == sum(bill.get(name, 0) for bill in bills.values()), name


def test_an_answer_asked_for_again_is_billed_once_as_far_as_it_came() -> None:
    """The first connection broke after 5 + 3 tokens; the second went on, and holds all 12."""
    first = [RECORD, replace(RECORD, attempt=2, prompt=0, delivered=3, status=RUNNING)]
    later = "2026-02-01T00:00:09.000+00:00"
    second = replace(RECORD, connection="c2", delivered=12, ended=later)
    for records in ([*first, second], [second, *first]):
        assert sum_by_tenant(records)["pirate"]["billed"] == 12
        assert sum_by_tenant(records)["pirate"]["prompt"] == 10
    broken = replace(second, delivered=0, status="503")
    assert sum_by_tenant([*first, broken])["pirate"]["billed"] == 8


def test_a_line_holds_what_a_bill_needs_and_no_secret() -> None:
    line = json.loads(RECORD.line())
    assert line["billed"] == line["delivered"] == 5
    assert set(line) == {
        "request", "attempt", "connection", "tenant", "model", "adapter", "status", "prompt",
        "cached", "delivered", "discarded", "recomputed", "billed", "started", "ended",
    }  # fmt: skip


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo = Path(__file__).resolve().parent.parent / "data" / "demo" / "base"
    path = tmp_path / "config.yaml"
    settings = {"models": [{"name": "demo", "path": str(demo)}], "usage": {"root": "records"}}
    path.write_text(yaml.safe_dump(settings))
    assert load_config(path).usage.root == str(tmp_path / "records")
    arguments = ["--config", str(path)]
    FolderStore(str(tmp_path / "records")).put_new("2026-02-01/a.jsonl", RECORD.line().encode())
    assert main(arguments) == 0
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert line == {"tenant": "pirate", "requests": 1} | {
        name: getattr(RECORD, name)
        for name in ("prompt", "cached", "billed", "delivered", "discarded", "recomputed")
    }
    assert main([*arguments, "--day", "2026-01-30"]) == 0 and not capsys.readouterr().out
    assert main([*arguments, "--day", "yesterday"]) == 1
    assert "yesterday" in capsys.readouterr().err
    (tmp_path / "records" / "2026-02-01" / "b.jsonl").write_text('{"request": 1}\n')
    assert main(arguments) == 1
    assert "2026-02-01/b.jsonl, line 1" in capsys.readouterr().err
    for wrong in ("http://bucket", "s3://", "s3:///prefix"):
        path.write_text(yaml.safe_dump(settings | {"usage": {"root": wrong}}))
        assert main(arguments) == 1
        assert f"usage.root: {wrong!r} is neither s3://bucket/prefix" in capsys.readouterr().err
    path.write_text(yaml.safe_dump(settings | {"usage": {}}))
    assert main(arguments) == 1 and "usage.root is empty" in capsys.readouterr().err


def test_names_tell_the_day(store: FlakyStore) -> None:
    def now() -> datetime:
        return datetime(2026, 1, 31, 23, 59, 59, tzinfo=UTC)

    log = UsageLog()
    end(log, RECORD)
    name, _, number = UsageWriter(log, store, MetricLog(), now)._next(0.0) or ("", b"", 0)
    assert name.startswith("2026-01-31/") and name.endswith("-00000001.jsonl") and number == 1
