"""The catalog: what each adapter uri holds, who looks at it for all, and where its bytes lie near.

Every replica reports twice a second: the uris it needs, what it saw, what its node's host tier
holds; it gets what others saw. Each uri that anybody needs is looked at by one replica, so S3 is
asked once a period for the whole service. Nothing is known here that the replicas do not know as
well: a catalog that was lost is full again after one report of each, and without one each replica
asks S3 itself. Keys are uris, which the ingress has checked for its tenant: nobody learns of a
digest but by a uri that holds it.
A plain class without I/O: catalog_link.py makes an actor of it. Not here: bytes, and S3.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from adapter_store.contents import MAX_URIS, Content, Contents

LEASE_S = 3.0
"""A replica that was silent for so long looks at nothing."""


@dataclass(frozen=True)
class Report:
    """One replica's turn. What changed since the last one; with `is_whole`, all there is.

    wanted, unwanted  uris that it needs, and no longer needs
    looked            uri -> revision of those it looks at, "" = holds nothing just now
    contents          what uris held
    held, dropped     digests in the host tier of its node
    """

    replica_id: str
    node_id: str
    is_whole: bool
    wanted: frozenset[str] = frozenset()
    unwanted: frozenset[str] = frozenset()
    looked: dict[str, str] = field(default_factory=dict)
    contents: tuple[Content, ...] = ()
    held: frozenset[str] = frozenset()
    dropped: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Answer:
    """What the replica is to know and to do.

    is_known  False: this catalog has nothing of the replica, which must report all there is
    watch     the uris to look at, all of them; None = as before
    current   uri -> revision where that changed, "" = nobody vouches for one
    contents  what these uris held
    """

    is_known: bool = True
    watch: frozenset[str] | None = None
    current: dict[str, str] = field(default_factory=dict)
    contents: tuple[Content, ...] = ()


@dataclass(frozen=True)
class CatalogStats:
    """Gauges. uris that are needed, of these looked at; replicas and nodes that report; contents
    in the host tiers of all nodes together, each node's counted."""

    wanted_uris: int
    watched_uris: int
    replicas: int
    held_by_node: dict[str, int]


@dataclass(eq=False)
class _Replica:
    node_id: str
    heard_at: float
    wanted: set[str] = field(default_factory=set)
    watched: set[str] = field(default_factory=set)
    is_watch_told: bool = False
    held: set[str] = field(default_factory=set)
    to_tell: set[str] = field(default_factory=set)


@dataclass(eq=False)
class _Uri:
    """A uri that somebody needs. revision "" = its watcher has not said (yet)."""

    wanted_by: dict[str, None] = field(default_factory=dict)
    watcher: str = ""
    revision: str = ""


class Catalog:
    """See the head of the file. One thread or event loop owns it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, max_uris: int = MAX_URIS):
        self._clock = clock
        self._max_uris = max_uris
        self._contents = Contents(max_uris)
        self._uris: dict[str, _Uri] = {}
        self._replicas: dict[str, _Replica] = {}

    def exchange(self, report: Report) -> Answer:
        """A replica's turn."""
        self._expire()
        mine = self._replicas.get(report.replica_id)
        if report.is_whole:
            self._drop(report.replica_id)
            mine = self._replicas[report.replica_id] = _Replica(report.node_id, self._clock())
        elif mine is None:
            return Answer(is_known=False)
        mine.heard_at = self._clock()
        mine.held = (mine.held - report.dropped) | report.held
        for content in report.contents:
            if self._contents.add(content):
                self._tell_all(content.uri)
        for uri in report.unwanted & mine.wanted:
            self._unwant(report.replica_id, mine, uri)
        for uri in report.wanted - mine.wanted:
            self._want(report.replica_id, mine, uri)
        for uri, revision in report.looked.items():
            entry = self._uris.get(uri)
            # Only its watcher may say what a uri holds now: another's look may be an old one.
            if entry and entry.watcher == report.replica_id and entry.revision != revision:
                entry.revision = revision
                self._tell_all(uri)
        told, mine.to_tell = mine.to_tell, set()
        watch = None if mine.is_watch_told else frozenset(mine.watched)
        mine.is_watch_told = True
        return Answer(
            watch=watch,
            current={uri: self._uris[uri].revision for uri in told if uri in self._uris},
            contents=tuple(content for uri in told for content in self._contents.of(uri)),
        )

    def stats(self) -> CatalogStats:
        """A snapshot."""
        self._expire()
        held: dict[str, set[str]] = {}
        for replica in self._replicas.values():
            held.setdefault(replica.node_id, set()).update(replica.held)
        return CatalogStats(
            wanted_uris=len(self._uris),
            watched_uris=sum(bool(entry.revision) for entry in self._uris.values()),
            replicas=len(self._replicas),
            held_by_node={node: len(digests) for node, digests in sorted(held.items())},
        )

    def _want(self, replica_id: str, mine: _Replica, uri: str) -> None:
        entry = self._uris.get(uri)
        if entry is None:
            if len(self._uris) >= self._max_uris:
                return  # nobody vouches for it: whoever needs it asks S3, as without a catalog
            entry = self._uris[uri] = _Uri()
        mine.wanted.add(uri)
        mine.to_tell.add(uri)
        entry.wanted_by[replica_id] = None
        watched = self._replicas[entry.watcher].watched if entry.watcher else set()
        if not entry.watcher:
            self._assign(uri, entry)
        elif len(watched) > len(mine.watched) + 1:
            # Handed over: what the other saw a moment ago holds until this one has looked.
            watched.discard(uri)
            self._replicas[entry.watcher].is_watch_told = False
            self._let_watch(replica_id, uri, entry)

    def _unwant(self, replica_id: str, mine: _Replica, uri: str) -> None:
        mine.wanted.discard(uri)
        mine.to_tell.discard(uri)
        if uri in mine.watched:
            mine.watched.discard(uri)
            mine.is_watch_told = False
        entry = self._uris[uri]
        del entry.wanted_by[replica_id]
        if not entry.wanted_by:
            del self._uris[uri]
        elif entry.watcher == replica_id:
            self._assign(uri, entry)

    def _assign(self, uri: str, entry: _Uri) -> None:
        """Let the one of those who need it that looks at the fewest look at this too."""
        by_load = {name: len(self._replicas[name].watched) for name in entry.wanted_by}
        self._let_watch(min(by_load, key=by_load.__getitem__), uri, entry)
        entry.revision = ""
        self._tell_all(uri)

    def _let_watch(self, replica_id: str, uri: str, entry: _Uri) -> None:
        entry.watcher = replica_id
        self._replicas[replica_id].watched.add(uri)
        self._replicas[replica_id].is_watch_told = False

    def _tell_all(self, uri: str) -> None:
        entry = self._uris.get(uri)
        for name in entry.wanted_by if entry else ():
            self._replicas[name].to_tell.add(uri)

    def _expire(self) -> None:
        now = self._clock()
        for name in [n for n, r in self._replicas.items() if now - r.heard_at >= LEASE_S]:
            self._drop(name)

    def _drop(self, replica_id: str) -> None:
        gone = self._replicas.get(replica_id)
        if gone is not None:
            for uri in list(gone.wanted):
                self._unwant(replica_id, gone, uri)
            del self._replicas[replica_id]
