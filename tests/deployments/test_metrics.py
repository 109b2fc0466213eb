"""Counting, merging and spelling of metrics, read back with Prometheus' own parser."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from deployments import metrics
from deployments.metrics import (
    SERIES,
    Kind,
    MetricLog,
    MetricRegistry,
    TenantLabels,
    engine_delta,
)
from deployments.placement.view import ReplicaView
from model_runner.stats import EngineStats


def samples(registry: MetricRegistry) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(registry.render().decode())
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def labels(**values: str) -> frozenset[tuple[str, str]]:
    return frozenset(values.items())


def test_names() -> None:
    assert len(SERIES) > 25
    for series in SERIES.values():
        assert series.name.startswith("moe_") and series.documentation
        assert (series.kind is Kind.COUNTER) == series.name.endswith("_total"), series.name
        assert list(series.buckets) == sorted(set(series.buckets))
        assert bool(series.buckets) == (series.kind is Kind.HISTOGRAM)


def test_every_name_is_rendered() -> None:
    registry = MetricRegistry()
    text = registry.render().decode()
    for name in SERIES:
        assert f"# TYPE {name} " in text, name


def test_counters_of_many_logs_add_up() -> None:
    registry = MetricRegistry()
    for value in (1, 2):
        log = MetricLog()
        log.count(metrics.REQUESTS, ("m", "t", "200"), value)
        registry.totals.merge(log.drain())
        assert log.drain() == metrics.MetricDelta()
    found = samples(registry)
    assert found[("moe_requests_total", labels(model="m", tenant="t", status="200"))] == 3


def test_histograms_merge_exactly() -> None:
    registry = MetricRegistry()
    log = MetricLog()
    for value, times in ((0.05, 1), (0.051, 3), (1e9, 1)):
        log.observe(metrics.TTFT, ("m", "t"), value, times)
        registry.totals.merge(log.drain())
    found = samples(registry)
    name = "moe_time_to_first_token_seconds"

    def bucket(le: str) -> float:
        return found[(f"{name}_bucket", labels(model="m", tenant="t", le=le))]

    assert [bucket(le) for le in ("0.025", "0.05", "0.1", "160.0", "+Inf")] == [0, 1, 4, 4, 5]
    assert found[(f"{name}_count", labels(model="m", tenant="t"))] == 5
    assert found[(f"{name}_sum", labels(model="m", tenant="t"))] == pytest.approx(1e9 + 0.203)


def test_engine_counters_grow_and_survive_a_restart() -> None:
    registry = MetricRegistry()
    lives = [EngineStats(), EngineStats(num_steps=5, finished={"stop": 2}, loads=1)]
    lives += [EngineStats(num_steps=9, finished={"stop": 3, "length": 1}, loads=1)]
    for before, after in zip(lives, lives[1:], strict=False):
        registry.totals.merge(engine_delta("m", before, after))
    registry.totals.merge(engine_delta("m", EngineStats(), EngineStats(num_steps=2)))
    found = samples(registry)
    assert found[("moe_engine_steps_total", labels(model="m"))] == 11
    assert found[("moe_engine_finished_total", labels(model="m", reason="stop"))] == 3
    assert found[("moe_engine_finished_total", labels(model="m", reason="length"))] == 1


def test_gauges_are_of_now() -> None:
    registry = MetricRegistry()
    stats = EngineStats(running=2, waiting=1, free_pages=10, num_slots=4)
    registry.set_now([ReplicaView("m-0", "m", "r", "n", stats)], 3)
    found = samples(registry)
    assert found[("moe_waiting_sequences", labels(model="m", seat="m-0"))] == 1
    assert found[("moe_placement_version", labels())] == 3
    registry.set_now([], 4)
    assert not any(key[0] == "moe_waiting_sequences" for key in samples(registry))


def test_tenant_labels_are_bounded() -> None:
    label = TenantLabels((f"t{i}" for i in range(10)), limit=3)
    assert [label(t) for t in ("t0", "t2", "t3", "attacker")] == ["t0", "t2", "other", "other"]


def test_labels_that_do_not_fit_are_a_bug() -> None:
    with pytest.raises(AssertionError):
        MetricLog().count(metrics.REQUESTS, ("m",))
    with pytest.raises(AssertionError):
        MetricLog().observe(metrics.REQUESTS, ("m", "t", "200"), 1.0)
