"""Where bytes come from: folders, and a real S3 server, with connections that break. Not here: what
the bytes mean."""

import errno
import hashlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adapter_store.errors import (
    AdapterChanged,
    AdapterInvalid,
    AdapterNotFound,
    AdapterUnavailable,
    DiskFull,
    StoreFull,
)
from adapter_store.ref import AdapterRef
from adapter_store.sources import local
from adapter_store.sources.registry import SOURCES, open_source
from adapter_store.sources.s3 import S3Source, _failed_check, _Object
from adapter_store.sources.source import S3Options
from tests.adapter_store.tiny_adapters import small_disk, write_peft_folder
from tests.s3_server import (
    READER_KEY,
    READER_SECRET,
    Relay,
    S3Server,
    start_s3_server,
)

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
BIG = os.urandom(3_000_000)


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with start_s3_server() as server:
        client = server.client()
        client.create_bucket(Bucket="tenants")
        client.create_bucket(Bucket="open")
        for prefix in ("a", "replaced"):
            client.put_object(Bucket="tenants", Key=f"{prefix}/{CONFIG}", Body=b"{}")
            client.put_object(Bucket="tenants", Key=f"{prefix}/{WEIGHTS}", Body=BIG)
            client.put_object(Bucket="tenants", Key=f"{prefix}/README.md", Body=b"not read")
        yield server


def options(server: S3Server, endpoint_url: str = "") -> S3Options:
    return S3Options(
        endpoint_url=endpoint_url or server.endpoint_url,
        region="us-east-1",
        access_key=server.access_key,
        secret_key=server.secret_key,
        part_bytes=1 << 20,
        connect_timeout_s=2,
        read_timeout_s=1,
        attempts=3,
    )


def ref_to(uri: str) -> AdapterRef:
    return AdapterRef("adapter", uri)


def fetched(source: object, uri: str, into: Path) -> dict[str, bytes]:
    into.mkdir()
    copy(source, uri, into)
    return {path.name: path.read_bytes() for path in into.iterdir()}


def copy(source: Any, uri: str, into: Path) -> None:
    """What the uri holds now."""
    source.fetch(ref_to(uri), into, source.revision(ref_to(uri)))


# ---- folders


def test_local_copies_the_known_files_only(tmp_path: Path) -> None:
    folder = write_peft_folder(tmp_path / "with space", 1)
    (folder / "vocab.json").write_text("{}")
    (folder / "adapter_model.bin").write_bytes(b"pickle")
    for i, uri in enumerate((str(folder), f"{folder}/", folder.as_uri())):
        files = fetched(open_source(uri), uri, tmp_path / str(i))
        assert files == {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS)}


def test_local_revision_follows_the_content(tmp_path: Path) -> None:
    ref = ref_to(str(write_peft_folder(tmp_path / "a", 1)))
    source = open_source(ref.uri)
    first = source.revision(ref)
    assert source.revision(ref) == first
    write_peft_folder(tmp_path / "a", 2)
    second = source.revision(ref)
    config = tmp_path / "a" / CONFIG
    config.write_text(config.read_text() + " ")
    assert len({first, second, source.revision(ref)}) == 3


def test_local_refusals_name_the_reason(tmp_path: Path) -> None:
    empty, half, pickle, bare = (tmp_path / n for n in ("empty", "half", "pickle", "bare"))
    for folder in (empty, half, pickle, bare):
        folder.mkdir()
    (half / CONFIG).write_text("{}")
    (pickle / CONFIG).write_text("{}")
    (pickle / "adapter_model.bin").write_bytes(b"x")
    (bare / WEIGHTS).write_bytes(b"x")
    for folder, error, text in (
        (tmp_path / "none", AdapterNotFound, "no folder"),
        (empty, AdapterNotFound, "neither"),
        (half, AdapterInvalid, f"no {WEIGHTS}"),
        (pickle, AdapterInvalid, "pickle: "),
        (bare, AdapterInvalid, "config: "),
    ):
        source = open_source(str(folder))
        with pytest.raises(error, match=text):
            source.revision(ref_to(str(folder)))
        with pytest.raises(error, match=text):
            source.fetch(ref_to(str(folder)), tmp_path, "local-")


