"""Static placement by rendezvous hashing. It looks at no load: every adapter has one home.

Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates" (1998).
A lost seat moves only its own adapters, and to the seat that was next in their order.
"""

from collections.abc import Iterable
from hashlib import blake2b

from deployments.placement.view import Move, MoveKind, Placement, ReplicaView, TenantLoad


def place(
    previous: Placement, tenants: Iterable[TenantLoad], replicas: Iterable[ReplicaView]
) -> Placement:
    """The map for these replicas; `previous` itself, version included, if nothing changed."""
    seats: dict[str, list[str]] = {}
    for replica in replicas:
        seats.setdefault(replica.model, []).append(replica.seat)
    homes: dict[str, tuple[str, ...]] = {}
    moves = []
    for tenant in tenants:
        adapter_id, base = tenant.adapter.adapter_id, tenant.adapter.base
        if base in seats:
            before, after = previous.homes.get(adapter_id), (first_seat(adapter_id, seats[base]),)
            homes[adapter_id] = after
            if before is not None and before != after:
                why = "it is the first seat by name now"
                moves.append(Move(base, adapter_id, MoveKind.NAME, before, after, why))
    fixed = {model: tuple(sorted(names)) for model, names in seats.items()}
    if fixed == previous.seats and homes == previous.homes:
        return previous
    return Placement(previous.version + 1, fixed, homes, tuple(moves))


def first_seat(name: str, seats: Iterable[str]) -> str:
    """The best seat for `name`, the same in every process; there must be one."""
    return max(seats, key=lambda seat: _score(name, seat))


def _score(name: str, seat: str) -> tuple[bytes, str]:
    return blake2b(f"{name}\0{seat}".encode(), digest_size=16).digest(), seat
