"""Plain values that placement reads and makes. No policy here, and nothing of Ray."""

from dataclasses import dataclass, field

from adapter_store.ref import AdapterRef
from model_runner.stats import EngineStats


@dataclass(frozen=True)
class ReplicaView:
    """What one replica says of itself, about once a second.

    seat     the name under which placement knows it, claimed from the router ("base-0")
    model    the base model that it serves;  replica_id, node_id  names of the cluster
    """

    seat: str
    model: str
    replica_id: str
    node_id: str
    stats: EngineStats = EngineStats()

    @property
    def resident(self) -> tuple[AdapterRef, ...]:
        return self.stats.resident

    @property
    def free_slots(self) -> int:
        return self.stats.num_slots - self.stats.slots_in_use


@dataclass(frozen=True)
class TenantLoad:
    """One adapter of one tenant and the traffic it draws.

    tokens_per_s  prompt and output tokens, a moving average over all ingresses
    """

    tenant_id: str
    adapter: AdapterRef
    weight: float = 1.0
    tokens_per_s: float = 0.0


@dataclass(frozen=True)
class Place:
    """Where one request may go: to the least loaded home, and after a while to the spill seats.

    spill     in order, the same for every ingress;  adapter_id "" = the base model
    avoid     names of replicas that this request was lost on: only others take it
    taken_by  the request router of the caller's process notes here which replica took it
    caller    the name of the caller's actor
    """

    homes: tuple[str, ...]
    spill: tuple[str, ...] = ()
    adapter_id: str = ""
    avoid: tuple[str, ...] = ()
    taken_by: list[str] = field(default_factory=list, compare=False)
    caller: str = ""


@dataclass(frozen=True)
class Placement:
    """The map that ingresses follow.

    version  grows with every change;  seats  base model -> its seats;  places  adapter_id -> its
    place
    """

    version: int = 0
    seats: dict[str, tuple[str, ...]] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)

    def place(self, model: str, adapter_id: str) -> Place | None:
        """Where a request for `adapter_id` ("" = the base alone) goes;

        None: the map does not know it.
        """
        if adapter_id:
            return self.places.get(adapter_id)
        seats = self.seats.get(model)
        return Place(homes=seats) if seats else None

    def homes_of(self, seat: str) -> frozenset[str]:
        """The adapters that have `seat` as a home."""
        return frozenset(name for name, place in self.places.items() if seat in place.homes)
