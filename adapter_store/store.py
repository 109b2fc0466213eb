"""`AdapterStore`: S3 or a folder -> host tier -> a slot of the arena, beside the steps.

One thread, the engine's, calls every public method; none of them does I/O, hashes or waits (`wait`
and `close` excepted). Threads of the store look, fetch and copy, and speak through one queue that
`poll` reads. Not here: who may use which adapter.

Who waits: `prefetch` counts one waiter of its ref. A lease (`acquire`) and `forget` take one away;
an error takes all. What was loaded while somebody waits is held for its first use, `hold_s` at
most; beyond that only leases protect. So a scheduler must go on with others when `acquire` gives
None, and should call `forget` for a request that ends without a lease.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from adapter_store.arena import AdapterArena, SlotRows
from adapter_store.contents import KnownContents
from adapter_store.errors import AdapterError, AdapterUnavailable
from adapter_store.extras import AdapterExtras
from adapter_store.formats.registry import load_adapter as load_any_format
from adapter_store.host_cache import HostCache
from adapter_store.load_threads import LoadThreads
from adapter_store.loader import AdapterLoader, LoadAdapter
from adapter_store.packed_layout import PackedLayout
from adapter_store.prefetcher import Prefetcher
from adapter_store.ref import AdapterRef
from adapter_store.slot_table import AdapterSlot, SlotState, SlotTable, Span
from adapter_store.sources.source import S3Options
from adapter_store.weights import LoraTarget


@dataclass(frozen=True)
class StoreStats:
    """Counters since the start, gauges of now.

    loads         by tier: "remote" (fetched from a source: a miss of the host tier), "host" (found
                  in the host tier: a hit), "device" (copied into a slot)
    load_seconds  by the same tiers, threads summed up;  load_bytes  read from the source, found,
                  copied;  failures  loads that ended in an error
    """

    loads: dict[str, int]
    load_seconds: dict[str, float]
    load_bytes: dict[str, int]
    failures: int
    evictions: int
    arena_used_bytes: int
    arena_bytes: int
    slots_in_use: int
    num_slots: int
    resident: tuple[AdapterRef, ...]


class AdapterStore:
    """Adapters of one device, or with arena None the host tier alone.

    cache         the host tier, shared with other processes; not closed by the store
    load_threads  adapters fetched side by side;  max_rank, dtype  None = the arena's
    s3            None = what the environment says
    base_folder   of the base model, whose vocabulary adapters must have; None = not compared
    fresh_s       a prefetch asks the source of a ref without digest again if the last look is older
    sticky_s      an error stays that long before a prefetch tries again;  hold_s  see the head of
                  the file
    contents, loader, cache  for who ties stores together; safe to use from other threads
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
        base_folder: Path | None = None,
        fresh_s: float = 1.0,
        sticky_s: float = 5.0,
        hold_s: float = 10.0,
    ) -> None:
        dtype = dtype or (arena.dtype if arena else torch.bfloat16)
        max_rank = max_rank or (arena.max_rank if arena else 256)
        pool_bytes = None
        if arena is not None:
            pool_bytes = arena.num_bytes if arena.num_slots else 0
        self._arena = arena
        self._table = SlotTable(arena.num_slots, arena.num_bytes) if arena else SlotTable(0, 0)
        self.contents = contents = KnownContents()
        self.loader = AdapterLoader(
            targets, dtype, cache, max_rank, s3, load_adapter, contents, base_folder
        )
        self.cache = cache
        self._hold_s = hold_s
        self._shown: list[tuple[int, str]] = []
        self._ready_at: dict[str, float] = {}
        self._copies = self._copied_bytes = 0
        self._copy_seconds = 0.0
        self._evictions = 0
        self._results: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._progress = threading.Event()
        self._prefetcher = Prefetcher(
            self.loader,
            load_threads,
            self._report,
            lambda digest: self._table.state_of(digest) != SlotState.EMPTY,
            self._table.retire,
            pool_bytes,
            fresh_s,
            sticky_s,
            self.contents,
        )
        # One copies: the link to the device is one, and so are the pinned buffers.
        self._copier = LoadThreads("adapter-copy", 1)

    def prefetch(self, ref: AdapterRef) -> None:
        """One more request waits for this adapter: see that it comes into the host tier.

        However many ask, it is fetched once. A ref without revision is bound to the content that
        its uri holds now; a later prefetch may bind it to a newer one, while leases keep theirs.
        """
        self._prefetcher.add_waiter(ref)

    def acquire(self, ref: AdapterRef, *, may_evict: bool = True) -> AdapterSlot | None:
        """A lease on the slot that holds this adapter; None if it is not ready, or failed.

        The first call after the adapter reached the host tier gives it a slot and starts the copy,
        evicting idle adapters, the longest unused first. None for ever so long is no error: all
        slots may be in use.

        may_evict  False: it takes what is free, see `has_room`
        """
        digest = self._prefetcher.resolve(ref)
        if digest is None:
            return None
        lease = self._table.acquire(digest, ref)
        if lease is not None:
            self._prefetcher.drop_waiter(ref)
            return lease
        if self._table.state_of(digest) == SlotState.EMPTY:
            layout = self._prefetcher.layout_of(digest)
            if layout is None:
                self._prefetcher.reload(ref)
            else:
                self._place(digest, layout, may_evict)
        return None

    def release(self, slot: AdapterSlot, unused: bool = False) -> None:
        """Give a lease back, exactly once, when no step that names it still runs.

        unused  no step has named it: the request waits again, as before `acquire`
        Errors:  AssertionError if it was given back before.
        """
        self._table.release(slot, unused)
        if unused:
            self._prefetcher.return_waiter(slot.ref)

    def poll(self, stream: Any = None) -> tuple[AdapterRef, ...]:
        """Take in what threads finished, and publish the tables. Once a step, before the batch.

        Gives the refs whose adapter has come into its slot: who waits for them may acquire.
        stream  CUDA: the one that steps run on (None: the calling thread's current one)
        """
        came: list[AdapterRef] = []
        self._progress.clear()
        for _ in range(self._results.qsize()):
            self._results.get()()
        # A slot is READY only when the device's tables name it.
        if self._arena is not None and self._arena.publish(stream) and self._shown:
            for index, digest in self._shown:
                self._table.set_ready(index)
                self._ready_at[digest] = time.monotonic()
                refs = self._prefetcher.refs_of(digest)
                if not refs:
                    self._table.retire(digest)
                came += refs
            self._shown.clear()
        return tuple(came)

    def wait(self, timeout_s: float) -> bool:
        """Wait until `poll` has something new, if there is nothing else to do; whether it has."""
        return self._progress.wait(timeout_s)

    def error_of(self, ref: AdapterRef) -> AdapterError | None:
        """Why the last load of this ref failed; None if it did not, or another try is under way."""
        return self._prefetcher.error_of(ref)

    def lacks_slot(self, ref: AdapterRef) -> bool:
        """Whether its bytes are on the host and it only waits for room on the device."""
        digest = self._prefetcher.resolve(ref)
        if digest is None or self._table.state_of(digest) != SlotState.EMPTY:
            return False
        return self._prefetcher.layout_of(digest) is not None

    def has_room(self, ref: AdapterRef) -> bool:
        """Whether it has a slot, or would get one with nobody evicted.

        One whose size is not known yet is taken to fit where a slot is free. Starts no load.
        """
        digest = self._prefetcher.digest_of(ref)
        if digest is not None and self._table.state_of(digest) != SlotState.EMPTY:
            return True
        layout = self._prefetcher.layout_of(digest) if digest is not None else None
        return self._table.fits(layout.ends if layout is not None else (0,))

    def digest_of(self, ref: AdapterRef) -> str | None:
        """The content to serve this ref with, now; None while that is not known.

        A known content too waits while the source is asked for a newer one (a second at most), or
        while a newer one is fetched. Whoever binds a request to it asks from then on for the ref
        with this digest as revision: that never waits.
        """
        return self._prefetcher.resolve(ref)

    def extras_of(self, digest: str) -> AdapterExtras:
        """What the content that `digest_of` names brings besides its weights."""
        return self._prefetcher.extras_of(digest)

    def forget(self, ref: AdapterRef) -> None:
        """One request no longer waits. The load goes on: others may want it."""
        self._prefetcher.drop_waiter(ref)

    def stats(self) -> StoreStats:
        """A snapshot."""
        fetched = self._prefetcher
        resident = [fetched.refs_of(digest) for digest in self._table.resident]
        return StoreStats(
            loads={"remote": 0, "host": 0, **fetched.loads, "device": self._copies},
            load_seconds={**fetched.load_seconds, "device": self._copy_seconds},
            load_bytes={"remote": 0, "host": 0, **fetched.load_bytes, "device": self._copied_bytes},
            failures=fetched.failures,
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
        """Stop the threads, fetches that hang excepted. Who waits gets an error."""
        self._prefetcher.close()
        self._copier.close(timeout_s=10.0)

    def _report(self, result: Callable[[], None]) -> None:
        """Hand a result from a thread of the store to the engine's."""
        self._results.put(result)
        self._progress.set()

    def _place(self, digest: str, layout: PackedLayout, may_evict: bool) -> None:
        """Give a content a slot, if there is room, and start its copy."""
        placement = self._table.place(digest, layout.ends, self._is_wanted, may_evict)
        if placement is None:
            return
        assert self._arena is not None
        for index, gone in placement.evicted:
            self._arena.clear(index)
            del self._ready_at[gone]
        self._evictions += len(placement.evicted)
        self._copier.submit(partial(self._run_copy, digest, placement.index, placement.spans))

    def _is_wanted(self, digest: str) -> bool:
        held = time.monotonic() - self._ready_at[digest] < self._hold_s
        return held and self._prefetcher.is_wanted(digest)

    def _run_copy(self, digest: str, index: int, spans: tuple[Span, ...]) -> None:
        """In the copier's thread."""
        assert self._arena is not None
        start = time.monotonic()
        try:
            packed = self.loader.open(digest)
            if packed is None:  # it has left the host tier since
                self._report(partial(self._take_lost, digest, index))
                return
            with packed:
                rows, num_bytes = self._arena.copy_in(packed, spans), packed.layout.num_bytes
        except Exception as e:
            error = AdapterUnavailable(f"copy to the device failed: {type(e).__name__}: {e}")
            self._report(partial(self._take_copy_failure, digest, index, error))
        else:
            seconds = time.monotonic() - start
            self._report(partial(self._take_copied, digest, index, rows, seconds, num_bytes))

    def _take_lost(self, digest: str, index: int) -> None:
        self._table.set_failed(index)
        self._prefetcher.mark_lost(digest)

    def _take_copy_failure(self, digest: str, index: int, error: AdapterError) -> None:
        self._table.set_failed(index)
        self._prefetcher.fail(digest, error)

    def _take_copied(
        self, digest: str, index: int, rows: SlotRows, seconds: float, num_bytes: int
    ) -> None:
        assert self._arena is not None
        self._arena.show(index, rows)
        self._shown.append((index, digest))
        self._copies += 1
        self._copy_seconds += seconds
        self._copied_bytes += num_bytes
