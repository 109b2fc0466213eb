"""Counting, merging and spelling of metrics, read back with Prometheus' own parser."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from deployments import metrics
from deployments.metric_registry import MetricRegistry
from deployments.metrics import MAX_TRAFFIC, SERIES, Kind, MetricLog, Outbox, engine_delta
from deployments.placement.view import ReplicaView
from deployments.tenant_labels import first_tenants
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
    registry = MetricRegistry(first=first_tenants(["t"], 1), max_tenants=1)
    for value in (1, 2):
        log = MetricLog()
        log.count(metrics.REQUESTS, ("m", "t", "200"), value)
        registry.merge(log.drain())
        assert log.drain() == metrics.MetricDelta()
    found = samples(registry)
    assert found[("moe_requests_total", labels(model="m", tenant="t", status="200"))] == 3


def test_histograms_merge_exactly() -> None:
    registry = MetricRegistry(first=first_tenants(["t"], 1), max_tenants=1)
    log = MetricLog()
    for value, times in ((0.05, 1), (0.051, 3), (1e9, 1)):
        log.observe(metrics.TTFT, ("m", "t"), value, times)
        registry.merge(log.drain())
    found = samples(registry)
    name = "moe_time_to_first_token_seconds"

    def bucket(le: str) -> float:
        return found[(f"{name}_bucket", labels(model="m", tenant="t", le=le))]

    assert [bucket(le) for le in ("0.025", "0.05", "0.1", "160.0", "+Inf")] == [0, 1, 4, 4, 5]
    assert found[(f"{name}_count", labels(model="m", tenant="t"))] == 5
    assert found[(f"{name}_sum", labels(model="m", tenant="t"))] == pytest.approx(1e9 + 0.203)


def test_engine_counters_grow_and_survive_a_restart() -> None:
    registry = MetricRegistry()
    lives = [EngineStats(), EngineStats(num_steps=5, finished={"stop": 2}, loads={"device": 1})]
    lives += [EngineStats(num_steps=9, finished={"stop": 3, "length": 1}, loads={"device": 1})]
    for before, after in zip(lives, lives[1:], strict=False):
        registry.merge(engine_delta("m", before, after))
    registry.merge(engine_delta("m", EngineStats(), EngineStats(num_steps=2)))
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


def test_a_node_has_one_host_tier_and_a_model_without_replicas_is_seen() -> None:
    registry = MetricRegistry(models=["m", "lost"])
    stats = EngineStats(host_adapters=3, host_used_bytes=20, host_bytes=100)
    registry.set_now([ReplicaView(f"m-{i}", "m", f"r{i}", "n1", stats) for i in range(2)], 1)
    found = samples(registry)
    tiers = {key: value for key, value in found.items() if key[0].startswith("moe_host_tier")}
    assert tiers == {
        ("moe_host_tier_adapters", labels(node="n1")): 3,
        ("moe_host_tier_used_bytes", labels(node="n1")): 20,
        ("moe_host_tier_bytes", labels(node="n1")): 100,
    }
    assert found[("moe_replicas", labels(model="m"))] == 2
    assert found[("moe_replicas", labels(model="lost"))] == 0


def test_a_delta_that_comes_twice_counts_once() -> None:
    """The answer to the first was lost, or two asked at once: nothing is lost, nothing doubled."""
    registry, log = MetricRegistry(), MetricLog()
    outboxes = Outbox("a"), Outbox("b")
    for outbox in outboxes:
        log.count(metrics.USAGE_RECORDS, (), 1)
        first = outbox.next(log.drain)
        registry.merge(first)
        log.count(metrics.USAGE_RECORDS, (), 10)
        again = outbox.next(log.drain)
        assert again is first
        registry.merge(again)
        outbox.arrived(again)
        second = outbox.next(log.drain)
        registry.merge(second)
        outbox.arrived(first)  # a late answer to what had arrived before
        assert outbox.next(log.drain) is second
    assert samples(registry)[("moe_usage_records_total", labels())] == 22


def test_traffic_that_does_not_fit_waits() -> None:
    log = MetricLog()
    log.traffic.update({f"t{i}": i for i in range(1, MAX_TRAFFIC + 3)})
    assert len(log.drain().traffic) == MAX_TRAFFIC
    assert log.drain().traffic == (("t2", 2), ("t1", 1))
    assert log.drain().traffic == ()


def test_labels_that_do_not_fit_are_a_bug() -> None:
    with pytest.raises(AssertionError):
        MetricLog().count(metrics.REQUESTS, ("m",))
    with pytest.raises(AssertionError):
        MetricLog().observe(metrics.REQUESTS, ("m", "t", "200"), 1.0)