def test_sizes_are_bounded_before_anything_is_read(tmp_path: Path) -> None:
    folder = write_peft_folder(tmp_path / "a", 1)
    size = sum(path.stat().st_size for path in folder.iterdir())
    into = tmp_path / "into"
    into.mkdir()
    with pytest.raises(StoreFull, match=str(size)):
        copy(open_source(str(folder), max_bytes=size - 1), str(folder), into)
    assert not list(into.iterdir())
    (folder / CONFIG).write_bytes(b" " * ((8 << 20) + 1))
    with pytest.raises(AdapterInvalid, match=CONFIG):
        copy(open_source(str(folder)), str(folder), into)


def test_unreadable_folder_is_no_missing_one(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 300)
    with pytest.raises(AdapterUnavailable, match="File name too long"):
        open_source(str(folder)).revision(ref_to(str(folder)))


@pytest.mark.parametrize("uri", ["", "http://x/y", "ftp://x", "file://other/x", "a\0b"])
def test_uris_that_nobody_reads(uri: str) -> None:
    with pytest.raises(AdapterNotFound):
        open_source(uri).revision(ref_to(uri))


def test_every_source_of_the_registry_opens() -> None:
    for scheme in SOURCES:
        source = open_source(f"{scheme}://x/y")
        assert callable(source.fetch) and callable(source.revision)


# ---- S3


def test_s3_reads_the_known_files_in_parts(s3: S3Server, tmp_path: Path) -> None:
    relay = Relay(s3.port)
    try:
        source = S3Source(options(s3, relay.endpoint_url))
        files = fetched(source, "s3://tenants/a", tmp_path / "into")
        assert files == {CONFIG: b"{}", WEIGHTS: BIG}
        assert relay.count("GET", f"/a/{WEIGHTS}") == 3
        assert relay.count("GET", "README.md") == 0
    finally:
        relay.close()


def test_s3_revision_follows_the_content(s3: S3Server) -> None:
    source, ref, client = S3Source(options(s3)), ref_to("s3://tenants/rev/"), s3.client()
    revisions = set()
    for config, weights in ((b"{}", b"1"), (b"{}", b"2"), (b"{ }", b"2")):
        client.put_object(Bucket="tenants", Key=f"rev/{CONFIG}", Body=config)
        client.put_object(Bucket="tenants", Key=f"rev/{WEIGHTS}", Body=weights)
        revisions.add(source.revision(ref))
        assert source.revision(ref) in revisions
    assert len(revisions) == 3


@pytest.mark.parametrize(
    ("uri", "text"),
    [
        ("s3://tenants/none", "NoSuchKey"),
        ("s3://no-such-bucket/a", "NoSuchBucket"),
        ("s3://", "not s3://bucket/prefix"),
        ("s3://tenants/a/../b", "not s3://bucket/prefix"),
        ("s3://Bad_Bucket!/a", "Bad_Bucket!"),
    ],
)
def test_s3_missing_is_not_found(s3: S3Server, uri: str, text: str) -> None:
    with pytest.raises(AdapterNotFound, match=text):
        S3Source(options(s3)).revision(ref_to(uri))


def test_s3_half_an_adapter_is_refused(s3: S3Server) -> None:
    client = s3.client()
    client.put_object(Bucket="tenants", Key=f"half/{CONFIG}", Body=b"{}")
    client.put_object(Bucket="tenants", Key="pickle/adapter_model.bin", Body=b"x")
    client.put_object(Bucket="tenants", Key=f"bare/{WEIGHTS}", Body=b"x")
    source = S3Source(options(s3))
    for prefix, reason in (("half", "file"), ("pickle", "pickle"), ("bare", "config")):
        with pytest.raises(AdapterInvalid, match=f"^{reason}: s3://tenants/{prefix}"):
            source.revision(ref_to(f"s3://tenants/{prefix}"))


def test_s3_wrong_keys_are_no_missing_object(s3: S3Server) -> None:
    good = options(s3)
    for bad, code in (
        (replace(good, secret_key="wrong"), "SignatureDoesNotMatch"),
        (replace(good, access_key="nobody"), "InvalidAccessKeyId"),
        (replace(good, access_key=READER_KEY, secret_key=READER_SECRET), "AccessDenied"),
    ):
        for uri in ("s3://tenants/a", "s3://tenants/none"):
            with pytest.raises(AdapterUnavailable, match=code) as caught:
                S3Source(bad).revision(ref_to(uri))
            assert bad.secret_key not in str(caught.value)
    assert good.secret_key not in repr(good)


def test_s3_that_is_not_there_is_named(s3: S3Server) -> None:
    gone = replace(options(s3), endpoint_url="http://127.0.0.1:9", attempts=1)
    with pytest.raises(AdapterUnavailable, match="EndpointConnectionError.*127.0.0.1:9"):
        S3Source(gone).revision(ref_to("s3://tenants/a"))
    with pytest.raises(AdapterUnavailable, match="no-url"):
        S3Source(replace(gone, endpoint_url="no-url")).revision(ref_to("s3://tenants/a"))


