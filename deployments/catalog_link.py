"""A replica's line to the catalog: what it needs and saw goes there, what others saw comes back.

Nothing waits for it: without a catalog the store asks S3 itself. Not here: what the catalog does
with it (catalog.py).
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from hashlib import sha256

import ray
from ray.actor import ActorHandle

from adapter_store.contents import KnownContents
from deployments.catalog import Answer, Catalog, CatalogStats, Report
from deployments.turns import take_turns

PERIOD_S = 0.5
LOOK_PERIOD_S = 1.0
VOUCHED_S = 1.5
"""So long what the catalog said of now holds: as long as two reports in a row may fail."""

MAX_LOOKS = 100
"""Uris looked at side by side; with more to watch than that, each has its turn less often."""

_PATIENCE_S = 5.0
_log = logging.getLogger("ray.serve")


class CatalogLink:
    """One replica's line.

    contents  of the replica's store;  held  digests in its node's host tier; blocks
    look      uris -> revisions ("" = nothing there) of those whose source answered; if it raises,
              this replica vouches for none of them
    send      a report to the catalog, its answer back; whatever it raises is tried again
    One event loop owns it.
    """

    def __init__(
        self,
        replica_id: str,
        node_id: str,
        contents: KnownContents,
        held: Callable[[], set[str]],
        look: Callable[[list[str]], Awaitable[dict[str, str]]],
        send: Callable[[Report], Awaitable[Answer]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replica_id, self._node_id = replica_id, node_id
        self._contents = contents
        self._held = held
        self._look = look
        self._send = send
        self._clock = clock
        self._is_known = False
        self._told_wanted: frozenset[str] = frozenset()
        self._told_held: frozenset[str] = frozenset()
        self._told_looked: dict[str, str] = {}
        self._looked: dict[str, str] = {}
        self._looked_at: dict[str, float] = {}  # of the uris to look at, and no others
        self._is_away = False
        self._turn = asyncio.Lock()  # what was told is compared with what is, one report at a time

    async def run(self) -> None:
        """Report for ever, and look at what the catalog says, beside that."""
        await asyncio.gather(
            take_turns("the line to the catalog", self.report, PERIOD_S),
            take_turns("looking at adapters", self._look_and_tell, LOOK_PERIOD_S / 4),
        )

    async def report(self) -> None:
        """One turn. Nothing is said before some uri was asked for that others may need as well."""
        async with self._turn:
            await self._report()

    async def _report(self) -> None:
        wanted = frozenset(self._contents.take_wanted())
        if not wanted and not self._is_known:
            return
        held = frozenset(await asyncio.to_thread(self._held))
        report = self._changes(wanted, held) if self._is_known else self._whole(wanted, held)
        try:
            async with asyncio.timeout(_PATIENCE_S):
                answer = await self._send(report)
        except Exception as exc:  # whatever it was, S3 is asked without the catalog meanwhile
            self._forget(f"{type(exc).__name__}: {exc}")
            return
        if not answer.is_known:
            self._forget("it is a new one")
            return
        if self._is_away:
            _log.info("the catalog answers again")
        self._is_known, self._is_away = True, False
        self._told_wanted, self._told_held = wanted, held
        self._told_looked.update(report.looked)
        for uri, revision in answer.current.items():
            if not revision:  # it is to be said again, if it was
                self._told_looked.pop(uri, None)
        if answer.watch is not None:
            self._watch(answer.watch)
        self._contents.tell(answer.current, answer.contents, VOUCHED_S)

    async def look_around(self) -> bool:
        """Look at those uris whose turn it is; whether anything is new."""
        now = self._clock()
        due = sorted((at, uri) for uri, at in self._looked_at.items() if now - at >= LOOK_PERIOD_S)
        uris = [uri for _, uri in due[:MAX_LOOKS]]
        if not uris:
            return False
        try:
            found = await self._look(uris)
        except Exception as exc:
            _log.warning("nobody looks at %d adapters: %s: %s", len(uris), type(exc).__name__, exc)
            found = dict.fromkeys(uris, "")
        for uri in uris:
            if uri in self._looked_at:
                self._looked_at[uri] = now
        mine = {uri: seen for uri, seen in found.items() if uri in self._looked_at}
        self._looked.update(mine)
        return any(self._told_looked.get(uri) != seen for uri, seen in mine.items())

    def _changes(self, wanted: frozenset[str], held: frozenset[str]) -> Report:
        return Report(
            self._replica_id,
            self._node_id,
            is_whole=False,
            wanted=wanted - self._told_wanted,
            unwanted=self._told_wanted - wanted,
            looked={
                u: seen for u, seen in self._looked.items() if self._told_looked.get(u) != seen
            },
            contents=self._contents.take_news(),
            held=held - self._told_held,
            dropped=self._told_held - held,
        )

    def _whole(self, wanted: frozenset[str], held: frozenset[str]) -> Report:
        self._contents.take_news()  # they are among all
        return Report(
            self._replica_id,
            self._node_id,
            is_whole=True,
            wanted=wanted,
            looked=dict(self._looked),
            contents=self._contents.all(),
            held=held,
        )

    def _watch(self, uris: frozenset[str]) -> None:
        for known in (self._looked_at, self._looked, self._told_looked):
            for uri in known.keys() - uris:
                del known[uri]
        for uri in uris:
            self._looked_at.setdefault(uri, float("-inf"))

    def _forget(self, why: str) -> None:
        """The catalog has nothing of this replica any more, or none of what it says is certain."""
        if self._is_known:
            _log.warning("the catalog is away: %s", why)
            self._is_away = True
        self._is_known = False
        self._told_looked.clear()
        self._contents.trust_nobody()

    async def _look_and_tell(self) -> None:
        if await self.look_around():
            await self.report()


class CatalogActor:
    """The catalog as an asyncio actor."""

    def __init__(self) -> None:
        self._catalog = Catalog()

    async def exchange(self, report: Report) -> Answer:
        """See `Catalog`."""
        return self._catalog.exchange(report)

    async def stats(self) -> CatalogStats:
        """See `Catalog`."""
        return self._catalog.stats()


def catalog_actor(name: str) -> ActorHandle:
    """The catalog of this name, made if there is none.

    Ray restarts it if its process dies; it ends with the replica that made it, and the next report
    of another makes another. So it needs no keeping, and nothing of it outlives the service.
    """
    return (
        ray.remote(CatalogActor)
        .options(
            name=name,
            namespace="adapter-store",
            get_if_exists=True,
            num_cpus=0,
            max_concurrency=1000,
            max_restarts=-1,
        )
        .remote()
    )


def catalog_name(endpoint_url: str, region: str, access_key: str) -> str:
    """Of the catalog for those who read the same S3 with the same rights: there a uri means the
    same to all."""
    same = repr((endpoint_url, region, access_key))
    return f"catalog-{sha256(same.encode()).hexdigest()[:16]}"
