"""The folder of packed files: budget, locks, what a crash leaves. Not here: what is in a file
(test_packed)."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from pathlib import Path

import pytest
import torch

from adapter_store import file_locks, host_cache
from adapter_store.errors import AdapterUnavailable, StoreFull
from adapter_store.host_cache import HostCache
from adapter_store.packed import PackedAdapter
from tests.adapter_store.tiny_adapters import TARGETS, small_disk, write_tiny

DTYPE = torch.float32
ROOT = Path(__file__).resolve().parents[2]


def digest_of(number: int) -> str:
    return f"{number:064x}"


@pytest.fixture
def size(tmp_path: Path) -> int:
    """Bytes of one packed file."""
    write_tiny(tmp_path / "probe", 0, digest_of(0))
    return (tmp_path / "probe").stat().st_size


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def put(cache: HostCache, number: int, num_bytes: int) -> None:
    hold(cache, number, num_bytes).close()


def hold(cache: HostCache, number: int, num_bytes: int, base: str = "") -> PackedAdapter:
    digest = digest_of(number)

    def fill(path: Path) -> None:
        write_tiny(path, number, digest)

    return cache.write(digest, TARGETS, DTYPE, num_bytes, fill, base)


def has(cache: HostCache, number: int) -> bool:
    packed = cache.open(digest_of(number), TARGETS, DTYPE)
    if packed is not None:
        packed.close()
    return packed is not None


def test_written_is_there_for_every_process(folder: Path, size: int) -> None:
    put(HostCache(folder, size * 2), 1, size)
    other = HostCache(folder, size * 2)
    assert has(other, 1) and not has(other, 2)
    assert other.used_bytes() == size


def test_longest_unused_leaves_first(folder: Path, size: int) -> None:
    cache = HostCache(folder, size * 3)
    for number in (1, 2, 3):
        put(cache, number, size)
        time.sleep(0.01)
    assert has(cache, 1)
    time.sleep(0.01)
    put(cache, 4, size)
    assert [has(cache, n) for n in (1, 2, 3, 4)] == [True, False, True, True]
    assert cache.used_bytes() <= cache.max_bytes


def test_what_was_checked_is_forgotten_with_its_file(folder: Path, size: int) -> None:
    """A process that loads adapters for months must not grow with each."""
    cache = HostCache(folder, size * 2)
    for number in (*range(1, 7), 5, 6, 5):
        put(cache, number, size)
        assert has(cache, number)
    assert len(cache._verified) == len(cache.digests()) == 2


def test_open_file_is_never_removed(folder: Path, size: int) -> None:
    cache = HostCache(folder, size * 2, room_timeout_s=0.1)
    put(cache, 1, size)
    put(cache, 2, size)
    held = [cache.open(digest_of(n), TARGETS, DTYPE) for n in (1, 2)]
    assert all(held)
    with pytest.raises(AdapterUnavailable, match="busy"):
        put(cache, 3, size)
    assert held[0] is not None
    held[0].close()
    put(cache, 3, size)
    assert [has(cache, n) for n in (1, 2, 3)] == [False, True, True]


def test_room_is_waited_for(folder: Path, size: int) -> None:
    cache = HostCache(folder, size, room_timeout_s=20)
    put(cache, 1, size)
    held = cache.open(digest_of(1), TARGETS, DTYPE)
    assert held is not None
    timer = threading.Timer(0.2, held.close)
    timer.start()
    put(cache, 2, size)
    timer.join()
    assert has(cache, 2) and not has(cache, 1)


def test_larger_than_the_budget_is_refused_with_both_sizes(folder: Path, size: int) -> None:
    cache = HostCache(folder, size - 1)
    with pytest.raises(StoreFull, match=f"{size} bytes .* {size - 1} bytes"):
        put(cache, 1, size)


def test_failed_write_leaves_nothing(folder: Path, size: int) -> None:
    cache = HostCache(folder, size)

    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cache.write(digest_of(1), TARGETS, DTYPE, size, fail)
    assert cache.used_bytes() == 0 and not list((folder / "scratch").iterdir())
    put(cache, 1, size)


def test_full_disk_is_named(folder: Path, size: int) -> None:
    cache = HostCache(folder, size)

    def fail(path: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(AdapterUnavailable, match="No space left"):
        cache.write(digest_of(1), TARGETS, DTYPE, size, fail)


def test_a_full_disk_takes_the_longest_unused(
    folder: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may fill it, and what is fetched lies there too: the budget is not all that counts."""
    cache = HostCache(folder, size * 100, room_timeout_s=0.1)
    small_disk(folder, size * 2 + 64, monkeypatch)
    for number in (1, 2):
        put(cache, number, size)
        time.sleep(0.01)
    assert has(cache, 1)
    put(cache, 3, size)
    assert [has(cache, n) for n in (1, 2, 3)] == [True, False, True]
    held = [cache.open(digest_of(n), TARGETS, DTYPE) for n in (1, 3)]
    assert all(held)
    with pytest.raises(AdapterUnavailable, match="No space left"):
        put(cache, 4, size)
    assert held[0] is not None
    held[0].close()
    put(cache, 4, size)
    assert [has(cache, n) for n in (1, 3, 4)] == [False, True, True]
    assert cache.used_bytes() == size * 2


