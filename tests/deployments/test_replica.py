"""One replica in this process, with a real engine: when it calls itself healthy, and how it goes on
after a fetch ahead has failed. Each promise once more with its line taken out.

The router and the node's actor are stand-ins that speak through `.remote`. Not here: Ray
(whole_service/), the actor itself (test_application.py).
"""

import asyncio
import os
import pickle
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

import deployments.replica as replica_side
from adapter_store.ref import AdapterRef
from deployments.adapter_actor import ServedModel
from deployments.config import ModelSettings, ServiceConfig
from deployments.metrics import MetricDelta
from deployments.replica import Replica
from deployments.router import SeatOrders
from model_runner.engine_process import EngineProcess
from model_runner.request import ErrorCode, Request, SamplingParams
from tests.guards import take_out

A, B = AdapterRef("t/a", "/a"), AdapterRef("t/b", "/b")


class Gone:
    """What a replica becomes: Python would call its `__del__` again, which only Serve awaits."""


def remote(call: Callable[..., Awaitable[Any]]) -> SimpleNamespace:
    """A method as a handle offers it."""
    return SimpleNamespace(remote=call)


class FakeRouter:
    def __init__(self) -> None:
        self.orders = SeatOrders(True)
        self.failure: Exception | None = None
        self.heard: list[tuple[Any, MetricDelta]] = []
        self.claim, self.report = remote(self._claim), remote(self._report)
        self.release = remote(self._release)

    async def _claim(self, model: str, replica_id: str, node_id: str) -> str:
        return f"{model}-0"

    async def _report(self, view: object, delta: MetricDelta) -> SeatOrders:
        self.heard.append((view, delta))
        if self.failure is not None:
            raise self.failure
        return self.orders

    async def _release(self, seat: str, replica_id: str) -> None: ...


class FakeActors:
    """The actors that a replica makes one after the other; the next call of one may fail."""

    def __init__(self) -> None:
        self.num_made = 0
        self.failure: Exception | None = None
        self.asked: list[tuple[int, list[AdapterRef]]] = []
        self.judged: list[tuple[int, ServedModel]] = []

    def make(self) -> SimpleNamespace:
        self.num_made += 1
        number = self.num_made

        async def prefetch(model: str, refs: list[AdapterRef]) -> None:
            self.asked.append((number, refs))
            failure, self.failure = self.failure, None
            if failure is not None:
                raise failure

        async def take_loads(model: str) -> tuple[dict[str, dict[str, float]], int]:
            return {"loads": {"remote": 1}, "load_seconds": {"remote": 0.5}}, 0

        async def validate(uri: str, served: ServedModel, root: str) -> dict[str, Any]:
            failure, self.failure = self.failure, None
            if failure is not None:
                raise failure
            self.judged.append((number, served))
            return {"uri": uri, "root": root, "served": True}

        return SimpleNamespace(
            prefetch=remote(prefetch), take_loads=remote(take_loads), validate=remote(validate)
        )


@pytest.fixture
def router() -> FakeRouter:
    return FakeRouter()


@pytest.fixture
def actors() -> FakeActors:
    return FakeActors()


@pytest.fixture
async def replica(
    demo_config: ServiceConfig,
    router: FakeRouter,
    actors: FakeActors,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Replica]:
    monkeypatch.setattr(replica_side, "_identity", lambda: ("r1", "node"))
    monkeypatch.setattr(replica_side, "REPORT_PERIOD_S", 3600.0)  # the tests report by hand
    one = await make_replica(demo_config, demo_config.models[0], router, tmp_path)
    one._make_actor = actors.make  # type: ignore[method-assign]
    while not router.heard:
        await asyncio.sleep(0.005)
    router.heard.clear()
    yield one
    await end(one)


async def make_replica(
    config: ServiceConfig, settings: ModelSettings, router: FakeRouter, folder: Path
) -> Replica:
    one = Replica.__new__(Replica)
    await one.__init__(settings, config.adapters, str(folder / "tier"), 0.02, router)  # type: ignore
    return one


async def end(replica: Replica) -> None:
    await replica.__del__()
    replica.__class__ = Gone  # type: ignore[assignment]


async def report(replica: Replica) -> None:
    """One report, and what it set going."""
    await replica._report()
    await asyncio.gather(*replica._fetch_tasks)


async def is_ill(replica: Replica) -> str:
    """Why the replica says it must be replaced; "" = it is well."""
    try:
        await replica.check_health()
    except RuntimeError as error:
        return str(error)
    return ""


async def test_a_replica_that_lost_its_seat_is_ill(replica: Replica, router: FakeRouter) -> None:
    await report(replica)
    assert not await is_ill(replica)
    router.orders = SeatOrders(False)
    await report(replica)
    assert "demo-0 is held by another" in await is_ill(replica)
    router.orders = SeatOrders(True)  # nobody took it after all
    await report(replica)
    assert not await is_ill(replica)


