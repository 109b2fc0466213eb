"""Requests on their way to the scheduler: what their adapter holds is not known yet.

Not here: the wait for a slot and for pages (scheduling/), which comes after.
"""

import dataclasses
import time
from dataclasses import dataclass, field

from adapter_store.extras import AdapterExtras
from adapter_store.ref import AdapterRef
from adapter_store.store import AdapterStore
from model_runner.outputs import adapter_error, make_end, make_failure, other_extras
from model_runner.request import ErrorCode, FinishReason, Request, RequestOutput


@dataclass(frozen=True)
class Arrival:
    """A request for the scheduler, bound to the content of its adapter.

    indices      of its n sequences: those that were not aborted on the way
    submitted_s  on the monotonic clock: when the engine got it
    """

    request: Request
    indices: list[int]
    submitted_s: float


@dataclass
class _Waiting:
    """One on its way. gone  the indices that were aborted since."""

    request: Request
    adapter: AdapterRef
    submitted_s: float = field(default_factory=time.monotonic)
    gone: set[int] = field(default_factory=set)

    def wanted(self) -> list[int]:
        return [i for i in self.request.indices if i not in self.gone]


class Arrivals:
    """In by `add`, out by `poll`, `refuse` or `abort`. On the way each waits once in the store;
    from there on each sequence of an `Arrival` does."""

    def __init__(self, store: AdapterStore) -> None:
        self._store = store
        self._waiting: dict[str, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def add(self, request: Request) -> None:
        """Ask the store for the adapter of a request, which has one."""
        assert request.adapter is not None
        self._waiting[request.request_id] = _Waiting(request, request.adapter)
        self._store.prefetch(request.adapter)

    def poll(self) -> tuple[list[Arrival], list[RequestOutput]]:
        """Those whose adapter's content is known now; and what is told to the lost ones.

        A content that was known before is used at once, while the store looks whether the uri has a
        newer one.
        """
        arrived: list[Arrival] = []
        outputs: list[RequestOutput] = []
        for request_id, waiting in list(self._waiting.items()):
            error = self._store.error_of(waiting.adapter)
            digest = self._store.digest_of(waiting.adapter)
            if error is not None:
                outputs += self.refuse(request_id, adapter_error(error))
                continue
            if digest is None:
                continue
            extras = self._store.extras_of(digest)
            if why := other_extras(waiting.request, extras):
                outputs += self.refuse(request_id, why, extras)
                continue
            del self._waiting[request_id]
            bound = dataclasses.replace(waiting.adapter, revision=digest)
            wanted = waiting.wanted()
            self._store.forget(waiting.adapter)
            for _ in wanted:
                self._store.prefetch(bound)
            request = dataclasses.replace(waiting.request, adapter=bound)
            arrived.append(Arrival(request, wanted, waiting.submitted_s))
        return arrived, outputs

    def refuse(
        self, request_id: str, why: tuple[ErrorCode, str], extras: AdapterExtras | None = None
    ) -> list[RequestOutput]:
        """End one of them; what its sequences are told. extras  what its adapter brings instead."""
        waiting = self._waiting[request_id]
        self._drop(waiting)
        return [make_failure(waiting.request, i, *why, extras) for i in waiting.wanted()]

    def abort(self, request_id: str, index: int | None) -> list[RequestOutput]:
        """End one of them, or one of its sequences; what those are told."""
        waiting = self._waiting[request_id]
        ended = [i for i in waiting.wanted() if index is None or i == index]
        waiting.gone.update(ended)
        if not waiting.wanted():
            self._drop(waiting)
        return [make_end(waiting.request, i, FinishReason.ABORT) for i in ended]

    def _drop(self, waiting: _Waiting) -> None:
        """All of its sequences are told their end."""
        del self._waiting[waiting.request.request_id]
        self._store.forget(waiting.adapter)