def test_the_disk_is_made_free_for_what_is_fetched(
    folder: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = HostCache(folder, size * 100)
    for number in (1, 2, 3):
        put(cache, number, size)
        time.sleep(0.01)
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    held = cache.open(digest_of(1), TARGETS, DTYPE)
    assert held is not None
    assert cache.free_disk(size + 100), "as many as are needed, and no more"
    assert [has(cache, n) for n in (1, 2, 3)] == [True, False, True]
    assert not cache.free_disk(size * 9) and has(cache, 3), "it would go for nothing"
    assert cache.free_disk(size + 100) and not has(cache, 3)
    assert not cache.free_disk(1), "all that is left is in use"
    held.close()


def test_a_new_file_is_open_before_others_see_it(folder: Path, size: int) -> None:
    """Else whoever needs room could take it before its writer has read it once."""
    cache = HostCache(folder, size, room_timeout_s=0.1)
    with hold(cache, 1, size) as packed:
        assert packed.digest == digest_of(1)
        with pytest.raises(AdapterUnavailable, match="busy"):
            put(cache, 2, size)
        assert has(cache, 1)
    put(cache, 2, size)


def test_a_file_comes_into_its_place_while_nobody_makes_room(folder: Path, size: int) -> None:
    """Else the old file of a name is looked at, and the new one removed."""
    cache = HostCache(folder, size * 2)
    filled, locked = threading.Event(), threading.Event()

    def fill(path: Path) -> None:
        write_tiny(path, 1, digest_of(1))
        filled.set()
        assert locked.wait(30)

    def write() -> None:
        cache.write(digest_of(1), TARGETS, DTYPE, size, fill).close()

    writer = threading.Thread(target=write)
    writer.start()
    assert filled.wait(30)
    with HostCache(folder, size).lock("make-room"):
        locked.set()
        writer.join(0.2)
        assert writer.is_alive() and not has(cache, 1)
    writer.join(30)
    assert has(cache, 1)


def test_what_took_a_damaged_files_place_stays(
    folder: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process found the damage first, and has mended it."""
    put(HostCache(folder, size * 2), 1, size)
    (path,) = (folder / "packed").iterdir()
    good = path.read_bytes()
    path.write_bytes(good[:-256])
    cache = HostCache(folder, size * 2)
    read = PackedAdapter.open

    def late(*args: object, **options: object) -> PackedAdapter:
        try:
            return read(*args, **options)  # type: ignore[arg-type]
        finally:
            path.with_name("other").write_bytes(good)
            os.rename(path.with_name("other"), path)

    monkeypatch.setattr(PackedAdapter, "open", late)
    has(cache, 1)
    monkeypatch.undo()
    assert path.exists() and has(cache, 1)


def test_bases_do_not_share_what_was_held_against_one(folder: Path, size: int) -> None:
    cache = HostCache(folder, size * 3)
    bases = ["a" * 64, "b" * 64]
    for base in bases:
        hold(cache, 1, size, base).close()
    assert cache.used_bytes() == 2 * size and cache.digests() == {digest_of(1)}
    for base in bases:
        packed = cache.open(digest_of(1), TARGETS, DTYPE, base)
        assert packed is not None
        packed.close()
    assert not has(cache, 1)


@pytest.mark.parametrize("damage", ["cut", "flip", "other"])
def test_damaged_file_is_removed(folder: Path, size: int, damage: str) -> None:
    put(HostCache(folder, size * 2), 1, size)
    (path,) = (folder / "packed").iterdir()
    data = bytearray(path.read_bytes())
    if damage == "cut":
        data = data[:-256]
    elif damage == "flip":
        data[-400] ^= 4
    else:
        write_tiny(path, 1, digest_of(2))
        data = bytearray(path.read_bytes())
    path.write_bytes(data)
    assert not has(HostCache(folder, size * 2), 1)
    assert not path.exists()


def test_aliases_belong_to_their_uri(folder: Path, size: int) -> None:
    cache = HostCache(folder, size)
    cache.remember("s3://a/x", "r1", digest_of(1))
    cache.remember("s3://a/x", "r2", digest_of(2))
    assert cache.lookup("s3://a/x", "r1") == digest_of(1)
    assert cache.lookup("s3://a/x", "r3") is None
    assert cache.has_seen("s3://a/x", digest_of(2))
    assert not cache.has_seen("s3://b/x", digest_of(2))
    for path in (folder / "alias").iterdir():
        path.write_bytes(b"\xff\xff")
    assert cache.lookup("s3://a/x", "r1") is None and not cache.has_seen("s3://a/x", digest_of(2))


def test_aliases_go_when_they_were_not_used_for_long(
    folder: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = HostCache(folder, size)
    for number in range(3):
        cache.remember(f"s3://a/{number}", "r", digest_of(number))
    old = time.time() - 8 * 24 * 3600

    def age() -> None:
        for path in (folder / "alias").iterdir():
            os.utime(path, (old, old))

    age()
    assert cache.lookup("s3://a/0", "r") and cache.has_seen("s3://a/1", digest_of(1))
    with cache.scratch():
        assert len(list((folder / "alias").iterdir())) == 3, "not each time"
    monkeypatch.setattr(host_cache, "_ALIAS_SWEEP_S", 0.0)
    with cache.scratch():
        pass
    assert [bool(cache.lookup(f"s3://a/{number}", "r")) for number in range(3)] == [1, 1, 0]
    age()
    assert not HostCache(folder, size).lookup("s3://a/0", "r")


def test_lock_is_held_by_one(folder: Path) -> None:
    cache = HostCache(folder, 1)
    inside, most = [], []

    def work() -> None:
        with cache.lock("one"):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.005)
            inside.pop()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert most == [1] * 8
    assert not (folder / "lock" / "one").exists()


def test_lock_held_elsewhere_ends_in_an_error(folder: Path) -> None:
    cache = HostCache(folder, 1, lock_timeout_s=0.1)
    with open(folder / "lock" / "one", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(AdapterUnavailable, match="too long"), cache.lock("one"):
            pass


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from adapter_store.host_cache import HostCache
    from tests.adapter_store.test_host_cache import DTYPE, TARGETS, digest_of, put, write_tiny

    folder = Path(sys.argv[1]) if sys.argv[1] else None
    cache = HostCache(folder, 1 << 20)
    put(cache, 7, 1 << 16)
    with cache.scratch() as scratch, cache.lock("held"):
        (scratch / "adapter_model.safetensors").write_bytes(b"half of it")

        def fill(path):
            path.write_bytes(b"half")
            print(cache.folder, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

        cache.write(digest_of(8), TARGETS, DTYPE, 1 << 16, fill)
"""


def run_killed(folder: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), folder],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=100,
    )
    assert done.returncode == -signal.SIGKILL
    return done.stdout.strip()


