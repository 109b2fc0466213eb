"""Who has a label of its own: the busiest, without flutter, so many at most, no count lost.

Ten thousand tenants are measured. Not here: the text of the page (test_metrics.py)."""

import pickle
import random
import time
from collections import Counter

import pytest

from deployments.metric_registry import MetricRegistry
from deployments.metrics import (
    CACHED_TOKENS,
    INTER_TOKEN,
    LATENCY,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    QUEUE,
    REQUESTS,
    TTFT,
    MetricLog,
)
from deployments.tenant_labels import (
    FORGET_S,
    OTHER_TENANT,
    RANK_PERIOD_S,
    LabelledTenants,
    TenantRanking,
    first_tenants,
)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def ranking(clock: Clock, *first: str, limit: int = 2) -> TenantRanking:
    return TenantRanking(first_tenants(first, limit), limit, clock)


def serve(rank: TenantRanking, clock: Clock, periods: int = 1, **tokens: int) -> frozenset[str]:
    """Traffic for some periods; who has a place then."""
    for _ in range(periods):
        rank.add(tokens.items())
        clock.now_s += RANK_PERIOD_S
        assert rank.is_due
        rank.rank(rank.exposed)
        assert not rank.is_due
    return rank.labelled.tenant_ids


def test_the_busiest_have_the_places(clock: Clock) -> None:
    rank = ranking(clock, "a", "b", "c")
    assert rank.labelled.tenant_ids == {"a", "b"}
    assert serve(rank, clock, a=10, c=10) == {"a", "c"}
    assert rank.exposed == {"a", "b", "c"}
    assert rank.labelled.version == 1


def test_a_small_lead_moves_nobody(clock: Clock) -> None:
    rank = ranking(clock)
    assert serve(rank, clock, a=100, b=100) == {"a", "b"}
    assert serve(rank, clock, periods=20, a=100, b=100, c=140) == {"a", "b"}
    assert serve(rank, clock, periods=60, a=100, b=100, c=200) in ({"a", "c"}, {"b", "c"})


def test_a_place_that_was_never_used_is_lost_without_a_trace(clock: Clock) -> None:
    rank = ranking(clock, "a", "b", limit=2)
    rank.add([("c", 5), ("d", 6)])
    clock.now_s += RANK_PERIOD_S
    rank.rank({"a"})
    assert rank.labelled.tenant_ids == {"c", "d"} and rank.exposed == {"a", "c", "d"}


def test_no_tenant_is_called_other(clock: Clock) -> None:
    assert OTHER_TENANT not in ranking(clock, OTHER_TENANT, "a").labelled.tenant_ids
    assert serve(ranking(clock), clock, **{OTHER_TENANT: 10**9, "a": 1}) == {"a"}


def test_series_stand_still_for_an_hour_and_then_make_room(clock: Clock) -> None:
    rank = ranking(clock, limit=1)
    serve(rank, clock, a=1)
    serve(rank, clock, b=1000)
    assert (rank.labelled.tenant_ids, rank.exposed) == ({"b"}, {"a", "b"})
    # The room is taken by `a`: nobody else gets the place, but `a` may have it back.
    assert serve(rank, clock, c=10**6) == {"b"}
    assert serve(rank, clock, a=10**8) == {"a"}
    clock.now_s += FORGET_S
    rank.add([("c", 10**10)])
    assert rank.rank(rank.exposed) == {"b"}
    assert (rank.labelled.tenant_ids, rank.exposed) == ({"c"}, {"a", "c"})


def test_a_new_router_goes_on_with_what_ingresses_know(clock: Clock) -> None:
    rank = ranking(clock, "a", "b")
    known = LabelledTenants(7, frozenset({"x", "y"}))
    rank.adopt(known)
    assert rank.labelled is known
    rank.adopt(LabelledTenants(6, frozenset({"z"})))
    assert rank.labelled is known
    assert serve(rank, clock, z=10) in ({"x", "z"}, {"y", "z"})
    assert rank.labelled.version == 8