async def test_a_replica_without_its_engine_is_ill(replica: Replica) -> None:
    assert not await is_ill(replica)
    await asyncio.to_thread(replica._loop.stop)
    assert "engine is not running" in await is_ill(replica)


async def test_an_engine_in_a_child_process_serves_and_its_death_is_noticed(
    demo_config: ServiceConfig, router: FakeRouter, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(replica_side, "_identity", lambda: ("r1", "node"))
    settings = demo_config.models[0].model_copy(update={"engine_process": True})
    replica = await make_replica(demo_config, settings, router, tmp_path)
    try:
        loop = replica._loop
        assert isinstance(loop, EngineProcess)
        assert loop.traits.targets and loop.traits.dtype is not None  # for the node's actor
        request = Request("r", (5, 6, 7), SamplingParams(max_tokens=4, ignore_eos=True))
        outputs = [output async for message in replica.generate(request) for output in message]
        assert sum(len(output.new_token_ids) for output in outputs) == 4
        os.kill(loop.pid, signal.SIGKILL)
        while not await is_ill(replica):
            await asyncio.sleep(0.01)
    finally:
        await end(replica)


async def test_it_takes_so_many_requests_and_what_is_said_about_them(
    demo_config: ServiceConfig, router: FakeRouter, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(replica_side, "_identity", lambda: ("r1", "node"))
    settings = demo_config.models[0].model_copy(update={"max_ongoing_requests": 2})
    replica = await make_replica(demo_config, settings, router, tmp_path)
    endless = SamplingParams(max_tokens=400, ignore_eos=True)
    try:
        requests = [Request(name, (5, 6, 7), endless) for name in "abc"]
        streams = [replica.generate(request) for request in requests]
        for stream in streams[:2]:
            await anext(stream)
        ((refusal,),) = [message async for message in streams[2]]
        assert refusal.error_code is ErrorCode.OVERLOADED
        assert await replica.recall("c") is None, "nothing was begun"
        assert await replica.recall("a")
        async for _ in streams[0]:
            pass
        stream = replica.generate(requests[2])
        (first,) = await anext(stream)
        assert first.error_code is None
        for left in (stream, streams[1]):
            await left.aclose()
    finally:
        await end(replica)


async def what_failed_is_tried_again(
    replica: Replica, router: FakeRouter, actors: FakeActors, failure: Exception
) -> None:
    """An actor that died, or gave up: the refs are asked for again, of a new actor."""
    router.orders = SeatOrders(True, (A, B))
    actors.failure = failure
    await report(replica)
    assert actors.asked == [(1, [A, B])]
    await report(replica)
    assert actors.asked[1:] == [(2, [A, B])]
    await report(replica)
    assert len(actors.asked) == 2, "what was fetched is not asked for again"
    assert not await is_ill(replica)


FAILURES = [RuntimeError("the actor died"), TimeoutError("gave up"), ValueError("of its own")]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda e: type(e).__name__)
async def test_what_failed_is_tried_again(
    replica: Replica, router: FakeRouter, actors: FakeActors, failure: Exception
) -> None:
    await what_failed_is_tried_again(replica, router, actors, failure)


async def test_an_actor_that_cannot_be_made_is_tried_again(
    replica: Replica, router: FakeRouter, actors: FakeActors
) -> None:
    def fail() -> None:
        raise RuntimeError("no place on this node")

    make, replica._make_actor = replica._make_actor, fail  # type: ignore[method-assign]
    router.orders = SeatOrders(True, (A,))
    await report(replica)
    replica._make_actor = make  # type: ignore[method-assign]
    await report(replica)
    assert actors.asked == [(1, [A])]


async def test_a_report_that_was_lost_is_sent_again_as_it_was(
    replica: Replica, router: FakeRouter
) -> None:
    """Its number tells the router whether it had it; what is new meanwhile goes with the next."""
    router.failure = ActorDiedError()
    with pytest.raises(ActorDiedError):
        await report(replica)
    request = Request("r", (5, 6, 7), SamplingParams(max_tokens=3, ignore_eos=True))
    outputs = [o async for message in replica.generate(request) for o in message]
    assert outputs[-1].num_output_tokens == 3
    router.failure = None
    await report(replica)
    lost, again = (delta for _, delta in router.heard)
    assert lost == again and again.number == 2 and again.source == "r1"
    await report(replica)
    delta = router.heard[-1][1]
    assert delta.number == 3
    assert (("moe_engine_delivered_tokens_total", ("demo",)), 3) in delta.counters


async def test_what_was_counted_last_is_told_before_it_stops(
    demo_config: ServiceConfig, router: FakeRouter, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Also after a report that was under way, and from a replica whose router is gone."""
    monkeypatch.setattr(replica_side, "_identity", lambda: ("r1", "node"))
    monkeypatch.setattr(replica_side, "REPORT_PERIOD_S", 3600.0)
    replica = await make_replica(demo_config, demo_config.models[0], router, tmp_path)
    while not router.heard:
        await asyncio.sleep(0.005)
    under_way = replica._outbox.next(lambda: replica._count(replica._loop.stats()))
    request = Request("r", (5, 6, 7), SamplingParams(max_tokens=3, ignore_eos=True))
    assert [message async for message in replica.generate(request)]
    await end(replica)
    told, last = (delta for _, delta in router.heard[-2:])
    assert told == under_way and last.number == told.number + 1
    assert (("moe_engine_delivered_tokens_total", ("demo",)), 3) in last.counters
    replica = await make_replica(demo_config, demo_config.models[0], router, tmp_path)
    router.failure = ActorDiedError()
    await end(replica)
    assert not replica._loop.alive


async def test_it_reports_on_after_a_failure_of_any_kind(
    demo_config: ServiceConfig, router: FakeRouter, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(replica_side, "_identity", lambda: ("r1", "node"))
    monkeypatch.setattr(replica_side, "REPORT_PERIOD_S", 0.005)
    router.failure = RuntimeError("Unexpected error (StatusCode.INTERNAL): what gRPC raises.")
    replica = await make_replica(demo_config, demo_config.models[0], router, tmp_path)
    try:
        async with asyncio.timeout(10):
            while len(router.heard) < 2:
                await asyncio.sleep(0.005)
    finally:
        await end(replica)


async def test_a_report_does_not_grow_with_tenants(replica: Replica, router: FakeRouter) -> None:
    for i in range(3):
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        request = Request(f"r{i}", (5, 6, 7), sampling, tenant_id=f"tenant-{i}")
        assert [o async for o in replica.generate(request)]
    while len((await replica.stats()).by_tenant) < 3:
        await asyncio.sleep(0.005)
    await report(replica)
    assert b"tenant-" not in pickle.dumps(router.heard[-1])


async def test_what_the_actor_loaded_is_counted(replica: Replica, router: FakeRouter) -> None:
    router.orders = SeatOrders(True, (A,))
    await report(replica)
    await report(replica)
    counters = dict(router.heard[-1][1].counters)
    assert counters[("moe_adapter_loads_total", ("demo", "remote"))] == 1
    assert counters[("moe_adapter_load_seconds_total", ("demo", "remote"))] == 0.5


async def test_an_adapter_is_judged_in_the_actor_for_this_engine(
    replica: Replica, actors: FakeActors
) -> None:
    assert await replica.validate("/a", "/") == {"uri": "/a", "root": "/", "served": True}
    ((number, served),) = actors.judged
    assert (number, served.name) == (1, "demo") and Path(served.path).name == "base"
    assert served.pool_bytes == (await replica.stats()).arena_bytes > 0
    actors.failure = FAILURES[0]
    with pytest.raises(type(FAILURES[0])):
        await replica.validate("/a", "/")
    assert (await replica.validate("/a", "/") or {})["served"] and actors.judged[-1][0] == 2


async def test_only_news_are_fetched(
    replica: Replica, router: FakeRouter, actors: FakeActors
) -> None:
    for homes in ((A,), (A, B), (B,), (B,), (A, B)):
        router.orders = SeatOrders(True, homes)
        await report(replica)
    assert actors.asked == [(1, [A]), (1, [B]), (1, [A])], "A may have left the tier meanwhile"


@pytest.mark.parametrize(
    ("name", "line", "instead"),
    [
        ("_prefetch", "except Exception as exc", "except KeyError as exc"),
        ("_prefetch", "self._actor = None", "pass"),
        ("_prefetch", "self._wanted.difference_update(refs)", "pass"),
    ],
)
async def test_it_is_not_tried_again_without(
    name: str, line: str, instead: str, replica: Replica, router: FakeRouter, actors: FakeActors,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    take_out(monkeypatch, Replica, name, line, instead)
    with pytest.raises((AssertionError, RuntimeError)):
        await what_failed_is_tried_again(replica, router, actors, FAILURES[0])


@pytest.mark.parametrize(
    ("line", "check"),
    [
        ("if not self._loop.alive:", test_a_replica_without_its_engine_is_ill),
        ("if self._seat_lost:", test_a_replica_that_lost_its_seat_is_ill),
    ],
)
async def test_it_calls_itself_well_without(
    line: str, check: Callable[..., Awaitable[None]], replica: Replica, router: FakeRouter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    take_out(monkeypatch, Replica, "check_health", line, "if False:")
    others = (router,) if check is test_a_replica_that_lost_its_seat_is_ill else ()
    with pytest.raises(AssertionError):
        await check(replica, *others)
