"""Placement by traffic: adapters are packed onto seats by the tokens a second that they draw.

What holds, for each base model apart, once no more moves are made (`load`: tokens a second, a hot
adapter's divided by its homes; `mean`: the load a seat would have if all had the same):

- Balance: no seat carries more than 1.25 x mean, unless its smallest movable adapter is the
  reason: without that one it carries at most 1.1 x mean. (Where the mean is low, both bounds are
  mean + 20 tokens/s: less than that is worth no move.)
- Hot: an adapter that draws more than a seat's mean (and more than 200 tokens/s) has as many homes
  as means it draws, rounded up. One more from 10 % above, one less from 40 % below (or below 100
  tokens/s), so that homes do not come and go.
- Room: a seat has no more adapters in traffic than slots and bytes, while another has room. Each
  counts as many bytes as those that are resident have in the mean; one without traffic needs none.
- Peace: an adapter moves only from a seat above 1.25 x mean, or to one below 0.75, or from one
  without room, and only if its new seat then still carries less than the old one did, by 10 % of
  the mean and by 20 tokens/s; at most 8 moves a round. So a new seat fills over several rounds.
- A lost seat moves its own adapters alone. They are not counted to the 8: they must go somewhere.

New and lost adapters go to a seat where they are resident, else to the first seat in their
rendezvous order that carries less than 1.25 x mean with them: where ingresses send them meanwhile.
So does a hot adapter's next home, which is where it spills to.

Source: Mirrokni, Thorup, Zadimoghaddam, "Consistent hashing with bounded loads" (2018), for the
first place; the moves are local search as in list scheduling (Graham 1969), which gives the bound.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, product
from math import ceil

from deployments.placement.hash_ring import first_seat
from deployments.placement.view import Move, MoveKind, Placement, ReplicaView, TenantLoad

SLACK = 0.25
MIN_GAIN = 0.1
MIN_TOKENS_PER_S = 20.0
SPLIT_TOKENS_PER_S = 200.0
MOVES_PER_ROUND = 8
_GROW_ABOVE = 1.1
_SHRINK_BELOW = 0.6


def place(
    previous: Placement, tenants: Iterable[TenantLoad], replicas: Iterable[ReplicaView]
) -> Placement:
    """The map for these replicas; `previous` itself, version included, if nothing changed."""
    views: dict[str, list[ReplicaView]] = {}
    for view in sorted(replicas, key=lambda view: view.seat):
        views.setdefault(view.model, []).append(view)
    loads: dict[str, list[TenantLoad]] = {}
    for load in tenants:
        loads.setdefault(load.adapter.base, []).append(load)
    homes: dict[str, tuple[str, ...]] = {}
    moves: list[Move] = []
    for model, found in views.items():
        packing = _Packing(model, found, loads.get(model, []), previous)
        packing.run()
        homes |= packing.homes()
        moves += packing.moves()
    seats = {model: tuple(view.seat for view in found) for model, found in views.items()}
    if seats == previous.seats and homes == previous.homes:
        return previous
    return Placement(previous.version + 1, seats, homes, tuple(moves))


@dataclass
class _Seat:
    """parts: what each adapter in traffic brings here, in tokens a second."""

    name: str
    slots: float
    free_bytes: float
    resident: frozenset[str]
    load: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def is_overfull(self) -> bool:
        return len(self.parts) > self.slots or self.free_bytes < 0


class _Packing:
    """The seats and adapters of one base model, while a new map is made of them."""

    def __init__(
        self,
        model: str,
        views: list[ReplicaView],
        loads: list[TenantLoad],
        previous: Placement,
    ) -> None:
        self._model = model
        self._before = previous.homes
        loads = sorted(loads, key=lambda load: load.adapter.adapter_id)
        self._loads = {load.adapter.adapter_id: load for load in loads}
        self._seats = {view.seat: _seat(view) for view in views}
        resident_bytes = sum(view.stats.arena_used_bytes for view in views)
        self._mean_bytes = resident_bytes / (sum(v.stats.slots_in_use for v in views) or 1)
        self._mean = sum(load.tokens_per_s for load in loads) / len(views)
        self._gain = max(MIN_GAIN * self._mean, MIN_TOKENS_PER_S)
        self._slack = max(SLACK * self._mean, MIN_TOKENS_PER_S)
        self._why: dict[str, tuple[MoveKind, str]] = {}
        self._moves_left = MOVES_PER_ROUND
        self._homes: dict[str, list[str]] = {}
        for name in self._loads:
            self._settle(name, [s for s in previous.homes.get(name, ()) if s in self._seats])

    def run(self) -> None:
        """Who has no home gets one; then what is worth moving is moved."""
        self._find_homes()
        self._fit_homes_of_hot()
        self._relieve_overfull()
        self._balance()

    def homes(self) -> dict[str, tuple[str, ...]]:
        return {name: tuple(seats) for name, seats in self._homes.items()}

    def moves(self) -> list[Move]:
        """What changed, explained; the first homes of adapters are no moves."""
        found = []
        for name, (kind, why) in self._why.items():
            before, after = self._before.get(name, ()), tuple(self._homes[name])
            if before and before != after:
                found.append(Move(self._model, name, kind, before, after, why))
        return found

    # The steps of a round

    def _find_homes(self) -> None:
        for load in sorted(self._loads.values(), key=_heaviest_first):
            name = load.adapter.adapter_id
            before = self._before.get(name, ())
            lost = [seat for seat in before if seat not in self._seats]
            if lost:
                self._why[name] = MoveKind.LOST, f"{' '.join(lost)} is gone"
            if self._homes[name]:
                continue
            if not load.tokens_per_s:
                here = [seat.name for seat in self._seats.values() if name in seat.resident]
                self._homes[name] = [first_seat(name, here or self._seats)]
                continue
            homes: list[str] = []
            count = self._count_homes(load, 0)
            for _ in range(count):
                part = load.tokens_per_s / count
                homes.append(self._find_seat(load, part, homes).name)
            self._settle(name, homes)

    def _fit_homes_of_hot(self) -> None:
        """More homes for who draws more than his have their mean of, less for who cooled down."""
        for load in sorted(self._loads.values(), key=_heaviest_first):
            if not load.tokens_per_s:
                break
            name, homes = load.adapter.adapter_id, self._homes[load.adapter.adapter_id]
            count = self._count_homes(load, len(homes))
            rate = f"{load.tokens_per_s:.0f} tokens/s where a seat's mean is {self._mean:.0f}"
            if count < len(homes):
                # The emptier ones keep it: those are where it is served soonest.
                kept = sorted(homes, key=lambda seat: (self._seats[seat].load, seat))[:count]
                self._settle(name, [seat for seat in homes if seat in kept])
                self._why[name] = MoveKind.COOLED, f"it draws {rate}: {count} will do"
            while len(homes) < count and self._moves_left:
                part = load.tokens_per_s / count
                homes = [*homes, self._find_seat(load, part, homes).name]
                self._settle(name, homes)
                self._why[name] = MoveKind.HOT, f"it draws {rate}"
                self._moves_left -= 1

    def _relieve_overfull(self) -> None:
        """Where more adapters are in traffic than fit, the least used go to seats with room."""
        for seat in self._seats.values():
            for name in sorted(seat.parts, key=lambda n: (seat.parts[n], n)):
                if not self._moves_left or not seat.is_overfull:
                    break
                goal = self._find_room(seat, self._loads[name])
                if goal is not None:
                    count, slots = len(seat.parts), seat.slots
                    why = f"{seat.name} has {count} adapters in traffic for {slots} slots"
                    if count <= slots:
                        why = f"{seat.name} lacks {-seat.free_bytes:.0f} bytes for those in traffic"
                    self._move(name, seat, goal, MoveKind.ROOM, why)

    def _balance(self) -> None:
        """Moves from the fullest seats to the emptiest, the largest gain first."""
        while self._moves_left:
            order = sorted(self._seats.values(), key=lambda seat: (seat.load, seat.name))
            low = order[:1] if order[0].load < self._mean - self._slack else []
            high = [seat for seat in reversed(order) if seat.load > self._mean + self._slack]
            pairs = chain(product(reversed(order), low), product(high, order))
            if not any(self._move_best(*pair) for pair in pairs):
                return

    def _move_best(self, high: _Seat, low: _Seat) -> bool:
        gap = high.load - low.load
        if gap - min(high.parts.values(), default=gap) <= self._gain:
            return False
        best, best_gain = "", 0.0
        for name, part in high.parts.items():
            gain = min(part, gap - part)
            if gap - part > self._gain and name not in low.parts:
                better = (gain, name) > (best_gain, best)
                if better and self._has_room(low):
                    best, best_gain = name, gain
        if not best:
            return False
        loads = f"{high.name} carries {high.load:.0f} tokens/s, {low.name} {low.load:.0f}"
        why = f"{loads}, a seat's mean is {self._mean:.0f}; {high.parts[best]:.0f} go"
        self._move(best, high, low, MoveKind.BALANCE, why)
        return True

    # What the steps are made of

    def _count_homes(self, load: TenantLoad, current: int) -> int:
        """How many homes an adapter in traffic should have, if it has `current` ones."""
        floor = SPLIT_TOKENS_PER_S / (1 if current < 2 else 2)
        if load.tokens_per_s <= floor:
            return 1
        means = load.tokens_per_s / self._mean
        if current and (current - 1) * _SHRINK_BELOW <= means <= current * _GROW_ABOVE:
            return current
        if not current and means <= _GROW_ABOVE:
            return 1
        return min(len(self._seats), ceil(means))

    def _find_seat(self, load: TenantLoad, part: float, taken: Iterable[str]) -> _Seat:
        """A seat for one more home: the first by name of those that may take it, else of the
        emptiest."""
        name = load.adapter.adapter_id
        free = [seat for seat in self._seats.values() if seat.name not in taken]
        roomy = [seat for seat in free if self._has_room(seat)]
        limit = self._mean + self._slack
        near = [seat for seat in roomy if seat.load + part <= limit]
        if not near:
            most = min(seat.load for seat in roomy or free) + self._gain
            near = [seat for seat in roomy or free if seat.load <= most]
        here = [seat.name for seat in near if name in seat.resident]
        return self._seats[first_seat(name, here or [seat.name for seat in near])]

    def _find_room(self, crowded: _Seat, load: TenantLoad) -> _Seat | None:
        name, limit = load.adapter.adapter_id, self._mean + self._slack
        part = crowded.parts[name]
        goals = [
            seat.name
            for seat in self._seats.values()
            if seat.load + part <= limit and self._has_room(seat) and name not in seat.parts
        ]
        return self._seats[first_seat(name, goals)] if goals else None

    def _has_room(self, seat: _Seat) -> bool:
        return len(seat.parts) < seat.slots and seat.free_bytes >= self._mean_bytes

    def _move(self, name: str, source: _Seat, goal: _Seat, kind: MoveKind, why: str) -> None:
        self._settle(name, [goal.name if s == source.name else s for s in self._homes[name]])
        self._why[name] = kind, why
        self._moves_left -= 1

    def _settle(self, name: str, homes: list[str]) -> None:
        """Give an adapter these homes instead of those it has; its traffic goes with it."""
        load = self._loads[name]
        for homes_now, sign in ((self._homes.get(name, []), -1), (homes, 1)):
            for seat in (self._seats[s] for s in homes_now if load.tokens_per_s):
                part = load.tokens_per_s / len(homes_now)
                seat.load += sign * part
                seat.free_bytes -= sign * self._mean_bytes
                if sign > 0:
                    seat.parts[name] = part
                else:
                    del seat.parts[name]
        self._homes[name] = homes


def _seat(view: ReplicaView) -> _Seat:
    """A replica that says nothing of its slots or bytes yet has no limit."""
    stats = view.stats
    resident = frozenset(ref.adapter_id for ref in view.resident)
    limits = stats.num_slots or float("inf"), stats.arena_bytes or float("inf")
    return _Seat(view.seat, *limits, resident)


def _heaviest_first(load: TenantLoad) -> tuple[float, str]:
    return -load.tokens_per_s, load.adapter.adapter_id
