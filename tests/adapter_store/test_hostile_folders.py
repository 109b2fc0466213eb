"""Made folders, mutated bytes and kept inputs through the whole loader: each is refused with words,
or loads right.

Not here: single files by hand (test_formats_hostile), the long search (fuzz_atheris).
"""

import gc
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapter_store.contents import KnownContents
from adapter_store.errors import AdapterInvalid
from adapter_store.formats.pickle_file import PickleFile
from adapter_store.formats.registry import load_adapter
from adapter_store.host_cache import HostCache
from adapter_store.loader import AdapterLoader
from adapter_store.ref import AdapterRef
from adapter_store.sources import local, s3
from adapter_store.sources.source import OPTIONAL_FILES, S3Options
from tests.adapter_store.fuzz_atheris import join, split
from tests.adapter_store.hostile.draft import CONFIG, WEIGHTS, Random, valid_draft
from tests.adapter_store.hostile.folders import MUTATIONS, Case, make_case, valid_case, whole_case
from tests.adapter_store.hostile.good_files import write_base
from tests.adapter_store.hostile.inputs import as_bytes, load_bytes
from tests.adapter_store.hostile.kept import KEPT_INPUTS, pack
from tests.adapter_store.hostile.places import make_socket
from tests.adapter_store.hostile.run import MAX_PEAK_BYTES, MAX_SECONDS, Bench
from tests.adapter_store.scripted_s3 import start_scripted_s3
from tests.adapter_store.tiny_adapters import TARGETS, write_peft_folder

ROOT = Path(__file__).parents[2]
NUM_CASES, ALL_CASES = 150, 10_000


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with start_scripted_s3() as server:
        made = Bench(tmp_path_factory.mktemp("hostile"), server)
        yield made
        made.close()


@pytest.mark.parametrize("form", ["linear", "flat", "3-D", "per expert"])
def test_what_is_mutated_loads_unmutated(bench: Bench, form: str) -> None:
    assert bench.run(valid_case(form)).refusal == ""


def test_all_that_an_adapter_may_bring_loads_unmutated(bench: Bench) -> None:
    case = whole_case()
    assert set(case.draft.beside) == set(OPTIONAL_FILES) and bench.run(case).refusal == ""


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_mutation_alone(bench: Bench, name: str) -> None:
    for number in range(2 if MUTATIONS[name].share == 1.0 else 1):
        bench.run(make_case(number, only=name))


@pytest.mark.slow
def test_made_folders(bench: Bench) -> None:
    cases = [make_case(number) for number in range(NUM_CASES)]
    refused = [bool(bench.run(case).refusal) for case in cases]
    assert 0.5 < sum(refused) / len(cases) < 1.0
    assert {name for case in cases for name in case.mutations} >= {
        name for name, mutation in MUTATIONS.items() if mutation.share == 1.0
    }


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_folders() -> None:
    """In a process of its own, whose memory is nobody else's."""
    command = [sys.executable, "-m", "tests.adapter_store.hostile.run", "--count", str(ALL_CASES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3500)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    summary = json.loads(done.stdout)
    assert summary["cases"] == ALL_CASES and summary["mutations"] == len(MUTATIONS)
    assert summary["peak_mib_over_idle"] < MAX_PEAK_BYTES >> 20


# ---- bytes

_EDITS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "insert", "remove", "double"]),
        st.sampled_from([WEIGHTS, WEIGHTS, CONFIG]),
        st.floats(0, 1, exclude_max=True),
        st.binary(min_size=1, max_size=12),
    ),
    min_size=1,
    max_size=5,
)


def _edited(raw: bytes, edits: list[tuple[str, str, float, bytes]], name: str) -> bytes:
    content = bytearray(raw)
    for kind, where, place, more in edits:
        if where != name or not content:
            continue
        # Nearer to the beginning, where the structure is.
        at = int(place * place * len(content))
        if kind == "flip":
            content[at] ^= more[0] or 1
        elif kind == "cut":
            del content[at:]
        elif kind == "insert":
            content[at:at] = more
        elif kind == "remove":
            del content[at : at + len(more)]
        else:
            content[at:at] = content[at : at + 8 * len(more)]
    return bytes(content)