def test_s3_without_keys_says_so(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    bare = S3Options(endpoint_url=s3.endpoint_url)
    with pytest.raises(AdapterUnavailable, match="NoCredentialsError"):
        S3Source(bare).revision(ref_to("s3://tenants/a"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret_key)
    assert S3Source(bare).revision(ref_to("s3://tenants/a")).startswith("s3-")


@pytest.mark.parametrize("stall", [False, True], ids=["cut", "stalled"])
def test_s3_broken_body_is_resumed_where_it_broke(
    s3: S3Server, tmp_path: Path, stall: bool
) -> None:
    """The first two answers for the weights break after about 300 kB; nothing is read twice."""

    def break_when(method: str, path: str, number: int) -> int | None:
        return 300_000 if method == "GET" and path.endswith(WEIGHTS) and number <= 2 else None

    relay = Relay(s3.port, break_when, stall)
    try:
        source = S3Source(replace(options(s3, relay.endpoint_url), parts_at_once=1))
        files = fetched(source, "s3://tenants/a", tmp_path / "into")
        assert files[WEIGHTS] == BIG
        assert relay.count("GET", WEIGHTS) == 5, "three parts, the first one in three pieces"
    finally:
        relay.close()


@pytest.mark.parametrize("stall", [False, True], ids=["cut", "stalled"])
def test_s3_body_that_always_breaks_is_a_clear_error(
    s3: S3Server, tmp_path: Path, stall: bool
) -> None:
    def break_when(method: str, path: str, number: int) -> int | None:
        return 5_000 if method == "GET" and path.endswith(WEIGHTS) else None

    relay = Relay(s3.port, break_when, stall)
    try:
        source = S3Source(options(s3, relay.endpoint_url))
        with pytest.raises(AdapterUnavailable, match=f"a/{WEIGHTS} at byte .*broken body"):
            fetched(source, "s3://tenants/a", tmp_path / "into")
    finally:
        relay.close()


def test_s3_object_replaced_while_read_is_never_mixed(s3: S3Server, tmp_path: Path) -> None:
    """The second part is asked for after the object has changed."""
    new = bytes(reversed(BIG))
    client = s3.client()

    def break_when(method: str, path: str, number: int) -> int | None:
        if method == "GET" and path.endswith(f"replaced/{WEIGHTS}") and number == 2:
            client.put_object(Bucket="tenants", Key=f"replaced/{WEIGHTS}", Body=new)
        return None

    relay = Relay(s3.port, break_when)
    try:
        source = S3Source(replace(options(s3, relay.endpoint_url), parts_at_once=1))
        with pytest.raises(AdapterChanged, match="s3://tenants/replaced no longer holds s3-"):
            fetched(source, "s3://tenants/replaced", tmp_path / "into")
        assert fetched(source, "s3://tenants/replaced", tmp_path / "again")[WEIGHTS] == new
    finally:
        relay.close()


@pytest.mark.parametrize("versioned", [True, False])
def test_s3_older_content_is_read_where_the_bucket_keeps_versions(
    s3: S3Server, tmp_path: Path, versioned: bool
) -> None:
    client, bucket = s3.client(), f"versioned-{versioned}".lower()
    client.create_bucket(Bucket=bucket)
    if versioned:
        enabled = {"Status": "Enabled"}
        client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration=enabled)
    source, uri = S3Source(options(s3)), f"s3://{bucket}/a"
    ref, revisions = ref_to(uri), []
    for body in (b"1", b"2"):
        client.put_object(Bucket=bucket, Key=f"a/{CONFIG}", Body=b"{}")
        client.put_object(Bucket=bucket, Key=f"a/{WEIGHTS}", Body=body)
        revisions.append(source.revision(ref))
    assert fetched(source, uri, tmp_path / "new")[WEIGHTS] == b"2"
    for deleted in (False, True):
        if deleted:
            client.delete_object(Bucket=bucket, Key=f"a/{WEIGHTS}")
        into = tmp_path / f"old-{deleted}"
        into.mkdir()
        if versioned:
            source.fetch(ref, into, revisions[0])
            assert (into / WEIGHTS).read_bytes() == b"1"
        else:
            with pytest.raises(AdapterChanged, match=f"{uri} no longer holds"):
                source.fetch(ref, into, revisions[0])
            assert not (into / WEIGHTS).exists()


def test_s3_content_from_before_versions_were_kept_is_read(s3: S3Server, tmp_path: Path) -> None:
    client, bucket = s3.client(), "late-versions"
    client.create_bucket(Bucket=bucket)
    source, uri = S3Source(options(s3)), f"s3://{bucket}/a"
    ref, revisions = ref_to(uri), []
    for body in (b"1", b"2", b"3"):
        client.put_object(Bucket=bucket, Key=f"a/{CONFIG}", Body=b"{}")
        client.put_object(Bucket=bucket, Key=f"a/{WEIGHTS}", Body=body)
        revisions.append(source.revision(ref))
        if body == b"1":
            enabled = {"Status": "Enabled"}
            client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration=enabled)
            revisions.append(source.revision(ref))  # its version is called "null" from now on
    for number, revision in enumerate(revisions):
        into = tmp_path / str(number)
        into.mkdir()
        source.fetch(ref, into, revision)
        assert (into / WEIGHTS).read_bytes() == (b"1", b"1", b"2", b"3")[number]


