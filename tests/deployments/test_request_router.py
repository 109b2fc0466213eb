"""The request router as Serve drives it, over replicas that are stood in for. No cluster."""

import asyncio
import itertools
import random
from collections.abc import Iterable
from dataclasses import replace
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest

from adapter_store.ref import AdapterRef
from deployments import request_router
from deployments.placement import bin_pack
from deployments.placement.hash_ring import first_seat
from deployments.placement.view import Place, Placement, ReplicaView, TenantLoad
from tests.bench.placement import time_choices
from tests.deployments.routing_world import FakeReplica, Ingress, pending_request

SEATS = ("a", "b", "c")


def rendezvous_order(name: str, seats: Iterable[str]) -> list[str]:
    """All seats, the best for `name` first."""
    left, found = set(seats), list[str]()
    while left:
        found.append(first_seat(name, left))
        left.remove(found[-1])
    return found


def home(adapter_id: str) -> Place:
    return Place((rendezvous_order(adapter_id, SEATS)[0],), adapter_id)


async def seat_of(ingress: Ingress, place: Place | None, waited_s: float = 0.0) -> str:
    pending = pending_request(place)
    pending.created_at -= waited_s
    return (await asyncio.wait_for(ingress.choose(pending), 5)).seat


async def test_a_home_takes_it_and_homes_take_turns() -> None:
    ingress = Ingress([FakeReplica(seat) for seat in SEATS], spill_after_s=60)
    assert {await seat_of(ingress, Place(("b",), "t/x")) for _ in range(5)} == {"b"}
    assert {await seat_of(ingress, Place(("a", "c"), "t/x")) for _ in range(4)} == {"a", "c"}
    assert {await seat_of(ingress, Place()) for _ in range(6)} == set(SEATS)
    assert {await seat_of(ingress, None) for _ in range(6)} == set(SEATS)


async def test_where_the_map_knows_no_living_home_all_ingresses_agree() -> None:
    replicas = [FakeReplica(seat) for seat in SEATS]
    ingresses = [Ingress(some, spill_after_s=60) for some in (replicas, replicas[::-1])]
    for number in range(20):
        name = f"t{number}/x"
        for place in (Place((), name), Place(("gone",), name)):
            found = {await seat_of(ingress, place) for ingress in ingresses}
            assert found == {rendezvous_order(name, SEATS)[0]}
    dead = replicas[0]
    for ingress in ingresses:
        ingress.router.on_replica_actor_died(dead.replica_id)
        assert await seat_of(ingress, Place(("a",), "t/x")) in ("b", "c")


async def test_the_least_loaded_home_takes_it() -> None:
    replicas = [FakeReplica("a", ongoing=3), FakeReplica("b", ongoing=1), FakeReplica("c")]
    ingress = Ingress(replicas, spill_after_s=60)
    await asyncio.sleep(0.01)  # the first probes
    assert {await seat_of(ingress, Place(("a", "b"), "t/x")) for _ in range(4)} == {"b"}


async def test_one_spill_seat_and_only_where_nothing_is_evicted() -> None:
    first, second, third = rendezvous_order("t/x", SEATS)
    replicas = {seat: FakeReplica(seat, max_ongoing_requests=1, slots=1) for seat in SEATS}
    replicas[first].ongoing = 1
    ingress = Ingress(replicas.values())
    place = Place((first,), "t/x")
    assert await seat_of(ingress, place, waited_s=1) == second
    # Its slot is another's: nobody takes it, the third neither.
    replicas[second].resident = ["u/y"]
    replicas[second].tell_stats()
    waiting = asyncio.create_task(seat_of(ingress, place, waited_s=1))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    replicas[second].resident = ["t/x"]
    replicas[second].tell_stats()
    assert await waiting == second
    # The second is a home too: the third is the spill seat. Not before it is late.
    replicas[second].ongoing = 1
    ingress.router.on_new_queue_len_info(replicas[second].replica_id, 1)
    both = Place((first, second), "t/x")
    assert await seat_of(ingress, both, waited_s=1) == third
    early = asyncio.create_task(seat_of(ingress, both))
    await asyncio.sleep(0.05)
    assert not early.done()
    assert await early == third
    refused = Place((first, second), "t/x", may_spill=False)
    waiting = asyncio.create_task(seat_of(ingress, refused, waited_s=1))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    replicas[first].ongoing = 0
    assert await waiting == first


