"""Replicas and ingresses without Ray, around the real `PlacementRequestRouter`.

An ingress goes through the steps of Serve's own `route_and_send_request`: choose, send, be accepted
or rejected by what the replica has at the moment, be told when a request ends.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from ray import ActorID
from ray.exceptions import ActorUnavailableError
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID
from ray.serve.request_router import PendingRequest

from adapter_store.ref import AdapterRef
from deployments.placement.view import Place
from deployments.request_router import PlacementRequestRouter
from deployments.spill import stream_near_home
from model_runner.request import ErrorCode, FinishReason, Request, RequestOutput

DEPLOYMENT = DeploymentID("Replica-m", "app")


@dataclass
class FakeReplica:
    """slots  of adapters: loads fill them, only evictions empty them;  served  what came here
    num_asked  how often it was asked for its load;  is_refusing  nothing reaches it"""

    seat: str
    max_ongoing_requests: int = 100
    slots: int = 8
    ongoing: int = 0
    resident: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    served: list[str] = field(default_factory=list)
    is_silent: bool = False
    is_refusing: bool = False
    num_asked: int = 0
    evictions: int = 0
    spilled_evictions: int = 0

    def __post_init__(self) -> None:
        self.replica_id = ReplicaID(self.seat, DEPLOYMENT)
        self.replica_metadata = {"seat": self.seat}
        self.routing_stats: dict[str, Any] = {}
        self.tell_stats()

    def tell_stats(self) -> None:
        """What routers know of it from now on, until the next time."""
        free = self.slots - len(self.resident)
        self.routing_stats = {"resident": list(self.resident), "free_slots": free}

    async def get_queue_len(self, *, deadline_s: float) -> int:
        self.num_asked += 1
        if self.is_refusing:
            raise ActorUnavailableError("connection refused", b"0" * ActorID.size())
        await asyncio.sleep(3600 if self.is_silent else 0)
        return self.ongoing

    def has_room(self, adapter_id: str) -> bool:
        return adapter_id in self.resident or len(self.resident) < self.slots

    def take_in(self, adapter_id: str, spilled: bool) -> None:
        if adapter_id in self.resident:
            self.resident.remove(adapter_id)
        else:
            self.loads.append(adapter_id)
            if len(self.resident) == self.slots:
                self.evictions += 1
                self.spilled_evictions += spilled
                self.resident.pop(0)
        self.resident.append(adapter_id)


class Ingress:
    """One process' request router, and calls through it."""

    def __init__(self, replicas: Iterable[FakeReplica], spill_after_s: float = 0.25) -> None:
        self.router = PlacementRequestRouter(
            deployment_id=DEPLOYMENT,
            handle_source=DeploymentHandleSource.REPLICA,
            use_replica_queue_len_cache=True,
            initial_backoff_s=0.001,
            max_backoff_s=0.004,
        )
        self.refusals = 0
        self.router.initialize_state(spill_after_s=spill_after_s)
        self.router.update_replicas(list(replicas))  # type: ignore[arg-type]

    async def choose(self, pending: PendingRequest, is_retry: bool = False) -> FakeReplica:
        chosen: Any = await self.router._choose_replica_for_request(pending, is_retry=is_retry)
        return chosen  # type: ignore[no-any-return]

    async def send(self, place: Place, work_s: float, internal_id: str = "i") -> FakeReplica:
        """A request that a replica works at for `work_s`; where that was.

        Errors: NoRoom, if it spilled to a replica without room.
        """
        pending = pending_request(place, internal_id)
        router, is_retry = self.router, False
        while True:
            replica = await self.choose(pending, is_retry)
            router.on_send_request(replica.replica_id)
            await asyncio.sleep(0)  # on its way
            is_retry = replica.ongoing >= replica.max_ongoing_requests
            if not is_retry:
                replica.ongoing += 1
            router.on_new_queue_len_info(replica.replica_id, replica.ongoing)
            if not is_retry:
                break
        try:
            spilled = pending.kwargs.get("spilled", False)
            if spilled and not replica.has_room(place.adapter_id):
                self.refusals += 1
                raise NoRoom
            replica.served.append(place.adapter_id)
            replica.take_in(place.adapter_id, spilled)
            await asyncio.sleep(work_s)
            return replica
        finally:
            replica.ongoing -= 1
            router.decrement_queue_len_cache(replica.replica_id)

    async def ask(self, place: Place, work_s: float) -> None:
        """The same through `stream_near_home`, as ingresses do."""

        async def stream(request: Request, place: Place) -> AsyncGenerator[RequestOutput, None]:
            try:
                await self.send(place, work_s)
                yield RequestOutput("r", finish_reason=FinishReason.STOP)
            except NoRoom:
                yield RequestOutput(
                    "r", finish_reason=FinishReason.ERROR, error_code=ErrorCode.NO_ROOM
                )

        request = Request("r", (1,), adapter=AdapterRef(place.adapter_id, "u"))
        outputs = [output async for output in stream_near_home(stream, request, place)]
        assert [output.finish_reason for output in outputs] == [FinishReason.STOP]


class NoRoom(Exception):
    """As the engine refuses it."""


def pending_request(
    place: Place | None, internal_id: str = "i", method: str = "generate"
) -> PendingRequest:
    metadata: Any = SimpleNamespace(
        internal_request_id=internal_id,
        request_id="r",
        multiplexed_model_id="",
        call_method=method,
    )
    return PendingRequest(args=[], kwargs={"place": place}, metadata=metadata)
