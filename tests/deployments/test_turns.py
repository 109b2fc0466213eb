"""Work that a process does turn by turn goes on after a turn that failed, whatever the failure was.

Over Ray's own transport a call raises one thing, over gRPC others (a RuntimeError, a TimeoutError,
an AioRpcError): a loop that knows the first kind alone would end in silence.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from adapter_store.contents import KnownContents
from deployments import catalog_link, router_link, usage
from deployments.catalog import Answer, Report
from deployments.catalog_link import CatalogLink
from deployments.ingress import Ingress
from deployments.metrics import OUTPUT_TOKENS, MetricDelta, MetricLog
from deployments.turns import take_turns
from deployments.usage import UsageLog, UsageWriter
from deployments.usage_store import FolderStore
from tests.deployments.conftest import Face
from tests.deployments.test_usage import RECORD, end, records_of

FAILURE = RuntimeError("Unexpected error (StatusCode.INTERNAL): what gRPC raises.")


@asynccontextmanager
async def running(work: Awaitable[None]) -> AsyncIterator["asyncio.Future[None]"]:
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def is_reached(happened: Callable[[], bool], task: "asyncio.Future[None]") -> None:
    async with asyncio.timeout(10):
        while not happened():
            assert not task.done(), task
            await asyncio.sleep(0.002)


def once_failing(then: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """A call that fails the first time."""
    failures = [FAILURE]

    async def call(*args: Any, **named: Any) -> Any:
        if failures:
            raise failures.pop()
        return await then(*args, **named)

    return call


async def test_a_row_of_failures_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    plan = ["well", "ill", "ill", "well", "ill", "well"]
    taken: list[str] = []

    async def turn() -> None:
        taken.append(plan[len(taken) % len(plan)])
        if taken[-1] == "ill":
            raise FAILURE

    with caplog.at_level(logging.INFO, "ray.serve"):
        async with running(take_turns("the work", turn, 0.0)) as task:
            await is_reached(lambda: len(taken) >= len(plan), task)
    told = [line for line in caplog.messages if "the work" in line][:4]
    assert [("fails" in line, "again" in line) for line in told] == [
        (True, False),
        (False, True),
    ] * 2
    assert "StatusCode.INTERNAL" in told[0]


async def test_counts_and_the_map_outlive_a_call_that_failed(
    face: Face, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_link, "SYNC_PERIOD_S", 0.0)
    seen: list[Any] = []

    async def sync(*args: Any) -> None:
        seen.append(args)

    async def echo(value: Any) -> Any:
        return value

    router: Any = SimpleNamespace(
        sync=SimpleNamespace(remote=once_failing(sync)),
        metric_tenants=SimpleNamespace(remote=echo),
    )
    face.frontend.traffic["pirate/pirate"] = 9
    face.frontend.log.count(OUTPUT_TOKENS, ("demo", "pirate"), 5)
    async with running(router_link.RouterLink(face.frontend, router).run()) as task:
        await is_reached(lambda: bool(seen), task)
    _, tokens, delta, _ = seen[0]
    assert tokens == {"pirate/pirate": 9} and len(delta.counters) == 1


async def test_what_was_counted_last_is_told_before_an_ingress_stops(face: Face) -> None:
    seen: list[MetricDelta] = []

    async def sync(*args: Any) -> None:
        seen.append(args[2])

    async def echo(value: Any) -> Any:
        return value

    router: Any = SimpleNamespace(
        sync=SimpleNamespace(remote=sync), metric_tenants=SimpleNamespace(remote=echo)
    )
    link = router_link.RouterLink(face.frontend, router)
    under_way = link._outbox.next(face.frontend.log.drain)
    face.frontend.log.count(OUTPUT_TOKENS, ("demo", "pirate"), 5)
    ingress: Any = SimpleNamespace(_frontend=face.frontend, _link=link, _tasks=[], _writer=None)
    stop: Any = Ingress.__mro__[1].__dict__["__del__"]  # Serve's own lies around it
    await stop(ingress)
    assert seen[0] == under_way and [value for _, value in seen[1].counters] == [5]
    router.sync.remote = once_failing(sync)  # nor does a router in trouble keep it
    await stop(ingress)


async def test_a_router_in_trouble_is_no_bug_of_the_ingress(face: Face) -> None:
    async def fail(*_: Any) -> None:
        raise FAILURE

    router: Any = SimpleNamespace(metric_tenants=SimpleNamespace(remote=fail))
    link = router_link.RouterLink(face.frontend, router)
    with pytest.raises(router_link.ApiError, match="router does not answer"):
        await link.metrics()
    assert await link.missing() == ["demo"]


async def test_the_line_to_the_catalog_outlives_a_host_tier_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(catalog_link, "PERIOD_S", 0.0)
    contents, reports = KnownContents(), list[Report]()
    failures = [OSError("no such folder")]

    def held() -> set[str]:
        if failures:
            raise failures.pop()
        return {"digest"}

    async def send(report: Report) -> Answer:
        reports.append(report)
        return Answer()

    async def look(uris: list[str]) -> dict[str, str]:
        return {}

    contents.want("s3://b/a")
    async with running(CatalogLink("r", "n", contents, held, look, send).run()) as task:
        await is_reached(lambda: bool(reports), task)
    assert reports[0].held == {"digest"} and reports[0].wanted == {"s3://b/a"}


async def test_usage_is_written_after_a_failure_that_no_store_should_raise(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "FLUSH_S", 0.0)

    class Buggy(FolderStore):
        failures = [FAILURE]

        def put_new(self, name: str, body: bytes) -> None:
            if self.failures:
                raise self.failures.pop()
            super().put_new(name, body)

    store, log = Buggy(str(tmp_path)), UsageLog()
    end(log, RECORD)
    async with running(UsageWriter(log, store, MetricLog()).run()) as task:
        await is_reached(lambda: bool(records_of(store)), task)
