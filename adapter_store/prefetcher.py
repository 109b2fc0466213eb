"""Which ref means which content, who waits for it, and bringing it into the host tier.

A content that was served goes on being served to new requests while the source is away, and while
what was put in its place is no adapter: a broken upload is its owner's to mend, and takes nobody
down meanwhile. A uri that holds nothing any more is an error.

A content that has a slot is used from there: it is fetched again only when it needs a slot again.

One thread owns it (the engine's); its own threads only look and fetch, and report. Not here: slots
and bytes of the device.
"""

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from adapter_store.contents import KnownContents
from adapter_store.errors import AdapterError, AdapterNotFound, AdapterUnavailable
from adapter_store.extras import NO_EXTRAS, AdapterExtras
from adapter_store.load_threads import LoadThreads
from adapter_store.loader import AbsentAdapter, AdapterLoader, HostAdapter, check_revision
from adapter_store.packed_layout import PackedLayout, check_share
from adapter_store.ref import AdapterRef, is_digest

_MAX_ENTRIES = 4096
_LOOK_THREADS = 4
_LOOK_WAIT_S = 1.0
_FETCH_WAIT_S = 10.0
_log = logging.getLogger(__name__)

Report = Callable[[Callable[[], None]], None]


@dataclass
class _Entry:
    """One ref. digest, revision: the content that it is bound to; looked_at: when that was last
    asked for.

    loading: a look or a fetch is under way; fetching: the look found content that must be fetched;
    refused: why newer content could not be taken, as it was logged
    """

    ref: AdapterRef
    waiters: int = 0
    digest: str | None = None
    revision: str = ""
    looked_at: float = 0.0
    loading: bool = False
    fetching: bool = False
    error: AdapterError | None = None
    failed_at: float = 0.0
    refused: str = ""


@dataclass
class _Content:
    """One digest that refs are bound to. layout None: it is known to have left the host tier."""

    layout: PackedLayout | None = None
    extras: AdapterExtras = NO_EXTRAS
    refs: set[AdapterRef] = field(default_factory=set)