@given(form=st.sampled_from(["linear", "flat", "3-D", "per expert"]), edits=_EDITS)
@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_edited_bytes(bench: Bench, form: str, edits: list[tuple[str, str, float, bytes]]) -> None:
    draft = valid_draft(Random(form), form)
    draft.raw_config = _edited(draft.config_bytes(), edits, CONFIG)
    draft.edit = lambda raw: _edited(raw, edits, WEIGHTS)
    bench.run(Case(-1, ("edited bytes",), False, draft))


def test_inputs_of_the_fuzzer(tmp_path: Path) -> None:
    base, folder = write_base(tmp_path / "base"), tmp_path / "a"
    folder.mkdir()
    forms = ("linear", "flat", "3-D", "per expert")
    for case in (whole_case(), *(valid_case(form) for form in forms)):
        data = as_bytes(case.draft)
        assert load_bytes(folder, data, base) is None and join(split(data)) == data
    cut = load_bytes(folder, data[:-1], base)
    assert cut is not None and WEIGHTS in str(cut)


def test_inputs_that_broke_the_reader_are_refused(tmp_path: Path) -> None:
    base, folder = write_base(tmp_path / "base"), tmp_path / "a"
    folder.mkdir()
    assert KEPT_INPUTS
    for kept in KEPT_INPUTS:
        data = kept.unpack()
        assert join(split(data)) == data == replace(kept, packed=pack(data)).unpack()
        began = time.process_time()
        refusal = load_bytes(folder, data, base)
        assert time.process_time() - began < MAX_SECONDS
        assert isinstance(refusal, AdapterInvalid) and refusal.reason == kept.reason
        assert kept.word in str(refusal) and len(str(refusal)) < 500, str(refusal)


# ---- what once went wrong, one by one


class Store:
    """A loader over a host tier of its own."""

    def __init__(self, folder: Path, options: S3Options | None = None) -> None:
        self.cache = HostCache(folder, 4 << 30)
        self.loader = AdapterLoader(
            TARGETS, torch.float32, self.cache, 256, options, load_adapter, KnownContents()
        )

    def refusal(self, uri: str) -> AdapterInvalid:
        with pytest.raises(AdapterInvalid) as refusal:
            self.loader.load(AdapterRef("hostile", uri))
        return refusal.value


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "tier")


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_link_to_a_good_file_is_refused(store: Store, tmp_path: Path, name: str) -> None:
    other = write_peft_folder(tmp_path / "other tenant", 1)
    folder = write_peft_folder(tmp_path / "mine", 2)
    (folder / name).unlink()
    (folder / name).symlink_to(other / name)
    refusal = store.refusal(str(folder))
    assert refusal.reason == "file" and name in str(refusal) and "link" in str(refusal)


def cached(root: Path, seed: int) -> Path:
    """A snapshot as huggingface_hub lays it out: every file a link to a blob of its digest."""
    good = write_peft_folder(root / "good", seed)
    repository = root / "hub" / "models--a--b"
    snapshot = repository / "snapshots" / "5f91d94bd9cd7190a9f3216ff93cd1dd95f2c7be"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for name, kind in ((CONFIG, hashlib.sha1), (WEIGHTS, hashlib.sha256)):
        raw = (good / name).read_bytes()
        digest = kind(raw).hexdigest()
        (repository / "blobs" / digest).write_bytes(raw)
        (snapshot / name).symlink_to(f"../../blobs/{digest}")
    return snapshot


