"""Daemon threads that run callables, with a lane for each place that may be slow.

Not `concurrent.futures`: its threads keep a process from ending while one hangs in the network.
No results here: a job reports by itself.
"""

import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable

_log = logging.getLogger(__name__)
_SPARE = 4


class LoadThreads:
    """Up to `count` jobs of one lane at a time, those of a lane in order, lanes in turn.

    A lane that hangs keeps nobody else: up to four times as many threads are made as they are
    needed, and a lane's second job at a time is not begun while half of those are busy. So the
    first job of a lane waits only where several lanes hang that hold all the others.
    A job must not raise; if it does, that is logged.
    """

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._count = count
        self._max_threads = _SPARE * count
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, deque[Callable[[], None]]] = OrderedDict()
        self._running: Counter[str] = Counter()
        self._threads: list[threading.Thread] = []
        self._closed = False
        for _ in range(count):
            self._add_thread()

    def submit(self, job: Callable[[], None], lane: str = "") -> None:
        """Run a job when a thread is free. After `close` it is dropped."""
        with self._changed:
            if self._closed:
                return
            self._waiting.setdefault(lane, deque()).append(job)
            self._add_thread_if_short()
            self._changed.notify()

    def close(self, timeout_s: float) -> None:
        """Drop the jobs that have not begun, and wait for the others, so long at most."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _add_thread_if_short(self) -> None:
        """All are busy, and some job might begin."""
        is_short = self._running.total() == len(self._threads) < self._max_threads
        if is_short and any(self._may_begin(lane) for lane in self._waiting):
            self._add_thread()

    def _add_thread(self) -> None:
        name = f"{self._name}-{len(self._threads)}"
        self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
        self._threads[-1].start()

    def _may_begin(self, lane: str) -> bool:
        mine = self._running[lane]
        return mine < self._count and (not mine or self._running.total() < self._max_threads // 2)

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            lane, job = taken
            try:
                job()
            except Exception:
                _log.exception("a job of %s failed", threading.current_thread().name)
            del job, taken
            with self._changed:
                self._running[lane] -= 1
                if not self._running[lane]:
                    del self._running[lane]

    def _take(self) -> tuple[str, Callable[[], None]] | None:
        """The next job that may begin; waits for one. None: closed."""
        with self._changed:
            while not self._closed:
                for lane, jobs in self._waiting.items():
                    if not self._may_begin(lane):
                        continue
                    job = jobs.popleft()
                    self._waiting.move_to_end(lane)
                    if not jobs:
                        del self._waiting[lane]
                    self._running[lane] += 1
                    self._add_thread_if_short()
                    return lane, job
                self._changed.wait()
            return None
