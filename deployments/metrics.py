"""Every metric name in the house, once, and how plain numbers become series. Nobody else knows
Prometheus.

Ingresses and replicas count into a `MetricLog` and send what is new to the router, which alone owns
the series: each
answer of /metrics is of the whole service, whoever gives it, and a dead process takes no counter
with it.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from deployments.placement.view import ReplicaView
from model_runner.stats import EngineStats

OTHER_TENANT = "other"


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
HANGUPS = _counter("moe_hangups_total", "Requests whose client left before the end.", *_TENANT)
TTFT = _histogram(
    "moe_time_to_first_token_seconds", "From the request to its first token.", _TENANT, _SLOW_S
)
INTER_TOKEN = _histogram(
    "moe_inter_token_seconds", "Time per token after the first.", _TENANT, _FAST_S
)
LATENCY = _histogram(
    "moe_request_seconds", "From the request to the end of its answer.", _TENANT, _SLOW_S
)

ENGINE_STEPS = _counter("moe_engine_steps_total", "Forward passes.", "model")
ENGINE_SAMPLED = _counter("moe_engine_sampled_tokens_total", "Tokens drawn on the device.", "model")
ENGINE_DISCARDED = _counter(
    "moe_engine_discarded_tokens_total", "Tokens drawn and thrown away.", "model"
)
ENGINE_PREEMPTIONS = _counter(
    "moe_engine_preemptions_total", "Sequences sent back for want of pages.", "model"
)
ENGINE_FINISHED = _counter(
    "moe_engine_finished_total", "Sequences ended, by reason.", "model", "reason"
)
ADAPTER_LOADS = _counter("moe_adapter_loads_total", "Adapters brought into a slot.", "model")
ADAPTER_EVICTIONS = _counter(
    "moe_adapter_evictions_total", "Adapters that lost their slot.", "model"
)
ADAPTER_LOAD_S = _counter("moe_adapter_load_seconds_total", "Time that loads took.", "model")

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
    (ENGINE_DISCARDED, "discarded_tokens"),
    (ENGINE_PREEMPTIONS, "preemptions"),
    (ADAPTER_LOADS, "loads"),
    (ADAPTER_EVICTIONS, "evictions"),
    (ADAPTER_LOAD_S, "load_seconds"),
)
_ENGINE_GAUGES = (
    (RUNNING, "running"),
    (WAITING, "waiting"),
    (WAITING_ADAPTER, "waiting_for_adapter"),
    (FREE_PAGES, "free_pages"),
    (PAGES, "num_pages"),
    (ARENA_USED, "arena_used_bytes"),
    (ARENA, "arena_bytes"),
    (SLOTS, "num_slots"),
    (STEP_AGE, "step_age_s"),
)

Key = tuple[str, tuple[str, ...]]


@dataclass(frozen=True)
class MetricDelta:
    """What was counted since the last time: plain values on their way to the router.

    counters  (name, labels) -> growth;  histograms  (name, labels) -> (growth per bucket, the last
    is infinity; sum)
    """

    counters: tuple[tuple[Key, float], ...] = ()
    histograms: tuple[tuple[Key, tuple[int, ...], float], ...] = ()


class MetricLog:
    """Counts in memory, one thread: cheap enough for every token."""

    def __init__(self) -> None:
        self.counters: dict[Key, float] = {}
        self.histograms: dict[Key, tuple[list[int], float]] = {}

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

    def merge(self, delta: MetricDelta) -> None:
        """Take over what another log counted."""
        for key, value in delta.counters:
            self.counters[key] = self.counters.get(key, 0.0) + value
        for key, counts, total in delta.histograms:
            self._add(key, counts, total)

    def drain(self) -> MetricDelta:
        """All that was counted; the log is empty afterwards."""
        delta = MetricDelta(
            tuple(self.counters.items()),
            tuple((key, tuple(counts), total) for key, (counts, total) in self.histograms.items()),
        )
        self.counters, self.histograms = {}, {}
        return delta

    def _add(self, key: Key, counts: Iterable[int], total: float) -> None:
        old_counts, old_total = self.histograms.get(key, (None, 0.0))
        counts = list(counts)
        if old_counts is not None:
            counts = [a + b for a, b in zip(old_counts, counts, strict=True)]
        self.histograms[key] = (counts, old_total + total)


class TenantLabels:
    """Tenant ids as labels: the configured ones up to a limit, one word for all others."""

    def __init__(self, tenant_ids: Iterable[str], limit: int) -> None:
        self._known = frozenset(list(tenant_ids)[:limit])

    def __call__(self, tenant_id: str) -> str:
        return tenant_id if tenant_id in self._known else OTHER_TENANT


class MetricRegistry(Collector):
    """The series of the whole service: totals of all logs, gauges of the replicas of now."""

    def __init__(self) -> None:
        self.totals = MetricLog()
        self._views: tuple[ReplicaView, ...] = ()
        self._placement_version = 0
        self._seat_traffic: dict[tuple[str, str], float] = {}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def set_now(
        self,
        views: Iterable[ReplicaView],
        placement_version: int,
        seat_traffic: Mapping[tuple[str, str], float] | None = None,
    ) -> None:
        """The replicas that live, and the traffic placed on (model, seat).

        A seat that is gone leaves no gauge behind.
        """
        self._views = tuple(views)
        self._seat_traffic = {**(seat_traffic or {})}
        self._placement_version = placement_version

    def render(self) -> bytes:
        """Prometheus' text form."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The series, as prometheus_client asks for them."""
        for series in SERIES.values():
            if series.kind is Kind.COUNTER:
                counter = CounterMetricFamily(
                    series.name, series.documentation, labels=series.labels
                )
                for (name, labels), value in self.totals.counters.items():
                    if name == series.name:
                        counter.add_metric(labels, value)
                yield counter
            elif series.kind is Kind.HISTOGRAM:
                yield self._histogram(series)
        for series, values in self._gauges().items():
            gauge = GaugeMetricFamily(series.name, series.documentation, labels=series.labels)
            for labels, value in values:
                gauge.add_metric(labels, value)
            yield gauge

    def _histogram(self, series: Series) -> HistogramMetricFamily:
        family = HistogramMetricFamily(series.name, series.documentation, labels=series.labels)
        bounds = [*(str(float(bound)) for bound in series.buckets), "+Inf"]
        for (name, labels), (counts, total) in self.totals.histograms.items():
            if name == series.name:
                heights = [sum(counts[: i + 1]) for i in range(len(counts))]
                family.add_metric(labels, list(zip(bounds, heights, strict=True)), total)
        return family

    def _gauges(self) -> dict[Series, list[tuple[tuple[str, ...], float]]]:
        gauges: dict[Series, list[tuple[tuple[str, ...], float]]] = {
            series: [
                ((view.model, view.seat), float(getattr(view.stats, field))) for view in self._views
            ]
            for series, field in _ENGINE_GAUGES
        }
        gauges[RESIDENT] = [
            ((view.model, view.seat), float(len({ref.adapter_id for ref in view.resident})))
            for view in self._views
        ]
        models = [view.model for view in self._views]
        gauges[REPLICAS] = [((model,), float(models.count(model))) for model in sorted(set(models))]
        gauges[SEAT_TRAFFIC] = [(labels, rate) for labels, rate in self._seat_traffic.items()]
        gauges[PLACEMENT_VERSION] = [((), float(self._placement_version))]
        return gauges


def engine_delta(model: str, before: EngineStats, after: EngineStats) -> MetricDelta:
    """What one engine's counters grew by between two snapshots."""
    log = MetricLog()
    for series, field in _ENGINE_COUNTERS:
        log.count(series, (model,), getattr(after, field) - getattr(before, field))
    for reason, number in after.finished.items():
        log.count(ENGINE_FINISHED, (model, str(reason)), number - before.finished.get(reason, 0))
    return log.drain()
