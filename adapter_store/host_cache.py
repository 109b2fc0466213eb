"""The host tier: a byte-budgeted folder of packed adapters, shared by all processes of a machine.

Best in shared memory (tmpfs), where a mapped file is memory already; any folder works. All truth is
in the folder, so a process may die at any time: names appear by atomic rename, and all locks are
flocks, which die with their owner. Not here: what is in a file (packed) and how it gets there
(loader). Every method blocks; call none from the engine's thread.

Folder:  packed/DIGEST-FINGERPRINT[-BASE].lora  modified when last used; readers hold a shared flock
         alias/URI-REVISION  holds the digest that this uri had at this revision; modified when last
                             used
         lock/NAME           flocked by the one who fills NAME; make-room: by whoever puts a file
                             into packed/ or takes one away
         scratch/NAME        of one living process, who flocks NAME.owner
"""

import errno
import hashlib
import os
import shutil
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from adapter_store.errors import AdapterUnavailable, StoreFull
from adapter_store.file_locks import hold, private_folder, remove_unless_open, try_lock
from adapter_store.packed import PackedAdapter, PackedFileError
from adapter_store.packed_layout import fingerprint
from adapter_store.ref import is_digest
from adapter_store.regular_file import reserve
from adapter_store.weights import LoraTarget

_POLL_S = 0.02
_ALIAS_LIFE_S = 7 * 24 * 3600
_ALIAS_SWEEP_S = 3600.0


