"""Follows the placement in every ingress: a request goes to a home seat, late ones to one spill
seat, never by chance, and never to a replica that it was lost on; one that was only silent, or that
could not be reached just now, is the last choice, and only once it answers again.

Loaded by Ray Serve in each process that calls the replicas, by value: no state of the module is
shared with anybody. Ray's own loop hands a chosen replica to the oldest waiting request, which
would undo the placement (and a fan-out inside one HTTP request would hang), so
`_choose_replica_for_request` is overridden, as Ray's CapacityQueueRouter does.

Ingresses' maps may differ, and yet no more than one seat beyond the homes takes an adapter in: the
spill seat is the first in the adapter's rendezvous order that is no home. Of two maps, each one's
spill seat is either a home in the other, or the other's spill seat too.
"""

import asyncio
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deployments.placement.hash_ring import first_seat
from deployments.placement.view import Place

_COMPARED = 8
"""Of many homes, as the base model has, the least loaded of so many is good enough."""

_OUT_OF_REACH_S = 2.0
"""How long a replica that a call could not reach is the last choice. When a node dies, its
connections break at once; that its actors are dead, Ray may know seconds later."""

_REQUEST = "generate"
"""The method that takes a place until its answer has ended. All others are control calls."""


class _Replica(RunningReplica):
    """One whose load is compared with the places for requests alone."""

    control_places = 0

    @property
    def max_ongoing_requests(self) -> int:
        """How many requests it takes at once."""
        return int(super().max_ongoing_requests) - self.control_places


@dataclass(eq=False)
class _Waiter:
    """A request in its adapter's line.

    late_at  when it may spill;  news  its part in the line may be another now
    """

    late_at: float
    news: asyncio.Event = field(default_factory=asyncio.Event)