def test_a_snapshot_in_the_hubs_cache_is_a_folder(store: Store, tmp_path: Path) -> None:
    snapshot = cached(tmp_path, 3)
    found = store.loader.load(AdapterRef("cached", str(snapshot)))
    plain = store.loader.load(AdapterRef("plain", str(tmp_path / "good")))
    assert found.digest == plain.digest


@pytest.mark.parametrize(
    "leads_to",
    [
        "../../../models--c--d/blobs/{blob}",
        "../../blobs/../../models--c--d/blobs/{blob}",
        "../blobs/{blob}",
        "../../blobs/x",
        "../../blobs/link",
        "{root}/hub/models--a--b/blobs/{blob}",
    ],
)
def test_a_link_out_of_a_cached_repository_is_refused(
    store: Store, tmp_path: Path, leads_to: str
) -> None:
    snapshot = cached(tmp_path, 3)
    repository = snapshot.parent.parent
    [blob] = [path for path in (repository / "blobs").iterdir() if len(path.name) == 64]
    other = repository.parent / "models--c--d" / "blobs"
    other.mkdir(parents=True)
    for path in (other / blob.name, snapshot.parent / "blobs" / blob.name, repository / "blobs/x"):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(blob.read_bytes())
    hidden = f"{0:064x}"
    (repository / "blobs" / hidden).symlink_to(other / blob.name)
    (snapshot / WEIGHTS).unlink()
    link = leads_to.format(blob=blob.name, root=tmp_path).replace("blobs/link", f"blobs/{hidden}")
    (snapshot / WEIGHTS).symlink_to(link)
    refusal = store.refusal(str(snapshot))
    assert refusal.reason == "file" and "link" in str(refusal)


