"""The router as a plain object with a clock of its own: seats, leases, the map, the series.

Without Ray.
"""

import dataclasses
from pathlib import Path

import pytest
import yaml

from deployments.config import ServiceConfig, load_config
from deployments.metrics import OUTPUT_TOKENS, MetricDelta, MetricLog
from deployments.placement.view import ReplicaView
from deployments.router import LEASE_S, METRICS_AFTER_S, Router
from model_runner.stats import EngineStats


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def router(demo_config: ServiceConfig, clock: Clock) -> Router:
    return Router(demo_config, clock)


def view(seat: str, replica_id: str, **stats: float) -> ReplicaView:
    return ReplicaView(seat, "demo", replica_id, "node", EngineStats(**stats))  # type: ignore[arg-type]


async def test_seats(router: Router, clock: Clock) -> None:
    assert await router.claim("demo", "r1", "n") == "demo-0"
    assert await router.claim("demo", "r2", "n") == "demo-1"
    await router.release("demo-0", "r2")  # not its own
    assert await router.claim("demo", "r3", "n") == "demo-2"
    await router.release("demo-0", "r1")
    assert await router.claim("demo", "r4", "n") == "demo-0"
    clock.now_s += LEASE_S
    assert await router.views() == ()
    assert await router.claim("demo", "r5", "n") == "demo-0"
    # r2 was silent for too long, but nobody took its seat meanwhile.
    assert (await router.report(view("demo-1", "r2"), MetricDelta())).seated
    assert not (await router.report(view("demo-0", "r4"), MetricDelta())).seated
    assert [v.replica_id for v in await router.views()] == ["r5", "r2"]


async def test_map_has_versions(router: Router, clock: Clock) -> None:
    empty = await router.sync(-1, {}, MetricDelta())
    assert empty is not None and not empty.seats
    await router.claim("demo", "r1", "n")
    first = await router.sync(empty.version, {}, MetricDelta())
    assert first is not None and first.seats == {"demo": ("demo-0",)}
    assert set(first.places) == {"pirate/pirate", "formal/formal", "spanish/spanish"}
    assert await router.sync(first.version, {}, MetricDelta()) is None
    clock.now_s += LEASE_S
    later = await router.sync(first.version, {}, MetricDelta())
    assert later is not None and not later.places and later.version > first.version


async def test_homes_are_told_to_their_seat(router: Router) -> None:
    for replica_id in ("r0", "r1"):
        await router.claim("demo", replica_id, "n")
    homes = []
    for i in range(2):
        orders = await router.report(view(f"demo-{i}", f"r{i}"), MetricDelta())
        assert orders.seated
        homes += [ref.adapter_id for ref in orders.homes]
    assert sorted(homes) == ["formal/formal", "pirate/pirate", "spanish/spanish"]


async def test_a_new_router_learns_everything_again(router: Router, clock: Clock) -> None:
    await router.report(view("demo-3", "r1"), MetricDelta())
    placement = await router.sync(-1, {}, MetricDelta())
    assert placement is not None and placement.seats == {"demo": ("demo-3",)}
    assert await router.claim("demo", "r2", "n") == "demo-0"


async def test_metrics_are_of_the_whole_service(router: Router, clock: Clock) -> None:
    log = MetricLog()
    log.count(OUTPUT_TOKENS, ("demo", "pirate"), 5)
    delta = log.drain()
    for number in (1, 2, 2):  # the last came twice: its answer was lost
        numbered = dataclasses.replace(delta, source="an ingress", number=number)
        await router.sync(-1, {}, numbered)
    await router.report(view("demo-0", "r1", running=3, num_pages=7), MetricDelta())
    assert await router.metrics() == b"", "too young to have heard of everybody"
    clock.now_s += METRICS_AFTER_S
    text = (await router.metrics()).decode()
    assert 'moe_output_tokens_total{model="demo",tenant="pirate"} 10.0' in text
    assert 'moe_running_sequences{model="demo",seat="demo-0"} 3.0' in text
    assert 'moe_replicas{model="demo"} 1.0' in text
    clock.now_s += LEASE_S
    text = (await router.metrics()).decode()
    assert "moe_running_sequences{" not in text and "moe_output_tokens_total{" in text
    assert 'moe_replicas{model="demo"} 0.0' in text


async def test_shares_follow_the_traffic_and_fade(router: Router, clock: Clock) -> None:
    for _ in range(200):
        clock.now_s += 1
        await router.sync(-1, {"pirate/pirate": 50, "unknown": 9}, MetricDelta())
    assert router._shares["pirate/pirate"] == pytest.approx(50, rel=0.1)
    assert router._shares["formal/formal"] == 0
    clock.now_s += 100
    await router.sync(-1, {}, MetricDelta())
    assert router._shares["pirate/pirate"] < 0.1


async def test_router_of_two_models(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "c.yaml"
    models = [{"name": "m", "path": "p"}, {"name": "n", "path": "q"}]
    tenants = [{"tenant_id": "t", "adapters": {"x": {"uri": "a", "base": "n"}}}]
    path.write_text(
        yaml.safe_dump({"models": models, "tenants": tenants, "adapters": {"root": "r"}})
    )
    router = Router(load_config(path), clock)
    assert await router.claim("m", "r1", "node") == "m-0"
    assert await router.claim("n", "r2", "node") == "n-0"
    placement = await router.sync(-1, {}, MetricDelta())
    assert placement is not None and placement.places["t/x"].homes == ("n-0",)
