"""The brain: who sits on which seat, which adapters live there, and the service's metrics. Requests
do not pass here.

Ingresses and replicas each call once a second: they send what they counted and take what is new of
the map, or their orders. All state is rebuilt from those calls, so a router that was lost needs no
backup: a new one listens for a moment, takes the old map from an ingress and goes on from there. It
is a plain class: the application makes a deployment of it, and tests call it directly.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product

from adapter_store.ref import AdapterRef
from deployments.config import ServiceConfig
from deployments.metric_registry import MetricRegistry
from deployments.metrics import PLACEMENT_MOVES, MetricDelta
from deployments.placement.registry import POLICIES
from deployments.placement.shares import Shares
from deployments.placement.view import (
    MapUpdate,
    MapWanted,
    MoveKind,
    Placement,
    ReplicaView,
    TenantLoad,
)
from deployments.serve_flags import open_log
from deployments.tenant_labels import LabelledTenants, first_tenants

LEASE_S = 10.0
"""A replica that was silent for so long has lost its seat."""
LEARN_S = 2.5
"""So long a new router only listens: every replica and ingress calls once in that time."""
ROUND_S = 10.0
"""Between two looks at the traffic. A change of the seats is looked at once."""
_MAPS_KEPT = 16
_MOVES_KEPT = 100
_MOVES_LOGGED = 20
_log = logging.getLogger("ray.serve")

METRICS_AFTER_S = 3.0
"""A router that is younger shows no metrics: the first page must hold what all ingresses and
replicas kept for it, or a scrape in between would take that for the work of a second."""


@dataclass(frozen=True)
class SeatOrders:
    """The router's answer to a replica. seated False: the seat is another's, this replica must go.

    homes  adapters that live on this seat now: worth having in the node's host tier before they are
    asked for. The most used ones, twice as many as the seat has slots at most
    """

    seated: bool
    homes: tuple[AdapterRef, ...] = ()


@dataclass
class _Lease:
    view: ReplicaView
    heard_at_s: float


class Router:
    """Traffic shares in, versioned Placement out."""

    def __init__(self, config: ServiceConfig, clock: Callable[[], float] = time.monotonic) -> None:
        open_log(_log)
        self._clock = clock
        self._listens_until_s = clock() + LEARN_S
        self._policy = POLICIES[config.placement_policy]
        self._adapters = {
            ref.adapter_id: (tenant, ref)
            for tenant in config.tenant_configs()
            for ref in tenant.adapters.values()
        }
        self._shares = Shares()
        self._leases: dict[str, _Lease] = {}
        # Versions grow over the router's lives too: an ingress compares nothing but this number.
        self._placement = Placement(version=int(time.time()))
        self._maps: deque[Placement] = deque(maxlen=_MAPS_KEPT)  # older ones, to tell news from
        self._adopted_version = 0
        self._placed_at_s = float("-inf")
        self._placed_seats: list[str] = []
        self._by_seat: dict[str, list[AdapterRef]] = {}  # the most used first
        self._moves: deque[str] = deque(maxlen=_MOVES_KEPT)
        self._born_s = clock()
        limit = config.max_metric_tenants
        first = first_tenants((tenant.tenant_id for tenant in config.tenants), limit)
        models = [model.name for model in config.models]
        self._metrics = MetricRegistry(models, first, limit, clock)
        for labels in product(models, MoveKind):  # so that the first move is seen as growth
            self._metrics.count(PLACEMENT_MOVES, labels, 0)

    async def claim(self, model: str, replica_id: str, node_id: str) -> str:
        """A seat for a new replica: the lowest that is free, which a restarted one had before.

        A router that has just started waits first: seats that it has not heard of may be taken.
        """
        await asyncio.sleep(max(0.0, self._listens_until_s - self._clock()))
        self._expire()
        number = 0
        while f"{model}-{number}" in self._leases:
            number += 1
        seat = f"{model}-{number}"
        self._leases[seat] = _Lease(ReplicaView(seat, model, replica_id, node_id), self._clock())
        return seat

    async def report(self, view: ReplicaView, delta: MetricDelta) -> SeatOrders:
        """What a replica says of itself. A seat that nobody holds is given back to who names it."""
        self._metrics.merge(delta)
        lease = self._leases.get(view.seat)
        now = self._clock()
        if lease and lease.view.replica_id != view.replica_id and now - lease.heard_at_s < LEASE_S:
            return SeatOrders(seated=False)
        self._leases[view.seat] = _Lease(view, now)
        self._place()
        most = 2 * view.stats.num_slots
        return SeatOrders(True, tuple(self._by_seat.get(view.seat, ())[:most]))

    async def release(self, seat: str, replica_id: str) -> None:
        """A replica that stops gives its seat back."""
        lease = self._leases.get(seat)
        if lease and lease.view.replica_id == replica_id:
            del self._leases[seat]
            self._place()

    async def sync(
        self,
        known_version: int,
        tokens: Mapping[str, int],
        delta: MetricDelta,
        over_s: float = 1.0,
    ) -> MapUpdate | MapWanted | None:
        """An ingress' turn: tokens by adapter_id that it counted in its last `over_s` seconds in,
        what is new of the map out.

        None: it knows all, or nothing is known yet.
        """
        self._metrics.merge(delta)
        known_tokens = {name: count for name, count in tokens.items() if name in self._adapters}
        self._shares.add(self._clock(), known_tokens, over_s)
        self._place()
        older = next((known for known in self._maps if known.version == known_version), None)
        if self._is_listening:
            return MapWanted() if known_version > 0 and older is None else None
        if self._placement.version == known_version:
            return None
        return self._placement.update_from(older)

    async def adopt(self, placement: Placement) -> None:
        """The map that an ingress goes by: a new router goes on from the newest that it is told."""
        if not self._is_listening:
            return
        self._maps.append(placement)
        if placement.version > self._adopted_version:
            self._adopted_version = placement.version
            version = max(self._placement.version, placement.version + 1)
            self._placement = replace(placement, version=version)

    async def metric_tenants(self, known: LabelledTenants) -> LabelledTenants:
        """Which tenants an ingress is to count under their own names; a new router learns it."""
        self._metrics.ranking.adopt(known)
        return self._metrics.ranking.labelled

    async def metrics(self) -> bytes:
        """All series in Prometheus' text form; b"" from a router that is too young to know them."""
        if self._clock() - self._born_s < METRICS_AFTER_S:
            return b""
        self._place()
        self._metrics.set_now(await self.views(), self._placement.version, self._seat_rates())
        return self._metrics.render()

    async def views(self) -> tuple[ReplicaView, ...]:
        """The replicas that hold a seat, by seat."""
        self._expire()
        return tuple(self._leases[seat].view for seat in sorted(self._leases))

    async def moves(self) -> tuple[str, ...]:
        """The last 100 changes of adapters' homes, a line for each, the newest last."""
        return tuple(self._moves)

    @property
    def _is_listening(self) -> bool:
        return self._clock() < self._listens_until_s

    def _place(self) -> None:
        self._expire()
        seats, now = sorted(self._leases), self._clock()
        is_due = seats != self._placed_seats or now - self._placed_at_s >= ROUND_S
        if self._is_listening or not is_due:
            return
        rates = self._shares.rates(now)
        loads = [
            TenantLoad(tenant.tenant_id, ref, tenant.weight, rates.get(ref.adapter_id, 0.0))
            for tenant, ref in self._adapters.values()
        ]
        before = self._placement
        self._placement = self._policy(before, loads, [self._leases[seat].view for seat in seats])
        self._placed_seats, self._placed_at_s = seats, now
        if self._placement is not before:
            self._maps.append(before)
            self._tell_moves()
        by_use = sorted(self._placement.homes, key=lambda name: (-rates.get(name, 0.0), name))
        self._by_seat = {seat: [] for seat in seats}
        for name in by_use:
            for seat in self._placement.homes[name]:
                self._by_seat[seat].append(self._adapters[name][1])

    def _tell_moves(self) -> None:
        moves = self._placement.moves
        lines = [str(move) for move in moves]
        self._moves.extend(lines)
        for line in lines[:_MOVES_LOGGED]:
            _log.info("placement %d: %s", self._placement.version, line)
        if len(lines) > _MOVES_LOGGED:
            rest = len(lines) - _MOVES_LOGGED
            _log.info("placement %d: and %d moves more", self._placement.version, rest)
        for labels, number in Counter((move.model, move.kind) for move in moves).items():
            self._metrics.count(PLACEMENT_MOVES, labels, number)

    def _seat_rates(self) -> dict[tuple[str, str], float]:
        """(model, seat) -> tokens a second that its adapters draw, as placement sees it."""
        rates = dict.fromkeys(((x.view.model, seat) for seat, x in self._leases.items()), 0.0)
        for name, rate in self._shares.rates(self._clock()).items():
            homes = self._placement.homes.get(name, ())
            for seat in homes:
                if seat in self._leases:
                    rates[self._leases[seat].view.model, seat] += rate / len(homes)
        return rates

    def _expire(self) -> None:
        now = self._clock()
        for seat in [s for s, lease in self._leases.items() if now - lease.heard_at_s >= LEASE_S]:
            del self._leases[seat]
