"""The router as a plain object with a clock of its own: seats, leases, the map, the series.

Without Ray.
"""

import dataclasses
import pickle
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from deployments.config import ServiceConfig, load_config
from deployments.metrics import OUTPUT_TOKENS, MetricDelta, MetricLog
from deployments.placement.shares import HALF_LIFE_S
from deployments.placement.view import MapUpdate, MapWanted, MoveKind, Placement, ReplicaView
from deployments.router import LEARN_S, LEASE_S, METRICS_AFTER_S, ROUND_S, Router
from deployments.tenant_settings import AdapterEntry
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
    """One that has listened long enough."""
    found = Router(demo_config, clock)
    clock.now_s += LEARN_S
    return found


def view(seat: str, replica_id: str, **stats: float) -> ReplicaView:
    return ReplicaView(seat, "demo", replica_id, "node", EngineStats(**stats))  # type: ignore[arg-type]


def moves_by_kind(page: bytes) -> dict[str, float]:
    """What the page says of moves of the demo's adapters."""
    return {
        sample.labels["kind"]: sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
        if sample.name == "moe_placement_moves_total"
    }


async def news(router: Router, known_version: int = -1) -> MapUpdate:
    update = await router.sync(known_version, {}, MetricDelta())
    assert isinstance(update, MapUpdate)
    return update


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
    empty = await news(router, -1)
    assert not empty.seats and empty.since is None
    await router.claim("demo", "r1", "n")
    first = await news(router, empty.version)
    assert first.seats == {"demo": ("demo-0",)} and first.since == empty.version
    assert set(first.homes) == {"pirate/pirate", "formal/formal", "spanish/spanish"}
    assert await router.sync(first.version, {}, MetricDelta()) is None
    clock.now_s += LEASE_S
    later = await news(router, first.version)
    assert set(later.gone) == set(first.homes) and later.version > first.version
    # Who was away for too many versions gets the whole map.
    for _ in range(10):
        seat = await router.claim("demo", "r1", "n")
        await router.sync(-1, {}, MetricDelta())
        await router.release(seat, "r1")
    assert (await news(router, first.version)).since is None


async def test_homes_are_told_to_their_seat(router: Router) -> None:
    for replica_id in ("r0", "r1"):
        await router.claim("demo", replica_id, "n")
    homes = []
    for i in range(2):
        orders = await router.report(view(f"demo-{i}", f"r{i}", num_slots=4), MetricDelta())
        assert orders.seated
        homes += [ref.adapter_id for ref in orders.homes]
    assert sorted(homes) == ["formal/formal", "pirate/pirate", "spanish/spanish"]


async def test_a_new_router_learns_everything_again(router: Router, clock: Clock) -> None:
    await router.report(view("demo-3", "r1"), MetricDelta())
    assert (await news(router)).seats == {"demo": ("demo-3",)}
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
    assert 'moe_seat_traffic_tokens_per_second{model="demo",seat="demo-0"} 0.0' in text
    clock.now_s += LEASE_S
    text = (await router.metrics()).decode()
    assert "demo-0" not in text and "moe_output_tokens_total{" in text
    assert 'moe_replicas{model="demo"} 0.0' in text


async def test_shares_follow_the_traffic_and_fade(router: Router, clock: Clock) -> None:
    for _ in range(400):
        clock.now_s += 1
        await router.sync(-1, {"pirate/pirate": 50, "unknown": 9}, MetricDelta())
    rates = router._shares.rates(clock.now_s)
    assert rates == {"pirate/pirate": pytest.approx(50, rel=0.05)}
    clock.now_s += 180
    assert router._shares.rates(clock.now_s)["pirate/pirate"] == pytest.approx(50 / 8, rel=0.05)


