"""A `serve-stdio` child as an outsider sees it: requests in over a pipe, tokens and times out.

Not here: which requests, and how many at once (loops.py).
"""

import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ANSWER_TIMEOUT_S, STATS_TIMEOUT_S, QUIT_TIMEOUT_S = 600.0, 60.0, 60.0


@dataclass
class Answer:
    """What came back for one request. Times are this process's `perf_counter`, in seconds.

    num_first  ids in the first message that had any
    """

    request: dict[str, Any]
    sent: float
    ids: list[int] = field(default_factory=list)
    num_first: int = 0
    first: float | None = None
    last: float | None = None
    error: str = ""
    done: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> "Answer":
        """Until the last token, or an error."""
        if not self.done.wait(ANSWER_TIMEOUT_S):
            self.error = self.error or "timed out"
        return self

    @property
    def tokens_per_s(self) -> float:
        """Ids after the first message over the time after the first message."""
        assert self.first is not None and self.last is not None
        return (len(self.ids) - self.num_first) / max(1e-9, self.last - self.first)

    @property
    def ttft_ms(self) -> float:
        """From sending to the first id."""
        assert self.first is not None
        return 1e3 * (self.first - self.sent)


class Client:
    """A serve-stdio child. Exits the process if the child is not ready in time.

    startup_s  from its start to its ready line;  ready  that line
    """

    def __init__(
        self, command: list[str], timeout_s: float = 300.0, env: dict[str, str] | None = None
    ) -> None:
        started = time.perf_counter()
        pipe = subprocess.PIPE
        self.child = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=env, bufsize=1
        )
        self.ready: dict[str, Any] = {}
        self._answers: dict[str, Answer] = {}
        self._lock, self._is_ready = threading.Lock(), threading.Event()
        self._stats: dict[str, Any] = {}
        self._got_stats = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        while not self._is_ready.wait(0.1):
            if self.child.poll() is not None:
                sys.exit(f"the engine ended with {self.child.returncode} before it was ready")
            if time.perf_counter() - started > timeout_s:
                self.child.kill()
                sys.exit(f"the engine was not ready in {timeout_s:.0f} s")
        self.startup_s = time.perf_counter() - started

    def submit(self, request: dict[str, Any]) -> Answer:
        """Send a request; its answer fills as tokens come."""
        answer = Answer(request, time.perf_counter())
        with self._lock:
            self._answers[request["id"]] = answer
            self._send(request)
        return answer

    def stats(self) -> dict[str, Any]:
        """The engine's own counters; reading them starts the count of experts anew."""
        self._got_stats.clear()
        with self._lock:
            self._send({"cmd": "stats"})
        return self._stats if self._got_stats.wait(STATS_TIMEOUT_S) else {}

    def quit(self) -> None:
        """End the child."""
        with self._lock:
            self._send({"cmd": "quit"})
        try:
            self.child.wait(QUIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.child.kill()

    def _send(self, message: dict[str, Any]) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps(message) + "\n")
        self.child.stdin.flush()

    def _read(self) -> None:
        assert self.child.stdout is not None
        for line in self.child.stdout:
            now, message = time.perf_counter(), json.loads(line)
            if "ready" in message:
                self.ready = message
                self._is_ready.set()
            elif "stats" in message:
                self._stats = message["stats"]
                self._got_stats.set()
            else:
                with self._lock:
                    answer = self._answers[message["id"]]
                if message["token_ids"] and answer.first is None:
                    answer.first, answer.num_first = now, len(message["token_ids"])
                answer.ids += message["token_ids"]
                answer.error = message["error"] or answer.error
                if message["finish_reason"] or message["error"]:
                    answer.last = now
                    answer.done.set()
