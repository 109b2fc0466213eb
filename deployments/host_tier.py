"""The folder of a node's host tier, where the service made it up: the last replica to leave takes
it away.

Not for what lies in it (adapter_store.host_cache).
"""

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path


class HostTierFolder:
    """One user's hold on a folder: a shared lock on a file beside it, which dies with its owner.

    After a crash of all users the folder stays, and the next ones use it and take it away.
    Errors: PermissionError for a folder that another user of the machine has made.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._mark = Path(f"{folder}.users")
        self._fd = self._hold()
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._folder.lstat().st_uid != os.getuid():  # who made it could change our adapters
            os.close(self._fd)
            raise PermissionError(f"{folder} is another user's: set adapters.host_cache_dir")

    def _hold(self) -> int:
        while True:
            fd = os.open(self._mark, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_SH)
            with suppress(FileNotFoundError):
                if os.stat(self._mark).st_ino == os.fstat(fd).st_ino:
                    return fd
            os.close(fd)  # the last user removed it between our two calls

    def leave(self) -> None:
        """Let go. Nobody else there: remove the folder. Safe to call again."""
        if self._fd < 0:
            return
        with suppress(BlockingIOError):
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self._folder, ignore_errors=True)
            self._mark.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1
