"""Placement policies: pure, steady, and moving no more than they must."""

from collections import Counter

import pytest

from adapter_store.ref import AdapterRef
from deployments.placement.registry import POLICIES, Policy
from deployments.placement.view import Place, Placement, ReplicaView, TenantLoad

LOADS = [TenantLoad(f"t{i}", AdapterRef(f"t{i}/x", "u", base="m")) for i in range(200)]


def views(*seats: str, model: str = "m") -> list[ReplicaView]:
    return [ReplicaView(seat, model, f"r-{seat}", "node") for seat in seats]


@pytest.fixture(params=sorted(POLICIES))
def policy(request: pytest.FixtureRequest) -> Policy:
    return POLICIES[request.param]


def test_same_input_same_answer(policy: Policy) -> None:
    first = policy(Placement(version=7), LOADS, views("m-0", "m-1", "m-2"))
    again = policy(Placement(version=7), LOADS, reversed(views("m-0", "m-1", "m-2")))
    assert first == again and first.version == 8
    assert policy(first, LOADS, views("m-2", "m-1", "m-0")) is first


def test_every_adapter_has_a_home_and_all_other_seats_to_spill(policy: Policy) -> None:
    seats = {"m-0", "m-1", "m-2", "m-3"}
    placement = policy(Placement(), LOADS, views(*seats))
    homes: Counter[str] = Counter()
    for load in LOADS:
        place = placement.place("m", load.adapter.adapter_id)
        assert place is not None and place.adapter_id == load.adapter.adapter_id
        assert place.homes and {*place.homes, *place.spill} == seats
        assert len(place.homes) + len(place.spill) == 4
        homes.update(place.homes)
    assert min(homes.values()) >= 30, homes
    assert sum(len(placement.homes_of(seat)) for seat in seats) == len(LOADS)


def test_a_lost_seat_moves_only_its_own(policy: Policy) -> None:
    before = policy(Placement(), LOADS, views("m-0", "m-1", "m-2"))
    after = policy(before, LOADS, views("m-0", "m-2"))
    assert after.version == before.version + 1
    for name, place in before.places.items():
        if place.homes != ("m-1",):
            assert after.places[name].homes == place.homes
        else:
            assert after.places[name].homes == place.spill[:1]
    assert policy(after, LOADS, views("m-0", "m-1", "m-2")).places == before.places


def test_base_requests_go_anywhere_and_models_are_apart(policy: Policy) -> None:
    replicas = views("m-0", "m-1") + views("n-0", model="n")
    placement = policy(Placement(), LOADS, replicas)
    assert placement.place("m", "") == Place(homes=("m-0", "m-1"))
    assert placement.place("n", "") == Place(homes=("n-0",))
    assert placement.place("o", "") is None and placement.place("m", "unknown") is None
    assert not placement.homes_of("n-0")


def test_no_replica_no_place(policy: Policy) -> None:
    assert policy(Placement(), LOADS, []) == Placement()