def test_counts_are_exact_while_tenants_come_and_go(clock: Clock) -> None:
    """200 tenants on 5 places, an ingress that learns late: no counter ever goes down, their sum is
    what was counted, and the page stays small."""
    rng = random.Random(2)
    tenants = [f"t{i}" for i in range(200)]
    registry = MetricRegistry(first=first_tenants(tenants, 5), max_tenants=5, clock=clock)
    log, labelled = MetricLog(), registry.ranking.labelled
    counted, before, moves = Counter[str](), dict[str, float](), 0
    for turn in range(400):
        favourites = random.Random(turn // 40).sample(tenants, 5)
        for tenant in [*rng.sample(tenants, 5), *favourites * 5]:
            log.count(OUTPUT_TOKENS, ("m", labelled.label(tenant)), 7)
            log.observe(TTFT, ("m", labelled.label(tenant)), 0.1)
            log.traffic[tenant] += 7
            counted[tenant] += 7
        registry.merge(log.drain())
        if turn % 3 == 2:
            moves += labelled != registry.ranking.labelled
            labelled = registry.ranking.labelled
        clock.now_s += RANK_PERIOD_S / 4
        found = tenant_values(registry, "moe_output_tokens_total")
        assert sum(found.values()) == counted.total()
        assert all(found.get(tenant, 0) >= value for tenant, value in before.items())
        assert all(found[t] <= counted[t] for t in found if t != OTHER_TENANT)
        assert len(found) <= 11
        before = found
    assert moves >= 2
    observed = tenant_values(registry, "moe_time_to_first_token_seconds_count")
    assert sum(observed.values()) == counted.total() / 7


def test_a_forgotten_tenant_takes_its_series_along(clock: Clock) -> None:
    registry = MetricRegistry(first=first_tenants(["a"], 1), max_tenants=1, clock=clock)
    shown = []
    for tenant, tokens in (("a", 1), ("b", 100), ("b", 100), ("c", 10**6)):
        log = MetricLog()
        log.count(OUTPUT_TOKENS, ("m", tenant), tokens)
        log.observe(TTFT, ("m", tenant), 0.1)
        log.traffic[tenant] = tokens
        registry.merge(log.drain())
        clock.now_s += FORGET_S + RANK_PERIOD_S
        registry.merge(MetricLog().drain())
        shown.append(tenant_values(registry, "moe_output_tokens_total"))
    # Nobody has a place yet when its first tokens come.
    assert shown[1:3] == [{"a": 1, OTHER_TENANT: 100}, {"a": 1, "b": 100, OTHER_TENANT: 100}]
    assert shown[3] == {"b": 100, OTHER_TENANT: 100 + 10**6}
    histograms = tenant_values(registry, "moe_time_to_first_token_seconds_count")
    assert set(histograms) == {"b", OTHER_TENANT}


def test_ten_thousand_tenants_do_not_make_it_grow(clock: Clock) -> None:
    """Each of them asks in each second; what is sent and shown is that of fifty."""

    def one_sync(num_tenants: int) -> tuple[int, int, float]:
        tenants = [f"customer-{i:05d}" for i in range(num_tenants)]
        registry = MetricRegistry(first=first_tenants(tenants, 50), max_tenants=50, clock=clock)
        log, labelled = MetricLog(), registry.ranking.labelled
        for turn in range(3):
            for tenant in tenants:
                count_request(log, labelled.label(tenant), tenant)
            delta = log.drain()
            registry.merge(delta)
            clock.now_s += RANK_PERIOD_S
            labelled = registry.ranking.labelled
            assert len(labelled.tenant_ids) == 50, turn
        begin = time.perf_counter()
        page = registry.render()
        return len(pickle.dumps(delta)), len(page), time.perf_counter() - begin

    few, many = one_sync(100), one_sync(10_000)
    print("bytes of a sync, bytes of a page, seconds to render:", few, many)
    # Larger numbers are longer; all sums of 100 tenants would be 100 times as many.
    assert many[0] < 1.5 * few[0] < 200_000
    assert many[1] < 1.5 * few[1] < 3_000_000


def count_request(log: MetricLog, label: str, tenant: str) -> None:
    for series in (PROMPT_TOKENS, CACHED_TOKENS, OUTPUT_TOKENS):
        log.count(series, ("m", label), 10)
    log.count(REQUESTS, ("m", label, "200"))
    for series in (QUEUE, TTFT, INTER_TOKEN, LATENCY):
        log.observe(series, ("m", label), 0.01)
    log.traffic[tenant] += 20


def tenant_values(registry: MetricRegistry, name: str) -> dict[str, float]:
    """Tenant label -> value, over all other labels."""
    found = Counter[str]()
    for family in registry.collect():
        for sample in family.samples:
            if sample.name == name:
                found[sample.labels["tenant"]] += sample.value
    return dict(found)
