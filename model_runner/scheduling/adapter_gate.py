"""Sequences whose adapter is not in a slot yet: who tries again now, and who makes room for them.

It knows slots only through `SlotGate`. Loading, eviction and the memory itself are the store's.
"""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from adapter_store.ref import AdapterRef
from model_runner.scheduling.sequence import Sequence, SlotLease

# Asked in one step: the refs that wait longest, and as many others in turn. A flood costs no more.
_PROBES = 16
# Weighted tokens that tenants are served beyond one that waits for a slot, until they make room.
_SLOT_QUANTUM = 4096.0


class SlotGate(Protocol):
    """The adapter slots, as the scheduler sees them."""

    def acquire(self, ref: AdapterRef, *, may_evict: bool = True) -> SlotLease | None:
        """A lease if the adapter is in a slot; None: not yet (asking makes the store bring it).

        may_evict  False: it comes only where no other has to go for it
        """

    def release(self, lease: Any, /, *, unused: bool = False) -> None:
        """Give one of its own leases back: no launched step names it any more.

        unused  none ever did: its sequence waits on, and the adapter must not go meanwhile
        """

    def error_of(self, ref: AdapterRef) -> Exception | None:
        """Why the adapter will never come, or None."""


class AdapterWaiters:
    """Sequences in WAITING_ADAPTER, by adapter.

    An adapter in use is never evicted, so endless work for the resident ones would keep the others
    out for ever. Therefore: if a ref lacks nothing but a slot, and tenants that hold one were
    served a quantum more since, the adapter of the most served tenant is `draining`: its running
    sequences end, none enters, until the waiting one is in.
    """

    def __init__(self, lacks_slot: Callable[[AdapterRef], bool] | None = None) -> None:
        self._lacks_slot = lacks_slot
        self._by_ref: dict[AdapterRef, dict[int, Sequence]] = {}
        self._woken: dict[AdapterRef, None] = {}
        self._turn = 0
        self._draining: set[AdapterRef] = set()
        self._beneficiary: AdapterRef | None = None
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def is_idle(self) -> bool:
        """Nobody waits and nobody has to make room."""
        return not self._by_ref and not self._draining

    def add(self, ref: AdapterRef, seq: Sequence) -> None:
        """It was refused a slot. Again is harmless."""
        line = self._by_ref.setdefault(ref, {})
        if seq.arrival not in line:
            line[seq.arrival] = seq
            seq.blocked_counter = seq.account.counter
            self._num_waiting += 1
        self._woken.pop(ref, None)

    def wake(self, ref: AdapterRef) -> None:
        """It is said to be in a slot now: it is among the next probes."""
        if ref in self._by_ref:
            self._woken[ref] = None

    def discard(self, seq: Sequence) -> None:
        """It no longer waits; nothing happens if it never did."""
        ref = seq.request.adapter
        line = self._by_ref.get(ref) if ref else None
        if ref and line and line.pop(seq.arrival, None) is not None:
            self._num_waiting -= 1
            if not line:
                del self._by_ref[ref]

    def take_all(self, ref: AdapterRef) -> list[Sequence]:
        """All that wait for the ref, oldest first. They no longer do."""
        line = self._by_ref.pop(ref, {})
        self._num_waiting -= len(line)
        return [line[arrival] for arrival in sorted(line)]

    def probes(self) -> list[Sequence]:
        """The longest waiting sequence of some refs, woken ones first: these may try now."""
        self._woken = {ref: None for ref in self._woken if ref in self._by_ref}
        refs = [*self._woken, *(ref for ref in self._by_ref if ref not in self._woken)]
        others = refs[_PROBES:]
        if others:
            self._turn %= len(others)
            others = (others + others)[self._turn : self._turn + min(_PROBES, len(others))]
            self._turn += _PROBES
        return [next(iter(self._by_ref[ref].values())) for ref in refs[:_PROBES] + others]

    def is_draining(self, ref: AdapterRef) -> bool:
        """No sequence with this adapter enters now."""
        return ref in self._draining

    def plan_drain(self, probes: Iterable[Sequence], running: Iterable[Sequence]) -> None:
        """Decide whose adapter makes room, from this step's probes and those that hold slots."""
        if self._lacks_slot is None:
            return
        needy = self._beneficiary
        if needy is not None and not (needy in self._by_ref and self._lacks_slot(needy)):
            self._beneficiary = needy = None
            self._draining.clear()
        served: dict[AdapterRef, float] = {}
        for seq in running:
            ref = seq.request.adapter
            if ref is not None:
                served[ref] = max(served.get(ref, 0.0), seq.account.counter)
        if needy is None:
            limit = max(served.values(), default=0.0) - _SLOT_QUANTUM
            for seq in probes:
                ref = seq.request.adapter
                if ref and seq.blocked_counter <= limit and self._lacks_slot(ref):
                    self._beneficiary = needy = ref
                    break
        if needy is not None and served and not self._draining & served.keys():
            self._draining.add(max(served, key=lambda ref: served[ref]))
