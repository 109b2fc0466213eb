"""`AdapterStore`: S3 or a folder -> host tier -> a slot of the arena, beside the steps and never in their way.

One thread, the engine's, calls every public method; none of them does I/O, hashes or waits (`wait` and `close` excepted).
Threads of the store fetch and copy, and speak through one queue that `poll` reads. Not here: who may use which adapter.

Who waits: `prefetch` counts one waiter of its ref. A lease (`acquire`) and `forget` take one away; an error takes all. What
was loaded while somebody waited is held for its first use, `hold_s` at most; beyond that only leases protect. So a scheduler
must go on with others when `acquire` gives None, and should call `forget` for a request that ends without a lease.
"""

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import torch

from adapter_store.arena import AdapterArena, SlotRows
from adapter_store.errors import AdapterError, AdapterUnavailable, StoreFull
from adapter_store.formats.registry import load_adapter as load_any_format
from adapter_store.host_cache import HostCache
from adapter_store.loader import AdapterLoader, HostAdapter, LoadAdapter, is_digest
from adapter_store.packed import PackedLayout
from adapter_store.ref import AdapterRef
from adapter_store.slot_table import AdapterSlot, SlotState, SlotTable, Span
from adapter_store.sources.source import S3Options
from adapter_store.weights import LoraTarget
from adapter_store.workers import Workers

_MAX_ENTRIES = 4096


class Fence(Protocol):
    """A point in the device's work, for instance a CUDA event."""

    def is_done(self) -> bool:
        """Whether the device is past it. Does not wait."""
        ...


@dataclass(frozen=True)
class StoreStats:
    """Counters since the start, gauges of now.

    loads         by tier: "remote" (fetched), "host" (found in the host tier), "device" (copied into a slot)
    load_seconds  by the same tiers, threads summed up;  failures  loads that ended in an error
    """

    loads: dict[str, int]
    load_seconds: dict[str, float]
    failures: int
    evictions: int
    arena_used_bytes: int
    arena_bytes: int
    slots_in_use: int
    num_slots: int
    resident: tuple[AdapterRef, ...]


@dataclass
class _Entry:
    """What is known of a ref. checked_at: when the source last said that `digest` is what it holds."""

    ref: AdapterRef
    waiters: int = 0
    digest: str | None = None
    checked_at: float = 0.0
    loading: bool = False
    error: AdapterError | None = None
    failed_at: float = 0.0


@dataclass
class _Content:
    """What is known of a digest. layout None: it left the host tier, as far as we know."""

    refs: set[AdapterRef] = field(default_factory=set)
    layout: PackedLayout | None = None
    ready_at: float = 0.0


