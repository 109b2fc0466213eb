"""The series of the whole service, as Prometheus reads them. The router owns the one that there is.

Not here: names (metrics.py) and who counts.
"""

import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from deployments import metrics
from deployments.metrics import SERIES, Kind, MetricDelta, MetricLog, Series
from deployments.placement.view import ReplicaView
from deployments.tenant_labels import OTHER_TENANT, LabelledTenants, TenantRanking

_MAX_SOURCES = 4096
_NOBODY = LabelledTenants()

_SEAT_GAUGES = (
    (metrics.RUNNING, "running"),
    (metrics.WAITING, "waiting"),
    (metrics.WAITING_ADAPTER, "waiting_for_adapter"),
    (metrics.FREE_PAGES, "free_pages"),
    (metrics.PAGES, "num_pages"),
    (metrics.ARENA_USED, "arena_used_bytes"),
    (metrics.ARENA, "arena_bytes"),
    (metrics.SLOTS, "num_slots"),
    (metrics.STEP_AGE, "step_age_s"),
)
_NODE_GAUGES = (
    (metrics.HOST_ADAPTERS, "host_adapters"),
    (metrics.HOST_USED, "host_used_bytes"),
    (metrics.HOST, "host_bytes"),
)
_Values = list[tuple[tuple[str, ...], float]]


class MetricRegistry(Collector):
    """Totals of all logs, gauges of the replicas of now.

    models  the configured ones: one without a replica is shown with 0
    first, max_tenants  see `TenantRanking`
    """

    def __init__(
        self,
        models: Iterable[str] = (),
        first: LabelledTenants = _NOBODY,
        max_tenants: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ranking = TenantRanking(first, max_tenants, clock)
        self._totals = MetricLog()
        self._models = tuple(models)
        self._heard: OrderedDict[str, int] = OrderedDict()  # source -> its last delta's number
        self._views: tuple[ReplicaView, ...] = ()
        self._placement_version = 0
        self._seat_traffic: dict[tuple[str, str], float] = {}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def merge(self, delta: MetricDelta) -> None:
        """Add what a process counted; nothing if this delta came before."""
        if delta.source:
            if delta.number <= self._heard.get(delta.source, 0):
                return
            self._heard[delta.source] = delta.number
            self._heard.move_to_end(delta.source)
            if len(self._heard) > _MAX_SOURCES:
                self._heard.popitem(last=False)
        self.ranking.add(delta.traffic)
        if self.ranking.is_due:
            keys = (*self._totals.counters, *self._totals.histograms)
            gone = self.ranking.rank({_tenant_of(key) or "" for key in keys})
            self._totals.drop(lambda key: _tenant_of(key) in gone)
        self._totals.merge(delta, self._exposed)

    def count(self, series: Series, labels: tuple[str, ...], value: float = 1.0) -> None:
        """Let a counter of the router's own grow."""
        self._totals.count(series, labels, value)

    def _exposed(self, key: metrics.Key) -> metrics.Key:
        """The key under which this is shown: an ingress may not know yet who has a label now."""
        tenant = _tenant_of(key)
        if tenant is None or tenant == OTHER_TENANT or tenant in self.ranking.exposed:
            return key
        name, labels = key
        place = SERIES[name].labels.index("tenant")
        return name, (*labels[:place], OTHER_TENANT, *labels[place + 1 :])

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
        counters, histograms = defaultdict(list), defaultdict(list)
        for (name, labels), value in self._totals.counters.items():
            counters[name].append((labels, value))
        for (name, labels), found in self._totals.histograms.items():
            histograms[name].append((labels, found))
        gauges = self._gauges()
        for series in SERIES.values():
            if series.kind is Kind.HISTOGRAM:
                yield _histogram(series, histograms[series.name])
                continue
            make = CounterMetricFamily if series.kind is Kind.COUNTER else GaugeMetricFamily
            family = make(series.name, series.documentation, labels=series.labels)
            for labels, value in counters[series.name] or gauges.get(series.name, []):
                family.add_metric(labels, value)
            yield family

    def _gauges(self) -> dict[str, _Values]:
        views = self._views
        gauges: dict[str, _Values] = {
            series.name: [
                ((view.model, view.seat), float(getattr(view.stats, field))) for view in views
            ]
            for series, field in _SEAT_GAUGES
        }
        for series, field in _NODE_GAUGES:  # replicas of a node share its host tier
            by_node = {(view.node_id,): float(getattr(view.stats, field)) for view in views}
            gauges[series.name] = list(by_node.items())
        gauges[metrics.RESIDENT.name] = [
            ((view.model, view.seat), float(len({ref.adapter_id for ref in view.resident})))
            for view in views
        ]
        seated = [view.model for view in views]
        gauges[metrics.REPLICAS.name] = [
            ((model,), float(seated.count(model))) for model in sorted({*self._models, *seated})
        ]
        gauges[metrics.SEAT_TRAFFIC.name] = list(self._seat_traffic.items())
        gauges[metrics.PLACEMENT_VERSION.name] = [((), float(self._placement_version))]
        return gauges


def _histogram(
    series: Series, values: list[tuple[tuple[str, ...], tuple[list[int], float]]]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(series.name, series.documentation, labels=series.labels)
    bounds = [*(str(float(bound)) for bound in series.buckets), "+Inf"]
    for labels, (counts, total) in values:
        heights = [sum(counts[: i + 1]) for i in range(len(counts))]
        family.add_metric(labels, list(zip(bounds, heights, strict=True)), total)
    return family


def _tenant_of(key: metrics.Key) -> str | None:
    name, values = key
    labels = SERIES[name].labels
    return values[labels.index("tenant")] if "tenant" in labels else None