class PlacementRequestRouter(RequestRouter):
    """Reads `place=` (a `Place`) of the call and the seat that each replica told Serve when it
    became ready. A call that spills over is told so: `spilled=True`.

    spill_after_s   how long a request waits for full homes before its spill seat may take it
    control_places  of each replica's `max_ongoing_requests`, those that no request takes: other
                    calls go to the first home that answers, full or not
    """

    def initialize_state(
        self, spill_after_s: float = 0.25, control_places: int = 0, **_: Any
    ) -> None:
        self._spill_after_s = spill_after_s
        self._control_places = control_places
        self._by_seat: dict[str, RunningReplica] = {}
        self._first_seats: dict[str, str] = {}  # what was worked out for these seats
        self._rotation = 0
        self._out_of_reach: dict[ReplicaID, float] = {}  # until when
        # Of each adapter's waiting requests only the first asks its full homes again and again, and
        # only one asks the spill seat: a flood costs no more calls than two requests, nor does it
        # keep other adapters' out.
        self._lines: dict[str, deque[_Waiter]] = {}

    def create_replica_wrapper(self, replica_info: Any) -> RunningReplica:
        """Serve's hook for each replica that it tells of."""
        replica = _Replica(replica_info)
        replica.control_places = self._control_places
        return replica

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve's news: replicas that came, went, or have new routing stats."""
        seats = self._by_seat.keys()
        self._by_seat = {
            seat: replica for replica in replicas if (seat := replica.replica_metadata.get("seat"))
        }
        if seats != self._by_seat.keys():
            self._first_seats.clear()
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Serve's news of a replica that a call found dead."""
        self._by_seat = {
            seat: replica
            for seat, replica in self._by_seat.items()
            if replica.replica_id != replica_id
        }
        self._first_seats.clear()
        super().on_replica_actor_died(replica_id)

    def on_replica_actor_unavailable(self, replica_id: ReplicaID) -> None:
        """Serve's news of a replica that a call could not reach."""
        self._out_of_reach[replica_id] = time.monotonic() + _OUT_OF_REACH_S
        super().on_replica_actor_unavailable(replica_id)

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        """Serve's news of a replica that has answered a call."""
        self._out_of_reach.pop(replica_id, None)
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        place = pending_request.kwargs.get("place")
        if pending_request.metadata.call_method != _REQUEST:
            return await self._choose_for_control(place, is_retry)
        pending_request.kwargs.pop("spilled", None)  # of a try that the replica rejected
        name = place.adapter_id if place is not None else ""
        may_spill = place is not None and place.adapter_id and place.may_spill
        late_at = pending_request.created_at + self._spill_after_s if may_spill else float("inf")
        line, me = self._lines.setdefault(name, deque()), _Waiter(late_at)
        if is_retry or (place is not None and place.taken_by):  # it has had its turn before
            line.appendleft(me)
        else:
            line.append(me)
        try:
            chosen = await self._choose_in_turn(pending_request, place, line, me)
        finally:
            line.remove(me)
            for waiter in (line[0], _spiller(line, time.time())) if line else ():
                if waiter is not None:
                    waiter.news.set()
            if not line:
                self._lines.pop(name, None)
        if place is not None:
            # The caller, who is in this process, asks from now on whether it lives: one that stands
            # still neither takes nor rejects the call, and Serve waits for it without a limit.
            place.taken_by.append(chosen.replica_id.to_full_id_str())
        return chosen

    async def _choose_for_control(self, place: Place | None, is_retry: bool) -> RunningReplica:
        """The home, or the least loaded one that answers: one that is full is the one to talk
        to."""
        attempt = int(is_retry)  # it is dead, or even the places beside the requests' are taken
        while True:
            if attempt:
                await self._backoff(attempt - 1)
            homes = (self._homes(place) or self._homes(place, last_choice=True))[:_COMPARED]
            if len(homes) == 1:
                return homes[0]
            found = await self._probe_queue_lens(homes, attempt)
            answered = [(load, replica) for replica, load in found if load is not None]
            if answered:
                return min(answered, key=lambda pair: pair[0])[1]
            attempt += 1

    async def _choose_in_turn(
        self,
        pending_request: PendingRequest,
        place: Place | None,
        line: "deque[_Waiter]",
        me: "_Waiter",
    ) -> RunningReplica:
        attempt = 0
        while True:
            while not self._replicas:
                self._replicas_updated_event.clear()
                await self._replicas_updated_event.wait()
            me.news.clear()
            now = time.time()  # read once: who is not late by it sleeps until it is
            is_first, is_spiller = line[0] is me, _spiller(line, now) is me
            homes = self._homes(place)
            if is_first:
                few = homes[:_COMPARED]
                chosen = await self._select_from_candidate_replicas(few, attempt) if few else None
                if chosen is None and len(few) < len(homes):
                    chosen = await self._select_from_candidate_replicas(homes, attempt)
                last = [] if homes else self._homes(place, last_choice=True)
                if last:
                    chosen = await self._select_if_it_answers(last, attempt)
                if chosen is not None:
                    return chosen
            if is_spiller:
                spill = self._spill(place, homes)
                chosen = await self._select_from_candidate_replicas(spill, attempt)
                if chosen is not None:
                    pending_request.kwargs["spilled"] = True
                    return chosen
            if is_first or is_spiller:
                await self._backoff(attempt)
                attempt += 1
            else:
                early_s = me.late_at - now
                with suppress(TimeoutError):
                    async with asyncio.timeout(early_s if 0 < early_s < float("inf") else None):
                        await me.news.wait()

    async def _select_if_it_answers(
        self, replicas: list[RunningReplica], attempt: int
    ) -> RunningReplica | None:
        """One of these that answers now, whatever it said before."""
        for replica in replicas:
            self._replica_queue_len_cache.invalidate_key(replica.replica_id)
        return await self._select_from_candidate_replicas(replicas, attempt)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Serve's ordinary hook: calls without a request of ours in hand."""
        if pending_request is None:
            return [candidate_replicas]
        return [self._homes(pending_request.kwargs.get("place"))]

    def _homes(self, place: Place | None, last_choice: bool = False) -> list[RunningReplica]:
        """Replicas of which the least loaded takes it; where loads are equal, each in its turn.

        None: all that there are lost the request or are the last choice.
        """
        out = self._left_out(place, last_choice)
        seats = self._open_seats(out)
        if place is None or not place.adapter_id or not self._by_seat:
            homes = [r for r in self._replicas.values() if not _is_among(r, out)]
        else:
            homes = [seats[seat] for seat in place.homes if seat in seats]
            if not homes and seats:  # dead, or the map is old: where the router would place it
                homes = [seats[self._first_seat(place, seats)]]
        if len(homes) > 1:
            self._rotation = (self._rotation + 1) % len(homes)
            homes = homes[self._rotation :] + homes[: self._rotation]
        return homes

    def _left_out(self, place: Place | None, last_choice: bool = False) -> tuple[str, ...]:
        """Names of replicas that do not get it."""
        lost = () if place is None else place.avoid
        if last_choice:
            return lost
        silent = () if place is None else place.shun
        if not self._out_of_reach:
            return lost + silent
        now = time.monotonic()
        self._out_of_reach = {r: until for r, until in self._out_of_reach.items() if now < until}
        return lost + silent + tuple(r.to_full_id_str() for r in self._out_of_reach)

    def _open_seats(self, out: tuple[str, ...]) -> dict[str, RunningReplica]:
        if not out:
            return self._by_seat
        return {seat: r for seat, r in self._by_seat.items() if not _is_among(r, out)}

    def _first_seat(self, place: Place, seats: dict[str, RunningReplica]) -> str:
        if seats is not self._by_seat:  # without those that lost it: too seldom to keep
            return first_seat(place.adapter_id, seats)
        seat = self._first_seats.get(place.adapter_id)
        if seat is None:
            seat = self._first_seats[place.adapter_id] = first_seat(place.adapter_id, seats)
        return seat

    def _spill(self, place: Place | None, homes: list[RunningReplica]) -> list[RunningReplica]:
        """The spill seat's replica, if it seems to take the adapter without evicting another."""
        if place is None or not place.adapter_id or not place.may_spill:
            return []
        at_home = {replica.replica_id for replica in homes}
        others = {
            seat: replica
            for seat, replica in self._open_seats(self._left_out(place)).items()
            if replica.replica_id not in at_home
        }
        if not others:
            return []
        replica = others[first_seat(place.adapter_id, others)]
        stats = replica.routing_stats
        takes = place.adapter_id in stats.get("resident", ()) or stats.get("free_slots", 0) > 0
        return [replica] if takes else []


def _spiller(line: "deque[_Waiter]", now: float) -> _Waiter | None:
    """Who asks the spill seat: the first of those that are late. The one that asks the homes is the
    last to do that as well, for one of them may keep it waiting."""
    late = islice((waiter for waiter in line if waiter.late_at <= now), 2)
    first, second = next(late, None), next(late, None)
    return second if first is line[0] and second is not None else first


def _is_among(replica: RunningReplica, names: tuple[str, ...]) -> bool:
    return bool(names) and replica.replica_id.to_full_id_str() in names
