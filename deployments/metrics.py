"""Every metric name in the house, once, and counting in plain numbers. Prometheus reads them from
metric_registry.py.

Ingresses and replicas count into a `MetricLog` and send what is new to the router, which alone owns
the series: each answer of /metrics is of the whole service, whoever gives it, and a dead process
takes no counter with it.
"""

import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from model_runner.stats import EngineStats

LAST_WORDS_S = 1.0
"""So long a process that is stopped in order tries to send what it counted last."""

MAX_TRAFFIC = 256
"""Tenants whose traffic one delta tells, the busiest; that of the others waits for a later one."""


class Kind(StrEnum):
    """How a series behaves."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Series:
    """One metric. buckets  upper bounds of a histogram, ascending, without infinity."""

    name: str
    kind: Kind
    documentation: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_FAST_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_SLOW_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2.5, 5, 10, 20, 40, 80, 160)
_TENANT = ("model", "tenant")
_SEAT = ("model", "seat")


def _counter(name: str, documentation: str, *labels: str) -> Series:
    return Series(name, Kind.COUNTER, documentation, labels)


def _gauge(name: str, documentation: str, *labels: str) -> Series:
    return Series(name, Kind.GAUGE, documentation, labels)


def _histogram(
    name: str, documentation: str, labels: tuple[str, ...], bounds: tuple[float, ...]
) -> Series:
    return Series(name, Kind.HISTOGRAM, documentation, labels, bounds)


REQUESTS = _counter("moe_requests_total", "Requests answered, by HTTP status.", *_TENANT, "status")
PROMPT_TOKENS = _counter("moe_prompt_tokens_total", "Tokens of prompts.", *_TENANT)
CACHED_TOKENS = _counter(
    "moe_cached_tokens_total", "Prompt tokens found in the prefix cache.", *_TENANT
)
OUTPUT_TOKENS = _counter("moe_output_tokens_total", "Tokens given to clients.", *_TENANT)
DISCARDED_TOKENS = _counter(
    "moe_discarded_tokens_total", "Tokens made for a client and not given to it.", *_TENANT
)
RECOMPUTED_TOKENS = _counter(
    "moe_recomputed_tokens_total", "Tokens computed again as their replica was lost.", *_TENANT
)
HANGUPS = _counter("moe_hangups_total", "Requests whose client left before the end.", *_TENANT)
TTFT = _histogram(
    "moe_time_to_first_token_seconds", "From the request to its first token.", _TENANT, _SLOW_S
)
QUEUE = _histogram(
    "moe_queue_seconds", "From the engine's submit to the first step.", _TENANT, _SLOW_S
)
INTER_TOKEN = _histogram(
    "moe_inter_token_seconds", "Time per token after the first.", _TENANT, _FAST_S
)
LATENCY = _histogram(
    "moe_request_seconds", "From the request to the end of its answer.", _TENANT, _SLOW_S
)

USAGE_RECORDS = _counter("moe_usage_records_total", "Usage records written for good.")
USAGE_FAILURES = _counter("moe_usage_write_failures_total", "Writes of usage records that failed.")
USAGE_LOST = _counter("moe_usage_records_lost_total", "Usage records given up for want of room.")

ENGINE_STEPS = _counter("moe_engine_steps_total", "Forward passes.", "model")
ENGINE_SAMPLED = _counter("moe_engine_sampled_tokens_total", "Tokens drawn on the device.", "model")
ENGINE_DELIVERED = _counter(
    "moe_engine_delivered_tokens_total", "Tokens drawn and handed out.", "model"
)
ENGINE_DISCARDED = _counter(
    "moe_engine_discarded_tokens_total", "Tokens drawn and thrown away.", "model"
)
ENGINE_REPLAYED = _counter(
    "moe_engine_replayed_tokens_total",
    "Tokens computed again: preempted, or resumed from another replica.",
    "model",
)
ENGINE_PREEMPTIONS = _counter(
    "moe_engine_preemptions_total", "Sequences sent back for want of pages.", "model"
)
ENGINE_FINISHED = _counter(
    "moe_engine_finished_total", "Sequences ended, by reason.", "model", "reason"
)
_TIER = "remote: S3 or a folder to the host; host: found there; device: host to a slot."
ADAPTER_LOADS = _counter("moe_adapter_loads_total", f"Adapter loads. {_TIER}", "model", "tier")
ADAPTER_LOAD_S = _counter(
    "moe_adapter_load_seconds_total", f"Time that loads took. {_TIER}", "model", "tier"
)
ADAPTER_LOAD_BYTES = _counter(
    "moe_adapter_load_bytes_total", f"Bytes that loads moved. {_TIER}", "model", "tier"
)
ADAPTER_FAILURES = _counter(
    "moe_adapter_load_failures_total", "Adapter loads that ended in an error.", "model"
)
ADAPTER_EVICTIONS = _counter(
    "moe_adapter_evictions_total", "Adapters that lost their slot.", "model"
)

PLACEMENT_MOVES = _counter(
    "moe_placement_moves_total", "Adapters whose homes were changed, by why.", "model", "kind"
)

RUNNING = _gauge("moe_running_sequences", "Sequences in the batch.", *_SEAT)
WAITING = _gauge("moe_waiting_sequences", "Sequences that wait for pages or their turn.", *_SEAT)
WAITING_ADAPTER = _gauge(
    "moe_waiting_for_adapter_sequences", "Sequences that wait for an adapter.", *_SEAT
)
FREE_PAGES = _gauge("moe_kv_free_pages", "KV pages that nobody holds.", *_SEAT)
PAGES = _gauge("moe_kv_pages", "KV pages.", *_SEAT)
ARENA_USED = _gauge("moe_adapter_arena_used_bytes", "Adapter memory in use.", *_SEAT)
ARENA = _gauge("moe_adapter_arena_bytes", "Adapter memory.", *_SEAT)
RESIDENT = _gauge("moe_resident_adapters", "Adapters in slots.", *_SEAT)
SLOTS = _gauge("moe_adapter_slots", "Adapter slots.", *_SEAT)
STEP_AGE = _gauge(
    "moe_engine_step_age_seconds", "Since the last step ended while work waited.", *_SEAT
)
HOST_ADAPTERS = _gauge("moe_host_tier_adapters", "Adapters in the host tier.", "node")
HOST_USED = _gauge("moe_host_tier_used_bytes", "Host tier in use.", "node")
HOST = _gauge("moe_host_tier_bytes", "Room in the host tier.", "node")
REPLICAS = _gauge("moe_replicas", "Replicas that hold a seat.", "model")
SEAT_TRAFFIC = _gauge(
    "moe_seat_traffic_tokens_per_second", "Drawn by the adapters that are placed there.", *_SEAT
)
PLACEMENT_VERSION = _gauge("moe_placement_version", "Version of the placement map.")

SERIES: dict[str, Series] = {
    series.name: series for series in list(globals().values()) if isinstance(series, Series)
}

_ENGINE_COUNTERS = (
    (ENGINE_STEPS, "num_steps"),
    (ENGINE_SAMPLED, "sampled_tokens"),
    (ENGINE_DELIVERED, "delivered_tokens"),
    (ENGINE_DISCARDED, "discarded_tokens"),
    (ENGINE_REPLAYED, "replayed_tokens"),
    (ENGINE_PREEMPTIONS, "preemptions"),
    (ADAPTER_FAILURES, "load_failures"),
    (ADAPTER_EVICTIONS, "evictions"),
)
_ENGINE_FAMILIES = (
    (ENGINE_FINISHED, "finished"),
    (ADAPTER_LOADS, "loads"),
    (ADAPTER_LOAD_S, "load_seconds"),
    (ADAPTER_LOAD_BYTES, "load_bytes"),
)

Key = tuple[str, tuple[str, ...]]


@dataclass(frozen=True)
class MetricDelta:
    """What was counted since the last time: plain values on their way to the router.

    counters  (name, labels) -> growth;  histograms  (name, labels) -> (growth per bucket, the last
    is infinity; sum)
    traffic   tenant -> tokens: who is worth a label of its own
    source, number  see `Outbox`; "" = not to be told apart
    """

    counters: tuple[tuple[Key, float], ...] = ()
    histograms: tuple[tuple[Key, tuple[int, ...], float], ...] = ()
    traffic: tuple[tuple[str, int], ...] = ()
    source: str = ""
    number: int = 0


class MetricLog:
    """Counts in memory, one thread: cheap enough for every token."""

    def __init__(self) -> None:
        self.counters: dict[Key, float] = {}
        self.histograms: dict[Key, tuple[list[int], float]] = {}
        self.traffic: Counter[str] = Counter()  # tokens by tenant, whatever its label

    def count(self, series: Series, labels: tuple[str, ...], value: float = 1.0) -> None:
        """Let a counter grow. `labels` are values, in the series' order."""
        assert series.kind is Kind.COUNTER and len(labels) == len(series.labels), series.name
        key = (series.name, labels)
        self.counters[key] = self.counters.get(key, 0.0) + value

    def observe(
        self, series: Series, labels: tuple[str, ...], value: float, times: int = 1
    ) -> None:
        """Add `times` equal observations to a histogram."""
        assert series.kind is Kind.HISTOGRAM and len(labels) == len(series.labels), series.name
        counts = [0] * (len(series.buckets) + 1)
        counts[bisect_left(series.buckets, value)] = times
        self._add((series.name, labels), counts, value * times)

    def merge(self, delta: MetricDelta, rename: Callable[[Key], Key] = lambda key: key) -> None:
        """Add what another log counted, under the keys that `rename` gives."""
        for key, value in delta.counters:
            key = rename(key)
            self.counters[key] = self.counters.get(key, 0.0) + value
        for key, counts, total in delta.histograms:
            self._add(rename(key), counts, total)

    def drop(self, is_gone: Callable[[Key], bool]) -> None:
        """Forget what was counted under some keys."""
        for key in [key for key in (*self.counters, *self.histograms) if is_gone(key)]:
            self.counters.pop(key, None)
            self.histograms.pop(key, None)

    def drain(self) -> MetricDelta:
        """All that was counted; the log is empty afterwards, but for traffic that did not fit."""
        busiest = heapq.nlargest(MAX_TRAFFIC, self.traffic.items(), key=lambda item: item[1])
        delta = MetricDelta(
            tuple(self.counters.items()),
            tuple((key, tuple(counts), total) for key, (counts, total) in self.histograms.items()),
            tuple(busiest),
        )
        self.counters, self.histograms = {}, {}
        for tenant, _ in busiest:
            del self.traffic[tenant]
        return delta

    def _add(self, key: Key, counts: Iterable[int], total: float) -> None:
        old_counts, old_total = self.histograms.get(key, (None, 0.0))
        counts = list(counts)
        if old_counts is not None:
            counts = [a + b for a, b in zip(old_counts, counts, strict=True)]
        self.histograms[key] = (counts, old_total + total)


