"""Follows the placement in every ingress: a request goes to its home seat, later to a spill seat,
never by chance, and never to a replica that it was lost on.

Loaded by Ray Serve in each process that calls the replicas, by value: no state of the module is
shared with anybody.
Ray's own loop hands a chosen replica to the oldest waiting request, which would undo the placement
(and a fan-out
inside one HTTP request would hang), so `_choose_replica_for_request` is overridden, as Ray's
CapacityQueueRouter does.
"""

import time
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica


class PlacementRequestRouter(RequestRouter):
    """Reads `place=` (a `Place`) of the call and the seat that each replica told Serve when it
    became ready.

    spill_after_s  how long a request waits for a full home before its spill seats may take it
    """

    def initialize_state(self, spill_after_s: float = 0.25, **_: Any) -> None:
        self._spill_after_s = spill_after_s

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        attempt = 0
        while True:
            while not self._replicas:
                self._replicas_updated_event.clear()
                await self._replicas_updated_event.wait()
            late = time.time() - pending_request.created_at >= self._spill_after_s
            for candidates in filter(None, self._ranks(pending_request, late)):
                chosen = await self._select_from_candidate_replicas(candidates, attempt)
                if chosen is not None:
                    return chosen
            await self._backoff(attempt)
            attempt += 1

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        """Tell the caller, who is in this process, which replica took its call."""
        place = pending_request.kwargs.get("place")
        if place is not None:
            place.taken_by.append(replica_id.to_full_id_str())

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Serve's ordinary hook: calls without a request of ours in hand."""
        if pending_request is None:
            return [candidate_replicas]
        return self._ranks(pending_request, late=True)

    def _ranks(self, pending_request: PendingRequest, late: bool) -> list[list[RunningReplica]]:
        """Replicas to try, rank by rank; inside a rank the least loaded takes it."""
        replicas = list(self._replicas.values())
        place = pending_request.kwargs.get("place")
        if place is None:
            return [replicas]
        replicas = [r for r in replicas if r.replica_id.to_full_id_str() not in place.avoid]
        by_seat = {r.replica_metadata.get("seat"): r for r in replicas}
        homes = [by_seat[seat] for seat in place.homes if seat in by_seat]
        spill = [by_seat[seat] for seat in place.spill if seat in by_seat]
        if not homes:  # dead, or the map is old: the next in order at once
            return [[replica] for replica in spill] + [replicas]
        ranks = [homes]
        if late:
            ranks += [[r] for r in spill if _takes(r, place.adapter_id)]
        return ranks


def _takes(replica: RunningReplica, adapter_id: str) -> bool:
    """Whether a replica can serve the adapter without evicting another one."""
    stats = replica.routing_stats
    return adapter_id in stats.get("resident", ()) or stats.get("free_slots", 0) > 0
