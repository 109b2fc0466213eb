"""The brain: who sits on which seat, which adapters live there, and the service's metrics. Requests
do not pass here.

Ingresses and replicas each call once a second: they send what they counted and take the map, or
their orders. All state
is rebuilt from those calls, so a router that was lost needs no backup. It is a plain class: the
application makes a
deployment of it, and tests call it directly.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from adapter_store.ref import AdapterRef
from deployments.config import ServiceConfig
from deployments.metric_registry import MetricRegistry
from deployments.metrics import MetricDelta
from deployments.placement.registry import POLICIES
from deployments.placement.view import Placement, ReplicaView, TenantLoad
from deployments.tenant_labels import LabelledTenants, first_tenants

LEASE_S = 10.0
"""A replica that was silent for so long has lost its seat."""

SHARE_HALF_LIFE_S = 10.0

METRICS_AFTER_S = 3.0
"""A router that is younger shows no metrics: the first page must hold what all ingresses and
replicas kept for it, or a scrape in between would take that for the work of a second."""


@dataclass(frozen=True)
class SeatOrders:
    """The router's answer to a replica. seated False: the seat is another's, this replica must go.

    homes  adapters that live on this seat now: worth having in the node's host tier before they are
    asked for
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
        self._clock = clock
        self._policy = POLICIES[config.placement_policy]
        self._adapters = {
            ref.adapter_id: (tenant, ref)
            for tenant in config.tenant_configs()
            for ref in tenant.adapters.values()
        }
        self._shares = dict.fromkeys(self._adapters, 0.0)
        self._shares_at_s = clock()
        self._leases: dict[str, _Lease] = {}
        # Versions grow over the router's lives too: an ingress compares nothing but this number.
        self._placement = Placement(version=int(time.time()))
        self._born_s = clock()
        limit = config.max_metric_tenants
        first = first_tenants((tenant.tenant_id for tenant in config.tenants), limit)
        models = [model.name for model in config.models]
        self._metrics = MetricRegistry(models, first, limit, clock)

    async def claim(self, model: str, replica_id: str, node_id: str) -> str:
        """A seat for a new replica: the lowest that is free, which a restarted one had before."""
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
        homes = self._placement.homes_of(view.seat)
        return SeatOrders(True, tuple(self._adapters[name][1] for name in sorted(homes)))

    async def release(self, seat: str, replica_id: str) -> None:
        """A replica that stops gives its seat back."""
        lease = self._leases.get(seat)
        if lease and lease.view.replica_id == replica_id:
            del self._leases[seat]
            self._place()

    async def sync(
        self, known_version: int, tokens: Mapping[str, int], delta: MetricDelta
    ) -> Placement | None:
        """An ingress' turn: tokens by adapter_id since the last in, the map out.

        None: it knows that version already.
        """
        self._metrics.merge(delta)
        self._add_traffic(tokens)
        self._place()
        return None if self._placement.version == known_version else self._placement

    async def metric_tenants(self, known: LabelledTenants) -> LabelledTenants:
        """Which tenants an ingress is to count under their own names; a new router learns it."""
        self._metrics.ranking.adopt(known)
        return self._metrics.ranking.labelled

    async def metrics(self) -> bytes:
        """All series in Prometheus' text form; b"" from a router that is too young to know them."""
        if self._clock() - self._born_s < METRICS_AFTER_S:
            return b""
        self._place()
        self._metrics.set_now(await self.views(), self._placement.version)
        return self._metrics.render()

    async def views(self) -> tuple[ReplicaView, ...]:
        """The replicas that hold a seat, by seat."""
        self._expire()
        return tuple(self._leases[seat].view for seat in sorted(self._leases))

    def _place(self) -> None:
        self._expire()
        loads = [
            TenantLoad(tenant.tenant_id, ref, tenant.weight, self._shares[ref.adapter_id])
            for tenant, ref in self._adapters.values()
        ]
        views = [self._leases[seat].view for seat in sorted(self._leases)]
        self._placement = self._policy(self._placement, loads, views)

    def _expire(self) -> None:
        now = self._clock()
        for seat in [s for s, lease in self._leases.items() if now - lease.heard_at_s >= LEASE_S]:
            del self._leases[seat]

    def _add_traffic(self, tokens: Mapping[str, int]) -> None:
        now = self._clock()
        faded = 0.5 ** ((now - self._shares_at_s) / SHARE_HALF_LIFE_S)
        self._shares_at_s = now
        per_token = 0.693 / SHARE_HALF_LIFE_S  # so that a steady rate is met by its own average
        for adapter_id, share in self._shares.items():
            self._shares[adapter_id] = share * faded + tokens.get(adapter_id, 0) * per_token
