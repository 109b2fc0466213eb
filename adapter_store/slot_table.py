"""Who lives where in the arena: pure bookkeeping over slots and bytes. One owner, no threads, no
torch, no clock.

The memory is one range of bytes. An adapter is a row of factors that must each lie in one piece; it
gets one span if a free run is large enough, else its row is cut between factors over several free
runs. So a free run is useless only if it is smaller than one factor, bookkeeping costs as many
steps as there are runs (not factors), and a load is as many copies as there are spans. Size classes
would round every factor up instead.
"""

from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from adapter_store.ref import AdapterRef


class SlotState(StrEnum):
    """EMPTY: nobody's. LOADING: an adapter's, its bytes on their way. READY: for batches."""

    EMPTY = "empty"
    LOADING = "loading"
    READY = "ready"


@dataclass(frozen=True)
class AdapterSlot:
    """A lease: the holder's batches may name this slot until it is given back, exactly once.

    index       of the slot in the arena's tables;  ref  as it was asked for
    digest      of the content: what prefix hashes start from, and the revision to ask for to get
                the same content again
    generation  counts the contents of this slot;  lease_id  tells leases apart
    """

    index: int
    ref: AdapterRef
    digest: str = ""
    generation: int = 0
    lease_id: int = 0


@dataclass(frozen=True)
class Span:
    """Consecutive factors of an adapter in one piece of the arena.

    Factors [first, first + count) in bytes [start, start + size).
    """

    first: int
    count: int
    start: int
    size: int


