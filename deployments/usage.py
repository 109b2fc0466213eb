"""What every request used, as records that outlive the ingress: one for each attempt of a request.

Records leave in batches, each one immutable object (JSON lines), so nothing is ever rewritten. A
batch is offered under one name until it is known to be kept; a second put of it changes nothing, so
a retry cannot double what a first one wrote. Requests that run long are written down as they go:
a crash loses the last seconds and not the hour before. Not here: where objects lie
(usage_store.py), who adds them up (usage_report.py), and who counts (meter.py).
"""

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Protocol
from uuid import uuid4

from deployments import metrics
from deployments.turns import take_turns
from deployments.usage_store import UsageStore

FLUSH_S = 1.5
"""Between two batches. At most 5 s are not kept when a process dies, if a write takes up to one."""

MAX_WAITING = 100_000
"""Records that wait while the store cannot be written; the oldest are given up beyond that."""

_RETRY_S = 0.2

RUNNING = "running"
MOVED = "moved"

_log = logging.getLogger("ray.serve")


@dataclass(frozen=True)
class UsageRecord:
    """One attempt of one request.

    request      as the client knows it (x-request-id)
    attempt      1, or more where a replica was lost
    connection   of the client: one that broke may ask for the same answer by another, and each
                 counts all of it, so the furthest is the bill
    status       of the HTTP answer; "moved" where another attempt went on; "running" = so far
    prompt, cached  prompt tokens of the attempt that first answered, and how many were not computed
    delivered    tokens given to the client, up to and with the one that completes a stop string;
                 exactly these are billed
    discarded    tokens made for the request and not given to the client, as far as is known here
    recomputed   tokens that an earlier attempt had and this one computed again
    started, ended  UTC, ISO 8601; while it runs, ended is the time of the record
    """

    request: str
    attempt: int
    connection: str
    tenant: str
    model: str
    adapter: str
    status: str
    prompt: int
    cached: int
    delivered: int
    discarded: int
    recomputed: int
    started: str
    ended: str

    @property
    def billed(self) -> int:
        return self.delivered

    def line(self) -> str:
        return json.dumps(asdict(self) | {"billed": self.billed}, separators=(",", ":"))


class Metered(Protocol):
    """A request that runs, and what it used so far."""

    def usage(self, status: str) -> Sequence[UsageRecord]: ...


class UsageLog:
    """Records of one ingress that are not written yet. One event loop owns it."""

    def __init__(self) -> None:
        self.ended: deque[UsageRecord] = deque()
        self._running: dict[Metered, float] = {}  # since when

    def begin(self, request: Metered) -> None:
        self._running[request] = time.monotonic()

    def end(self, request: Metered, records: Sequence[UsageRecord]) -> None:
        """It is over: what it used, for good."""
        del self._running[request]
        self.ended.extend(records)

    def take(self, min_age_s: float) -> list[UsageRecord]:
        """What has ended since, and what runs for so long already."""
        records = list(self.ended)
        self.ended.clear()
        before = time.monotonic() - min_age_s
        for request, since in self._running.items():
            if since <= before:
                records += request.usage(RUNNING)
        return records


class UsageWriter:
    """Takes the records of one log into a store, batch by batch. It begins with its process."""

    def __init__(
        self,
        log: UsageLog,
        store: UsageStore,
        counts: metrics.MetricLog,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._log = log
        self._store = store
        self._counts = counts
        self._now = now
        self._writer_id = uuid4().hex
        self._number = 0
        self._batch: tuple[str, bytes, int] | None = None  # name, body, records
        self._writing = asyncio.Lock()
        for series in (metrics.USAGE_RECORDS, metrics.USAGE_FAILURES, metrics.USAGE_LOST):
            counts.count(series, (), 0)  # so that the first failure is seen as growth

    async def run(self) -> None:
        """Write for ever."""
        await take_turns("writing usage records", self.flush, FLUSH_S)

    async def flush(self, min_age_s: float = FLUSH_S) -> None:
        """Write what there is. Errors: those of the store; the batch is kept for the next call."""
        async with self._writing:
            if self._batch is not None:
                await self._write()
            self._batch = self._next(min_age_s)
            if self._batch is not None:
                await self._write()

    async def close(self, timeout_s: float = 5.0) -> None:
        """The last batch, with all that still runs; a write that fails is tried again meanwhile."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    with suppress(Exception):
                        return await self.flush(min_age_s=0.0)
                    await asyncio.sleep(_RETRY_S)
        except TimeoutError:
            _log.error("the last usage records were not written in %s s", timeout_s)

    def _next(self, min_age_s: float) -> tuple[str, bytes, int] | None:
        records = self._log.take(min_age_s)
        if not records:
            return None
        self._number += 1
        name = f"{self._now():%Y-%m-%d}/{self._writer_id}-{self._number:08d}.jsonl"
        return name, "".join(f"{record.line()}\n" for record in records).encode(), len(records)

    async def _write(self) -> None:
        assert self._batch is not None
        name, body, number = self._batch
        try:
            await asyncio.to_thread(self._store.put_new, name, body)
        except Exception as exc:
            _log.error("usage records wait: %s", exc)
            self._counts.count(metrics.USAGE_FAILURES, ())
            self._shed()
            raise
        self._batch = None
        self._counts.count(metrics.USAGE_RECORDS, (), number)

    def _shed(self) -> None:
        ended = self._log.ended
        lost = max(0, len(ended) - MAX_WAITING)
        for _ in range(lost):
            ended.popleft()
        if lost:
            _log.error("%d usage records are lost: the store was away for too long", lost)
            self._counts.count(metrics.USAGE_LOST, (), lost)
