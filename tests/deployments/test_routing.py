"""How a request finds a replica, and what happens when it loses it.

No cluster: Ray's parts are stood in for.
"""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from deployments import router_link
from deployments.api_errors import ApiError
from deployments.metrics import OUTPUT_TOKENS
from deployments.placement.view import MapUpdate, MapWanted, Place, Placement
from deployments.spill import stream_near_home
from model_runner.request import ErrorCode, Request, RequestOutput
from tests.deployments.conftest import Face


async def echo(value: Any) -> Any:
    return value


async def test_without_a_router_the_last_map_holds_and_no_count_is_lost(face: Face) -> None:
    whole = MapUpdate(3, None, {"demo": ("demo-0",)}, {"t/x": ("demo-0",)})
    answers: list[Any] = [whole, ActorDiedError(), None]
    seen: list[Any] = []

    async def sync(*args: Any) -> MapUpdate | None:
        seen.append(args)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    router: Any = SimpleNamespace(
        sync=SimpleNamespace(remote=sync), metric_tenants=SimpleNamespace(remote=echo)
    )
    link = router_link.RouterLink(face.frontend, router)
    assert await link.missing() == [] and face.frontend.placement.version == 3
    face.frontend.log.count(OUTPUT_TOKENS, ("demo", "pirate"), 5)
    face.frontend.traffic["pirate/pirate"] = 9
    with pytest.raises(ActorDiedError):
        await link.sync()
    assert face.frontend.placement.version == 3
    await link.sync()
    version, traffic, delta, over_s = seen[-1]
    # What is sent was counted since the last call that came through, not since the failed one.
    assert over_s >= seen[-2][3] > 0
    assert version == 3 and traffic == {"pirate/pirate": 9}
    assert delta.counters == ((("moe_output_tokens_total", ("demo", "pirate")), 5.0),)
    assert face.frontend.placement.version == 3


async def test_a_router_that_does_not_answer_keeps_nobody_waiting(
    face: Face, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_link, "_ROUTER_PATIENCE_S", 0.05)
    is_back, seen = asyncio.Event(), list[Any]()

    async def sync(*args: Any) -> MapUpdate | None:
        await is_back.wait()
        seen.append(args)
        return MapUpdate(3, None, {"demo": ("demo-0",)}, {})

    async def render() -> bytes:
        return b"moe_replicas 3"

    router: Any = SimpleNamespace(
        sync=SimpleNamespace(remote=sync),
        metrics=SimpleNamespace(remote=render),
        metric_tenants=SimpleNamespace(remote=echo),
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
    # Two that asked at once offered the same counts: the router takes a number once.
    counted = {d.number: d.counters for _, _, d, _ in seen if d.counters}
    assert list(counted.values()) == [((("moe_output_tokens_total", ("demo", "pirate")), 5.0),)]
    assert {d.source for _, _, d, _ in seen if d.counters} == {seen[0][2].source} != {""}


async def test_news_lead_on_from_the_map_that_is_here(face: Face) -> None:
    first = MapUpdate(3, None, {"demo": ("demo-0",)}, {"t/x": ("demo-0",), "t/y": ("demo-0",)})
    seats = {"demo": ("demo-0", "demo-1")}
    later = MapUpdate(5, 3, seats, {"t/x": ("demo-1",)}, gone=("t/y",))
    answers: list[Any] = [first, later, MapUpdate(9, 4, {}, {}), MapWanted()]
    adopted: list[Placement] = []

    async def sync(*args: Any) -> Any:
        return answers.pop(0)

    async def adopt(placement: Placement) -> None:
        adopted.append(placement)

    router: Any = SimpleNamespace(
        sync=SimpleNamespace(remote=sync),
        adopt=SimpleNamespace(remote=adopt),
        metric_tenants=SimpleNamespace(remote=echo),
    )
    link = router_link.RouterLink(face.frontend, router)
    await link.sync()
    await link.sync()
    now = face.frontend.placement
    assert now == Placement(5, seats, {"t/x": ("demo-1",)})
    await link.sync()  # from a map that is not here: two calls overtook each other
    assert face.frontend.placement is now and not adopted
    await link.sync()
    assert adopted == [now] and face.frontend.placement is now


async def test_a_refused_spill_waits_for_its_home() -> None:
    places: list[Place] = []
    codes = [ErrorCode.NO_ROOM, None]

    async def stream(request: Request, place: Place) -> AsyncIterator[RequestOutput]:
        places.append(place)
        code = codes.pop(0)
        for index in range(2):
            yield RequestOutput("r", index, error_code=code)

    near: Any = stream
    home = Place(("a",), "t/x")
    outputs = [o async for o in stream_near_home(near, Request("r", (1,)), home)]
    assert [(o.index, o.error_code) for o in outputs] == [(0, None), (1, None)]
    assert places == [home, Place(("a",), "t/x", may_spill=False)]
    codes = [ErrorCode.NO_ROOM]
    outputs = [o async for o in stream_near_home(near, Request("r", (1,)), places.pop())]
    assert len(places) == 2 and outputs[0].error_code is ErrorCode.NO_ROOM, "it was no spill"
    codes = [ErrorCode.NOT_FINITE]
    outputs = [o async for o in stream_near_home(near, Request("r", (1,)), home)]
    assert len(places) == 3 and outputs[0].error_code is ErrorCode.NOT_FINITE
