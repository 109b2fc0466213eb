"""What a replica has told of its requests, kept for a while, for ingresses that ask again.

A client whose connection broke comes back to any ingress. The ids that its answer had are here, so
the answer goes on from them: the same on every device, and nothing is drawn twice. Not for
requests whose replica died: those are run again from their beginning.
"""

import time
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import count

from model_runner.request import (
    ErrorCode,
    FinishReason,
    Request,
    RequestOutput,
    TokenLogprobs,
)

GRACE_S = 15.0
"""How long an answer is kept after its stream was closed, at its end or before."""

ORPHAN_S = 5.0
"""How long a request runs on whose caller is dead, for it may be asked for again."""

MAX_CLOSED = 1024

MAX_KEPT = 1 << 22
"""Ids and log-probabilities of all answers together, some 100 bytes each. Above it the largest is
not kept any more: who asks for it has it made anew."""


@dataclass
class _Answer:
    request: Request
    number: int  # by age: a later run of the same request knows more
    ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    last: dict[int, RequestOutput] = field(default_factory=dict)
    caller: str = ""
    orphan_since_s: float | None = None
    closed_at_s: float = 0.0
    is_over: bool = False  # what still comes is the echo of its abort
    is_dropped: bool = False
    size: int = 0

    def add(self, message: list[RequestOutput]) -> None:
        for output in message:
            if self.is_over or self.is_dropped or output.error_code is ErrorCode.ENGINE_DEAD:
                continue
            self.ids.setdefault(output.index, []).extend(output.new_token_ids)
            self.logprobs.setdefault(output.index, []).extend(output.logprobs)
            self.last[output.index] = output
            self.size += len(output.new_token_ids)
            self.size += sum(1 + len(entry.top) for entry in output.logprobs)

    def drop(self) -> None:
        """Keep none of it."""
        self.is_dropped, self.size = True, 0
        for part in (self.ids, self.logprobs, self.last):
            part.clear()

    @property
    def is_refusal(self) -> bool:
        """Nothing came of it here. Elsewhere, or at another time, something may."""
        refused = any(last.finish_reason is FinishReason.ERROR for last in self.last.values())
        return refused and not any(self.ids.values())

    @property
    def is_whole(self) -> bool:
        """All of it was told here, nothing by another replica that is not known any more; and all
        of it is still here."""
        if self.is_dropped:
            return False
        resumed = self.request.resumed
        if self.request.sampling.logprobs is not None:
            return not any(resumed)
        return None not in resumed

    def outputs(self) -> list[RequestOutput]:
        """One for each sequence that had news, from its beginning."""
        given = self.request.resumed or ((),) * self.request.sampling.n
        return [
            replace(
                last,
                new_token_ids=(given[index] or ()) + tuple(self.ids[index]),
                logprobs=tuple(self.logprobs[index]),
            )
            for index, last in self.last.items()
        ]


class KeptAnswers:
    """Several runs of one request may be here at a time: each has its caller, and the newest is
    the one to recall. One event loop owns it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._numbers = count()
        self._size = 0  # of all
        self._running: dict[str, _Answer] = {}  # by the run's own id
        self._closed: dict[str, _Answer] = {}  # by the id without what tells runs apart

    async def note(
        self,
        request: Request,
        messages: AsyncGenerator[list[RequestOutput], None],
        caller: str = "",
    ) -> AsyncGenerator[list[RequestOutput], None]:
        """The messages of a request, each noted before it goes out. `caller` is for `orphans`."""
        name = base_id(request.request_id)
        answer = _Answer(request, next(self._numbers), caller=caller)
        self._running[request.request_id] = answer
        try:
            async with aclosing(messages):
                async for message in messages:
                    before = answer.size
                    answer.add(message)
                    self._size += answer.size - before
                    if self._size > MAX_KEPT:
                        self._drop_largest()
                    yield message
        finally:
            if self._running.get(request.request_id) is answer:
                del self._running[request.request_id]
            known = self._closed.get(name)
            is_newest = known is None or known.number < answer.number
            if is_newest and not answer.is_refusal:
                answer.closed_at_s = self._clock()
                self._forget_one(name)
                self._closed[name] = answer
            else:
                self._size -= answer.size
            self._forget()

    def recall(self, request_id: str) -> tuple[str, list[RequestOutput]] | None:
        """Who is to be aborted, and all that was told of it; None: not known, or not from its
        beginning. Nothing is added to it from now on."""
        self._forget()
        known = [
            answer
            for name, answer in self._running.items()
            if base_id(name) == request_id and not answer.is_refusal
        ]
        if request_id in self._closed:
            known.append(self._closed[request_id])
        answer = max(known, key=lambda answer: answer.number, default=None)
        if answer is None or not answer.is_whole:
            return None
        answer.is_over = True
        return answer.request.request_id, answer.outputs()

    def callers(self) -> set[str]:
        """Those of the requests that run."""
        return {answer.caller for answer in self._running.values() if answer.caller}

    def orphans(self, dead: Collection[str]) -> list[str]:
        """The running requests that are to be aborted: their callers are dead, and nobody has
        asked for them for a while. To be called now and then: what is old is forgotten here."""
        self._forget()
        now, found = self._clock(), []
        for answer in self._running.values():
            if answer.caller not in dead:
                continue
            if answer.orphan_since_s is None:
                answer.orphan_since_s = now
            if now - answer.orphan_since_s >= ORPHAN_S:
                answer.is_over = True
                found.append(answer.request.request_id)
        return found

    def _forget(self) -> None:
        """The oldest come first."""
        over = self._clock() - GRACE_S
        for name, answer in list(self._closed.items()):
            if answer.closed_at_s >= over and len(self._closed) <= MAX_CLOSED:
                return
            self._forget_one(name)

    def _forget_one(self, name: str) -> None:
        answer = self._closed.pop(name, None)
        if answer is not None:
            self._size -= answer.size

    def _drop_largest(self) -> None:
        known = (*self._running.values(), *self._closed.values())
        largest = max(known, key=lambda answer: answer.size)
        self._size -= largest.size
        largest.drop()


def base_id(request_id: str) -> str:
    """A request's id without the marks of its attempts."""
    return request_id.partition("/")[0]
