"""The placement policies by name.

A literal: a Ray replica is another process, nothing registers itself.
"""

from collections.abc import Callable, Iterable

from deployments.placement import bin_pack, hash_ring
from deployments.placement.view import Placement, ReplicaView, TenantLoad

Policy = Callable[[Placement, Iterable[TenantLoad], Iterable[ReplicaView]], Placement]

POLICIES: dict[str, Policy] = {"bin_pack": bin_pack.place, "hash_ring": hash_ring.place}