class HostCache:
    """Packed adapters in a folder, at most `max_bytes` of them. What is being fetched comes on top;
    where the disk has no room for it, packed adapters that nobody reads make way.

    folder  None: a private one in shared memory (among temporary files if that is too small),
            removed by `close` and at exit; one left by a killed process goes with the next
    lock_timeout_s  how long to wait for another process that fetches the same;  room_timeout_s  for
                    room in the budget
    Safe to use from several threads and processes at once.
    """

    def __init__(
        self,
        folder: Path | None = None,
        max_bytes: int = 4 << 30,
        lock_timeout_s: float = 600.0,
        room_timeout_s: float = 30.0,
    ) -> None:
        self.max_bytes = max_bytes
        self._lock_timeout_s = lock_timeout_s
        self._room_timeout_s = room_timeout_s
        self._private = folder is None
        self.folder = private_folder(max_bytes) if folder is None else folder.absolute()
        for name in ("packed", "alias", "lock", "scratch"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        alive = hold(self.folder / "lock" / "alive") if self._private else None
        self._verified: dict[str, int] = {}  # inode of the file of that name when it was checked
        self._cancelled = False
        self._swept_at = float("-inf")
        if alive is not None:
            self._finalizer = weakref.finalize(self, _end, alive, self.folder)
        self._remove_leftovers()
        self._remove_old_aliases()

    def close(self) -> None:
        """Stop waiting for locks; remove a private folder. Open adapters stay readable."""
        self._cancelled = True
        if self._private:
            self._finalizer()

    def open(
        self, digest: str, targets: Sequence[LoraTarget], dtype: torch.dtype, base: str = ""
    ) -> PackedAdapter | None:
        """The packed adapter, marked as just used; None if it is not here.

        base  names what it was held against besides the targets
        The checksum is read the first time that this process meets the file. A damaged file is
        removed, and is not here.
        """
        path = self._path(digest, targets, dtype, base)
        with suppress(FileNotFoundError):
            try:
                return self._open(path, digest, targets, dtype)
            except PackedFileError:
                with self.lock("make-room"):  # where it is the only one who replaces it
                    try:
                        return self._open(path, digest, targets, dtype)
                    except PackedFileError:
                        path.unlink()
        return None

    def _open(
        self, path: Path, digest: str, targets: Sequence[LoraTarget], dtype: torch.dtype
    ) -> PackedAdapter:
        packed = PackedAdapter.open(path, targets, dtype, verify=False)
        try:
            if packed.digest != digest:
                raise PackedFileError(f"{path.name} holds {packed.digest}")
            if self._verified.get(path.name) != packed.inode():
                packed.check_data()
        except PackedFileError:
            packed.close()
            raise
        self._verified[path.name] = packed.inode()
        with suppress(FileNotFoundError):
            os.utime(path)
        return packed

    def _path(
        self, digest: str, targets: Sequence[LoraTarget], dtype: torch.dtype, base: str
    ) -> Path:
        parts = [digest, fingerprint(targets, dtype), base[:16]]
        return self.folder / "packed" / f"{'-'.join(filter(None, parts))}.lora"

    def write(
        self,
        digest: str,
        targets: Sequence[LoraTarget],
        dtype: torch.dtype,
        num_bytes: int,
        fill: Callable[[Path], object],
        base: str = "",
    ) -> PackedAdapter:
        """Make room, let `fill` write a file, and show it: open already, so that nobody takes it
        for unused. Nothing stays if `fill` raises.

        num_bytes  of the file, as an upper bound;  base  as `open` has it
        Errors:  StoreFull if it is larger than the budget;  AdapterUnavailable if all room is in
                 use or the disk is full.
        """
        path = self._path(digest, targets, dtype, base)
        part = self.folder / "scratch" / f"{path.name}.{uuid.uuid4().hex}"
        with self._owned(part):
            try:
                self._reserve(part, num_bytes)
                fill(part)
            except OSError as e:
                raise AdapterUnavailable(f"cannot write {self.folder}: {e.strerror}") from e
            packed = PackedAdapter.open(part, targets, dtype, verify=False)
            try:
                with self.lock("make-room"):
                    os.rename(part, path)
            except BaseException:
                packed.close()
                raise
            self._verified[path.name] = packed.inode()
            return packed

    def free_disk(self, num_bytes: int) -> bool:
        """The disk had no room for so many bytes beside the budget: remove packed adapters, the
        longest unused first. Whether any was."""
        with self.lock("make-room"):
            return self._free_disk(num_bytes)

    def _free_disk(self, num_bytes: int) -> bool:
        short = num_bytes - shutil.disk_usage(self.folder).free
        if sum(size for _, size in self._oldest_first()) < short:
            return False  # all of them would go, and for nothing
        return self._remove_idle(max(1, short)) > 0

    def _remove_idle(self, num_bytes: int) -> int:
        """Remove so many bytes that nobody reads, the longest unused first; how many it were."""
        removed = 0
        for path, size in self._oldest_first():
            if removed >= num_bytes:
                break
            if remove_unless_open(path):
                removed += size
                self._verified.pop(path.name, None)
        return removed

    def _reserve(self, part: Path, num_bytes: int) -> None:
        """Take room for a file: remove the longest unused ones; wait while all are in use."""
        if num_bytes > self.max_bytes:
            raise StoreFull(f"{num_bytes} bytes do not fit the host tier of {self.max_bytes} bytes")
        deadline = time.monotonic() + self._room_timeout_s
        while True:
            with self.lock("make-room"):
                over = self.used_bytes() + num_bytes - self.max_bytes
                if over > 0:
                    over -= self._remove_idle(over)
                if over <= 0 and self._allocate(part, num_bytes):
                    return
            if self._cancelled or time.monotonic() > deadline:
                words = f"the host tier of {self.max_bytes} bytes is busy: {over} bytes too few"
                if over <= 0:
                    words = f"cannot write {self.folder}: {os.strerror(errno.ENOSPC)}"
                raise AdapterUnavailable(words)
            time.sleep(_POLL_S)

    def _allocate(self, part: Path, num_bytes: int) -> bool:
        """Take the space itself, packed adapters making way if need be; False if there is none."""
        while True:
            try:
                with open(part, "w+b") as file:
                    reserve(file.fileno(), num_bytes)
                return True
            except OSError as e:
                part.unlink(missing_ok=True)
                if e.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
            if not self._free_disk(num_bytes):
                return False

    def used_bytes(self) -> int:
        """Bytes of all packed files, those being written included."""
        parts = (self.folder / "scratch").glob("*.lora.*")
        return sum(size for _, _, size in _stamped([*self._packed(), *parts]))

    def digests(self) -> set[str]:
        """Of all packed files."""
        return {path.name.partition("-")[0] for path in self._packed()}

    def remember(self, uri: str, revision: str, digest: str) -> None:
        """Note that the uri held this digest at this revision."""
        path = self.folder / "alias" / _alias(uri, revision)
        part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
        part.write_text(digest)
        os.rename(part, path)

    def lookup(self, uri: str, revision: str) -> str | None:
        """The digest that the uri had at this revision, if that was ever seen."""
        return _read_digest(self.folder / "alias" / _alias(uri, revision))

    def has_seen(self, uri: str, digest: str) -> bool:
        """Whether this very uri ever held this digest: no other uri gives a right to it."""
        aliases = (self.folder / "alias").glob(f"{_alias(uri, '').partition('-')[0]}-*")
        return any(_read_digest(path, digest) for path in aliases)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A folder for a while; the next to ask for one removes it if this process dies."""
        self._remove_leftovers()
        if time.monotonic() - self._swept_at > _ALIAS_SWEEP_S:
            self._remove_old_aliases()
        path = self.folder / "scratch" / uuid.uuid4().hex
        with self._owned(path):
            path.mkdir()
            yield path

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """One holder over all threads and processes. AdapterUnavailable if it takes too long."""
        path = self.folder / "lock" / name
        deadline = time.monotonic() + self._lock_timeout_s
        while (file := try_lock(path)) is None:
            if self._cancelled or time.monotonic() > deadline:
                raise AdapterUnavailable(f"another process has held {path} for too long")
            time.sleep(_POLL_S)
        try:
            yield
        finally:
            # Unlinked while held: who opened the old name sees another inode and tries again.
            path.unlink(missing_ok=True)
            os.close(file)

    @contextmanager
    def _owned(self, path: Path) -> Iterator[None]:
        """Keep `path` from being taken for a leftover, and remove what is left there at the end."""
        owner = path.with_name(f"{path.name}.owner")
        fd = hold(owner)
        try:
            yield
        finally:
            _remove(path)
            owner.unlink(missing_ok=True)
            os.close(fd)

    def _packed(self) -> list[Path]:
        return list((self.folder / "packed").glob("*.lora"))

    def _oldest_first(self) -> list[tuple[Path, int]]:
        return [(path, size) for _, path, size in sorted(_stamped(self._packed()))]

    def _remove_leftovers(self) -> None:
        """Remove scratch whose owner died."""
        with self.lock("leftovers"):
            names = {path.name for path in (self.folder / "scratch").iterdir()}
            for name in {name.removesuffix(".owner") for name in names}:
                path = self.folder / "scratch" / name
                owner = path.with_name(f"{name}.owner")
                fd = try_lock(owner)
                if fd is not None:  # held until both are gone: nobody else can begin to own it
                    _remove(path)
                    owner.unlink(missing_ok=True)
                    os.close(fd)

    def _remove_old_aliases(self) -> None:
        """Remove those that were not used for long."""
        self._swept_at = time.monotonic()
        old = time.time() - _ALIAS_LIFE_S
        for path in (self.folder / "alias").iterdir():
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < old:
                    path.unlink()


def census(folder: Path) -> tuple[int, int]:
    """How many packed adapters a host tier's folder has, and their bytes."""
    found = _stamped(list((folder / "packed").glob("*.lora")))
    return len(found), sum(size for _, _, size in found)


def hash_text(text: str) -> str:
    """sha256 in hex of any text: a uri may hold halves of characters, as names of folders do."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _alias(uri: str, revision: str) -> str:
    left, right = (hash_text(text)[:32] for text in (uri, revision))
    return f"{left}-{right}"


def _read_digest(path: Path, wanted: str | None = None) -> str | None:
    """What an alias says, which is thereby used; None if that is not what is wanted, or nothing."""
    try:
        digest = path.read_text()
        if not is_digest(digest) or wanted not in (None, digest):
            return None
        os.utime(path)
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    return digest


def _stamped(paths: list[Path]) -> list[tuple[int, Path, int]]:
    """(modification time, path, bytes) of each file; what vanished meanwhile is passed over."""
    found = []
    for path in paths:
        with suppress(FileNotFoundError):
            info = path.stat()
            found.append((info.st_mtime_ns, path, info.st_size))
    return found


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _end(alive: int, folder: Path) -> None:
    os.close(alive)
    shutil.rmtree(folder, ignore_errors=True)
