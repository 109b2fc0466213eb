"""Locks of files, which die with the process that holds them, and a folder that its process alone
uses.

Not here: what lies there (host_cache).
"""

import fcntl
import os
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from adapter_store.errors import AdapterUnavailable

_PRIVATE_PREFIX = "adapter-cache-"
_HEADROOM = 1.25
"""What is fetched lies beside what is kept: a private folder wants that many times the budget."""


def try_lock(path: Path) -> int | None:
    """File descriptor that holds the exclusive lock on this name, or None."""
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(path).st_ino == os.fstat(fd).st_ino:
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(fd)
    return None


def hold(path: Path) -> int:
    """Lock a name that is this process's alone."""
    for _ in range(1000):  # who looks whether it is held holds it for a moment
        fd = try_lock(path)
        if fd is not None:
            return fd
        time.sleep(0.001)
    raise AdapterUnavailable(f"{path} is held by somebody else")


def is_held(path: Path) -> bool:
    """Whether a living process holds the lock. A file that is not there is held by nobody."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def remove_unless_open(path: Path) -> bool:
    """Unlink a packed file that no process reads; False if one does."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def private_folder(max_bytes: int) -> Path:
    """A new folder in shared memory; among temporary files where that is small (containers)."""
    shm, parent = Path("/dev/shm"), Path(tempfile.gettempdir())
    for place in (shm, parent):  # first of all: what killed processes left takes room
        for path in place.glob(f"{_PRIVATE_PREFIX}*"):
            with suppress(FileNotFoundError):  # its process removes it just now
                info = path.lstat()
                mine = stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid()
                young = time.time() - info.st_mtime < 60
                if mine and not young and not is_held(path / "lock" / "alive"):
                    shutil.rmtree(path, ignore_errors=True)
    if os.access(shm, os.W_OK) and shutil.disk_usage(shm).free >= max_bytes * _HEADROOM:
        parent = shm
    return Path(tempfile.mkdtemp(prefix=_PRIVATE_PREFIX, dir=parent))
