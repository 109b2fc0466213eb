"""One engine in one actor: streams its outputs, reports to the router, dies when its engine does.

No HTTP, no text.
"""

import asyncio
import logging
import sys
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle

from adapter_store.ref import AdapterRef
from deployments.adapter_actor import ServedModel, adapter_store_actor
from deployments.autoscaling import Demand
from deployments.catalog import Answer, Report
from deployments.catalog_link import CatalogLink, catalog_actor, catalog_name
from deployments.config import AdapterSettings, ModelSettings
from deployments.host_tier import HostTierFolder
from deployments.kept_answers import KeptAnswers
from deployments.metrics import (
    LAST_WORDS_S,
    MetricDelta,
    MetricLog,
    Outbox,
    engine_delta,
    loads_delta,
)
from deployments.placement.view import Place, ReplicaView
from deployments.router import SeatOrders
from deployments.serve_flags import open_log
from deployments.turns import take_turns
from model_runner.engine_face import EngineFace
from model_runner.request import ErrorCode, FinishReason, Request, RequestOutput
from model_runner.stats import EngineStats

if TYPE_CHECKING:
    from adapter_store.sources.source import S3Options
    from model_runner.engine_loop import Steppable

REPORT_PERIOD_S = 1.0
_LOOK_PATIENCE_S = 10.0
_FULL = "all places of this replica are taken"
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
        from model_runner.engine_loop import EngineLoop
        from model_runner.engine_process import SWITCH_INTERVAL_S, EngineProcess

        open_log(_log)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._model = settings.name
        self._config = settings.engine_config(host_cache_dir)
        self._s3 = _s3_options(adapters)
        endpoint_url, region, access_key, _ = adapters.s3.options()
        self._catalog_name = catalog_name(endpoint_url, region, access_key)
        # A folder that the operator named is the operator's; ours goes when its last replica does.
        ours = self._config.host_cache_dir == host_cache_dir and not adapters.host_cache_dir
        self._folder = HostTierFolder(host_cache_dir) if ours else None
        self._min_gap_s = min_gap_s
        self._router = router
        self._actor: Any = None
        self._catalog: Any = None
        self._wanted: set[AdapterRef] = set()
        self._fetches = asyncio.Lock()
        self._fetch_tasks: set[asyncio.Task[None]] = set()
        self._log, self._counted = MetricLog(), EngineStats()
        self._seat_lost = False
        self._kept = KeptAnswers()
        # Serve has CONTROL_PLACES more: what is said about requests gets in where these are taken.
        self._places = asyncio.Semaphore(settings.max_ongoing_requests)

        face = EngineProcess if settings.engine_process else EngineLoop
        self._loop: EngineFace = face(self._engine_maker())
        await asyncio.to_thread(self._loop.start)
        self._replica_id, self._node_id = _identity()
        self._outbox = Outbox(self._replica_id)
        self._seat: str = await router.claim.remote(self._model, self._replica_id, self._node_id)
        self._tasks = [
            asyncio.create_task(take_turns(what, turn, REPORT_PERIOD_S))
            for what, turn in (
                ("the line to the router", self._report),
                ("looking for callers that are dead", self._end_orphans),
            )
        ]
        store = self._loop.traits.store
        if store is not None:  # in a child process: that store asks its sources itself
            link = CatalogLink(
                self._replica_id,
                self._node_id,
                store.contents,
                store.cache.digests,
                self._look,
                self._exchange,
            )
            self._tasks.append(asyncio.create_task(link.run()))

    def _engine_maker(self) -> "Callable[[], Steppable]":
        # The engine, and torch with it, is imported by replicas and by no other process.
        from model_runner.engine import Engine

        return partial(Engine, self._config, self._s3)

    async def generate(
        self, request: Request, place: Place | None = None, spilled: bool = False
    ) -> AsyncGenerator[list[RequestOutput], None]:
        """Run a request; closing this aborts it, and so does the death of the caller that `place`
        names, after a while. OVERLOADED: all places are taken, and nothing was begun.

        spilled  it came here from a full home: nobody loses an adapter slot for it
        """
        if self._places.locked():  # two ingresses saw the same last place
            error, reason = ErrorCode.OVERLOADED, FinishReason.ERROR
            yield [
                RequestOutput(
                    request.request_id, finish_reason=reason, error_code=error, error=_FULL
                )
            ]
            return
        if spilled:
            request = replace(request, may_evict=False)
        caller = place.caller if place is not None else ""
        noted = self._kept.note(request, self._loop.messages(request, self._min_gap_s), caller)
        async with self._places, aclosing(noted) as messages:
            async for message in messages:
                yield message

    async def recall(
        self, request_id: str, place: Place | None = None
    ) -> list[RequestOutput] | None:
        """End a request here, and say all that was told of it, for who goes on with it; None: it is
        not known. `place` was for the request router."""
        found = self._kept.recall(request_id)
        if found is None:
            return None
        running, outputs = found
        self._loop.abort(running)
        return outputs

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """End one sequence of a request, or all; an id that is not here is passed over."""
        self._loop.abort(request_id, index)

    async def validate(self, uri: str, root: str) -> dict[str, Any] | None:
        """What would come of an adapter here, as `adapter_store.validation.as_values` tells it.

        The node's actor reads it: the engine's process has other work. None: that actor judges
        another one just now. `uri` is read as it stands, `root` is as an AdapterRef has it.
        """
        served = ServedModel(
            self._model,
            self._config.model,
            self._loop.stats().arena_bytes if self._config.max_loras else 0,
            self._loop.traits.num_gpus,
        )
        try:
            actor = await self._node_actor()
            report: dict[str, Any] | None = await actor.validate.remote(uri, served, root)
        except Exception:
            self._actor = None
            raise
        return report

    async def stats(self) -> EngineStats:
        """The engine's latest snapshot."""
        return self._loop.stats()

    async def view(self) -> ReplicaView:
        """What it would report now."""
        return self._view()

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

    async def _end_orphans(self) -> None:
        """Nobody closes the streams of an ingress that died: Ray runs them to their ends."""
        callers = self._kept.callers()
        dead = await asyncio.to_thread(_dead_among, callers) if callers else set()
        for request_id in self._kept.orphans(dead):
            self._loop.abort(request_id)

    async def _tell_router(self) -> SeatOrders:
        adapters, used = await asyncio.to_thread(_census, self._config.host_cache_dir)
        view = self._view()
        # Tenants are counted by ingresses: thousands of them do not make this report longer.
        stats = replace(
            view.stats,
            host_adapters=adapters,
            host_used_bytes=used,
            host_bytes=self._config.host_cache_bytes,
            by_tenant={},
        )
        delta = self._outbox.next(lambda: self._count(stats))
        orders: SeatOrders = await self._router.report.remote(replace(view, stats=stats), delta)
        self._outbox.arrived(delta)
        return orders

    async def _report(self) -> None:
        orders = await self._tell_router()
        self._seat_lost = not orders.seated
        self._wanted.intersection_update(orders.homes)  # who comes back is fetched again
        news = [ref for ref in orders.homes if ref not in self._wanted]
        if news:  # apart from the reports: a seat is lost if they stop
            self._wanted.update(news)
            task = asyncio.create_task(self._prefetch(news))
            self._fetch_tasks.add(task)
            task.add_done_callback(self._fetch_tasks.discard)

    def _count(self, stats: EngineStats) -> MetricDelta:
        self._log.merge(engine_delta(self._model, self._counted, stats))
        self._counted = stats
        return self._log.drain()

    async def _prefetch(self, refs: list[AdapterRef]) -> None:
        """Have the node's actor fetch adapters of this seat, so that requests find them near."""
        try:
            actor = await self._node_actor()
            await actor.prefetch.remote(self._model, refs)
            growth = await actor.take_loads.remote(self._model)
            self._log.merge(loads_delta(self._model, *growth))
        except Exception as exc:
            # It died with the replica that made it, or gave up: the next try makes one if needed.
            _log.warning("nothing was fetched ahead: %s", exc)
            self._actor = None
            self._wanted.difference_update(refs)

    async def _look(self, uris: list[str]) -> dict[str, str]:
        """Look at uris for the whole service, in the node's actor, which has the time for it."""
        try:
            actor = await self._node_actor()
            async with asyncio.timeout(_LOOK_PATIENCE_S):
                found: dict[str, str] = await actor.look.remote(self._model, uris)
        except BaseException:
            self._actor = None
            raise
        return found

    async def _exchange(self, report: Report) -> Answer:
        """A turn with the catalog; after a failure the next one finds or makes it anew."""
        if self._catalog is None:
            self._catalog = await asyncio.to_thread(catalog_actor, self._catalog_name)
        try:
            answer: Answer = await self._catalog.exchange.remote(report)
        except BaseException:
            self._catalog = None
            raise
        return answer

    async def _node_actor(self) -> Any:
        async with self._fetches:
            if self._actor is None:
                self._actor = await asyncio.to_thread(self._make_actor)
            return self._actor

    def _make_actor(self) -> Any:
        config = self._config
        actor = adapter_store_actor(config.host_cache_dir.replace("/", "_"), self._node_id)
        ray.get(
            actor.register.remote(
                self._model,
                self._loop.traits.targets,
                self._loop.traits.dtype,
                config.max_lora_rank,
                config.host_cache_dir,
                config.host_cache_bytes,
                self._s3,
                config.model,
            )
        )
        return actor

    async def __del__(self) -> None:
        """Serve awaits this when the replica is stopped in order, after its streams."""
        if not hasattr(self, "_seat"):
            return
        for task in (*self._tasks, *self._fetch_tasks):
            task.cancel()
        # Whatever becomes of its last words, the engine must be stopped.
        with suppress(Exception):
            async with asyncio.timeout(LAST_WORDS_S):
                await self._tell_router()  # perhaps a report that was under way
                await self._tell_router()
        with suppress(Exception):
            async with asyncio.timeout(LAST_WORDS_S):
                await self._router.release.remote(self._seat, self._replica_id)
        await asyncio.to_thread(self._loop.stop)
        if self._folder is not None:
            self._folder.leave()


def _s3_options(adapters: AdapterSettings) -> "S3Options":
    from adapter_store.sources.source import S3Options

    endpoint_url, region, access_key, secret_key = adapters.s3.options()
    return S3Options(endpoint_url, region, access_key, secret_key)


def _census(folder: str) -> tuple[int, int]:
    from adapter_store.host_cache import census

    return census(Path(folder))


def _dead_among(callers: Collection[str]) -> set[str]:
    """Actors of Serve that are no more; one about which nothing can be learned counts as living."""
    dead = set()
    for name in callers:
        try:
            ray.get_actor(name, namespace="serve")
        except ValueError:
            dead.add(name)
        except RayError as exc:
            _log.warning("whether %s lives is not known: %s", name, exc)
    return dead


def _identity() -> tuple[str, str]:
    """Names of this replica and of its node."""
    replica_id: str = serve.get_replica_context().replica_id.unique_id
    return replica_id, ray.get_runtime_context().get_node_id()