def test_a_repository_whose_blobs_lie_elsewhere_is_refused(store: Store, tmp_path: Path) -> None:
    snapshot = cached(tmp_path, 3)
    blobs = snapshot.parent.parent / "blobs"
    blobs.rename(tmp_path / "somebody elses")
    blobs.symlink_to(tmp_path / "somebody elses")
    refusal = store.refusal(str(snapshot))
    assert refusal.reason == "file" and "link" in str(refusal)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A tenant's folder, beside another tenant's with a good adapter in it."""
    write_peft_folder(tmp_path / "adapters" / "b" / "secret", 1)
    mine = tmp_path / "adapters" / "a"
    write_peft_folder(mine / "own", 2)
    return mine


@pytest.mark.parametrize("form", ["{}", "file://{}"])
@pytest.mark.parametrize(
    ("link", "leads_to", "asked"),
    [
        ("support", "../b/secret", "support"),
        ("support", "{root}/../b/secret", "support"),
        ("sub", "../b", "sub/secret"),
        ("support", "own", "support"),
        ("loop", "loop", "loop"),
    ],
)
def test_no_link_below_a_tenants_root_is_followed(
    store: Store, root: Path, link: str, leads_to: str, asked: str, form: str
) -> None:
    (root / link).symlink_to(leads_to.format(root=root))
    for place in (root, root.parent):
        ref = AdapterRef("a", form.format(root / asked), root=form.format(place))
        with pytest.raises(AdapterInvalid) as refusal:
            store.loader.load(ref)
        assert refusal.value.reason == "file"
        assert f"{link} is a symbolic link" in refusal.value.message
    assert store.loader.load(AdapterRef("a", str(root / "own"), root=str(root))).digest


def test_an_operators_root_may_be_a_link(store: Store, root: Path, tmp_path: Path) -> None:
    link, plain = tmp_path / "link", AdapterRef("plain", str(root / "own"))
    link.symlink_to(root)
    digest = store.loader.load(plain).digest
    for ref in (
        AdapterRef("below", f"{link}/own", root=str(link)),
        AdapterRef("named by the operator himself", f"{link}/own"),
    ):
        assert store.loader.load(ref).digest == digest
    itself = AdapterRef("itself", str(link), root=f"{link}/")
    link.unlink()
    link.symlink_to(root / "own")
    assert store.loader.load(itself).digest == digest
    snapshot = cached(tmp_path / "cache", 3)
    link.unlink()
    link.symlink_to(snapshot)
    below = AdapterRef("below", str(snapshot), root=str(tmp_path / "cache" / "hub"))
    assert store.loader.load(itself).digest == store.loader.load(below).digest != digest


@pytest.mark.parametrize("uri", ["{root}/../b/secret", "file://{root}/%2e%2e/b/secret"])
def test_dots_lead_out_of_no_root(store: Store, root: Path, uri: str) -> None:
    place = f"file://{root}" if uri.startswith("file") else str(root)
    with pytest.raises(AdapterInvalid, match="does not lie below"):
        store.loader.load(AdapterRef("a", uri.format(root=root), root=place))


def test_a_folder_that_becomes_a_link_meanwhile_is_not_followed(root: Path, tmp_path: Path) -> None:
    source, into = local.LocalSource(), tmp_path / "into"
    into.mkdir()
    ref = AdapterRef("a", str(root / "own"), root=str(root))
    revision = source.revision(ref)
    (root / "own").rename(root / "kept")
    (root / "own").symlink_to("kept")
    with pytest.raises(AdapterInvalid, match="own is a symbolic link"):
        source.fetch(ref, into, revision)
    assert not list(into.iterdir())


@pytest.mark.parametrize("put", [os.mkfifo, make_socket, lambda at: at.symlink_to("/dev/zero")])
def test_what_is_put_in_a_files_place_is_not_waited_for(
    store: Store, tmp_path: Path, put: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_peft_folder(tmp_path / "a", 1)
    open_file = local.open_regular

    def late(path: Path, folder_fd: int | None = None) -> int:
        if path.name == WEIGHTS:
            (folder / path).unlink()
            put(folder / path)
        return open_file(path, folder_fd)

    monkeypatch.setattr(local, "open_regular", late)
    assert store.refusal(str(folder)).reason == "file"


def test_a_file_that_grows_is_not_copied_on_and_on(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_peft_folder(tmp_path / "a", 1)
    copied: list[int] = []
    send = os.sendfile

    def grows(out: int, source: int, offset: int, count: int) -> int:
        with (folder / WEIGHTS).open("ab") as file:
            file.write(bytes(1 << 16))
        copied.append(send(out, source, offset, count))
        return copied[-1]

    monkeypatch.setattr(local.os, "sendfile", grows)
    with pytest.raises(Exception, match="changed while it was read|changes faster"):
        store.loader.load(AdapterRef("hostile", str(folder)))
    assert len(copied) == 6  # two files, three tries


@pytest.fixture
def judged_from(monkeypatch: pytest.MonkeyPatch) -> int:
    """The size from which weights are judged by their head, much smaller than it is."""
    for module in (local, s3):
        monkeypatch.setattr(module, "JUDGED_FROM_BYTES", 1 << 20)
    return 1 << 20


def test_large_garbage_is_judged_by_its_head(tmp_path: Path, judged_from: int) -> None:
    folder = write_peft_folder(tmp_path / "a", 1)
    content = (folder / WEIGHTS).read_bytes() + bytes(judged_from)
    (folder / WEIGHTS).write_bytes(content)
    with start_scripted_s3() as server:
        server.put_folder("b/a", folder)
        options = S3Options(server.endpoint_url, "us-east-1", "key", "secret", part_bytes=1 << 20)
        store = Store(tmp_path / "tier", options)
        for uri in (str(folder), "s3://b/a"):
            for _ in range(2):  # and what was refused is not read again
                refusal = store.refusal(uri)
                assert refusal.reason == "file" and WEIGHTS in str(refusal)
        assert server.count("GET", WEIGHTS) == 1


def test_a_large_good_one_is_loaded(tmp_path: Path, judged_from: int) -> None:
    rank = judged_from // 4 // 40
    folder = write_peft_folder(tmp_path / "a", 1, rank)
    with start_scripted_s3() as server:
        server.put_folder("b/a", folder)
        options = S3Options(server.endpoint_url, "us-east-1", "key", "secret")
        cache = HostCache(tmp_path / "tier", 4 << 30)
        loader = AdapterLoader(
            TARGETS, torch.float32, cache, rank, options, load_adapter, KnownContents()
        )
        digests = {loader.load(AdapterRef("a", uri)).digest for uri in (str(folder), "s3://b/a")}
    assert len(digests) == 1 and (folder / WEIGHTS).stat().st_size > judged_from


def test_a_refusal_keeps_no_tensor(store: Store, tmp_path: Path) -> None:
    draft = valid_draft(Random("nan"), "linear")
    name, entry = draft.entries[-1]
    begin, end = entry["data_offsets"]
    draft.data = draft.data[:begin] + b"\xff" * (end - begin)
    Case(-1, (), True, draft).write(tmp_path / "a")
    gc.collect()
    before = _num_tensors()
    refusal = store.refusal(str(tmp_path / "a"))  # as the store keeps it for those who ask later
    assert refusal.reason == "not_finite" and name in str(refusal)
    gc.collect()
    assert _num_tensors() == before


def _num_tensors() -> int:
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def test_zeros_that_the_file_lacks_count(tmp_path: Path) -> None:
    from adapter_store.errors import StoreFull

    make_case(0, only="rank_of_one_expert").write(tmp_path / "a")
    load_adapter(tmp_path / "a", TARGETS)
    num_bytes = 3 * 256 * (40 + 48) * 2
    load_adapter(tmp_path / "a", TARGETS, max_bytes=num_bytes)
    with pytest.raises(StoreFull, match=str(num_bytes)):
        load_adapter(tmp_path / "a", TARGETS, max_bytes=num_bytes - 1)


def test_a_header_may_not_unfold(bench: Bench) -> None:
    draft = valid_draft(Random("pairs"), "linear")
    pairs = b",".join(b'"%x":""' % i for i in range(2_000_000))
    for header in (b'{"__metadata__": {' + pairs + b"}}", b"{" + pairs + b"}"):
        draft.raw_header = header
        assert bench.run(Case(-1, ("pairs",), True, draft)).refusal == "file"


def test_warnings_are_not_a_flood(tmp_path: Path) -> None:
    draft = valid_draft(Random("words"), "linear")
    draft.config |= {f"novel {i}": i for i in range(1, 1000)}
    Case(-1, (), False, draft).write(tmp_path / "a")
    warnings = load_adapter(tmp_path / "a", TARGETS).manifest.warnings
    assert len(warnings) == 33 and "967 more" in warnings[-1]


def test_a_pickle_that_is_allowed_may_not_unfold(tmp_path: Path) -> None:
    import pickle
    import zipfile

    class Large:
        def __reduce__(self) -> tuple[Any, ...]:
            return bytearray, (1 << 40,)

    at = tmp_path / "adapter_model.bin"
    for kind in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with zipfile.ZipFile(at, "w", kind) as archive:
            archive.writestr("archive/data.pkl", pickle.dumps({"x": Large()}, protocol=2))
            archive.writestr("archive/version", "3\n" + " " * 1000)
        with pytest.raises(AdapterInvalid, match="bytearray|compressed"):
            PickleFile(at)


def test_a_folder_may_be_called_anything(store: Store, tmp_path: Path) -> None:
    for name in ("a\nb", os.fsdecode(b"\xff\xfe"), "..." + "\u202e"):
        folder = write_peft_folder(tmp_path / name, 1)
        assert store.loader.load(AdapterRef("odd", str(folder))).digest
    with pytest.raises(Exception, match="no usable uri"):
        store.loader.load(AdapterRef("odd", f"{tmp_path}/\ud800"))
