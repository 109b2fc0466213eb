"""Sources that stall, throttle, refuse or lose their reader: bounded tries, clear words, and nobody
else who waits.

Not here: bodies that break (test_sources.py), content that changes (test_changing_content.py).
"""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from adapter_store.errors import AdapterNotFound, AdapterUnavailable
from adapter_store.load_threads import LoadThreads
from adapter_store.ref import AdapterRef
from adapter_store.sources.source import S3Options
from adapter_store.watch import Watch
from tests.adapter_store.scripted_s3 import STALL, ScriptedS3, start_scripted_s3
from tests.adapter_store.test_store import ROOT, TIMEOUT_S, Bench, drive, fails, use
from tests.adapter_store.tiny_adapters import write_peft_folder

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    for store in made.stores:
        store.check()
        store.close()


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[ScriptedS3]:
    with start_scripted_s3() as server:
        server.put_folder("good/a", write_peft_folder(tmp_path / "good", 1))
        yield server


def options(s3: ScriptedS3, attempts: int = 3, read_timeout_s: float = 0.5) -> S3Options:
    return S3Options(
        endpoint_url=s3.endpoint_url,
        region="us-east-1",
        access_key="key",
        secret_key="secret",
        connect_timeout_s=1,
        read_timeout_s=read_timeout_s,
        attempts=attempts,
    )


GOOD = AdapterRef("good", "s3://good/a")


def test_a_bucket_that_hangs_keeps_no_other_tenant(bench: Bench, s3: ScriptedS3) -> None:
    """Looks and loads of 30 adapters hang; the 31st, of another bucket, comes at once."""
    s3.script = lambda method, path, number: STALL if path.startswith("stuck") else None
    store = bench.store(s3=options(s3, read_timeout_s=60), load_threads=2)
    stuck = [AdapterRef(f"t{i}", f"s3://stuck/{i}") for i in range(30)]
    for ref in stuck:
        store.prefetch(ref)
    drive(store, lambda: s3.stalled >= 4)
    assert use(store, GOOD)
    assert all(store.error_of(ref) is None and store.digest_of(ref) is None for ref in stuck)
    assert s3.stalled <= 8, "a bucket has so many requests at a time and no more"


def test_a_download_that_hangs_keeps_no_other_tenant(bench: Bench, s3: ScriptedS3) -> None:
    for i in range(6):
        s3.put_folder(f"stuck/{i}", bench.tmp_path / "good")
    s3.script = lambda method, path, number: (
        STALL if method == "GET" and path.startswith("stuck") else None
    )
    store = bench.store(s3=options(s3, read_timeout_s=60), load_threads=2)
    for i in range(6):
        store.prefetch(AdapterRef(f"t{i}", f"s3://stuck/{i}"))
    drive(store, lambda: s3.stalled >= 2)
    assert use(store, GOOD) and s3.stalled == 2


@pytest.mark.parametrize("status", [503, 500, 403, STALL])
def test_failures_are_tried_a_few_times_named_and_not_kept_for_ever(
    bench: Bench, s3: ScriptedS3, status: int
) -> None:
    s3.script = lambda method, path, number: status
    store = bench.store(s3=options(s3, attempts=2), sticky_s=0.5)
    error = fails(store, GOOD)
    assert isinstance(error, AdapterUnavailable) and GOOD.uri in str(error)
    cause = {503: "503", 500: "500", 403: "AccessDenied", STALL: "ReadTimeoutError"}[status]
    assert cause in str(error)
    asked = s3.requests.total()
    assert asked <= 4, s3.requests
    store.prefetch(GOOD)
    store.poll()
    assert store.error_of(GOOD) is error and s3.requests.total() == asked, "kept for a moment"
    s3.script = lambda method, path, number: None
    time.sleep(0.5)
    assert use(store, GOOD) and store.error_of(GOOD) is None


def test_a_throttled_source_is_asked_again_after_a_while(bench: Bench, s3: ScriptedS3) -> None:
    s3.script = lambda method, path, number: 503 if number == 1 else None
    assert use(bench.store(s3=options(s3)), GOOD)
    assert s3.count("GET", WEIGHTS) == 2


