"""The whole store on a CPU: folders and S3 in, slots out, errors apart. Not here: its parts alone
(their own files)."""

import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from adapter_store import prefetcher
from adapter_store.arena import AdapterArena
from adapter_store.errors import (
    AdapterChanged,
    AdapterError,
    AdapterInvalid,
    AdapterNotFound,
    AdapterUnavailable,
    StoreFull,
)
from adapter_store.formats.registry import load_adapter
from adapter_store.host_cache import HostCache
from adapter_store.ref import AdapterRef
from adapter_store.slot_table import AdapterSlot
from adapter_store.sources.source import S3Options
from adapter_store.store import AdapterStore
from adapter_store.weights import AdapterWeights, LoraTarget
from tests.adapter_store.tiny_adapters import (
    TARGETS,
    assert_slot_holds,
    read_slot,
    small_disk,
    write_peft_folder,
)
from tests.s3_server import Relay, S3Server, start_s3_server

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60.0
ADAPTER_BYTES = 2 * (8 * 40 * 4 + 8 * 56 * 4)


class Bench:
    """Stores over one cache folder, and the calls that an engine makes."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.stores: list[AdapterStore] = []

    def store(
        self, num_slots: int = 4, num_bytes: int = 1 << 20, cache: str = "cache", **options: Any
    ) -> AdapterStore:
        arena = AdapterArena(TARGETS, num_slots, num_bytes, torch.float32, max_rank=16)
        arena.memory.fill_(float("nan"))
        host = HostCache(self.tmp_path / cache, options.pop("cache_bytes", 1 << 24))
        options = {"fresh_s": 0.0, "sticky_s": 0.3, **options}
        store = AdapterStore(TARGETS, arena, host, **options)
        self.stores.append(store)
        return store

    def ref(self, name: str, seed: int | None = None, rank: int = 4) -> AdapterRef:
        """A folder of its own; with a seed, new content for it."""
        folder = self.tmp_path / name
        if seed is not None:
            write_peft_folder(folder, seed, rank)
        return AdapterRef(name, str(folder))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    for store in made.stores:
        store.check()
        store.close()


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with start_s3_server() as server:
        server.client().create_bucket(Bucket="tenants")
        yield server


def drive(store: AdapterStore, until: Callable[[], Any]) -> Any:
    """Poll as an idle engine does until something is true."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        store.poll()
        result = until()
        if result:
            return result
        store.wait(0.02)
    raise AssertionError(f"nothing within {TIMEOUT_S} s: {store.stats()}")


def take(store: AdapterStore, ref: AdapterRef) -> AdapterSlot:
    """What one request does: prefetch, then acquire until there is a lease. Raises what went
    wrong."""
    store.prefetch(ref)

    def ready() -> AdapterSlot | None:
        error = store.error_of(ref)
        if error is not None:
            raise error
        return store.acquire(ref)

    lease: AdapterSlot = drive(store, ready)
    return lease


def acquired(store: AdapterStore, ref: AdapterRef) -> AdapterSlot:
    """The lease of somebody who has called prefetch before."""
    lease: AdapterSlot = drive(store, lambda: store.acquire(ref))
    return lease


def use(store: AdapterStore, ref: AdapterRef) -> AdapterSlot:
    """Take and give back."""
    lease = take(store, ref)
    store.release(lease)
    return lease


def load_only(store: AdapterStore, ref: AdapterRef) -> None:
    """Have it in a slot, without a lease."""
    drive(store, lambda: ref in store.stats().resident or store.acquire(ref))


def fails(store: AdapterStore, ref: AdapterRef) -> AdapterError:
    """Prefetch and wait for the error."""
    store.prefetch(ref)
    error: AdapterError = drive(store, lambda: store.error_of(ref))
    return error


def weights_of(ref: AdapterRef) -> AdapterWeights:
    return load_adapter(Path(ref.uri), TARGETS)


def arena_of(store: AdapterStore) -> AdapterArena:
    assert store._arena is not None
    return store._arena