async def test_a_flood_asks_full_replicas_no_more_than_one_request_does() -> None:
    first, second, _ = rendezvous_order("t/x", SEATS)

    async def flood(number: int) -> tuple[int, int]:
        replicas = {seat: FakeReplica(seat, max_ongoing_requests=1) for seat in SEATS}
        for seat in (first, second):
            replicas[seat].ongoing = 1
        ingress = Ingress(replicas.values(), spill_after_s=0.01)
        waiting = [
            asyncio.create_task(ingress.send(Place((first,), "t/x"), 0.001)) for _ in range(number)
        ]
        await asyncio.sleep(0.3)
        asked = replicas[first].num_asked, replicas[second].num_asked
        assert not any(task.done() for task in waiting)
        replicas[second].ongoing = 0
        spilled = await asyncio.wait_for(asyncio.gather(*waiting), 10)
        assert {replica.seat for replica in spilled} == {second}
        return asked

    alone, many = await flood(1), await flood(50)
    assert min(alone) > 5, "the test has lost its point"
    assert many[0] < 3 * alone[0] and many[1] < 3 * alone[1], (alone, many)


async def test_a_silent_home_holds_up_none_that_may_spill() -> None:
    first, second, _ = rendezvous_order("t/x", SEATS)
    replicas = {seat: FakeReplica(seat) for seat in SEATS}
    replicas[first].is_silent = True
    ingress = Ingress(replicas.values(), spill_after_s=0.01)
    place = Place((first,), "t/x")
    waiting = [asyncio.create_task(ingress.send(place, 0.001)) for _ in range(50)]
    stays = asyncio.create_task(ingress.send(replace(place, may_spill=False), 0.001))
    done, _ = await asyncio.wait(waiting, timeout=2)
    assert len(done) >= 49, "but for the one that waits for its answer just now"
    assert {task.result().seat for task in done} == {second}
    assert not stays.done()
    for task in (stays, *waiting):
        task.cancel()


