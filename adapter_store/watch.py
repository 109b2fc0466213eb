"""Looking at many uris again and again, none of which keeps the others from their turn.

Not here: who needs to know (contents, the service's catalog).
"""

import threading
import time
from collections.abc import Callable, Iterable

from adapter_store.errors import AdapterError, AdapterUnavailable
from adapter_store.load_threads import LoadThreads
from adapter_store.prefetcher import lane_of

_THREADS = 16  # a look is little work and much waiting


class Watch:
    """look  (uri) -> revision, or an AdapterError: asks the source. Safe to use from threads."""

    def __init__(self, look: Callable[[str], str]) -> None:
        self._look = look
        self._threads = LoadThreads("adapter-watch", _THREADS)
        self._changed = threading.Condition()
        self._under_way: set[str] = set()
        self._seen: dict[str, str] = {}

    def look(self, uris: Iterable[str], timeout_s: float) -> dict[str, str]:
        """uri -> revision, "" = it holds no adapter; blocks until all are known or time is up.

        A uri whose source is away or slow is left out, now or until it answers at last.
        """
        asked = set(uris)
        with self._changed:
            new = asked - self._under_way
            self._under_way |= new
        for uri in new:
            self._threads.submit(lambda uri=uri: self._run(uri), lane_of(uri))  # type: ignore[misc]
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while asked & self._under_way and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            return {uri: self._seen.pop(uri) for uri in asked if uri in self._seen}

    def close(self) -> None:
        """Stop the threads, those that hang excepted."""
        self._threads.close(timeout_s=1.0)

    def _run(self, uri: str) -> None:
        seen: str | None = None
        try:
            seen = self._look(uri)
        except AdapterUnavailable:
            pass
        except AdapterError:
            seen = ""
        finally:
            with self._changed:
                self._under_way.discard(uri)
                if seen is not None:
                    self._seen[uri] = seen
                self._changed.notify_all()