def test_what_is_not_there_is_told_as_that(bench: Bench, s3: ScriptedS3) -> None:
    store = bench.store(s3=options(s3), sticky_s=0.2)
    ref = AdapterRef("late", "s3://good/late")
    assert isinstance(fails(store, ref), AdapterNotFound)
    s3.put_folder("good/late", bench.tmp_path / "good")
    time.sleep(0.2)
    assert use(store, ref), "it was uploaded since"


# ---- a reader that dies


def test_a_fetcher_killed_in_mid_download_leaves_the_fetch_to_the_next(
    bench: Bench, s3: ScriptedS3
) -> None:
    """What the node's actor had of it is removed, and the engine reads it once."""
    s3.script = lambda method, path, number: (
        STALL if method == "GET" and path.endswith(WEIGHTS) and number == 1 else None
    )
    code = f"""
from pathlib import Path
from adapter_store.sources.source import S3Options
from tests.adapter_store.test_slow_sources import GOOD
from tests.adapter_store.test_store import Bench, use
s3 = S3Options({s3.endpoint_url!r}, "us-east-1", "key", "secret", read_timeout_s=60)
use(Bench(Path({str(bench.tmp_path)!r})).store(s3=s3), GOOD)
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while not s3.stalled and time.monotonic() < deadline:
            time.sleep(0.02)
        scratch = bench.tmp_path / "cache" / "scratch"
        store = bench.store(s3=options(s3))
        assert list(scratch.glob(f"*/{WEIGHTS}")), "it has begun"
        store.prefetch(GOOD)
        drive(store, lambda: s3.count("HEAD", WEIGHTS) >= 3)  # both looked, one fetches
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert use(store, GOOD)
        assert s3.count("GET", WEIGHTS) == 2, "the dead one's and ours"
        assert not list(scratch.iterdir())
    finally:
        process.kill()
        process.wait()


# ---- threads with lanes


def test_lanes_that_hang_hold_only_their_share() -> None:
    threads, gate, done = LoadThreads("test", 2), threading.Event(), threading.Semaphore(0)
    begun: list[str] = []

    def hang(lane: str) -> None:
        begun.append(lane)
        gate.wait(TIMEOUT_S)

    try:
        for _ in range(5):
            for lane in ("x", "y"):
                threads.submit(lambda lane=lane: hang(lane), lane)  # type: ignore[misc]
        for i in range(4):
            threads.submit(done.release, f"lane-{i}")
            assert done.acquire(timeout=TIMEOUT_S)
        assert sorted(begun) == ["x", "x", "y", "y"]
        gate.set()
        for lane in ("x", "y") * 10:
            threads.submit(done.release, lane)
        assert all(done.acquire(timeout=TIMEOUT_S) for _ in range(20))
        assert len(begun) == 10 and len(threads._threads) <= 8, "each lane in its order"
    finally:
        gate.set()
        threads.close(TIMEOUT_S)
    threads.submit(lambda: begun.append("closed"))
    assert "closed" not in begun


# ---- looking for all


def test_looks_that_hang_are_left_out_until_they_end() -> None:
    gate = threading.Event()

    def look(uri: str) -> str:
        if "slow" in uri:
            assert gate.wait(TIMEOUT_S)
        if "away" in uri:
            raise AdapterUnavailable("away")
        if "none" in uri:
            raise AdapterNotFound("none")
        return f"revision of {uri}"

    watch = Watch(look)
    uris = ["s3://b/fast", "s3://slow/x", "s3://away/x", "s3://none/x"]
    try:
        found = {"s3://b/fast": "revision of s3://b/fast", "s3://none/x": ""}
        assert watch.look(uris, 0.3) == found
        assert watch.look(uris, 0.3) == found, "and not begun twice"
        gate.set()
        assert watch.look(uris, TIMEOUT_S) == {**found, "s3://slow/x": "revision of s3://slow/x"}
    finally:
        gate.set()
        watch.close()
