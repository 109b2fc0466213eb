"""Parts of the service die, or an adapter is replaced: nobody waits, and all is whole again."""

import os
import time

import httpx
import pytest
import ray

from tests.deployments.whole_service.world import (
    DEMO,
    QUESTIONS,
    STYLES,
    Service,
    answers,
    ask,
    mixed_jobs,
    wait_until,
)
from tests.prometheus_server import PrometheusServer
from tests.s3_server import READER_SECRET

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]


def test_a_lost_replica_is_replaced_and_nobody_waits_for_it(
    service: Service, prometheus: PrometheusServer
) -> None:
    def replicas() -> set[str]:
        names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
        return {name for name in names if "Replica-demo" in name}

    def seats() -> set[str]:
        return {labels["seat"] for labels in prometheus.series('{model="demo", seat!=""}')}

    wait_until(lambda: seats() == service.seats(), 30)
    victim, begin, steps = min(replicas()), time.time(), 'moe_engine_steps_total{model="demo"}'
    before = prometheus.value(steps)
    ray.kill(ray.get_actor(victim, namespace="serve"), no_restart=False)
    jobs = mixed_jobs(12)
    by_question = {line["question"]: line for line in QUESTIONS}
    for (tenant, model, question), text in zip(jobs, answers(service, jobs, 3), strict=True):
        assert text == by_question[question]["base" if model == "demo" else tenant]
    wait_until(lambda: len(replicas()) == 2 and victim not in replicas(), 60)
    wait_until(lambda: service.metrics()("moe_replicas", model="demo") == 2, 60)

    # No gauge of the dead one stays; what it counted stays with the service.
    wait_until(lambda: len(seats()) == 2 and seats() == service.seats(), 60)
    wait_until(lambda: prometheus.value('moe_replicas{model="demo"}') == 2, 30)
    assert prometheus.value(steps) > before
    assert prometheus.increase(steps, begin) <= prometheus.value(steps) - before, (
        "it never went down"
    )


@pytest.mark.slow
def test_without_its_router_the_service_goes_on(
    service: Service, prometheus: PrometheusServer
) -> None:
    """Counters begin at zero again: Prometheus sees what was done meanwhile, and no more."""
    requests = 'moe_requests_total{status="200"}'
    time.sleep(3)  # what is done so far is known to the router, and seen
    begin = time.time()
    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    ray.kill(ray.get_actor(next(n for n in names if "#Router#" in n), namespace="serve"))
    line = QUESTIONS[1]
    for style in STYLES:
        answer = ask(service.client(style), style, line["question"])
        assert answer.choices[0].message.content == line[style]
    wait_until(lambda: httpx.get(f"{service.url}/metrics", timeout=30).status_code == 200, 60)
    wait_until(lambda: service.metrics()("moe_replicas") == 3, 60)
    wait_until(lambda: prometheus.increase(requests, begin - 2) >= len(STYLES), 30)
    time.sleep(2)
    assert prometheus.increase(requests, begin - 2) == len(STYLES)
    steps = prometheus.increase("moe_engine_steps_total", begin - 2)
    assert 0 < steps < sum(s.num_steps for s in service.stats())


def restless(service: Service) -> str:
    """An answer under the adapter that is replaced now and then: the old one's or the new one's."""
    line = QUESTIONS[2]
    answer = ask(service.client("restless"), "restless", line["question"])
    text = str(answer.choices[0].message.content)
    return next((style for style in STYLES if line[style] == text), f"a mix: {text}")


def catalog_vouches(service: Service) -> bool:
    """Whether the catalog has a watcher's word for all that was asked for lately."""
    stats = service.catalog()
    return stats is not None and 0 < stats.wanted_uris == stats.watched_uris


LATE_S = 10.0
"""A replica learns of new content on its own, within three seconds, or some more on a busy machine:
so long after a change two of them may answer by turns from the old and the new."""

HELD_UNTIL = {"pirate": float("inf")}
"""What the restless adapter holds and held, and when that ended."""


def replace_and_see(service: Service, style: str) -> None:
    assert HELD_UNTIL[restless(service)] > (begin := time.monotonic()) - LATE_S, "too old"
    [held] = [name for name, end in HELD_UNTIL.items() if end > begin]
    service.s3.put_folder("open", "restless", DEMO / "adapters" / style)
    HELD_UNTIL.update({held: time.monotonic(), style: float("inf")})
    seen: list[str] = []
    wait_until(lambda: seen.append(restless(service)) or seen[-1] == style, 30)
    lately = {name for name, end in HELD_UNTIL.items() if end > begin - LATE_S}
    assert set(seen) <= lately, "old or new, nothing else"


def named_actors() -> set[str]:
    actors = ray.util.list_named_actors(all_namespaces=True)
    return {actor["name"] for actor in actors if actor["namespace"] == "adapter-store"}


def test_a_replaced_adapter_is_served_soon_and_looked_at_for_all(service: Service) -> None:
    assert restless(service) == "pirate"
    wait_until(lambda: catalog_vouches(service), 60)
    replace_and_see(service, "formal")
    wait_until(lambda: catalog_vouches(service), 60)
    stats = service.catalog()
    assert stats is not None and sum(stats.held_by_node.values()) >= 2, "old and new"


@pytest.mark.parametrize("for_good", [False, True], ids=["restarted", "gone"])
def test_a_killed_catalog_keeps_nobody_and_is_full_again(service: Service, for_good: bool) -> None:
    assert restless(service) in STYLES
    wait_until(lambda: catalog_vouches(service), 60)
    actor = ray.get_actor(service.catalog_name, namespace="adapter-store")
    ray.kill(actor, no_restart=for_good)
    replace_and_see(service, "spanish" if for_good else "pirate")
    wait_until(lambda: catalog_vouches(service), 60)
    replace_and_see(service, "formal")


def test_a_killed_store_actor_keeps_nobody_and_is_made_again(service: Service) -> None:
    assert restless(service) in STYLES
    [name] = named_actors() - {service.catalog_name}
    ray.kill(ray.get_actor(name, namespace="adapter-store"))
    replace_and_see(service, "spanish")
    wait_until(lambda: named_actors() == {name, service.catalog_name}, 60)
    wait_until(lambda: catalog_vouches(service), 60)
    replace_and_see(service, "pirate")


def test_health_and_readiness(service: Service) -> None:
    assert httpx.get(f"{service.url}/health", timeout=30).status_code == 200
    wait_until(lambda: httpx.get(f"{service.url}/ready", timeout=30).status_code == 200, 30)


def test_environment_is_not_in_the_answer(service: Service) -> None:
    for path in ("/metrics", "/ready", "/health"):
        text = httpx.get(f"{service.url}{path}", timeout=30).text
        assert READER_SECRET not in text and os.environ["TEST_S3_SECRET"] not in text
