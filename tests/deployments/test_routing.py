"""How a request finds a replica, and what happens when it loses it.

No cluster: Ray's parts are stood in for.
"""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from deployments import router_link
from deployments.api_errors import ApiError
from deployments.metrics import OUTPUT_TOKENS
from deployments.placement.view import Place, Placement
from deployments.request_router import PlacementRequestRouter
from tests.deployments.conftest import Face


def replica(seat: str, resident: tuple[str, ...] = (), free_slots: int = 0) -> Any:
    stats = {"resident": resident, "free_slots": free_slots}
    replica_id = SimpleNamespace(to_full_id_str=lambda: f"replica-{seat}")
    metadata = {"seat": seat}
    return SimpleNamespace(replica_id=replica_id, replica_metadata=metadata, routing_stats=stats)


def ranks(place: Place | None, replicas: list[Any], late: bool = False) -> list[list[str]]:
    router = PlacementRequestRouter.__new__(PlacementRequestRouter)
    router._replicas = dict(enumerate(replicas))
    request: Any = SimpleNamespace(kwargs={"place": place})
    return [[r.replica_metadata["seat"] for r in rank] for rank in router._ranks(request, late)]


ALL = [replica("a"), replica("b"), replica("c")]
HOME_B = Place(homes=("b",), spill=("c", "a"), adapter_id="t/x")


def test_home_alone_until_it_is_late() -> None:
    assert ranks(HOME_B, ALL) == [["b"]]
    assert ranks(Place(homes=("a", "b", "c")), ALL) == [["a", "b", "c"]]
    assert ranks(None, ALL) == [["a", "b", "c"]]


def test_spill_in_order_and_only_where_nothing_is_evicted() -> None:
    assert ranks(HOME_B, ALL, late=True) == [["b"]]
    has_it = [replica("a", ("t/x",)), replica("b"), replica("c")]
    assert ranks(HOME_B, has_it, late=True) == [["b"], ["a"]]
    free = [replica("a", free_slots=1), replica("b"), replica("c", free_slots=2)]
    assert ranks(HOME_B, free, late=True) == [["b"], ["c"], ["a"]]


def test_a_dead_home_is_left_at_once() -> None:
    assert ranks(HOME_B, [replica("a"), replica("c")]) == [["c"], ["a"], ["a", "c"]]
    assert ranks(HOME_B, [replica("new")]) == [["new"]]


def test_a_replica_that_was_lost_is_avoided() -> None:
    place = replace(HOME_B, avoid=("replica-b",))
    assert ranks(place, ALL) == [["c"], ["a"], ["a", "c"]]
    assert ranks(replace(place, avoid=("replica-b", "replica-c")), ALL) == [["a"], ["a"]]
    assert not any(ranks(replace(place, homes=()), ALL[1:2]))


async def test_without_a_router_the_last_map_holds_and_no_count_is_lost(face: Face) -> None:
    answers: list[Any] = [Placement(3, {"demo": ("demo-0",)}), ActorDiedError(), None]
    seen: list[Any] = []

    async def sync(*args: Any) -> Placement | None:
        seen.append(args)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    router: Any = SimpleNamespace(sync=SimpleNamespace(remote=sync))
    link = router_link.RouterLink(face.frontend, router)
    assert await link.missing() == [] and face.frontend.placement.version == 3
    face.frontend.log.count(OUTPUT_TOKENS, ("demo", "pirate"), 5)
    face.frontend.traffic["pirate/pirate"] = 9
    with pytest.raises(ActorDiedError):
        await link.sync()
    assert face.frontend.placement.version == 3
    await link.sync()
    version, traffic, delta = seen[-1]
    assert version == 3 and traffic == {"pirate/pirate": 9}
    assert delta.counters == ((("moe_output_tokens_total", ("demo", "pirate")), 5.0),)
    assert face.frontend.placement.version == 3


async def test_a_router_that_does_not_answer_keeps_nobody_waiting(
    face: Face, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_link, "_ROUTER_PATIENCE_S", 0.05)
    is_back, seen = asyncio.Event(), list[Any]()

    async def sync(*args: Any) -> Placement | None:
        await is_back.wait()
        seen.append(args)
        return Placement(3, {"demo": ("demo-0",)})

    async def render() -> bytes:
        return b"moe_replicas 3"

    router: Any = SimpleNamespace(
        sync=SimpleNamespace(remote=sync), metrics=SimpleNamespace(remote=render)
    )
    link = router_link.RouterLink(face.frontend, router)
    face.frontend.log.count(OUTPUT_TOKENS, ("demo", "pirate"), 5)
    for _ in range(2):
        with pytest.raises(ApiError, match="router does not answer") as caught:
            await asyncio.wait_for(link.metrics(), 2)
        assert caught.value.status == 503 and caught.value.retry_after_s
        await asyncio.wait_for(link.missing(), 2)
    is_back.set()
    assert await link.metrics() == b"moe_replicas 3"
    assert await link.missing() == []
    counted = [count for _, _, delta in seen for count in delta.counters]
    assert counted == [(("moe_output_tokens_total", ("demo", "pirate")), 5.0)]
