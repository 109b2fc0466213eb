"""Static placement by rendezvous hashing. It looks at no load: every adapter has one home and an
order of spill seats.

Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates" (1998).
A lost seat moves only its own adapters, and to the seat that was next in their order.
"""

from collections.abc import Iterable
from hashlib import blake2b

from deployments.placement.view import Place, Placement, ReplicaView, TenantLoad


def place(
    previous: Placement, tenants: Iterable[TenantLoad], replicas: Iterable[ReplicaView]
) -> Placement:
    """The map for these replicas; `previous` itself, version included, if nothing changed."""
    seats: dict[str, list[str]] = {}
    for replica in replicas:
        seats.setdefault(replica.model, []).append(replica.seat)
    places: dict[str, Place] = {}
    for tenant in tenants:
        adapter_id = tenant.adapter.adapter_id
        order = rendezvous_order(adapter_id, seats.get(tenant.adapter.base, []))
        if order:
            places[adapter_id] = Place(homes=order[:1], spill=order[1:], adapter_id=adapter_id)
    fixed = {model: tuple(sorted(names)) for model, names in seats.items()}
    if fixed == previous.seats and places == previous.places:
        return previous
    return Placement(version=previous.version + 1, seats=fixed, places=places)


def rendezvous_order(name: str, seats: Iterable[str]) -> tuple[str, ...]:
    """All seats, the best for `name` first: the same answer in every process."""

    def score(seat: str) -> tuple[bytes, str]:
        return blake2b(f"{name}\0{seat}".encode(), digest_size=16).digest(), seat

    return tuple(sorted(seats, key=score, reverse=True))