def test_s3_writes_that_stop_half_way_go_on(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they do where space ends: the rest was never written, and no error was raised."""
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:50_001], at))
    key = f"a/{WEIGHTS}"
    etag = str(s3.client().head_object(Bucket="tenants", Key=key)["ETag"])
    obj = _Object(key, len(BIG), etag, "", ())  # no checksum would tell
    S3Source(options(s3))._download(ref_to("s3://tenants/a"), "tenants", obj, tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == BIG


@pytest.mark.parametrize("scheme", ["file", "s3"])
def test_a_full_disk_is_told_before_the_weights_are_read(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    relay, into = Relay(s3.port), tmp_path / "into"
    into.mkdir()
    folder = write_peft_folder(tmp_path / "a", 1)
    uri = str(folder) if scheme == "file" else "s3://tenants/a"
    size = (folder / WEIGHTS).stat().st_size if scheme == "file" else len(BIG)
    source = open_source(uri, options(s3, relay.endpoint_url))
    small_disk(into, 1000, monkeypatch)
    try:
        with pytest.raises(DiskFull, match="No space left") as caught:
            copy(source, uri, into)
        assert caught.value.num_bytes == size
        assert relay.count("GET", WEIGHTS) == 0
    finally:
        relay.close()


@pytest.mark.parametrize("scheme", ["file", "s3"])
def test_a_disk_that_is_full_after_the_config_is_told_as_that(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    """The head of large weights is kept before their room is taken: others can make way for it."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    into, folder = tmp_path / "into", write_peft_folder(tmp_path / "a", 1)
    into.mkdir()
    if scheme == "file":
        source: Any = open_source(str(folder), options(s3))
        monkeypatch.setattr(local, "JUDGED_FROM_BYTES", 0)
        monkeypatch.setattr(local, "_copy_head", full)
        revision = source.revision(ref_to(str(folder)))
        with pytest.raises(DiskFull, match="No space left"):
            source.fetch(ref_to(str(folder)), into, revision, lambda _: None)
        return
    monkeypatch.setattr(os, "pwrite", full)
    key = f"a/{WEIGHTS}"
    etag = str(s3.client().head_object(Bucket="tenants", Key=key)["ETag"])
    obj = _Object(key, len(BIG), etag, "", ())
    source = S3Source(options(s3))
    with pytest.raises(DiskFull, match="No space left"):
        source._download_head(ref_to("s3://tenants/a"), "tenants", obj, tmp_path / "x")


def test_s3_size_is_bounded(s3: S3Server, tmp_path: Path) -> None:
    with pytest.raises(StoreFull, match=str(len(BIG) + 2)):
        copy(S3Source(options(s3), max_bytes=len(BIG)), "s3://tenants/a", tmp_path)
    assert not list(tmp_path.iterdir())


def test_checksums_of_whole_objects(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"123456789")
    for name, value in (
        ("crc32", "cbf43926"),
        ("md5", hashlib.md5(b"123456789").hexdigest()),
        ("sha256", hashlib.sha256(b"123456789").hexdigest()),
    ):
        assert _failed_check(path, _Object("k", 9, "e", "", ((name, value),))) is None
        wrong = _failed_check(path, _Object("k", 9, "e", "", ((name, "0" * len(value)),)))
        assert wrong is not None and name in wrong and value in wrong
    assert _failed_check(path, _Object("k", 9, "e", "", ())) is None