async def test_who_becomes_late_in_mid_turn_is_not_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock that goes a second further with every look at it."""
    first, second, _ = rendezvous_order("t/x", SEATS)
    replicas = {seat: FakeReplica(seat, max_ongoing_requests=1) for seat in SEATS}
    replicas[first].ongoing = 1
    ingress = Ingress(replicas.values(), spill_after_s=1.5)
    clock = itertools.count(1e9)
    monkeypatch.setattr(request_router, "time", SimpleNamespace(time=lambda: float(next(clock))))
    place = Place((first,), "t/x")
    stays = asyncio.create_task(ingress.choose(pending_request(replace(place, may_spill=False))))
    await asyncio.sleep(0.01)
    pending = pending_request(place)
    pending.created_at = float(next(clock))  # not late at the next look, but at the one after
    assert (await asyncio.wait_for(ingress.choose(pending), 5)).seat == second
    stays.cancel()


async def test_a_silent_replica_is_the_last_choice_and_only_once_it_answers() -> None:
    replicas = {seat: FakeReplica(seat) for seat in SEATS}
    ingress = Ingress(replicas.values())
    names = {seat: replica.replica_id.to_full_id_str() for seat, replica in replicas.items()}
    for adapter_id in ("t/x", ""):
        for _ in SEATS:
            await seat_of(ingress, Place(("a",), adapter_id))
        place = Place(("a",), adapter_id, shun=(names["a"],))
        assert await seat_of(ingress, place) in ("b", "c")
        alone = replace(place, avoid=(names["b"], names["c"]))
        replicas["a"].is_silent = True
        waiting = asyncio.create_task(seat_of(ingress, alone))
        done, _ = await asyncio.wait({waiting}, timeout=0.3)
        assert not done, "Serve's own cache says that it has room"
        replicas["a"].is_silent = False
        assert await waiting == "a"
        lost = replace(place, avoid=tuple(names.values()))
        waiting = asyncio.create_task(seat_of(ingress, lost))
        done, _ = await asyncio.wait({waiting}, timeout=0.1)
        assert not done, "what a request was lost on never has it again"
        waiting.cancel()


async def test_one_that_cannot_be_reached_is_the_last_choice_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_router, "_OUT_OF_REACH_S", 60.0)
    first, second, third = rendezvous_order("t/x", SEATS)
    replicas = {seat: FakeReplica(seat) for seat in SEATS}
    ingress = Ingress(replicas.values(), spill_after_s=60)
    at_home = Place((first,), "t/x", may_spill=False)
    assert await seat_of(ingress, at_home) == first
    ingress.router.on_replica_actor_unavailable(replicas[first].replica_id)
    assert await seat_of(ingress, at_home) == second, "where the router would place it"
    assert await seat_of(ingress, Place((first, third), "t/x")) == third, "another home before it"
    assert {await seat_of(ingress, place) for place in (Place(), None)} <= {second, third}
    recall = pending_request(Place((first,), first, may_spill=False), method="recall")
    chosen = await asyncio.wait_for(ingress.choose(recall, is_retry=True), 5)
    assert chosen.seat != first, "its answer is known nowhere"
    monkeypatch.setattr(request_router, "_OUT_OF_REACH_S", 0.0)
    ingress.router.on_replica_actor_unavailable(replicas[first].replica_id)
    assert await seat_of(ingress, at_home) == first, "its time is over"
    monkeypatch.setattr(request_router, "_OUT_OF_REACH_S", 60.0)
    ingress.router.on_replica_actor_unavailable(replicas[first].replica_id)
    ingress.router.on_new_queue_len_info(replicas[first].replica_id, 0)
    assert await seat_of(ingress, at_home) == first, "it has answered"


async def test_where_none_can_be_reached_the_first_that_answers_takes_it() -> None:
    replica = FakeReplica("a")
    ingress = Ingress([replica], spill_after_s=60)
    await seat_of(ingress, Place())
    for place in (Place(("a",), "t/x"), Place(), None):
        replica.is_refusing = True
        ingress.router.on_replica_actor_unavailable(replica.replica_id)
        waiting = asyncio.create_task(seat_of(ingress, place))
        done, _ = await asyncio.wait({waiting}, timeout=0.05)
        assert not done
        replica.is_refusing = False
        assert await waiting == "a"
    ingress.router.on_replica_actor_unavailable(replica.replica_id)
    assert (await ingress.choose(pending_request(None, method="validate"))).seat == "a"


async def test_a_control_call_goes_to_its_seat_full_or_not() -> None:
    replicas = {seat: FakeReplica(seat, max_ongoing_requests=1, ongoing=1) for seat in SEATS}
    ingress = Ingress(replicas.values())
    recall = pending_request(Place(("b",), "b", may_spill=False), method="recall")
    assert (await asyncio.wait_for(ingress.choose(recall), 5)).seat == "b"
    replicas["a"].is_silent = True
    validate = pending_request(None, method="validate")
    for _ in SEATS:
        chosen = await asyncio.wait_for(ingress.choose(validate), 5)
        assert chosen.seat in ("b", "c"), "one that answers"
    request = asyncio.create_task(ingress.choose(pending_request(Place(("b",), "t/x"))))
    done, _ = await asyncio.wait({request}, timeout=0.05)
    assert not done
    request.cancel()


async def test_requests_leave_the_places_for_control_calls_free() -> None:
    router = Ingress([], spill_after_s=60).router
    router.initialize_state(control_places=64)
    info: Any = SimpleNamespace(
        max_ongoing_requests=66, multiplexed_model_ids=(), is_cross_language=False,
        get_actor_handle=lambda: None,
    )  # fmt: skip
    assert router.create_replica_wrapper(info).max_ongoing_requests == 2


async def test_who_comes_back_from_a_full_replica_does_not_wait_from_the_end() -> None:
    replica = FakeReplica("a", max_ongoing_requests=1, ongoing=1)
    ingress = Ingress([replica], spill_after_s=60)
    ingress.router.on_new_queue_len_info(replica.replica_id, 1)
    been_there = Place(("a",), "t/x", taken_by=["SERVE_REPLICA::a"])
    order: list[str] = []

    async def wait_for(name: str, place: Place) -> None:
        await ingress.choose(pending_request(place))
        ingress.router.on_new_queue_len_info(replica.replica_id, 1)
        replica.ongoing = 1
        order.append(name)

    places = {"first": Place(("a",), "t/x"), "second": Place(("a",), "t/x"), "back": been_there}
    waiting = [asyncio.create_task(wait_for(*item)) for item in places.items()]
    for number in range(3):
        await asyncio.sleep(0.02)
        replica.ongoing = 0
        while len(order) <= number:
            await asyncio.sleep(0.001)
    assert order[-1] == "second", order
    await asyncio.gather(*waiting)


async def test_replicas_learn_that_a_call_has_spilled() -> None:
    first, second, _ = rendezvous_order("t/x", SEATS)
    replicas = {seat: FakeReplica(seat, max_ongoing_requests=1) for seat in SEATS}
    ingress = Ingress(replicas.values())
    pending = pending_request(Place((first,), "t/x"))
    assert (await ingress.choose(pending)).seat == first and "spilled" not in pending.kwargs
    replicas[first].ongoing = 1
    ingress.router.on_new_queue_len_info(replicas[first].replica_id, 1)
    pending.created_at -= 1
    assert (await ingress.choose(pending)).seat == second and pending.kwargs["spilled"]
    # The spill seat rejected it, and meanwhile its home is free again.
    replicas[first].ongoing = 0
    assert (await ingress.choose(pending, is_retry=True)).seat == first
    assert "spilled" not in pending.kwargs


async def test_the_caller_knows_at_once_where_its_call_goes() -> None:
    """Before the replica says a word: it may stand still."""
    replica, place = FakeReplica("a"), Place(("a",), "t/x")
    ingress, pending = Ingress([replica]), pending_request(place)
    await ingress.choose(pending)
    await ingress.choose(pending, is_retry=True)  # it had rejected the call
    assert place.taken_by == [replica.replica_id.to_full_id_str()] * 2


async def test_a_fan_out_inside_one_request_does_not_hang() -> None:
    replicas = [FakeReplica(seat, max_ongoing_requests=2) for seat in SEATS]
    ingress = Ingress(replicas, spill_after_s=60)
    places = [home(f"t{number % 3}/x") for number in range(16)]
    calls = [ingress.send(place, 0.002, internal_id="the same") for place in places]
    seats = await asyncio.wait_for(asyncio.gather(*calls), 20)
    assert [replica.seat for replica in seats] == [place.homes[0] for place in places]


async def test_saturation_misplaces_nobody() -> None:
    replicas = [FakeReplica(seat, max_ongoing_requests=3) for seat in SEATS]
    ingresses = [Ingress(replicas, spill_after_s=60) for _ in range(2)]
    places = [home(f"t{number % 7}/x") for number in range(90)]
    calls = [
        ingresses[number % 2].send(place, 0.005, f"i{number}")
        for number, place in enumerate(places)
    ]
    seats = await asyncio.wait_for(asyncio.gather(*calls), 30)
    assert [replica.seat for replica in seats] == [place.homes[0] for place in places]
    assert max(replica.ongoing for replica in replicas) == 0


async def test_three_ingresses_with_stale_maps_spread_a_hot_adapter_no_further_than_planned() -> (
    None
):
    """One adapter at five times a seat's traffic; each ingress has another age of the map, and
    nobody's knowledge of free slots is newer than the start."""
    seats = [f"m-{number}" for number in range(12)]
    rng = random.Random(5)
    beyond = refusals = 0
    for trial in range(3):
        name = f"hot{trial}/x"
        tenants = [(f"t{trial}-{number}/x", 100.0) for number in range(36)]
        maps = [plan(Placement(), [(name, 10.0), *tenants], seats)]
        maps.append(plan(maps[0], [(name, 900.0), *tenants], seats))
        maps.append(plan(maps[1], [(name, 2000.0), *tenants], seats))
        planned = {seat for known in maps for seat in known.homes[name]}
        assert 1 == len(maps[0].homes[name]) < len(maps[1].homes[name]) < len(maps[2].homes[name])
        slots = (8, 4, 4)[trial]
        replicas = [FakeReplica(seat, max_ongoing_requests=2, slots=slots) for seat in seats]
        for replica in replicas:
            others = [other for other, _ in tenants if maps[2].homes[other] == (replica.seat,)]
            replica.resident = others[: rng.randint(2, 3)]
            replica.tell_stats()
            if trial == 1:  # by now it is full, and nobody has been told
                replica.resident += [f"late{number}/x" for number in range(4)]
                del replica.resident[4:]
        ingresses = [Ingress(replicas, spill_after_s=0.005) for _ in maps]
        calls = [
            ingress.ask(known.place(name), 0.004)
            for _ in range(40)
            for ingress, known in zip(ingresses, maps, strict=True)
        ]
        calls += [
            ingresses[number % 3].ask(maps[2].place(other), 0.004)
            for number, (other, _) in enumerate(tenants)
        ]
        rng.shuffle(calls)
        await asyncio.wait_for(asyncio.gather(*calls), 60)
        loaded = {replica.seat for replica in replicas if name in replica.loads}
        assert len(loaded) <= len(planned) + 1, (loaded, planned)
        assert len(loaded - planned) <= 1
        assert not any(replica.spilled_evictions for replica in replicas)
        served = sum(replica.served.count(name) for replica in replicas)
        assert served == 120
        beyond += len(loaded - planned)
        refusals += sum(ingress.refusals for ingress in ingresses)
    assert beyond and refusals, "the test has lost its point"


def plan(before: Placement, rates: list[tuple[str, float]], seats: list[str]) -> Placement:
    views = [ReplicaView(seat, "m", seat, "n") for seat in seats]
    loads = [TenantLoad("t", AdapterRef(name, "u", base="m"), 1.0, rate) for name, rate in rates]
    return bin_pack.place(before, loads, views)


@pytest.mark.slow
async def test_a_choice_is_cheap() -> None:
    """Under 0.2 ms at p99, by the thread's own time, among 100 seats and 2000 adapters. That is
    loose: what it takes is in tests/bench/LOG.md."""
    runs = [await time_choices(100, 2000, 5000) for _ in range(3)]
    for case in runs[0]:
        p99s_us = [run[case][1] for run in runs]
        assert median(p99s_us) < 200, f"{case}: {p99s_us}"