def test_poll_tells_once_who_has_come_into_a_slot(bench: Bench) -> None:
    store, ref = bench.store(), bench.ref("a", seed=1)
    store.prefetch(ref)
    came: list[AdapterRef] = []
    for _ in range(200):
        came += store.poll()
        lease = store.acquire(ref)
        assert bool(came) == (lease is not None)
        if lease is not None:
            break
        store.wait(TIMEOUT_S)
    assert came == [ref] and store.poll() == ()


def test_folder_to_slot(bench: Bench) -> None:
    store, ref = bench.store(), bench.ref("a", seed=1)
    assert store.digest_of(ref) is None and store.acquire(ref) is None
    lease = take(store, ref)
    assert_slot_holds(arena_of(store), lease.index, weights_of(ref))
    assert lease.ref == ref and lease.digest == drive(store, lambda: store.digest_of(ref))
    stats = store.stats()
    assert stats.loads == {"remote": 1, "host": 0, "device": 1}
    assert all(stats.load_seconds[tier] > 0 for tier in ("remote", "device"))
    assert (stats.slots_in_use, stats.num_slots) == (1, 4)
    assert (stats.arena_used_bytes, stats.arena_bytes) == (ADAPTER_BYTES, 1 << 20)
    assert stats.resident == (ref,)


def test_restart_finds_the_host_tier_filled(bench: Bench) -> None:
    ref = bench.ref("a", seed=1)
    use(bench.store(), ref)
    again = bench.store()
    lease = take(again, ref)
    assert_slot_holds(arena_of(again), lease.index, weights_of(ref))
    assert again.stats().loads == {"remote": 0, "host": 1, "device": 1}


def test_one_fetch_for_many_waiters(bench: Bench, s3: S3Server) -> None:
    """50 requests of 5 tenants for one uri, some of which give up: one GET of the weights."""
    ref = bench.ref("shared", seed=3)
    s3.put_folder("tenants", "shared", Path(ref.uri))
    relay = Relay(s3.port)
    try:
        store = bench.store(s3=s3_options(s3, relay.endpoint_url), fresh_s=60)
        refs = [AdapterRef(f"tenant-{i % 5}", "s3://tenants/shared") for i in range(50)]
        for i, one in enumerate(refs):
            store.prefetch(one)
            if i % 3 == 0:
                store.forget(one)
        leases = [acquired(store, one) for one in refs]
        assert {lease.index for lease in leases} == {leases[0].index}
        assert len({lease.lease_id for lease in leases}) == 50
        assert relay.count("GET", "adapter_model.safetensors") == 1
        assert store.stats().loads["remote"] == store.stats().loads["device"] == 1
        assert_slot_holds(arena_of(store), leases[0].index, weights_of(ref))
    finally:
        relay.close()


def test_all_waiters_gone_harms_nobody(bench: Bench) -> None:
    gate = threading.Event()
    store = bench.store(load_adapter=gated(gate))
    a, b = bench.ref("a", seed=1), bench.ref("b", seed=2)
    store.prefetch(a)
    store.prefetch(b)
    store.forget(a)
    store.forget(a)
    gate.set()
    for ref in (b, a):
        lease = acquired(store, ref)
        assert_slot_holds(arena_of(store), lease.index, weights_of(ref))


def test_an_error_is_its_waiters_alone(bench: Bench) -> None:
    store = bench.store()
    good, bad, gone = bench.ref("good", seed=1), bench.ref("bad", seed=2), bench.ref("gone")
    (Path(bad.uri) / "adapter_model.safetensors").write_bytes(b"no tensors")
    for ref in (bad, good, gone):
        store.prefetch(ref)
    assert drive(store, lambda: store.acquire(good))
    error = drive(store, lambda: store.error_of(bad))
    assert isinstance(error, AdapterInvalid) and error.reason == "file"
    assert isinstance(drive(store, lambda: store.error_of(gone)), AdapterNotFound)
    assert store.acquire(bad) is None and store.error_of(good) is None
    assert store.stats().failures == 2 and store.stats().slots_in_use == 1


