"""Content that is replaced, removed or spoilt while it is in use: who gets which, and who an error.

Not here: sources that are slow or away (test_slow_sources.py).
"""

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import adapter_store.loader as loader_side
import adapter_store.prefetcher as prefetcher_side
from adapter_store.contents import KnownContents
from adapter_store.errors import AdapterChanged, AdapterError
from adapter_store.ref import AdapterRef
from adapter_store.store import AdapterStore
from tests.adapter_store.test_store import (
    Bench,
    arena_of,
    drive,
    fails,
    s3_options,
    take,
    use,
    weights_of,
)
from tests.adapter_store.tiny_adapters import assert_slot_holds, write_peft_folder
from tests.s3_server import Relay, S3Server, start_s3_server

WEIGHTS = "adapter_model.safetensors"


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
        for bucket in ("plain", "versioned"):
            server.client().create_bucket(Bucket=bucket)
        server.client().put_bucket_versioning(
            Bucket="versioned", VersioningConfiguration={"Status": "Enabled"}
        )
        yield server


def put(s3: S3Server, bucket: str, name: str, folder: Path) -> AdapterRef:
    s3.put_folder(bucket, name, folder)
    return AdapterRef(name, f"s3://{bucket}/{name}")


def tell_all(source: AdapterStore, other: AdapterStore) -> None:
    """What the catalog does between two replicas."""
    other.contents.tell({}, source.contents.all(), vouched_s=60)


# ---- broken uploads


