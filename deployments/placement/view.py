"""Plain values that placement reads and makes. No policy here, and nothing of Ray."""

from dataclasses import dataclass, field
from enum import StrEnum

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

    tokens_per_s  prompt and output tokens, a moving average over all ingresses; 0 = it is not used
    """

    tenant_id: str
    adapter: AdapterRef
    weight: float = 1.0
    tokens_per_s: float = 0.0


@dataclass(frozen=True)
class Place:
    """Where one request may go: to the least loaded home, or, late, to the one spill seat.

    The spill seat needs no word here: it is the first in the adapter's rendezvous order that is no
    home.
    adapter_id  "" = the base model, which is at home everywhere
    may_spill   False: it was refused there, so it waits for a home
    avoid       names of replicas that this request was lost on: only others take it
    shun        those that were silent lately: where there are no others, one takes it as soon as it
                answers again
    taken_by    the request router of the caller's process notes here to which replicas it went
    caller      the name of the caller's actor
    seats       of a request that ran before: who may know of it, beside the homes
    """

    homes: tuple[str, ...] = ()
    adapter_id: str = ""
    may_spill: bool = True
    avoid: tuple[str, ...] = ()
    shun: tuple[str, ...] = ()
    taken_by: list[str] = field(default_factory=list, compare=False)
    caller: str = ""
    seats: tuple[str, ...] = ()


class MoveKind(StrEnum):
    """Why an adapter's homes were changed, in one word: the label of a series."""

    LOST = "lost"
    HOT = "hot"
    COOLED = "cooled"
    ROOM = "room"
    BALANCE = "balance"
    NAME = "name"


@dataclass(frozen=True)
class Move:
    """One change of an adapter's homes and why; as a string, the line that explains it."""

    model: str
    adapter_id: str
    kind: MoveKind
    before: tuple[str, ...]
    after: tuple[str, ...]
    why: str

    def __str__(self) -> str:
        before, after = (" ".join(seats) or "nowhere" for seats in (self.before, self.after))
        return f"{self.adapter_id}: {before} -> {after} ({self.kind}: {self.why})"


@dataclass(frozen=True)
class MapUpdate:
    """What an ingress lacks of the newest map.

    since  the version that this leads on from, None = this is the whole map
    homes  adapter_id -> its seats, where they are others now;  gone  adapters that are no more
    """

    version: int
    since: int | None
    seats: dict[str, tuple[str, ...]]
    homes: dict[str, tuple[str, ...]]
    gone: tuple[str, ...] = ()


@dataclass(frozen=True)
class MapWanted:
    """The answer of a router that has just started: it wants the map that an ingress goes by."""


@dataclass(frozen=True)
class Placement:
    """The map that ingresses follow.

    version  grows with every change;  seats  base model -> its seats;  homes  adapter_id -> its
    seats;  moves  what was changed from the version before, and why (no part of the map)
    """

    version: int = 0
    seats: dict[str, tuple[str, ...]] = field(default_factory=dict)
    homes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    moves: tuple[Move, ...] = field(default=(), compare=False)

    def place(self, adapter_id: str) -> Place:
        """Where a request for `adapter_id` ("" = the base alone) goes.

        An adapter that the map does not know yet has no homes: its first seat by name takes it.
        """
        return Place(self.homes.get(adapter_id, ()), adapter_id)

    def update_from(self, older: "Placement | None") -> MapUpdate:
        """What leads from an older map to this one; None = from nothing."""
        if older is None:
            return MapUpdate(self.version, None, self.seats, self.homes)
        homes = {n: seats for n, seats in self.homes.items() if older.homes.get(n) != seats}
        gone = tuple(name for name in older.homes if name not in self.homes)
        return MapUpdate(self.version, older.version, self.seats, homes, gone)

    def apply(self, update: MapUpdate) -> "Placement":
        """The map after an update. Needs: `since` is None or this version."""
        assert update.since in (None, self.version), (update.since, self.version)
        homes = update.homes
        if update.since is not None:
            homes = {**self.homes, **homes}
            for name in update.gone:
                homes.pop(name, None)
        return Placement(update.version, update.seats, homes)