class Prefetcher:
    """Refs and their contents.

    report     hands a callable from a thread to the owner, who runs it
    has_slot   whether a digest has a slot of the device, or is on its way there
    orphaned   told of a digest that no ref is bound to any more
    pool_bytes what the arena holds: `check_share` refuses what takes too much of it
    fresh_s, sticky_s  as `AdapterStore` documents them
    loads, load_seconds, load_bytes  counters by tier: "host" (found there), "remote" (fetched);
                                     failures  loads that ended in an error
    """

    def __init__(
        self,
        loader: AdapterLoader,
        load_threads: int,
        report: Report,
        has_slot: Callable[[str], bool],
        orphaned: Callable[[str], None],
        pool_bytes: int | None,
        fresh_s: float,
        sticky_s: float,
        contents: KnownContents,
    ) -> None:
        self._loader = loader
        self._known_contents = contents
        self._report = report
        self._has_slot, self._orphaned = has_slot, orphaned
        self._pool_bytes = pool_bytes
        self._fresh_s, self._sticky_s = fresh_s, sticky_s
        self._entries: OrderedDict[AdapterRef, _Entry] = OrderedDict()
        self._contents: dict[str, _Content] = {}
        self._fetching: dict[tuple[str, str, str], list[_Entry]] = {}
        self.loads: Counter[str] = Counter()
        self.load_seconds: dict[str, float] = {"host": 0.0, "remote": 0.0}
        self.load_bytes: Counter[str] = Counter()
        self.failures = 0
        # Apart from each other: a look takes milliseconds and must not stand behind a download.
        self._lookers = LoadThreads("adapter-look", _LOOK_THREADS)
        self._fetchers = LoadThreads("adapter-fetch", load_threads)

    def add_waiter(self, ref: AdapterRef) -> None:
        """One more waits for this ref; start a load if it is needed."""
        entry = self._entry(ref)
        self._entries.move_to_end(ref)
        entry.waiters += 1
        self._refresh(entry)

    def return_waiter(self, ref: AdapterRef) -> None:
        """One who had left the waiters waits again; no reason to look anew."""
        self._entry(ref).waiters += 1

    def drop_waiter(self, ref: AdapterRef) -> None:
        """One less waits."""
        entry = self._entries.get(ref)
        if entry is not None:
            entry.waiters = max(0, entry.waiters - 1)

    def resolve(self, ref: AdapterRef) -> str | None:
        """The content to serve this ref with, now; None while that is not known.

        While a source is asked whether it holds newer content, a known one waits for the answer,
        a second at most; once it is known that there is newer content, that is waited for, ten
        seconds at most. Starts a load if none was.
        """
        entry = self._entry(ref)
        if entry.digest is None:
            if entry.error is None:
                self._refresh(entry)
            return None
        patience_s = _FETCH_WAIT_S if entry.fetching else _LOOK_WAIT_S
        if entry.loading and time.monotonic() - entry.looked_at < patience_s:
            return None
        return entry.digest

    def digest_of(self, ref: AdapterRef) -> str | None:
        """The content that a ref was bound to last. Starts nothing."""
        entry = self._entries.get(ref)
        return entry.digest if entry else None

    def reload(self, ref: AdapterRef) -> None:
        """Bring a content that left the host tier, and has no slot, back into it."""
        entry = self._entry(ref)
        if not entry.loading:
            self._look(entry)

    def error_of(self, ref: AdapterRef) -> AdapterError | None:
        """Why the last load failed, until another try begins."""
        entry = self._entries.get(ref)
        return entry.error if entry else None

    def layout_of(self, digest: str) -> PackedLayout | None:
        """Of a content in the host tier; None if it is not there."""
        content = self._contents.get(digest)
        return content.layout if content else None

    def extras_of(self, digest: str) -> AdapterExtras:
        """What a content that refs are bound to brings besides weights."""
        content = self._contents.get(digest)
        return content.extras if content else NO_EXTRAS

    def refs_of(self, digest: str) -> tuple[AdapterRef, ...]:
        """Refs that are bound to a content."""
        content = self._contents.get(digest)
        return tuple(content.refs) if content else ()

    def is_wanted(self, digest: str) -> bool:
        """Whether anybody waits for this content."""
        return any(self._entries[ref].waiters for ref in self.refs_of(digest))

    def mark_lost(self, digest: str) -> None:
        """A content is not in the host tier after all; who waits for it gets it again."""
        content = self._contents.get(digest)
        if content is not None:
            content.layout = None
            for ref in content.refs:
                if self._entries[ref].waiters:
                    self.reload(ref)

    def fail(self, digest: str, error: AdapterError) -> None:
        """A content could not be used: an error for all who wait for it."""
        self.failures += 1
        for ref in self.refs_of(digest):
            self._fail(self._entries[ref], error)

    def close(self) -> None:
        """Stop the threads, those that hang excepted. Who waits gets an error."""
        self._lookers.close(timeout_s=2.0)
        self._fetchers.close(timeout_s=3.0)
        for entry in self._entries.values():
            if entry.loading:
                entry.loading = entry.fetching = False
                self._fail(entry, AdapterUnavailable("the adapter store is closed"))

    def _entry(self, ref: AdapterRef) -> _Entry:
        entry = self._entries.get(ref)
        if entry is None:
            self._drop_old_entries()
            entry = self._entries[ref] = _Entry(ref)
            content = self._contents.get(ref.revision)
            # A digest that the same uri had needs no look; another uri gives no right to it.
            if content is not None and any(known.uri == ref.uri for known in content.refs):
                self._bind(entry, ref.revision)
        return entry

    def _refresh(self, entry: _Entry) -> None:
        """Start a load if the ref is unknown, failed long enough ago, or may have new content."""
        now = time.monotonic()
        self._known_contents.want(entry.ref.uri)
        if entry.loading:
            return
        if entry.error is not None:
            old = now - entry.failed_at >= self._sticky_s
        elif entry.digest is None or not self._is_near(entry.digest):
            old = True
        else:
            old = (
                not is_digest(entry.ref.revision)
                and now - entry.looked_at >= self._fresh_s
                and self._known_contents.current(entry.ref.uri) != entry.revision
            )
        if old:
            self._look(entry)

    def _look(self, entry: _Entry) -> None:
        entry.loading, entry.error, entry.looked_at = True, None, time.monotonic()
        self._lookers.submit(partial(self._run_look, entry), lane_of(entry.ref.uri))

    def _run_look(self, entry: _Entry) -> None:
        """In a thread of the lookers."""
        start = time.monotonic()
        try:
            found = self._loader.find(entry.ref)
        except AdapterError as e:
            self._report(partial(self._take_error, [entry], e))
            return
        if isinstance(found, AbsentAdapter):
            self._report(partial(self._take_absent, entry, found))
        else:
            seconds = time.monotonic() - start
            self._report(partial(self._take_host, [entry], found, "host", seconds))

    def _take_absent(self, entry: _Entry, found: AbsentAdapter) -> None:
        """The host tier lacks it: fetch it, unless a slot has just that content."""
        digest = found.digest
        if entry.digest is not None and entry.revision == found.revision:
            digest = entry.digest
        content = self._contents.get(digest)
        if content is None or not self._has_slot(digest):
            self._fetch(entry, found.revision)
            return
        content.layout = None
        self._settle(entry, found.revision, digest)

    def _fetch(self, entry: _Entry, revision: str) -> None:
        """Join the fetch of this (uri, revision), or start it."""
        entry.fetching = True
        # Who asks for a digest wants that or nothing; the others follow the uri.
        pin = entry.ref.revision if is_digest(entry.ref.revision) else ""
        key = entry.ref.uri, revision, pin
        waiting = self._fetching.setdefault(key, [])
        waiting.append(entry)
        if len(waiting) == 1:
            self._fetchers.submit(partial(self._run_fetch, entry.ref, key), lane_of(entry.ref.uri))

    def _run_fetch(self, ref: AdapterRef, key: tuple[str, str, str]) -> None:
        """In a thread of the fetchers."""
        start = time.monotonic()
        try:
            found = self._loader.fetch(ref, key[1])
        except AdapterError as e:
            error = e
            self._report(lambda: self._take_error(self._fetching.pop(key), error))
        else:
            seconds = time.monotonic() - start
            tier = "remote" if found.fetched_bytes else "host"
            self._report(lambda: self._take_host(self._fetching.pop(key), found, tier, seconds))

    def _take_error(self, entries: list[_Entry], error: AdapterError) -> None:
        self.failures += 1
        for entry in entries:
            self._fail_or_stay(entry, error)

    def _take_host(
        self, entries: list[_Entry], found: HostAdapter, tier: str, seconds: float
    ) -> None:
        content = self._contents.get(found.digest)
        # A look that finds what was there before is no load.
        if found.fetched_bytes or content is None or content.layout is None:
            self.loads[tier] += 1
            self.load_seconds[tier] += seconds
            self.load_bytes[tier] += found.fetched_bytes or found.layout.num_bytes
        for entry in entries:
            try:
                check_revision(entry.ref, found.revision, found.digest)
                self._check_size(entry.ref, found.layout)
            except AdapterError as e:
                self.failures += 1
                self._fail_or_stay(entry, e)
                continue
            self._settle(entry, found.revision, found.digest)
            bound = self._contents[found.digest]
            bound.layout, bound.extras = found.layout, found.extras

    def _settle(self, entry: _Entry, revision: str, digest: str) -> None:
        """The end of a load that went well."""
        entry.loading = entry.fetching = False
        entry.refused = ""
        entry.revision = revision
        if digest != entry.digest:
            self._unbind(entry)
            self._bind(entry, digest)

    def _is_near(self, digest: str) -> bool:
        """Whether a content that refs are bound to can be had without its source."""
        return self._contents[digest].layout is not None or self._has_slot(digest)

    def _check_size(self, ref: AdapterRef, layout: PackedLayout) -> None:
        if self._pool_bytes is not None:
            check_share(str(ref), layout.num_bytes, self._pool_bytes)

    def _fail_or_stay(self, entry: _Entry, error: AdapterError) -> None:
        """The end of a load that failed; see the head of the file for who is served on."""
        entry.loading = entry.fetching = False
        is_known = entry.digest is not None and self._is_near(entry.digest)
        if not is_known or isinstance(error, AdapterNotFound):
            self._fail(entry, error)
        elif entry.refused != str(error):
            entry.refused = str(error)
            _log.warning("%s is served as it was: %s", entry.ref, error)

    def _fail(self, entry: _Entry, error: AdapterError) -> None:
        entry.error, entry.failed_at, entry.waiters = error, time.monotonic(), 0
        self._unbind(entry)

    def _bind(self, entry: _Entry, digest: str) -> None:
        entry.digest = digest
        self._contents.setdefault(digest, _Content()).refs.add(entry.ref)

    def _unbind(self, entry: _Entry) -> None:
        digest, entry.digest = entry.digest, None
        if digest is not None:
            refs = self._contents[digest].refs
            refs.discard(entry.ref)
            if not refs:
                del self._contents[digest]
                self._orphaned(digest)

    def _drop_old_entries(self) -> None:
        """Refs that nobody waits for are forgotten, the longest unused first, so that memory stays
        bounded. Not the last ref of a content that has a slot: nobody would find it there."""
        for ref in [ref for ref, _ in zip(self._entries, range(16), strict=False)]:
            if len(self._entries) < _MAX_ENTRIES:
                return
            entry = self._entries[ref]
            if entry.waiters or entry.loading or self._is_last_of_slot(entry):
                self._entries.move_to_end(ref)
            else:
                self._unbind(entry)
                del self._entries[ref]

    def _is_last_of_slot(self, entry: _Entry) -> bool:
        digest = entry.digest
        if digest is None or len(self._contents[digest].refs) > 1:
            return False
        return self._has_slot(digest)


def lane_of(uri: str) -> str:
    """What is slow or away together: a bucket, or all folders."""
    return uri.partition("://")[2].partition("/")[0] if "://" in uri else ""