def test_a_load_that_breaks_in_any_way_is_an_adapter_error(bench: Bench) -> None:
    def broken(*args: Any, **kwargs: Any) -> AdapterWeights:
        raise ZeroDivisionError("inner")

    store = bench.store(load_adapter=broken)
    error = fails(store, bench.ref("a", seed=1))
    assert isinstance(error, AdapterUnavailable) and "ZeroDivisionError: inner" in str(error)


def test_errors_stick_and_are_then_tried_again(bench: Bench) -> None:
    loads = Counted()
    store, ref = bench.store(load_adapter=loads, sticky_s=0.5), bench.ref("a")
    error = fails(store, ref)
    write_peft_folder(Path(ref.uri), 1)
    for _ in range(20):
        store.prefetch(ref)
        store.poll()
    assert store.error_of(ref) is error
    time.sleep(0.5)
    assert store.error_of(ref) is error, "only a prefetch starts another try"
    assert use(store, ref) and store.error_of(ref) is None
    assert loads.count == 1


def test_refused_bytes_are_not_fetched_twice(bench: Bench) -> None:
    loads = Counted()
    store, ref = bench.store(load_adapter=loads, sticky_s=0.0), bench.ref("a", seed=1, rank=32)
    for _ in range(3):
        error = fails(store, ref)
        assert isinstance(error, AdapterInvalid) and error.reason == "rank_limit"
    assert loads.count == 1
    write_peft_folder(Path(ref.uri), 1, rank=8)
    assert use(store, ref)


def test_rank_limit_holds_for_what_another_engine_packed(bench: Bench) -> None:
    ref = bench.ref("a", seed=1, rank=16)
    use(bench.store(), ref)
    small = AdapterStore(
        TARGETS,
        AdapterArena(TARGETS, 1, 1 << 20, torch.float32, max_rank=8),
        HostCache(bench.tmp_path / "cache", 1 << 24),
    )
    bench.stores.append(small)
    error = fails(small, ref)
    assert isinstance(error, AdapterInvalid) and error.reason == "rank_limit"


def test_s3_errors_reach_the_waiters(bench: Bench, s3: S3Server) -> None:
    store = bench.store(s3=s3_options(s3, s3.endpoint_url))
    assert isinstance(fails(store, AdapterRef("x", "s3://tenants/none")), AdapterNotFound)
    wrong = bench.store(s3=replace(s3_options(s3, s3.endpoint_url), secret_key="wrong"))
    error = fails(wrong, AdapterRef("x", "s3://tenants/none"))
    assert isinstance(error, AdapterUnavailable) and "SignatureDoesNotMatch" in str(error)


# ---- eviction


def test_longest_unused_is_evicted_and_comes_back(bench: Bench) -> None:
    store = bench.store(num_slots=2)
    a, b, c = (bench.ref(name, seed=i) for i, name in enumerate("abc"))
    for ref in (a, b, a, c):
        use(store, ref)
    assert set(store.stats().resident) == {a, c} and store.stats().evictions == 1
    lease = take(store, b)
    assert_slot_holds(arena_of(store), lease.index, weights_of(b))
    assert store.stats().loads["remote"] == 3, "the host tier still had it"


def test_in_use_is_never_evicted(bench: Bench) -> None:
    store = bench.store(num_slots=2)
    refs = [bench.ref(f"r{i}", seed=i) for i in range(6)]
    held = take(store, refs[0])
    for ref in refs[1:]:
        use(store, ref)
        assert_slot_holds(arena_of(store), held.index, weights_of(refs[0]))
    other = take(store, refs[1])
    store.prefetch(refs[2])
    for _ in range(50):
        store.poll()
        assert store.acquire(refs[2]) is None and store.error_of(refs[2]) is None
        time.sleep(0.002)
    store.release(held)
    assert drive(store, lambda: store.acquire(refs[2])).index == held.index
    assert_slot_holds(arena_of(store), other.index, weights_of(refs[1]))


