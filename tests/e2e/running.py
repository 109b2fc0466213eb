"""A command of the project that a test runs as a user would, and all the processes it started."""

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Running:
    """A command in a session of its own; its processes carry a mark in their environment."""

    def __init__(
        self, command: Sequence[str | Path], environment: Mapping[str, str] | None = None
    ) -> None:
        self.mark = f"RUNNING_TEST_MARK={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        # A shell's background jobs are deaf to Ctrl-C, and so would be what they start.
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self.begin = time.monotonic()
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | dict(environment or {}) | {name: value},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def wait_until_printed(self, words: str, limit_s: float = 120.0) -> None:
        deadline = time.monotonic() + limit_s
        while not any(words in line for line in self.lines):
            try:
                line = self._queue.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                line = None
            assert line is not None, f"{words!r} was not printed:\n{''.join(self.lines)}"
            self.lines.append(line)

    def tail(self) -> str:
        """The last lines that it printed."""
        while not self._queue.empty():
            self.lines.append(self._queue.get() or "")
        return "".join(self.lines[-40:])

    def pids(self) -> list[int]:
        """Every living process that the command started, itself included."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def wait_until_gone(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while self.pids():
            assert time.monotonic() < deadline, _names(self.pids())
            time.sleep(0.05)

    def end(self, signum: int, limit_s: float) -> bool:
        """Ask it to end, and kill what is left of it; whether it ended by itself in time."""
        self.process.send_signal(signum)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(limit_s)
        has_ended = self.process.poll() is not None
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return has_ended

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(line)
        self._queue.put(None)


def _names(pids: list[int]) -> list[str]:
    names = []
    for pid in pids:
        with contextlib.suppress(OSError):
            names.append(f"{pid}: {Path(f'/proc/{pid}/cmdline').read_bytes()[:200]!r}")
    return names