def test_killed_process_leaves_nothing_that_stays(folder: Path) -> None:
    run_killed(str(folder))
    left = list((folder / "scratch").iterdir())
    assert len(left) == 4, "a folder, half a file and their owners' marks"
    cache = HostCache(folder, 1 << 20, lock_timeout_s=1)
    assert not list((folder / "scratch").iterdir())
    assert has(cache, 7) and not has(cache, 8)
    with cache.lock("held"):
        pass


def test_scratch_of_the_living_stays(folder: Path) -> None:
    cache = HostCache(folder, 1 << 20)
    with cache.scratch() as scratch:
        (scratch / "file").write_bytes(b"x")
        HostCache(folder, 1 << 20)
        assert (scratch / "file").read_bytes() == b"x"
    assert not list((folder / "scratch").iterdir())


def test_private_folder_goes_with_its_cache(size: int) -> None:
    cache = HostCache(None, size)
    put(cache, 1, size)
    other = HostCache(None, size)
    assert cache.folder.exists() and other.folder != cache.folder and not has(other, 1)
    cache.close()
    other.close()
    assert not cache.folder.exists() and not other.folder.exists()


def test_private_folder_of_a_killed_process_is_removed_by_the_next() -> None:
    left = Path(run_killed(""))
    assert left.exists()
    old = time.time() - 3600
    os.utime(left, (old, old))
    cache = HostCache(None, 1 << 20)
    cache.close()
    assert not left.exists()


def test_what_a_killed_process_left_in_shared_memory_goes_also_where_that_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be what fills it."""
    left = Path("/dev/shm") / f"adapter-cache-{uuid.uuid4().hex}"
    left.mkdir()
    os.utime(left, (0, 0))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    monkeypatch.setattr(file_locks.tempfile, "gettempdir", lambda: str(tmp_path))
    assert file_locks.private_folder(1 << 20).parent == tmp_path
    assert not left.exists()


def test_a_private_folder_that_goes_meanwhile_harms_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process closes its cache while this one looks for leftovers."""
    gone = tmp_path / "adapter-cache-gone"
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([gone]))
    monkeypatch.setattr(Path, "is_dir", lambda self: True)
    folder = file_locks.private_folder(1 << 20)
    assert folder.exists()
    folder.rmdir()


def test_a_private_folder_is_where_there_is_room_for_fetching_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(file_locks.tempfile, "gettempdir", lambda: str(tmp_path))
    for free, has_room in ((1 << 20, False), (2 << 20, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, n=free: usage._replace(free=n))
        cache = HostCache(None, 1 << 20)
        assert (cache.folder.parent != tmp_path) == has_room
        cache.close()