async def test_router_of_two_models(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "c.yaml"
    models = [{"name": "m", "path": "p"}, {"name": "n", "path": "q"}]
    tenants = [{"tenant_id": "t", "adapters": {"x": {"uri": "a", "base": "n"}}}]
    path.write_text(
        yaml.safe_dump({"models": models, "tenants": tenants, "adapters": {"root": "r"}})
    )
    router = Router(load_config(path), clock)
    clock.now_s += LEARN_S
    assert await router.claim("m", "r1", "node") == "m-0"
    assert await router.claim("n", "r2", "node") == "n-0"
    assert (await news(router)).homes == {"t/x": ("n-0",)}


class Fleet:
    """A router and what calls it once a second, for as long as a test says."""

    def __init__(self, config: ServiceConfig, clock: Clock, num_seats: int) -> None:
        self.clock = clock
        self.config = config
        self.router: Router | None = Router(config, clock)
        self.seats = [f"demo-{number}" for number in range(num_seats)]
        self.maps = [Placement(), Placement()]
        self.kept = [dict[str, int](), dict[str, int]()]
        self.counted_since_s = [clock.now_s] * 2
        self.orders: dict[str, set[str]] = {}

    async def pass_time(self, seconds: int, tokens: dict[str, int]) -> None:
        """Ingresses keep what they cannot tell, as RouterLink does."""
        for _ in range(seconds):
            self.clock.now_s += 1
            for kept in self.kept:
                for name, count in tokens.items():
                    kept[name] = kept.get(name, 0) + count
            if self.router is not None:
                await self._call(self.router)

    async def _call(self, router: Router) -> None:
        for seat in self.seats:
            orders = await router.report(view(seat, f"r-{seat}", num_slots=4), MetricDelta())
            assert orders.seated
            self.orders[seat] = {ref.adapter_id for ref in orders.homes}
        for number, known in enumerate(self.maps):
            over_s = self.clock.now_s - self.counted_since_s[number]
            answer = await router.sync(known.version, self.kept[number], MetricDelta(), over_s)
            self.kept[number], self.counted_since_s[number] = {}, self.clock.now_s
            if isinstance(answer, MapWanted):
                await router.adopt(known)
            elif answer is not None:
                self.maps[number] = known.apply(answer)


async def test_a_router_away_for_a_minute_goes_on_where_the_last_one_was(
    demo_config: ServiceConfig, clock: Clock
) -> None:
    fleet = Fleet(demo_config, clock, 3)
    traffic = {"pirate/pirate": 500, "formal/formal": 40}
    await fleet.pass_time(400, traffic)
    assert fleet.router is not None
    before, rates = fleet.maps[0], fleet.router._shares.rates(clock.now_s)
    assert fleet.maps[1] == before and len(before.homes["pirate/pirate"]) == 3
    assert fleet.orders["demo-0"] >= {"pirate/pirate"}
    fleet.router = None
    await fleet.pass_time(60, traffic)
    assert fleet.maps == [before, before]
    fleet.router = Router(demo_config, clock)
    fleet.seats.append("demo-3")  # came meanwhile and was given its seat by nobody we know
    await fleet.pass_time(int(LEARN_S), traffic)
    assert fleet.maps == [before, before], "a map was made before anything was known"
    await fleet.pass_time(1, traffic)
    after = fleet.maps[0]
    assert after.version > before.version and after == fleet.maps[1]
    # The new seat is there, and nothing else was touched but by a move with its reason.
    assert after.seats == {"demo": ("demo-0", "demo-1", "demo-2", "demo-3")}
    assert {n for n in before.homes if before.homes[n] != after.homes[n]} == {"pirate/pirate"}
    assert set(after.homes["pirate/pirate"]) > set(before.homes["pirate/pirate"])
    [line] = await fleet.router.moves()
    assert line.startswith("pirate/pirate: ") and "hot: it draws" in line
    # Of the minute no token is missing: a half-life of the average, and as even as it was.
    now = fleet.router._shares.rates(clock.now_s)
    known = 1 - 0.5 ** (63 / HALF_LIFE_S)
    assert now == {name: pytest.approx(rate * known, rel=0.03) for name, rate in rates.items()}
    assert rates["pirate/pirate"] == pytest.approx(1000, rel=0.05)


async def test_a_new_router_waits_before_it_gives_a_seat_away(
    demo_config: ServiceConfig, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    router = Router(demo_config, clock)

    async def sleep(seconds: float) -> None:
        clock.now_s += seconds
        await router.report(view("demo-0", "r1"), MetricDelta())

    monkeypatch.setattr("deployments.router.asyncio.sleep", sleep)
    assert await router.claim("demo", "r2", "n") == "demo-1"
    assert clock.now_s == 100 + LEARN_S


async def test_moves_are_counted_told_and_bounded(
    demo_config: ServiceConfig, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = Fleet(demo_config, clock, 2)
    await fleet.pass_time(5, {})
    caplog.set_level("INFO", "ray.serve")
    assert fleet.router is not None and await fleet.router.moves() == ()
    assert moves_by_kind(await fleet.router.metrics()) == dict.fromkeys(MoveKind, 0.0)
    for _ in range(70):
        lost = fleet.seats.pop()
        await fleet.router.release(lost, f"r-{lost}")
        await fleet.pass_time(1, {})
        fleet.seats.append(lost)
        await fleet.pass_time(int(ROUND_S), {"pirate/pirate": 300, "formal/formal": 300})
    lines = await fleet.router.moves()
    assert 70 < len(lines) == 100
    assert any("lost: demo-1 is gone" in line for line in lines)
    assert lines[-1] in caplog.text
    counted = moves_by_kind(await fleet.router.metrics())
    assert counted.keys() == set(MoveKind) and counted["lost"] >= 70


async def test_what_goes_over_the_wire_does_not_grow_with_the_number_of_adapters(
    demo_config: ServiceConfig, clock: Clock
) -> None:
    many = {
        f"a{number}": AdapterEntry(uri=f"pirate/{number}", base="demo") for number in range(10_000)
    }
    tenant = demo_config.tenants[0].model_copy(update={"adapters": many})
    config = demo_config.model_copy(update={"tenants": (tenant,)})
    fleet = Fleet(config, clock, 8)
    await fleet.pass_time(5, {})
    assert fleet.router is not None and len(fleet.maps[0].homes) == 10_000
    busy = {f"pirate/a{number}": 800 // (number + 1) for number in range(100)}
    known = fleet.maps[0].version
    await fleet.pass_time(3 * int(ROUND_S) + 1, busy)
    assert fleet.maps[0].version > known
    update = fleet.maps[0].update_from(next(m for m in fleet.router._maps if m.version == known))
    assert len(pickle.dumps(update)) < 2000, len(update.homes)
    orders = await fleet.router.report(view("demo-0", "r-demo-0", num_slots=4), MetricDelta())
    assert len(orders.homes) == 8 and len(pickle.dumps(orders)) < 2000
    assert orders.homes[0].adapter_id in busy
