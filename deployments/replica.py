"""One engine in one actor: streams its outputs, reports to the router, dies when its engine does.

No HTTP, no text.
"""

import asyncio
import logging
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from adapter_store.ref import AdapterRef
from deployments.adapter_actor import adapter_store_actor
from deployments.autoscaling import Demand
from deployments.coalescing import coalesce
from deployments.config import AdapterSettings, ModelSettings
from deployments.host_tier import HostTierFolder
from deployments.metrics import engine_delta
from deployments.placement.view import Place, ReplicaView
from deployments.router import SeatOrders
from model_runner.request import Request, RequestOutput
from model_runner.stats import EngineStats

if TYPE_CHECKING:
    from adapter_store.sources.source import S3Options

REPORT_PERIOD_S = 1.0
_TROUBLE = (RayError, RayServeException)  # what a call over a handle may raise of its own
_log = logging.getLogger("ray.serve")


class Replica:
    """The deployment of one base model.

    host_cache_dir  the node's host tier, where neither model nor adapters name one
    min_gap_s       between two messages of one stream
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        settings: ModelSettings,
        adapters: AdapterSettings,
        host_cache_dir: str,
        min_gap_s: float,
        router: DeploymentHandle,
    ) -> None:
        # The engine, and torch with it, is imported in this process and in no other.
        from model_runner.engine import Engine
        from model_runner.engine_loop import EngineLoop

        # The engine's thread must not wait 5 ms, Python's default, for this process' event loop.
        sys.setswitchinterval(5e-5)
        self._model = settings.name
        self._config = settings.engine_config(host_cache_dir)
        self._s3 = _s3_options(adapters)
        # A folder that the operator named is the operator's; ours goes when its last replica does.
        ours = self._config.host_cache_dir == host_cache_dir and not adapters.host_cache_dir
        self._folder = HostTierFolder(host_cache_dir) if ours else None
        self._min_gap_s = min_gap_s
        self._router = router
        self._engine: Engine | None = None
        self._actor: Any = None
        self._wanted: set[AdapterRef] = set()
        self._fetches = asyncio.Lock()
        self._fetch_tasks: set[asyncio.Task[None]] = set()
        self._reported = EngineStats()
        self._seat_lost = False

        def make_engine() -> Engine:
            self._engine = Engine(self._config, self._s3)
            return self._engine

        self._loop = EngineLoop(make_engine)
        await asyncio.to_thread(self._loop.start)
        self._replica_id, self._node_id = _identity()
        self._seat: str = await router.claim.remote(self._model, self._replica_id, self._node_id)
        self._reports = asyncio.create_task(self._report_for_ever())

    async def generate(
        self, request: Request, place: Place | None = None, spilled: bool = False
    ) -> AsyncGenerator[list[RequestOutput], None]:
        """Run a request; closing this aborts it.

        place    was for the request router
        spilled  it came here from a full home: nobody loses an adapter slot for it
        """
        if spilled:
            request = replace(request, may_evict=False)
        stream = cast(AsyncGenerator[RequestOutput, None], self._loop.stream(request))
        async with aclosing(coalesce(stream, self._min_gap_s)) as messages:
            async for message in messages:
                yield message

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """End one sequence of a request, or all; an id that is not here is passed over."""
        self._loop.abort(request_id, index)

    async def stats(self) -> EngineStats:
        """The engine's latest snapshot."""
        return self._loop.stats()

    async def check_health(self) -> None:
        """Serve replaces this replica if it raises."""
        if not self._loop.alive:
            raise RuntimeError("the engine is not running")
        if self._seat_lost:
            raise RuntimeError(f"seat {self._seat} is held by another replica")

    def record_replica_metadata(self) -> dict[str, str]:
        """What request routers need to know once."""
        return {"seat": self._seat}

    def record_routing_stats(self) -> dict[str, Any]:
        """What request routers need to know of now: may a request spill over to this replica?"""
        view = self._view()
        return {
            "resident": [ref.adapter_id for ref in view.resident],
            "free_slots": view.free_slots,
        }

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What the autoscaling policy needs to know of now."""
        return Demand.of(self._loop.stats()).metrics()

    def _view(self) -> ReplicaView:
        stats = self._loop.stats()
        return ReplicaView(self._seat, self._model, self._replica_id, self._node_id, stats)

    async def _report_for_ever(self) -> None:
        while True:
            with suppress(*_TROUBLE):
                await self._report()
            await asyncio.sleep(REPORT_PERIOD_S)

    async def _report(self) -> None:
        view = self._view()
        delta = engine_delta(self._model, self._reported, view.stats)
        # Every tenant ever served is in there, and the router makes nothing of it.
        view = replace(view, stats=replace(view.stats, by_tenant={}))
        orders: SeatOrders = await self._router.report.remote(view, delta)
        self._reported = view.stats
        self._seat_lost = not orders.seated
        news = [ref for ref in orders.homes if ref not in self._wanted]
        if news:  # apart from the reports: a seat is lost if they stop
            self._wanted.update(news)
            task = asyncio.create_task(self._prefetch(news))
            self._fetch_tasks.add(task)
            task.add_done_callback(self._fetch_tasks.discard)

    async def _prefetch(self, refs: list[AdapterRef]) -> None:
        """Have the node's actor fetch adapters of this seat, so that requests find them near."""
        try:
            async with self._fetches:
                if self._actor is None:
                    self._actor = await asyncio.to_thread(self._make_actor)
            await self._actor.prefetch.remote(self._model, refs)
        except Exception as exc:
            # It died with the replica that made it, or gave up: the next try makes one if needed.
            _log.warning("nothing was fetched ahead: %s", exc)
            self._actor = None
            self._wanted.difference_update(refs)

    def _make_actor(self) -> Any:
        assert self._engine is not None
        config = self._config
        actor = adapter_store_actor(config.host_cache_dir.replace("/", "_"), self._node_id)
        ray.get(
            actor.register.remote(
                self._model,
                self._engine.targets,
                self._engine.dtype,
                config.max_lora_rank,
                config.host_cache_dir,
                config.host_cache_bytes,
                self._s3,
            )
        )
        return actor

    async def __del__(self) -> None:
        """Serve awaits this when the replica is stopped in order, after its streams."""
        if not hasattr(self, "_seat"):
            return
        for task in (self._reports, *self._fetch_tasks):
            task.cancel()
        with suppress(*_TROUBLE, TimeoutError):
            await asyncio.wait_for(
                _done(self._router.release.remote(self._seat, self._replica_id)), 1
            )
        await asyncio.to_thread(self._loop.stop)
        if self._folder is not None:
            self._folder.leave()


def _s3_options(adapters: AdapterSettings) -> "S3Options":
    from adapter_store.sources.source import S3Options

    endpoint_url, region, access_key, secret_key = adapters.s3.options()
    return S3Options(endpoint_url, region, access_key, secret_key)


async def _done(response: Any) -> None:
    await response


def _identity() -> tuple[str, str]:
    """Names of this replica and of its node."""
    replica_id: str = serve.get_replica_context().replica_id.unique_id
    return replica_id, ray.get_runtime_context().get_node_id()
