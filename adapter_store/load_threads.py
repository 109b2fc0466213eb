"""Daemon threads that run callables in order.

Not `concurrent.futures`: its threads keep a process from ending while one hangs in the network.
No results here: a job reports by itself.
"""

import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

_log = logging.getLogger(__name__)


class LoadThreads:
    """`count` threads over one queue. A job must not raise; if it does, that is logged."""

    def __init__(self, name: str, count: int) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True)
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job when a thread is free. After `close` it is dropped."""
        self._jobs.put(job)

    def close(self, timeout_s: float) -> None:
        """Drop the jobs that have not begun, and wait for the others, so long at most."""
        self._closed.set()
        for _ in self._threads:
            self._jobs.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._closed.is_set():
                continue
            try:
                job()
            except Exception:
                _log.exception("a job of %s failed", threading.current_thread().name)