class AdapterStore:
    """Adapters of one device, or with arena None the host tier alone.

    cache         the host tier, shared with other processes; not closed by the store
    load_threads  adapters fetched side by side;  max_rank  None = the arena's
    s3            None = what the environment says
    on_progress   called by the store's threads whenever `poll` has something new: set an event, nothing more
    fresh_s       a ref without revision is looked up again by a prefetch if the last look is older
    sticky_s      an error stays that long before a prefetch tries again;  hold_s  see the head of the file
    """

    def __init__(
        self,
        targets: Sequence[LoraTarget],
        arena: AdapterArena | None,
        cache: HostCache,
        *,
        load_threads: int = 4,
        max_rank: int | None = None,
        dtype: torch.dtype | None = None,
        s3: S3Options | None = None,
        load_adapter: LoadAdapter = load_any_format,
        on_progress: Callable[[], None] | None = None,
        fresh_s: float = 1.0,
        sticky_s: float = 5.0,
        hold_s: float = 10.0,
    ) -> None:
        dtype = dtype or (arena.dtype if arena else torch.bfloat16)
        max_rank = max_rank or (arena.max_rank if arena else 256)
        self._arena = arena
        self._table = SlotTable(arena.num_slots, arena.num_bytes) if arena else SlotTable(0, 0)
        self._loader = AdapterLoader(targets, dtype, cache, max_rank, s3, load_adapter)
        self._fresh_s, self._sticky_s, self._hold_s = fresh_s, sticky_s, hold_s
        self._entries: OrderedDict[AdapterRef, _Entry] = OrderedDict()
        self._contents: dict[str, _Content] = {}
        self._fences: list[tuple[Fence, AdapterSlot, bool]] = []
        self._loads: Counter[str] = Counter()
        self._load_seconds: Counter[str] = Counter()
        self._failures = 0
        self._evictions = 0
        self._results: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._progress = threading.Event()
        self._on_progress = on_progress
        self._fetchers = Workers("adapter-fetch", load_threads)
        # One copies: the link to the device is one, and so are the pinned buffers.
        self._copier = Workers("adapter-copy", 1)

    def prefetch(self, ref: AdapterRef) -> None:
        """Say that one more request waits for this adapter, and see that it comes into the host tier.

        However many ask, it is fetched once. A ref without revision is bound to the content that its uri holds now; a
        later prefetch may bind it to a newer one, while leases keep theirs.
        """
        entry = self._entry(ref)
        entry.waiters += 1
        self._refresh(entry)

    def acquire(self, ref: AdapterRef) -> AdapterSlot | None:
        """A lease on the slot that holds this adapter; None if it is not ready yet, or failed (`error_of`).

        The first call after the adapter reached the host tier gives it a slot and starts the copy, evicting idle adapters,
        the longest unused first. None for ever so long is no error: all slots may be in use.
        """
        assert self._arena is not None, "a store without an arena has no slots"
        entry = self._entry(ref)
        if entry.digest is None:
            if entry.error is None:
                self._refresh(entry)
            return None
        if entry.loading and not ref.revision:
            return None  # a newer content may be about to take its place
        lease = self._table.acquire(entry.digest, ref)
        if lease is not None:
            entry.waiters = max(0, entry.waiters - 1)
            return lease
        if self._table.state_of(entry.digest) == SlotState.EMPTY and entry.error is None:
            layout = self._contents[entry.digest].layout
            if layout is None:
                self._fetch(entry)
            else:
                self._place(entry.digest, layout)
        return None

    def release(self, slot: AdapterSlot, after: Fence | None = None, unused: bool = False) -> None:
        """Give a lease back, exactly once, when no launched step that names it is still running; `after` a fence if one is.

        unused  no step has named it: the request waits again, as before `acquire`
        Errors:  AssertionError if it was given back before.
        """
        if unused:
            self._entry(slot.ref).waiters += 1
        if after is None:
            self._table.release(slot, unused)
        else:
            self._fences.append((after, slot, unused))

    def poll(self, stream: Any = None) -> None:
        """Take in what threads finished, and publish the tables. Once a step, before the batch is made.

        stream  CUDA: the one that steps run on (None: the current one)
        """
        if self._fences:
            passed = [entry for entry in self._fences if entry[0].is_done()]
            if passed:
                self._fences = [entry for entry in self._fences if entry not in passed]
                for _, slot, unused in passed:
                    self._table.release(slot, unused)
        self._progress.clear()
        while not self._results.empty():
            try:
                self._results.get_nowait()()
            except Empty:
                break
        if self._arena is not None:
            self._arena.publish(stream)

    def wait(self, timeout_s: float) -> bool:
        """Wait until `poll` has something new, for a caller with nothing else to do; whether it has."""
        return self._progress.wait(timeout_s)

    def error_of(self, ref: AdapterRef) -> AdapterError | None:
        """Why the last load of this ref failed; None if it did not, or another try is under way."""
        entry = self._entries.get(ref)
        return entry.error if entry else None

    def digest_of(self, ref: AdapterRef) -> str | None:
        """The content that this ref is bound to now; None if that is not known yet. A lease bears its own."""
        entry = self._entries.get(ref)
        return entry.digest if entry else None

    def forget(self, ref: AdapterRef) -> None:
        """Say that one request no longer waits. The load goes on: others may want it, and it is paid for."""
        entry = self._entries.get(ref)
        if entry is not None:
            entry.waiters = max(0, entry.waiters - 1)

    def stats(self) -> StoreStats:
        """A snapshot."""
        resident = [self._contents[d].refs for d in self._table.resident if d in self._contents]
        return StoreStats(
            loads=dict(self._loads),
            load_seconds=dict(self._load_seconds),
            failures=self._failures,
            evictions=self._evictions,
            arena_used_bytes=self._table.used_bytes,
            arena_bytes=self._table.num_bytes,
            slots_in_use=self._table.num_used,
            num_slots=self._table.num_slots,
            resident=tuple(ref for refs in resident for ref in sorted(refs, key=str)),
        )

    def check(self) -> None:
        """`SlotTable.check`, for tests and idle engines."""
        self._table.check()

    def close(self) -> None:
        """Stop the threads; a fetch that hangs in the network is left behind after 5 s. Waiters get an error."""
        self._fetchers.close(timeout_s=5.0)
        self._copier.close(timeout_s=30.0)
        for entry in self._entries.values():
            if entry.loading:
                entry.loading = False
                self._fail(entry, AdapterUnavailable("the adapter store is closed"))

    def _entry(self, ref: AdapterRef) -> _Entry:
        entry = self._entries.get(ref)
        if entry is None:
            entry = self._entries[ref] = _Entry(ref)
            if is_digest(ref.revision):
                self._bind_to_resident(entry)
            self._drop_old_entries()
        return entry

    def _bind_to_resident(self, entry: _Entry) -> None:
        """A digest that the same uri was bound to before needs no look at the source."""
        content = self._contents.get(entry.ref.revision)
        if content and any(ref.uri == entry.ref.uri for ref in content.refs):
            self._bind(entry, entry.ref.revision)

    def _refresh(self, entry: _Entry) -> None:
        """Start a load if the ref is unknown, failed long enough ago, or may have got new content."""
        if entry.loading:
            return
        now = time.monotonic()
        if entry.error is not None:
            if now - entry.failed_at >= self._sticky_s:
                self._fetch(entry)
        elif entry.digest is None:
            self._fetch(entry)
        elif not entry.ref.revision and now - entry.checked_at >= self._fresh_s:
            self._fetch(entry)
        elif self._contents[entry.digest].layout is None and not self._in_arena(entry.digest):
            self._fetch(entry)

    def _in_arena(self, digest: str) -> bool:
        return self._table.state_of(digest) != SlotState.EMPTY

    def _fetch(self, entry: _Entry) -> None:
        entry.loading, entry.error = True, None
        self._fetchers.submit(partial(self._run_fetch, entry, time.monotonic()))

    def _run_fetch(self, entry: _Entry, asked_at: float) -> None:
        """In a thread of the fetchers."""
        start = time.monotonic()
        try:
            found = self._loader.load(entry.ref)
        except AdapterError as e:
            self._report(partial(self._take_failure, entry, e))
        else:
            seconds = time.monotonic() - start
            self._report(partial(self._take_host, entry, found, asked_at, seconds))

    def _report(self, result: Callable[[], None]) -> None:
        self._results.put(result)
        self._progress.set()
        if self._on_progress is not None:
            self._on_progress()

    def _take_failure(self, entry: _Entry, error: AdapterError) -> None:
        entry.loading = False
        self._failures += 1
        known = entry.digest is not None and self._in_arena(entry.digest)
        if known and isinstance(error, AdapterUnavailable):
            # The source is away for a while; what it held last is better than nothing.
            entry.checked_at = time.monotonic()
            return
        self._fail(entry, error)

    def _fail(self, entry: _Entry, error: AdapterError) -> None:
        entry.error, entry.failed_at, entry.waiters = error, time.monotonic(), 0
        self._unbind(entry)

    def _take_host(
        self, entry: _Entry, found: HostAdapter, asked_at: float, seconds: float
    ) -> None:
        entry.loading = False
        tier = "remote" if found.fetched else "host"
        self._loads[tier] += 1
        self._load_seconds[tier] += seconds
        if found.digest != entry.digest:
            self._unbind(entry)
            self._bind(entry, found.digest)
        entry.checked_at = asked_at
        self._contents[found.digest].layout = found.layout
        room = self._table.num_bytes
        if self._arena is not None and found.layout.num_bytes > room:
            size = found.layout.num_bytes
            self._fail(entry, StoreFull(f"{entry.ref} has {size} bytes, the arena {room} bytes"))

    def _bind(self, entry: _Entry, digest: str) -> None:
        entry.digest = digest
        self._contents.setdefault(digest, _Content()).refs.add(entry.ref)

    def _unbind(self, entry: _Entry) -> None:
        """Take a ref from its content; content without refs goes first when room is needed."""
        if entry.digest is None:
            return
        content = self._contents[entry.digest]
        content.refs.discard(entry.ref)
        if not content.refs:
            self._table.retire(entry.digest)
            if not self._in_arena(entry.digest):
                del self._contents[entry.digest]
        entry.digest = None

    def _is_wanted(self, digest: str) -> bool:
        content = self._contents[digest]
        if time.monotonic() - content.ready_at > self._hold_s:
            return False
        return any(self._entries[ref].waiters for ref in content.refs)

    def _place(self, digest: str, layout: PackedLayout) -> None:
        """Give a content a slot, if there is room, and start its copy."""
        placement = self._table.place(digest, layout.ends, self._is_wanted)
        if placement is None:
            return
        assert self._arena is not None
        for index in placement.evicted:
            self._arena.clear(index)
        self._evictions += len(placement.evicted)
        self._prune_contents()
        self._copier.submit(partial(self._run_copy, digest, placement.index, placement.spans))

    def _run_copy(self, digest: str, index: int, spans: tuple[Span, ...]) -> None:
        """In the copier's thread."""
        assert self._arena is not None
        start = time.monotonic()
        try:
            packed = self._loader.open(digest)
            if packed is None:  # it left the host tier since
                self._report(partial(self._take_lost, digest, index))
                return
            with packed:
                rows = self._arena.copy_in(packed, spans)
        except Exception as e:
            error = AdapterUnavailable(f"copy to the device failed: {type(e).__name__}: {e}")
            self._report(partial(self._take_copy_failure, digest, index, error))
        else:
            seconds = time.monotonic() - start
            self._report(partial(self._take_ready, digest, index, rows, seconds))

    def _take_lost(self, digest: str, index: int) -> None:
        self._table.set_failed(index)
        self._contents[digest].layout = None
        for ref in self._contents[digest].refs:
            self._refresh(self._entries[ref])
        self._prune_contents()

    def _take_copy_failure(self, digest: str, index: int, error: AdapterError) -> None:
        self._table.set_failed(index)
        self._failures += 1
        for ref in tuple(self._contents[digest].refs):
            self._fail(self._entries[ref], error)
        self._prune_contents()

    def _take_ready(self, digest: str, index: int, rows: SlotRows, seconds: float) -> None:
        assert self._arena is not None
        self._arena.show(index, rows)
        self._table.set_ready(index)
        self._loads["device"] += 1
        self._load_seconds["device"] += seconds
        content = self._contents[digest]
        content.ready_at = time.monotonic()
        if not content.refs:
            self._table.retire(digest)

    def _prune_contents(self) -> None:
        """Forget contents that no ref names and no slot holds."""
        gone = [d for d, c in self._contents.items() if not c.refs and not self._in_arena(d)]
        for digest in gone:
            del self._contents[digest]

    def _drop_old_entries(self) -> None:
        """Refs that nobody asked for lately are forgotten, so that memory stays bounded."""
        if len(self._entries) <= _MAX_ENTRIES:
            return
        for ref, entry in list(self._entries.items())[:16]:
            busy = entry.waiters or entry.loading
            if busy or (entry.digest is not None and self._in_arena(entry.digest)):
                self._entries.move_to_end(ref)
            else:
                self._unbind(entry)
                del self._entries[ref]