class Outbox:
    """Deltas on their way to the router, each offered again until it is known to have arrived.

    source  of this process and no other: with the number it tells a delta that came twice
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._number = 0
        self._pending: MetricDelta | None = None

    def next(self, drain: Callable[[], MetricDelta]) -> MetricDelta:
        """The delta that has not arrived yet, else a new one."""
        if self._pending is None:
            self._number += 1
            self._pending = replace(drain(), source=self._source, number=self._number)
        return self._pending

    def arrived(self, delta: MetricDelta) -> None:
        """The router has taken it."""
        if self._pending is not None and self._pending.number == delta.number:
            self._pending = None


def loads_delta(model: str, by_tier: dict[str, Any], failures: int) -> MetricDelta:
    """What a store without an engine has loaded. by_tier  fields of `EngineStats`."""
    return engine_delta(model, EngineStats(), EngineStats(**by_tier, load_failures=failures))


def engine_delta(model: str, before: EngineStats, after: EngineStats) -> MetricDelta:
    """What one engine's counters grew by between two snapshots."""
    log = MetricLog()
    for series, field in _ENGINE_COUNTERS:
        log.count(series, (model,), getattr(after, field) - getattr(before, field))
    for series, field in _ENGINE_FAMILIES:
        was = getattr(before, field)
        for name, number in getattr(after, field).items():
            log.count(series, (model, str(name)), number - was.get(name, 0))
    return log.drain()
