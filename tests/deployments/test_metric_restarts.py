"""What Prometheus makes of a router that dies: every count once, no spike.

Router, links and outboxes are real; time, and the calls that get lost, are the test's. Not here:
Prometheus itself (whole_service/test_metrics.py).
"""

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from ray.exceptions import ActorDiedError

from deployments import metrics
from deployments.api_errors import ApiError
from deployments.config import ServiceConfig
from deployments.metrics import MetricLog
from deployments.placement.view import Placement
from deployments.router import Router
from deployments.router_link import RouterLink
from deployments.tenant_labels import LabelledTenants


class World:
    """One router, which may be dead, and its ingresses. A second passes with each `tick`.

    loses  whether the answer of the next call gets lost, after the router has heard it
    """

    def __init__(self, config: ServiceConfig, num_ingresses: int) -> None:
        self.config = config
        self.now_s = 0.0
        self.loses: Callable[[], bool] = lambda: False
        self.router: Router | None = Router(config, lambda: self.now_s)
        handle = SimpleNamespace(
            **{name: self._method(name) for name in ("sync", "adopt", "metrics", "metric_tenants")}
        )
        self.frontends: list[Any] = [
            SimpleNamespace(
                log=MetricLog(),
                traffic=dict[str, int](),
                placement=Placement(),
                labelled=LabelledTenants(),
                config=config,
            )
            for _ in range(num_ingresses)
        ]
        self.links = [RouterLink(frontend, handle) for frontend in self.frontends]
        self.pages: list[tuple[float, float]] = []  # (second, the counter's value)

    def _method(self, name: str) -> SimpleNamespace:
        async def remote(*args: Any) -> Any:
            if self.router is None:
                raise ActorDiedError()
            answer = await getattr(self.router, name)(*args)
            if self.loses():
                raise ActorDiedError()
            return answer

        return SimpleNamespace(remote=remote)

    async def tick(self, requests_each: int) -> None:
        """A second's requests; the first ingress syncs, is scraped, and then the others sync."""
        self.now_s += 1
        for frontend in self.frontends:
            frontend.log.count(metrics.REQUESTS, ("demo", "pirate", "200"), requests_each)
        for number, link in enumerate(self.links):
            with suppress(ActorDiedError):
                await link.sync()
            if not number:
                await self.scrape()

    async def scrape(self) -> None:
        """By the first ingress, as Prometheus does: no sample if it answers 503."""
        self.links[0]._rendered_at_s = float("-inf")
        try:
            page = (await self.links[0].metrics()).decode()
        except ApiError:
            return
        value = sum(
            sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == "moe_requests_total"
        )
        self.pages.append((self.now_s, value))

    def growths(self) -> list[tuple[float, float]]:
        """(seconds, growth) between samples, as Prometheus reads resets."""
        return [
            (then - at, after - before if after >= before else after)
            for (at, before), (then, after) in zip(self.pages, self.pages[1:], strict=False)
        ]


@pytest.mark.parametrize("down_s", [1, 5, 60])
async def test_a_router_that_begins_again_shows_no_spike_and_loses_little(
    demo_config: ServiceConfig, down_s: int
) -> None:
    """But for what it had taken since its last scrape. It had counted more before than what waits
    for the new one: Prometheus sees no reset where the counter has grown beyond what it was."""
    world = World(demo_config, num_ingresses=3)
    for _ in range(down_s + 30):
        await world.tick(5)
    assert world.pages, "a young router keeps silent for a few seconds only"
    first = world.pages[0]
    world.router = None
    for _ in range(down_s):
        await world.tick(5)
    world.router = Router(demo_config, lambda: world.now_s)
    for _ in range(10):
        await world.tick(5)
    last = world.pages[-1]
    rates = [growth / seconds for seconds, growth in world.growths()]
    assert max(rates) == 15.0, "no spike"
    seen = sum(growth for _, growth in world.growths())
    assert 0 <= (last[0] - first[0]) * 15 - seen <= 10, "two ingresses' last second"


async def test_it_would_spike_if_a_young_router_answered(
    demo_config: ServiceConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.router.METRICS_AFTER_S", 0.0)
    with pytest.raises(AssertionError, match="no spike"):
        await test_a_router_that_begins_again_shows_no_spike_and_loses_little(demo_config, 5)


async def test_answers_that_get_lost_count_nothing_twice(demo_config: ServiceConfig) -> None:
    rng = random.Random(3)
    world = World(demo_config, num_ingresses=2)
    world.loses = lambda: rng.random() < 0.3
    for _ in range(50):
        await asyncio.gather(world.tick(1), *(link.sync() for link in world.links),
                             return_exceptions=True)  # fmt: skip
    world.loses = lambda: False
    await world.tick(0)
    await world.tick(0)
    await world.scrape()
    assert world.pages[-1][1] == 100