@pytest.mark.parametrize("kind", ["garbage", "half", "too large"])
def test_a_broken_upload_leaves_the_old_content_serving(
    bench: Bench, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    store, ref = bench.store(num_bytes=1 << 14), bench.ref("a", seed=1)
    old, folder = use(store, ref), Path(ref.uri)
    if kind == "garbage":
        (folder / WEIGHTS).write_bytes(b"no tensors")
    elif kind == "half":
        (folder / WEIGHTS).unlink()
    else:
        write_peft_folder(folder, 2, rank=16)
    for tries in range(1, 4):
        assert use(store, ref).digest == old.digest and store.error_of(ref) is None
        drive(store, lambda tries=tries: store.stats().failures == tries)  # type: ignore[misc]
    assert sum("is served as it was" in r.message for r in caplog.records) == 1, "said once"
    with pytest.raises(AdapterError) as caught:
        use(bench.store(num_bytes=1 << 14, cache="new"), ref)
    assert type(caught.value).__name__ == ("StoreFull" if kind == "too large" else "AdapterInvalid")
    write_peft_folder(folder, 3)
    assert use(store, ref).digest != old.digest, "a mended one is taken"


def test_new_content_that_does_not_come_keeps_nobody_long(
    bench: Bench, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = put(s3, "plain", "slow", Path(bench.ref("slow", seed=1).uri))
    hang = False
    relay = Relay(s3.port, lambda m, p, n: 0 if hang and (m, p[-7:]) == ("GET", WEIGHTS[-7:])
                  else None, stall=True)  # fmt: skip
    try:
        store = bench.store(s3=replace(s3_options(s3, relay.endpoint_url), read_timeout_s=30))
        old = use(store, ref)
        put(s3, "plain", "slow", write_peft_folder(bench.tmp_path / "slow", 2))
        hang = True
        monkeypatch.setattr(prefetcher_side, "_FETCH_WAIT_S", 0.5)
        start = time.monotonic()
        assert use(store, ref).digest == old.digest
        assert time.monotonic() - start < 10
    finally:
        relay.close()


# ---- requests bound to a digest


def pinned(ref: AdapterRef, digest: str) -> AdapterRef:
    return replace(ref, revision=digest)


@pytest.mark.parametrize("bucket", ["plain", "versioned"])
def test_who_is_bound_to_a_digest_gets_that_or_an_error(
    bench: Bench, s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_side, "_TELL_WAIT_S", 0.3)
    options: dict[str, Any] = {"s3": s3_options(s3, s3.endpoint_url)}
    folder = Path(bench.ref("a", seed=1).uri)
    ref = put(s3, bucket, "bound", folder)
    old_weights = weights_of(AdapterRef("a", str(folder)))
    store = bench.store(**options)
    old = take(store, ref)
    put(s3, bucket, "bound", write_peft_folder(folder, 2))
    new = take(store, ref)
    assert new.digest != old.digest
    assert_slot_holds(arena_of(store), old.index, old_weights)
    assert_slot_holds(arena_of(store), new.index, weights_of(AdapterRef("a", str(folder))))
    bound = pinned(ref, old.digest)

    shares_the_tier = bench.store(**options)
    lease = take(shares_the_tier, bound)
    assert_slot_holds(arena_of(shares_the_tier), lease.index, old_weights)
    assert use(shares_the_tier, ref).digest == new.digest, "and others the new one, beside it"

    alone = bench.store(cache="alone", **options)
    error = fails(alone, bound)
    assert isinstance(error, AdapterChanged) and ref.uri in str(error) and old.digest in str(error)
    assert use(alone, ref).digest == new.digest

    told = bench.store(cache="told", **options)
    tell_all(store, told)
    if bucket == "plain":
        error = fails(told, bound)
        assert isinstance(error, AdapterChanged) and ref.uri in str(error)
    else:
        lease = take(told, bound)
        assert lease.digest == old.digest
        assert_slot_holds(arena_of(told), lease.index, old_weights)
    assert use(told, ref).digest == new.digest


def test_bound_to_what_the_uri_still_holds(bench: Bench, s3: S3Server) -> None:
    options: dict[str, Any] = {"s3": s3_options(s3, s3.endpoint_url)}
    ref = put(s3, "plain", "same", Path(bench.ref("a", seed=1).uri))
    digest = use(bench.store(**options), ref).digest
    assert use(bench.store(cache="other", **options), pinned(ref, digest)).digest == digest


def test_a_removed_adapter_serves_only_those_bound_to_it(bench: Bench, s3: S3Server) -> None:
    options: dict[str, Any] = {"s3": s3_options(s3, s3.endpoint_url)}
    ref = put(s3, "plain", "removed", Path(bench.ref("a", seed=1).uri))
    store = bench.store(**options)
    digest = use(store, ref).digest
    for path in Path(bench.ref("a").uri).iterdir():
        s3.client().delete_object(Bucket="plain", Key=f"removed/{path.name}")
    again = bench.store(**options)
    assert use(again, pinned(ref, digest)).digest == digest
    assert "NoSuchKey" in str(fails(again, ref))
    error = fails(bench.store(cache="other", **options), pinned(ref, digest))
    assert isinstance(error, AdapterChanged)


def test_what_others_know_of_a_uri_is_no_ticket_by_another(bench: Bench, s3: S3Server) -> None:
    """Also through the catalog: the digest of one uri is not served by another's name."""
    options: dict[str, Any] = {"s3": s3_options(s3, s3.endpoint_url)}
    theirs = put(s3, "plain", "theirs", Path(bench.ref("a", seed=1).uri))
    mine = put(s3, "plain", "mine", Path(bench.ref("b", seed=2).uri))
    store = bench.store(**options)
    digest = use(store, theirs).digest
    other = bench.store(**options)  # even the file is there
    tell_all(store, other)
    assert isinstance(fails(other, pinned(mine, digest)), AdapterChanged)
    assert use(other, pinned(theirs, digest)).digest == digest


# ---- what others vouch for


def test_what_others_vouch_for_costs_no_request_to_the_source(bench: Bench, s3: S3Server) -> None:
    ref = put(s3, "plain", "vouched", Path(bench.ref("a", seed=1).uri))
    relay = Relay(s3.port)
    try:
        store = bench.store(s3=s3_options(s3, relay.endpoint_url))
        old = use(store, ref)
        [content] = store.contents.all()
        assert (content.uri, content.digest) == (ref.uri, old.digest)
        store.contents.tell({ref.uri: content.revision}, vouched_s=60)
        before = len(relay.requests)
        for _ in range(20):
            assert use(store, ref).digest == old.digest
        assert len(relay.requests) == before
        put(s3, "plain", "vouched", write_peft_folder(bench.tmp_path / "a", 2))
        assert use(store, ref).digest == old.digest, "nobody has told it yet"
        store.contents.tell({ref.uri: store.loader.look(ref.uri)}, vouched_s=60)
        new = use(store, ref)
        assert new.digest != old.digest
        store.contents.trust_nobody()
        before = relay.count("HEAD", WEIGHTS)
        assert use(store, ref).digest == new.digest
        drive(store, lambda: relay.count("HEAD", WEIGHTS) > before)
    finally:
        relay.close()


def test_revisions_of_the_past_are_waited_for_only_from_others() -> None:
    now = 0.0
    contents = KnownContents(lambda: now)
    start = time.monotonic()
    assert contents.revision_of("s3://b/a", "d" * 64, timeout_s=30) is None
    contents.tell({}, vouched_s=5)
    assert contents.revision_of("s3://b/a", "d" * 64, timeout_s=0.05) is None
    assert time.monotonic() - start < 10
    now = 6.0
    assert contents.revision_of("s3://b/a", "d" * 64, timeout_s=30) is None


# ---- numbers


def test_every_tier_tells_its_seconds_and_bytes(bench: Bench) -> None:
    store, ref = bench.store(), bench.ref("a", seed=1)
    lease = use(store, ref)
    read = sum(os.path.getsize(path) for path in Path(ref.uri).iterdir())
    one = store.stats()
    size = one.arena_used_bytes
    assert one.loads == {"remote": 1, "host": 0, "device": 1}
    assert one.load_bytes == {"remote": read, "host": 0, "device": size}
    for _ in range(3):  # looks that find what is there are no loads
        assert use(store, ref).digest == lease.digest
    assert store.stats().loads == one.loads
    again = bench.store()
    use(again, ref)
    two = again.stats()
    assert two.loads == {"remote": 0, "host": 1, "device": 1}
    assert two.load_bytes == {"remote": 0, "host": size, "device": size}
