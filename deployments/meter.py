"""What one HTTP request is counted as: its status, tokens and times, its usage records.

Not here: the names of the series (metrics.py), who adds them up (metric_registry.py), and where
records go (usage.py).
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import uuid4

from deployments import metrics
from deployments.admission import Job
from deployments.api_errors import CLIENT_GONE_STATUS
from deployments.usage import MOVED, RUNNING, UsageLog, UsageRecord
from model_runner.request import FinishReason, RequestOutput
from model_runner.sequence_text import TextOutput

_FAILURES = ("500", "503")
_ENDS = (FinishReason.STOP, FinishReason.LENGTH)  # an answer may be its prompt alone


@dataclass
class _Times:
    started_s: float
    first_s: float | None = None
    last_s: float = 0.0


@dataclass
class _Attempt:
    """Tokens of one attempt. received  from engines;  thrown_away  there, as the engines tell."""

    started: str
    prompt: int = 0
    cached: int = 0
    received: int = 0
    delivered: int = 0
    thrown_away: int = 0
    recomputed: int = 0


class Meter:
    """What one HTTP request costs: made when it enters, finished once; later calls do nothing.

    log, traffic  where it counts, traffic in tokens by adapter_id;  label  of a tenant's id there
    tenant_id     who asks: the request may turn out to be another tenant's
    usage         where its records go, None = nowhere
    leave         called once, when the request ends
    """

    def __init__(
        self,
        log: metrics.MetricLog,
        traffic: Counter[str],
        label: Callable[[str], str],
        tenant_id: str,
        usage: UsageLog | None,
        leave: Callable[[], None],
    ) -> None:
        self._log = log
        self._traffic = traffic
        self._label_of = label
        self._tenant_id, self._label = tenant_id, label(tenant_id)
        self._usage = usage
        self._leave = leave
        self._job: Job | None = None
        self._connection = uuid4().hex[:16]
        self._times = _Times(time.monotonic())
        self._attempts: dict[int, _Attempt] = {1: _Attempt(_utc())}
        self._attempt_of: dict[str, int] = {}  # an engine's request -> the attempt that answers it
        self._open = True
        if usage is not None:
            usage.begin(self)

    def began(self, job: Job) -> None:
        self._job = job
        self._tenant_id = job.requests[0].tenant_id
        self._label = self._label_of(self._tenant_id)

    def _labels(self) -> tuple[str, str]:
        model = self._job.target.model if self._job else ""
        return model, self._label

    def received(self, output: RequestOutput) -> None:
        """Take note of what an engine gave, before it is known what of it the client gets."""
        attempt = self._attempts.get(output.attempt)
        if attempt is None:
            attempt = self._attempts[output.attempt] = _Attempt(_utc())
        attempt.received += len(output.new_token_ids)
        attempt.thrown_away += output.num_discarded_tokens
        before = self._attempt_of.get(output.request_id)
        answers = output.new_token_ids or output.finish_reason in _ENDS
        if before != output.attempt and answers:
            self._attempt_of[output.request_id] = output.attempt
            self._log.observe(metrics.QUEUE, self._labels(), output.queue_s)
            if before is None:  # a prompt that came to no answer costs nothing
                attempt.prompt += output.num_prompt_tokens
                attempt.cached += output.num_cached_tokens
            else:
                had = output.num_prompt_tokens + output.num_output_tokens
                had -= len(output.new_token_ids) + output.num_cached_tokens
                attempt.recomputed += max(0, had)

    def saw(self, job: Job, output: TextOutput) -> None:
        """Take note of one output on its way to the client."""
        brought = job.writer.tally.add(output)
        if not brought:
            return
        now, log, labels = time.monotonic(), self._log, self._labels()
        if self._times.first_s is None:
            self._times.first_s = now
            log.observe(metrics.TTFT, labels, now - self._times.started_s)
        else:
            log.observe(metrics.INTER_TOKEN, labels, (now - self._times.last_s) / brought, brought)
        self._times.last_s = now
        self._attempts[self._attempt_of.get(output.request_id, 1)].delivered += brought
        if job.stream:
            log.count(metrics.OUTPUT_TOKENS, labels, brought)

    def finish(self, status: int) -> None:
        """Count the request out, under its HTTP status."""
        if not self._open:
            return
        self._open = False
        self._leave()
        records = self.usage(str(status))
        self._count(self._job, status, records)
        if self._usage is not None:
            self._usage.end(self, records)

    def _count(self, job: Job | None, status: int, records: list[UsageRecord]) -> None:
        log, labels = self._log, self._labels()
        log.count(metrics.REQUESTS, (*labels, str(status)))
        # What alerts look at is counted with 0 too, so that the first one is seen as growth.
        for failure in _FAILURES:
            log.count(metrics.REQUESTS, (*labels, failure), 0)
        log.count(metrics.HANGUPS, labels, int(status == CLIENT_GONE_STATUS))
        if job is None:
            return
        log.observe(metrics.LATENCY, labels, time.monotonic() - self._times.started_s)
        prompt, delivered = (sum(getattr(r, n) for r in records) for n in ("prompt", "delivered"))
        log.count(metrics.PROMPT_TOKENS, labels, prompt)
        log.count(metrics.CACHED_TOKENS, labels, sum(r.cached for r in records))
        log.count(metrics.DISCARDED_TOKENS, labels, sum(r.discarded for r in records))
        log.count(metrics.RECOMPUTED_TOKENS, labels, sum(r.recomputed for r in records))
        if not job.stream:
            log.count(metrics.OUTPUT_TOKENS, labels, delivered)
        log.traffic[self._tenant_id] += prompt + delivered
        if job.target.adapter is not None:
            self._traffic[job.target.adapter.adapter_id] += prompt + delivered

    def usage(self, status: str) -> list[UsageRecord]:
        """The record of each attempt, as of now; none of a request that runs and has no job yet."""
        job, ended, last = self._job, _utc(), max(self._attempts)
        if job is None and status == RUNNING:
            return []
        adapter = job.target.adapter if job else None
        # An answer that is not streamed is sent whole, at the end, or not at all.
        given = {
            number: attempt.delivered if job and (job.stream or status == "200") else 0
            for number, attempt in self._attempts.items()
        }
        return [
            UsageRecord(
                request=job.writer.answer_id if job else f"refused-{self._connection}",
                attempt=number,
                connection=self._connection,
                tenant=self._tenant_id,
                model=job.target.model if job else "",
                adapter=adapter.adapter_id if adapter else "",
                status=status if number == last else MOVED,
                prompt=attempt.prompt,
                cached=attempt.cached,
                delivered=given[number],
                discarded=max(0, attempt.received - given[number]) + attempt.thrown_away,
                recomputed=attempt.recomputed,
                started=attempt.started,
                ended=ended,
            )
            for number, attempt in sorted(self._attempts.items())
        ]


def _utc() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
