"""What uris hold and held, as this process and the others of the service have seen it.

The store asks here before it asks a source, and says here what it saw. Somebody outside may tie
several of these together (deployments.catalog_link); untied, it vouches for nothing, and the store
asks the sources itself. Only uris that mean the same on every machine are kept: no folders.
No I/O here, no threads; safe to use from several.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from adapter_store.sources.registry import scheme_of

WANTED_S = 60.0
"""So long after it was last asked for a uri is watched."""

MAX_URIS = 20_000
_MAX_CONTENTS = 4
"""That are remembered of one uri."""


@dataclass(frozen=True)
class Content:
    """The uri held `digest` when the source called its state `revision`."""

    uri: str
    digest: str
    revision: str


class Contents:
    """The last contents of each of many uris: bounded, the longest untouched uri goes first."""

    def __init__(self, max_uris: int = MAX_URIS) -> None:
        self._max_uris = max_uris
        self._uris: OrderedDict[str, OrderedDict[str, str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._uris)

    def add(self, content: Content) -> bool:
        """Note a content; whether that is news."""
        known = self._uris.setdefault(content.uri, OrderedDict())
        self._uris.move_to_end(content.uri)
        if known.get(content.digest) == content.revision:
            return False
        known[content.digest] = content.revision
        known.move_to_end(content.digest)
        if len(known) > _MAX_CONTENTS:
            known.popitem(last=False)
        if len(self._uris) > self._max_uris:
            self._uris.popitem(last=False)
        return True

    def revision_of(self, uri: str, digest: str) -> str | None:
        """What the source called the uri's state when it held this digest; None: not known."""
        known = self._uris.get(uri)
        return None if known is None else known.get(digest)

    def of(self, uri: str) -> list[Content]:
        """All that is known of one uri, the latest last."""
        return [Content(uri, *pair) for pair in self._uris.get(uri, {}).items()]

    def all(self) -> list[Content]:
        """All that is known."""
        return [content for uri in self._uris for content in self.of(uri)]


class KnownContents:
    """See the head of the file.

    A revision is vouched for while others (or the link of this process, for them) look at the uri
    all the time. What the store sees by itself says what a uri held, not what it holds: a slow
    answer may be older than what others told meanwhile.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._contents = Contents()
        self._news: dict[Content, None] = {}
        self._wanted: OrderedDict[str, float] = OrderedDict()  # uri -> when it was last asked for
        self._current: dict[str, str] = {}
        self._vouched_until = float("-inf")

    # The store's side

    def want(self, uri: str) -> None:
        """A request needs what this uri holds."""
        if not _is_shared(uri):
            return
        with self._changed:
            self._wanted[uri] = self._clock()
            self._wanted.move_to_end(uri)
            if len(self._wanted) > MAX_URIS:
                self._current.pop(self._wanted.popitem(last=False)[0], None)

    def saw(self, uri: str, digest: str, revision: str) -> None:
        """The uri held this."""
        if not _is_shared(uri):
            return
        content = Content(uri, digest, revision)
        with self._changed:
            if self._contents.add(content):
                self._news[content] = None
                if len(self._news) > MAX_URIS:
                    del self._news[next(iter(self._news))]

    def current(self, uri: str) -> str | None:
        """The source's name for what the uri holds now, if somebody vouches for it."""
        with self._changed:
            is_alive = self._clock() < self._vouched_until
            return self._current.get(uri) if is_alive else None

    def revision_of(self, uri: str, digest: str, timeout_s: float = 0.0) -> str | None:
        """What the source called the uri's state when it held this digest; None: not known.

        timeout_s  how long to wait for others to tell, if there are others. Blocks.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                found = self._contents.revision_of(uri, digest)
                left = deadline - time.monotonic()
                if found is not None or left <= 0 or self._clock() >= self._vouched_until:
                    return found
                self._changed.wait(left)

    # The link's side

    def take_wanted(self) -> set[str]:
        """Uris that were asked for lately."""
        with self._changed:
            old = self._clock() - WANTED_S
            while self._wanted and next(iter(self._wanted.values())) <= old:
                self._current.pop(self._wanted.popitem(last=False)[0], None)
            return set(self._wanted)

    def take_news(self) -> tuple[Content, ...]:
        """Contents that this process saw since the last call."""
        with self._changed:
            news, self._news = tuple(self._news), {}
            return news

    def all(self) -> tuple[Content, ...]:
        """All that is known."""
        with self._changed:
            return tuple(self._contents.all())

    def tell(
        self, current: Mapping[str, str], contents: Iterable[Content] = (), vouched_s: float = 0.0
    ) -> None:
        """What others saw.

        current    uri -> revision, "" = nobody vouches for one now
        vouched_s  these, and all that were told before, hold at least so long from now
        """
        with self._changed:
            for uri, revision in current.items():
                if revision and uri in self._wanted:
                    self._current[uri] = revision
                else:
                    self._current.pop(uri, None)
            for content in contents:
                self._contents.add(content)
            self._vouched_until = max(self._vouched_until, self._clock() + vouched_s)
            self._changed.notify_all()

    def trust_nobody(self) -> None:
        """The others are away: what uris hold now is not known, what they held still is."""
        with self._changed:
            self._current.clear()
            self._vouched_until = float("-inf")
            self._changed.notify_all()


def _is_shared(uri: str) -> bool:
    return scheme_of(uri) != "file"
