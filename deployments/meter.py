"""What one HTTP request is counted as: its status, tokens and times.

Not here: the names of the series (metrics.py), and who adds them up (router.py).
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from deployments import metrics
from deployments.admission import Job
from deployments.api_errors import CLIENT_GONE_STATUS
from model_runner.text import TextOutput


@dataclass
class _Times:
    started_s: float
    first_s: float | None = None
    last_s: float = 0.0


class Meter:
    """What one HTTP request costs: made when it enters, finished once; later calls do nothing.

    log, traffic  where it counts, traffic in tokens by adapter_id;  label  of a tenant's id;
    tenant_id  who asks: the request may turn out to be another tenant's;
    leave  called once, when the request ends
    """

    def __init__(
        self,
        log: metrics.MetricLog,
        traffic: Counter[str],
        label: Callable[[str], str],
        tenant_id: str,
        leave: Callable[[], None],
    ) -> None:
        self._log = log
        self._traffic = traffic
        self._label = label
        self._tenant = label(tenant_id)
        self._leave = leave
        self._job: Job | None = None
        self._times = _Times(time.monotonic())
        self._open = True

    def began(self, job: Job) -> None:
        self._job = job
        self._tenant = self._label(job.requests[0].tenant_id)

    def _labels(self) -> tuple[str, str]:
        model = self._job.target.model if self._job else ""
        return model, self._tenant

    def saw(self, job: Job, output: TextOutput) -> None:
        """Take note of one output."""
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
        log.count(metrics.OUTPUT_TOKENS, labels, brought)

    def finish(self, status: int) -> None:
        """Count the request out, under its HTTP status."""
        if not self._open:
            return
        self._open = False
        log, labels = self._log, self._labels()
        self._leave()
        log.count(metrics.REQUESTS, (*labels, str(status)))
        if status == CLIENT_GONE_STATUS:
            log.count(metrics.HANGUPS, labels)
        if self._job is None:
            return
        log.observe(metrics.LATENCY, labels, time.monotonic() - self._times.started_s)
        usage = self._job.writer.tally.usage()
        log.count(metrics.PROMPT_TOKENS, labels, usage.prompt_tokens)
        log.count(metrics.CACHED_TOKENS, labels, usage.prompt_tokens_details.cached_tokens)
        adapter = self._job.target.adapter
        if adapter is not None:
            self._traffic[adapter.adapter_id] += usage.total_tokens