class ByteRange:
    """Free runs of one range of bytes, kept sorted and coalesced."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._runs: list[tuple[int, int]] = [(0, num_bytes)] if num_bytes else []
        self.free_bytes = num_bytes

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """(start, size) of every free run, in order."""
        return tuple(self._runs)

    def copy(self) -> "ByteRange":
        """A second book over the same range, to try things in."""
        other = ByteRange(0)
        other.num_bytes, other.free_bytes = self.num_bytes, self.free_bytes
        other._runs = self._runs.copy()
        return other

    def place(self, ends: Sequence[int]) -> tuple[Span, ...] | None:
        """Take room for factors that end at `ends[1:]`; None if the runs do not hold them.

        The smallest run that holds all; else the largest runs one after the other.
        """
        total, count = ends[-1], len(ends) - 1
        if total > self.free_bytes:
            return None
        fitting = [(size, start) for start, size in self._runs if size >= total]
        if total and fitting:
            spans = [Span(0, count, min(fitting)[1], total)]
        else:
            spans, done = [], 0
            for size, start in sorted(((s, at) for at, s in self._runs), reverse=True):
                upto = bisect_right(ends, ends[done] + size, lo=done) - 1
                if upto > done:
                    spans.append(Span(done, upto - done, start, ends[upto] - ends[done]))
                    done = upto
                if ends[done] == total:
                    break
            if ends[done] < total:
                return None
        for span in spans:
            self._take(span.start, span.size)
        return tuple(spans)

    def free(self, spans: Sequence[Span]) -> None:
        """Give spans back; neighbours grow together."""
        for span in spans:
            if not span.size:
                continue
            at = bisect_right(self._runs, (span.start, 0))
            start, size = span.start, span.size
            if at < len(self._runs) and start + size == self._runs[at][0]:
                size += self._runs.pop(at)[1]
            if at and sum(self._runs[at - 1]) == start:
                start, left = self._runs.pop(at - 1)
                size += left
            insort(self._runs, (start, size))
            self.free_bytes += span.size

    def _take(self, start: int, size: int) -> None:
        if not size:
            return
        at = bisect_right(self._runs, (start, self.num_bytes + 1)) - 1
        run_start, run_size = self._runs[at]
        assert run_start == start and size <= run_size, (start, size, run_start, run_size)
        self._runs[at : at + 1] = [(start + size, run_size - size)] if run_size > size else []
        self.free_bytes -= size


@dataclass
class _Slot:
    state: SlotState = SlotState.EMPTY
    digest: str = ""
    spans: tuple[Span, ...] = ()
    generation: int = 0
    used: bool = False
    leases: dict[int, AdapterRef] = field(default_factory=dict)


@dataclass(frozen=True)
class Placement:
    """What `place` decided: fill this slot.

    evicted  (slot, digest) of those that had to go, maybe from this very slot
    """

    index: int
    spans: tuple[Span, ...]
    evicted: tuple[tuple[int, str], ...]


class SlotTable:
    """Slots and bytes of one arena. Contents go by digest: refs of equal content share a slot.

    Errors:  AssertionError when a caller breaks the contract (a lease given back twice).
    """

    def __init__(self, num_slots: int, num_bytes: int) -> None:
        self._slots = [_Slot() for _ in range(num_slots)]
        self._bytes = ByteRange(num_bytes)
        self._by_digest: dict[str, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._num_leases = 0

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    @property
    def num_bytes(self) -> int:
        return self._bytes.num_bytes

    @property
    def used_bytes(self) -> int:
        return self._bytes.num_bytes - self._bytes.free_bytes

    @property
    def num_used(self) -> int:
        """Slots that are not EMPTY."""
        return len(self._by_digest)

    @property
    def resident(self) -> tuple[str, ...]:
        """Digests in READY slots."""
        return tuple(
            d for d, i in self._by_digest.items() if self._slots[i].state == SlotState.READY
        )

    def state_of(self, digest: str) -> SlotState:
        """State of the slot that this content has; EMPTY if it has none."""
        index = self._by_digest.get(digest)
        return SlotState.EMPTY if index is None else self._slots[index].state

    def acquire(self, digest: str, ref: AdapterRef) -> AdapterSlot | None:
        """A lease on a READY slot; None if this content is in no READY slot."""
        index = self._by_digest.get(digest)
        if index is None or self._slots[index].state != SlotState.READY:
            return None
        slot = self._slots[index]
        self._idle.pop(index, None)
        self._num_leases += 1
        slot.leases[self._num_leases] = ref
        return AdapterSlot(index, ref, digest, slot.generation, self._num_leases)

    def release(self, lease: AdapterSlot, unused: bool = False) -> None:
        """Give a lease back. The last one makes the adapter idle, as the most recently used.

        unused  no batch has named it: what was loaded still waits for its first use
        """
        slot = self._slots[lease.index]
        held = slot.generation == lease.generation and lease.lease_id in slot.leases
        assert held, f"{lease} is given back twice"
        del slot.leases[lease.lease_id]
        slot.used = slot.used or not unused
        if not slot.leases:
            self._idle[lease.index] = None

    def fits(self, ends: Sequence[int]) -> bool:
        """Whether factors that end at `ends[1:]` have a slot and bytes now, nobody evicted."""
        return self._first_empty() is not None and self._bytes.copy().place(ends) is not None

    def place(
        self,
        digest: str,
        ends: Sequence[int],
        is_wanted: Callable[[str], bool],
        may_evict: bool = True,
    ) -> Placement | None:
        """Give a content a slot and bytes (LOADING), evicting idle ones, the longest unused first.

        ends       bytes before each factor, the whole size last
        is_wanted  whether somebody waits for a digest: one that was loaded for them and not used
                   yet is not evicted
        may_evict  False: only what `fits`
        None, and nobody is evicted, if there is no room even so: the arena is busy.
        """
        assert digest not in self._by_digest, digest
        if not self._slots or ends[-1] > self._bytes.num_bytes:
            return None
        evicted: list[int] = []
        spans = None
        index = self._first_empty()
        book = self._bytes
        if index is not None:
            spans = book.place(ends)
        if spans is None and not may_evict:
            return None
        if spans is None:
            book = self._bytes.copy()
            for victim in self._idle:
                slot = self._slots[victim]
                if not slot.used and is_wanted(slot.digest):
                    continue
                evicted.append(victim)
                book.free(slot.spans)
                spans = book.place(ends)
                if spans is not None:
                    break
            if spans is None:
                return None
        if index is None:
            index = evicted[-1]
        self._bytes = book
        gone = tuple((victim, self._slots[victim].digest) for victim in evicted)
        for victim in evicted:
            self._empty(victim)
        slot = self._slots[index]
        slot.state, slot.digest, slot.spans = SlotState.LOADING, digest, spans
        slot.generation += 1
        self._by_digest[digest] = index
        return Placement(index, spans, gone)

    def set_ready(self, index: int) -> None:
        """All bytes of a LOADING slot have arrived."""
        slot = self._slots[index]
        assert slot.state == SlotState.LOADING, (index, slot.state)
        slot.state, slot.used = SlotState.READY, False
        self._idle[index] = None

    def set_failed(self, index: int) -> None:
        """The load of a LOADING slot failed, and nothing writes there any more: EMPTY again."""
        slot = self._slots[index]
        assert slot.state == SlotState.LOADING, (index, slot.state)
        self._bytes.free(slot.spans)
        self._empty(index)

    def retire(self, digest: str) -> None:
        """Nobody will ask for this content any more: if idle, it is the first to go."""
        index = self._by_digest.get(digest)
        if index is not None and index in self._idle:
            self._slots[index].used = True
            self._idle.move_to_end(index, last=False)

    def spans_of(self, index: int) -> tuple[Span, ...]:
        """Where the content of a slot lies."""
        return self._slots[index].spans

    def check(self) -> None:
        """Walk all of it. AssertionError if two owners share a byte or a count is off."""
        pieces = [(start, size, "free") for start, size in self._bytes.runs]
        for i, slot in enumerate(self._slots):
            empty = slot.state == SlotState.EMPTY
            assert empty == (not slot.digest), (i, slot)
            assert not empty or not (slot.spans or slot.leases), (i, slot)
            assert empty or self._by_digest[slot.digest] == i, (i, slot)
            assert slot.state == SlotState.READY or not slot.leases, (i, slot)
            idle = slot.state == SlotState.READY and not slot.leases
            assert idle == (i in self._idle), (i, slot, list(self._idle))
            pieces += [(span.start, span.size, f"slot {i}") for span in slot.spans if span.size]
        assert len(self._by_digest) == sum(s.state != SlotState.EMPTY for s in self._slots)
        at, last = 0, ""
        for start, size, owner in sorted(pieces):
            assert start == at and size > 0, f"byte {at}: next is {owner} at {start}"
            assert not (owner == last == "free"), f"free runs meet at {start}"
            at, last = start + size, owner
        assert at == self.num_bytes, (at, self.num_bytes)
        assert self._bytes.free_bytes == sum(size for _, size in self._bytes.runs)

    def _first_empty(self) -> int | None:
        if self.num_used == self.num_slots:
            return None
        states = enumerate(self._slots)
        return next(i for i, slot in states if slot.state == SlotState.EMPTY)

    def _empty(self, index: int) -> None:
        """Forget a slot's content; its bytes are free in the book already."""
        slot = self._slots[index]
        del self._by_digest[slot.digest]
        self._idle.pop(index, None)
        slot.state, slot.digest, slot.spans, slot.used = SlotState.EMPTY, "", (), False