def test_who_may_not_evict_takes_what_is_free(bench: Bench) -> None:
    store = bench.store(num_slots=2)
    first, second, third = (bench.ref(f"r{i}", seed=i) for i in range(3))
    assert store.has_room(first)
    use(store, first)
    store.prefetch(second)
    lease = drive(store, lambda: store.acquire(second, may_evict=False))
    store.release(lease)
    assert store.has_room(first) and store.has_room(second) and not store.has_room(third)
    assert store.stats().loads["remote"] == 2, "asking for room has fetched something"
    store.prefetch(third)
    drive(store, lambda: store.digest_of(third))
    for _ in range(20):
        store.poll()
        assert store.acquire(third, may_evict=False) is None and not store.has_room(third)
        time.sleep(0.002)
    assert store.stats().evictions == 0
    assert drive(store, lambda: store.acquire(third)) and store.stats().evictions == 1


def test_an_evicted_adapter_is_gone_from_the_tables_while_the_next_one_loads(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = bench.store(num_slots=1)
    arena, gate = arena_of(store), threading.Event()
    a, b = bench.ref("a", seed=1), bench.ref("b", seed=2)
    index = use(store, a).index
    copy_in = arena.copy_in

    def slow(*args: Any) -> Any:
        assert gate.wait(TIMEOUT_S)
        return copy_in(*args)

    monkeypatch.setattr(arena, "copy_in", slow)
    store.prefetch(b)
    drive(store, lambda: store.acquire(b) or store.stats().evictions)
    store.poll()
    assert all(read_slot(arena, index, target) is None for target in range(len(TARGETS)))
    gate.set()
    assert_slot_holds(arena, acquired(store, b).index, weights_of(b))


def test_loaded_for_a_waiter_stays_until_its_first_use(bench: Bench) -> None:
    store = bench.store(num_slots=1, hold_s=60)
    a, b = bench.ref("a", seed=1), bench.ref("b", seed=2)
    store.prefetch(a)
    store.prefetch(b)
    load_only(store, a)
    for _ in range(20):
        store.poll()
        assert store.acquire(b) is None
        time.sleep(0.002)
    lease = store.acquire(a)
    assert lease is not None
    store.release(lease, unused=True)
    assert store.acquire(b) is None
    lease = store.acquire(a)
    assert lease is not None
    store.release(lease)
    assert drive(store, lambda: store.acquire(b))


def test_a_hold_ends_when_nobody_waits_or_after_its_time(bench: Bench) -> None:
    store = bench.store(num_slots=1, hold_s=60)
    a, b, c = (bench.ref(name, seed=i) for i, name in enumerate("abc"))
    for ref in (a, b, c):
        store.prefetch(ref)
    load_only(store, a)
    store.forget(a)
    load_only(store, b)
    assert store.acquire(c) is None
    store._hold_s = 0.05
    time.sleep(0.06)
    assert drive(store, lambda: store.acquire(c))


def test_more_than_half_of_the_arena_is_an_error_with_both_sizes(bench: Bench) -> None:
    room = 2 * ADAPTER_BYTES
    store = bench.store(num_bytes=room - 256)
    error = fails(store, bench.ref("a", seed=1))
    assert isinstance(error, StoreFull)
    assert str(ADAPTER_BYTES) in str(error) and str(room - 256) in str(error)
    use(bench.store(num_bytes=room), bench.ref("a"))
    error = fails(bench.store(num_slots=0), bench.ref("a"))
    assert isinstance(error, StoreFull)


def test_bytes_are_short_before_slots_are(bench: Bench) -> None:
    store = bench.store(num_slots=8, num_bytes=ADAPTER_BYTES * 2 + 512)
    refs = [bench.ref(f"r{i}", seed=i) for i in range(4)]
    held = take(store, refs[0])
    for ref in refs[1:]:
        lease = take(store, ref)
        assert_slot_holds(arena_of(store), lease.index, weights_of(ref))
        store.release(lease)
    assert store.stats().evictions == 2 and store.stats().slots_in_use == 2
    assert_slot_holds(arena_of(store), held.index, weights_of(refs[0]))


def test_larger_than_the_host_tier_is_an_error(bench: Bench) -> None:
    error = fails(bench.store(cache_bytes=2048), bench.ref("a", seed=1))
    assert isinstance(error, StoreFull) and "2048" in str(error)


def test_what_left_the_host_tier_is_fetched_again(bench: Bench) -> None:
    store, ref = bench.store(fresh_s=60), bench.ref("a", seed=1)
    store.prefetch(ref)
    drive(store, lambda: store.digest_of(ref))
    for path in (bench.tmp_path / "cache" / "packed").iterdir():
        path.unlink()
    lease = drive(store, lambda: store.acquire(ref))
    assert_slot_holds(arena_of(store), lease.index, weights_of(ref))
    assert store.stats().loads["remote"] == 2


def test_a_resident_adapter_needs_no_host_copy(bench: Bench) -> None:
    """The host tier holds one of the two: the slots have both, and nothing is fetched again."""
    store = bench.store(num_slots=2, cache_bytes=10_000)
    a, b, c = (bench.ref(name, seed=i) for i, name in enumerate("abc"))
    digests = {use(store, ref).digest for ref in (a, b)}
    for _ in range(4):
        for ref in (a, b):
            assert use(store, ref).digest in digests
            drive(store, lambda ref=ref: store.digest_of(ref))
    assert len(store.cache.digests()) == 1
    assert (store.stats().loads["remote"], store.stats().loads["device"]) == (2, 2)
    # Others with a right to the content need none either.
    other = AdapterRef("other", a.uri)
    pinned = replace(b, revision=store.digest_of(b) or "")
    assert {use(store, ref).digest for ref in (other, pinned)} == digests
    assert store.stats().loads["remote"] == 2
    write_peft_folder(Path(a.uri), 7)
    assert use(store, a).digest not in digests
    use(store, c)
    lease = take(store, b)
    assert_slot_holds(arena_of(store), lease.index, weights_of(b))
    assert store.stats().loads["remote"] == 5


def test_a_resident_adapter_is_served_though_its_source_is_away(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, ref = bench.store(), bench.ref("a", seed=1)
    use(store, ref)
    for path in (bench.tmp_path / "cache" / "packed").iterdir():
        path.unlink()
    use(store, ref)
    drive(store, lambda: store.digest_of(ref))

    def away(ref: AdapterRef) -> None:
        raise AdapterUnavailable("away")

    monkeypatch.setattr(store.loader, "find", away)
    for _ in range(2):
        use(store, ref)
        drive(store, lambda: store.stats().failures)
    assert store.error_of(ref) is None and store.stats().loads["remote"] == 1


def test_what_is_used_is_not_forgotten(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many others are asked for once."""
    monkeypatch.setattr(prefetcher, "_MAX_ENTRIES", 8)
    store, hot = bench.store(num_slots=2, fresh_s=60), bench.ref("hot", seed=0)
    use(store, hot)
    for number in range(1, 25):
        use(store, bench.ref(f"r{number}", seed=number))
        use(store, hot)
    assert store.stats().loads["device"] == 25, "the others took each other's slot, not this one's"
    assert len(store._prefetcher._entries) <= 9


def test_what_is_in_a_slot_is_the_last_to_be_forgotten(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetcher, "_MAX_ENTRIES", 8)
    store, hot = bench.store(fresh_s=60), bench.ref("hot", seed=0)
    digest = use(store, hot).digest
    for number in range(40):
        ref = bench.ref(f"r{number}", seed=1)
        store.prefetch(ref)
        drive(store, lambda ref=ref: store.digest_of(ref))
        store.forget(ref)
    assert hot in store.stats().resident
    for number in range(40):  # many names of one content are not kept for it
        use(store, replace(hot, adapter_id=f"tenant-{number}"))
    assert len(store._prefetcher._entries) <= 9
    assert use(store, hot).digest == digest and store.stats().loads["device"] == 1


def test_a_full_disk_makes_room_for_a_download(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = bench.store(num_slots=1)
    refs = [bench.ref(f"r{i}", seed=i) for i in range(5)]
    use(store, refs[0])
    small_disk(store.cache.folder, 3 * store.cache.used_bytes(), monkeypatch)
    for ref in refs[1:]:
        use(store, ref)
    assert store.stats().failures == 0 and 1 <= len(store.cache.digests()) <= 2
    small_disk(store.cache.folder, 100, monkeypatch)
    error = fails(store, bench.ref("late", seed=9))
    assert isinstance(error, AdapterUnavailable) and "No space left" in str(error)


# ---- content and revisions


def test_new_content_is_another_digest_and_leases_keep_theirs(bench: Bench) -> None:
    store, ref = bench.store(), bench.ref("a", seed=1)
    old_weights = weights_of(ref)
    old = take(store, ref)
    write_peft_folder(Path(ref.uri), 2)
    new = take(store, ref)
    assert new.digest != old.digest and new.index != old.index
    assert_slot_holds(arena_of(store), old.index, old_weights)
    assert_slot_holds(arena_of(store), new.index, weights_of(ref))
    pinned = replace(ref, revision=old.digest)
    again = take(store, pinned)
    assert again.index == old.index and again.digest == old.digest


def test_digest_is_not_told_while_newer_content_may_be_coming(bench: Bench) -> None:
    gate = threading.Event()
    gate.set()
    store, ref = bench.store(load_adapter=gated(gate)), bench.ref("a", seed=1)
    old = use(store, ref).digest
    write_peft_folder(Path(ref.uri), 2)
    gate.clear()
    store.prefetch(ref)
    assert store.digest_of(ref) is None
    for _ in range(30):
        store.poll()
        assert store.digest_of(ref) is None and store.acquire(ref) is None
        time.sleep(0.002)
    gate.set()
    assert drive(store, lambda: store.digest_of(ref)) != old


def test_known_content_survives_a_source_that_is_away(bench: Bench, s3: S3Server) -> None:
    folder = Path(bench.ref("away", seed=5).uri)
    s3.put_folder("tenants", "away", folder)
    ref = AdapterRef("away", "s3://tenants/away")
    relay = Relay(s3.port)
    store = bench.store(s3=replace(s3_options(s3, relay.endpoint_url), attempts=1))
    first = use(store, ref)
    relay.close()
    again = use(store, ref)
    assert again.digest == first.digest and store.error_of(ref) is None
    assert store.stats().failures == 1


def test_deleted_content_is_not_served_to_new_requests(bench: Bench) -> None:
    store, ref = bench.store(), bench.ref("a", seed=1)
    lease = take(store, ref)
    (Path(ref.uri) / "adapter_config.json").unlink()
    (Path(ref.uri) / "adapter_model.safetensors").unlink()
    assert isinstance(fails(store, ref), AdapterNotFound)
    assert store.acquire(ref) is None
    store.release(lease)


def test_a_digest_is_no_ticket_to_other_peoples_adapters(bench: Bench) -> None:
    """Whoever names the digest of an adapter must name a uri that holds it."""
    store, mine, theirs = bench.store(), bench.ref("a", seed=1), bench.ref("b", seed=2)
    digest = use(store, theirs).digest
    stolen = replace(mine, revision=digest)
    assert isinstance(fails(store, stolen), AdapterChanged)
    other = bench.store()
    assert isinstance(fails(other, stolen), AdapterChanged)
    assert use(other, replace(theirs, revision=digest)).digest == digest
    write_peft_folder(Path(theirs.uri), 9)
    late = replace(theirs, revision=digest)
    assert use(bench.store(), late).digest == digest, "known to have been there"
    fresh = bench.store(cache="other")
    assert isinstance(fails(fresh, late), AdapterChanged), "gone for good"


def test_equal_content_shares_a_slot(bench: Bench) -> None:
    store = bench.store()
    a, b = take(store, bench.ref("a", seed=1)), take(store, bench.ref("b", seed=1))
    assert a.index == b.index and a.digest == b.digest and store.stats().slots_in_use == 1
    assert len(store.stats().resident) == 2


def test_replaced_content_is_the_first_to_go(bench: Bench) -> None:
    store = bench.store(num_slots=2)
    a, b = bench.ref("a", seed=1), bench.ref("b", seed=2)
    use(store, b)
    use(store, a)
    write_peft_folder(Path(a.uri), 3)
    lease = take(store, a)
    assert set(store.stats().resident) == {a, b}
    assert_slot_holds(arena_of(store), lease.index, weights_of(a))


# ---- threads and processes


def test_no_call_ever_waits(bench: Bench) -> None:
    """Loads that take for ever, and an engine that goes on: each call costs microseconds."""
    gate = threading.Event()
    store = bench.store(load_adapter=gated(gate), load_threads=2)
    ready = bench.ref("ready", seed=0)
    gate.set()
    use(store, ready)
    gate.clear()
    refs = [bench.ref(f"r{i}", seed=i) for i in range(8)]
    took: dict[str, list[float]] = {name: [] for name in ("prefetch", "acquire", "poll", "release")}

    def timed(name: str, call: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        result = call(*args)
        took[name].append(time.perf_counter() - start)
        return result

    for turn in range(200):
        timed("prefetch", store.prefetch, refs[turn % 8])
        timed("acquire", store.acquire, refs[turn % 8])
        lease = timed("acquire", store.acquire, replace(ready, revision=""))
        timed("poll", store.poll)
        if lease is not None:
            timed("release", store.release, lease)
    gate.set()
    assert len(took["release"]) > 150
    for name, values in took.items():
        assert statistics.median(values) < 100e-6, (name, sorted(values)[-5:])
    assert drive(store, lambda: store.acquire(refs[0]))


def test_host_tier_alone(bench: Bench) -> None:
    ref = bench.ref("a", seed=1)
    host = HostCache(bench.tmp_path / "cache", 1 << 24)
    store = AdapterStore(TARGETS, None, host, dtype=torch.float32)
    bench.stores.append(store)
    store.prefetch(ref)
    digest = drive(store, lambda: store.digest_of(ref))
    other = bench.store()
    assert use(other, ref).digest == digest and other.stats().loads["remote"] == 0


def test_close_ends_a_load_that_hangs(bench: Bench) -> None:
    gate = threading.Event()
    store, ref = bench.store(load_adapter=gated(gate)), bench.ref("a", seed=1)
    store.prefetch(ref)
    time.sleep(0.1)
    start = time.monotonic()
    store.close()
    assert time.monotonic() - start < 10
    assert isinstance(store.error_of(ref), AdapterUnavailable)
    gate.set()


def test_two_processes_fetch_once(bench: Bench, tmp_path: Path) -> None:
    code = f"""
import sys, time
from pathlib import Path
from adapter_store.formats.registry import load_adapter
from adapter_store.ref import AdapterRef
from tests.adapter_store.test_store import Bench, use

def slow(folder, targets, *, max_rank, max_bytes):
    open({str(tmp_path / "loads")!r}, "a").write("x")
    time.sleep(0.5)
    return load_adapter(folder, targets, max_rank=max_rank)

bench = Bench(Path({str(tmp_path)!r}))
store = bench.store(load_adapter=slow)
print("ready", flush=True)
sys.stdin.readline()
for name in ("a", "b"):
    print(use(store, bench.ref(name)).digest, flush=True)
store.close()
"""
    for i, name in enumerate("ab"):
        bench.ref(name, seed=i)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        outs = [
            process.communicate("go\n", timeout=TIMEOUT_S)[0] for process in _started(processes)
        ]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert outs[0] == outs[1] and len(outs[0].split()) == 2
    assert (tmp_path / "loads").read_text() == "xx"


def test_whoever_waits_for_a_fetch_makes_it_when_its_process_is_killed(
    bench: Bench, tmp_path: Path
) -> None:
    """As an engine does when the node's actor dies in the middle: it does not wait for another."""
    code = f"""
import time
from pathlib import Path
from tests.adapter_store.test_store import Bench, use

def hangs(folder, targets, *, max_rank, max_bytes):
    print("loading", flush=True)
    time.sleep(600)

bench = Bench(Path({str(tmp_path)!r}))
use(bench.store(load_adapter=hangs), bench.ref("a"))
"""
    ref, loads = bench.ref("a", seed=1), []

    def load(folder: Path, targets: Any, *, max_rank: int, max_bytes: int) -> AdapterWeights:
        loads.append(folder)
        return load_adapter(folder, targets, max_rank=max_rank)

    actor = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert actor.stdout is not None and actor.stdout.readline() == "loading\n"
        engine = bench.store(load_adapter=load)
        engine.prefetch(ref)
        for _ in range(20):
            engine.poll()
            time.sleep(0.01)
        assert not loads and engine.digest_of(ref) is None, "the other one has it in hand"
    finally:
        actor.kill()
        actor.wait()
    use(engine, ref)
    assert len(loads) == 1


def test_random_lives_never_touch_each_other(bench: Bench) -> None:
    """Six adapters over three slots, held and given back at random: what is held reads as it was,
    always."""
    random = torch.Generator().manual_seed(7)
    store = bench.store(num_slots=3, num_bytes=ADAPTER_BYTES * 4, fresh_s=60)
    refs = [bench.ref(f"r{i}", seed=i, rank=(3, 8, 16)[i % 3]) for i in range(6)]
    weights = {ref: weights_of(ref) for ref in refs}
    held: list[AdapterSlot] = []
    for _ in range(60):
        if len(held) == 3 or (held and torch.rand(1, generator=random).item() < 0.4):
            at = int(torch.randint(len(held), (1,), generator=random))
            store.release(held.pop(at))
        else:
            ref = refs[int(torch.randint(6, (1,), generator=random))]
            store.prefetch(ref)
            for _ in range(40):
                store.poll()
                lease = store.acquire(ref)
                if lease is not None:
                    held.append(lease)
                    break
                store.wait(0.02)
        store.check()
        for lease in held:
            assert_slot_holds(arena_of(store), lease.index, weights[lease.ref])
    assert store.stats().evictions > 3


def s3_options(server: S3Server, endpoint_url: str) -> S3Options:
    return S3Options(
        endpoint_url=endpoint_url,
        region="us-east-1",
        access_key=server.access_key,
        secret_key=server.secret_key,
        attempts=2,
    )


def gated(gate: threading.Event) -> Callable[..., AdapterWeights]:
    """A load that waits for a gate."""

    def load(
        folder: Path, targets: Sequence[LoraTarget], *, max_rank: int, max_bytes: int
    ) -> AdapterWeights:
        assert gate.wait(TIMEOUT_S)
        return load_adapter(folder, targets, max_rank=max_rank)

    return load


class Counted:
    """A load that counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(
        self, folder: Path, targets: Sequence[LoraTarget], *, max_rank: int, max_bytes: int
    ) -> AdapterWeights:
        self.count += 1
        return load_adapter(folder, targets, max_rank=max_rank)


def _started(processes: list[subprocess.Popen[str]]) -> list[subprocess.Popen[str]]:
    """Let all go at once, before the first is waited for."""
    for process in processes[1:]:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return processes


def test_what_the_formats_warn_of_is_logged_with_the_adapters_name(tmp_path, caplog):
    """A lone square down_proj is read by the version that wrote it: the operator must hear of
    it, and that nothing was left out."""
    from tests.golden import golden_targets, load_cases

    case = next(c for c in load_cases("logits", "gpt_oss") if "square" in c.id and "-down_" in c.id)
    cache = HostCache(tmp_path / "cache")
    store = AdapterStore(golden_targets(case.model), None, cache, dtype=torch.float32)
    ref = AdapterRef("square", str(case.adapter))
    with caplog.at_level("INFO", logger="adapter_store.loader"):
        store.prefetch(ref)
        while store.digest_of(ref) is None:
            assert store.error_of(ref) is None
            store.wait(1.0)
            store.poll()
    store.close()
    cache.close()
    said = [(r.levelname, r.getMessage()) for r in caplog.records]
    assert any(k == "WARNING" and "square" in m and "sizes are equal" in m for k, m in said)
    assert any("square" in m and "4 tensors bound, 0 left out" in m for _, m in said), said
