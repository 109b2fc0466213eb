"""How many replicas: as a function, in Serve's own words, and from the configuration."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from deployments.application import _replica, _router
from deployments.autoscaling import Demand, ReplicaCount, ScaleLimits, target_replicas
from deployments.config import ModelSettings, ServiceConfig
from model_runner.stats import EngineStats

LIMITS = ScaleLimits(1, 8, sequences=32)


def target(sequences: list[float], queued: float = 0, current: int | None = None) -> int:
    demands = [Demand(count) for count in sequences]
    return target_replicas(demands, queued, current or len(demands), LIMITS)


def test_more_before_a_batch_is_full_and_less_when_the_rest_will_do() -> None:
    assert target([25]) == 1
    assert target([26]) == 2, "0.8 of 32 are 25.6"
    assert target([32, 32]) == 3
    assert target([100]) == 4
    assert target([20], queued=80) == 4
    assert target([0, 0, 0, 0]) == 1
    assert target([19, 19, 19]) == 3, "57 are 0.89 of two"
    assert target([12, 12, 12]) == 2, "36 are 0.56 of two"


def test_limits_hold_whatever_comes() -> None:
    assert target([5000]) == 8
    assert target_replicas([Demand(0)] * 4, 0, 4, ScaleLimits(3, 8, 32)) == 3
    assert target_replicas([], 0, 1, LIMITS) == 1
    assert target_replicas([], 200, 1, LIMITS) == 8, "queued, and nobody has told anything yet"


def test_pages_count_as_well() -> None:
    assert target_replicas([Demand(3, 0.7)], 0, 1, LIMITS) == 1
    assert target_replicas([Demand(3, 0.75)], 0, 1, LIMITS) == 2
    assert target_replicas([Demand(1, 0.5), Demand(1, 0.5)], 0, 2, LIMITS) == 2


def test_demand_of_an_engine() -> None:
    stats = EngineStats(running=3, waiting=2, waiting_for_adapter=1, free_pages=25, num_pages=100)
    assert Demand.of(stats) == Demand(6, 0.75)
    assert Demand.of(EngineStats()) == Demand(0, 0)


@given(st.lists(st.floats(0, 300), max_size=8), st.floats(0, 300), st.integers(1, 8))
def test_it_comes_to_rest_at_once(sequences: list[float], queued: float, current: int) -> None:
    """The load as it is, its number is right: what was decided is not taken back."""
    demands = [Demand(count) for count in sequences]
    first = target_replicas(demands, queued, current, LIMITS)
    assert target_replicas(demands, queued, first, LIMITS) == first
    more = target_replicas(demands, queued + 50, current, LIMITS)
    assert more >= first, "more to do, fewer replicas"


def test_as_the_policy_of_serve() -> None:
    context: Any = SimpleNamespace(
        aggregated_metrics={"sequences": {"a": 30.0, "b": 28.0}, "pages": {"a": 0.2}},
        total_queued_requests=10.0,
        target_num_replicas=2,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=8,
    )
    assert ReplicaCount(sequences=32)(context) == (3, {})
    context.aggregated_metrics = context.total_queued_requests = None
    assert ReplicaCount(sequences=32)(context) == (1, {})


def test_what_the_configuration_says_reaches_serve(demo_config: ServiceConfig) -> None:
    fixed = demo_config.models[0]
    router = _router(demo_config)
    deployment = _replica(demo_config, fixed, router)._bound_deployment
    assert deployment._deployment_config.autoscaling_config is None
    scaling = fixed.model_copy(update={"num_replicas": 2, "max_replicas": 5})
    config = _replica(demo_config, scaling, router)._bound_deployment._deployment_config
    found = config.autoscaling_config
    assert (found.min_replicas, found.initial_replicas, found.max_replicas) == (2, 2, 5)
    policy = found.policy.get_policy()(**found.policy.policy_kwargs)
    assert policy._sequences == fixed.engine_config().max_num_seqs == 32
    # A replica that lets in fewer than its engine could batch is full with those.
    narrow = scaling.model_copy(update={"max_ongoing_requests": 8})
    config = _replica(demo_config, narrow, router)._bound_deployment._deployment_config
    assert config.autoscaling_config.policy.policy_kwargs == {"sequences": 8}


@pytest.mark.parametrize(
    "fields", [{"min_replicas": 3}, {"max_replicas": 1}, {"min_replicas": 2, "max_replicas": 1}]
)
def test_replicas_out_of_order_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match=r"num_replicas \(2\) is not within"):
        ModelSettings(name="m", path="p", num_replicas=2, **fields)
