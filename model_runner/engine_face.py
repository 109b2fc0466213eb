"""`EngineFace`: streams of an engine that steps somewhere else, for any event loop.

Where it steps is for the two that fill this in: a thread (engine_loop.py) or a child process
(engine_process.py). Not here: text, HTTP, Ray. No torch.
"""

import asyncio
import contextlib
import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from model_runner.request import ErrorCode, FinishReason, Request, RequestOutput
from model_runner.stats import EngineStats

STUCK_S = 60.0


@dataclass(frozen=True)
class Submit:
    """Take a request in. Its id is the face's own."""

    request: Request


@dataclass(frozen=True)
class Abort:
    """End one sequence of a request, or all."""

    request_id: str
    index: int | None = None


Command = Submit | Abort


@dataclass(frozen=True)
class EngineTraits:
    """What others must know of an engine to prepare adapters for it.

    targets  the `LoraTarget`s;  dtype  the torch dtype that adapters are kept in
    num_gpus that it runs on, 0 = a CPU
    store    its `AdapterStore`, None where it is in another process
    """

    targets: Sequence[Any] = ()
    dtype: Any = None
    num_gpus: int = 0
    store: Any = None


@dataclass(eq=False)
class _Stream:
    """One request's way back. Its event loop alone touches it.

    open   its sequences that still run;  news  what came since the last message
    waiter  the consumer, while it waits;  timer  runs until the next message may go
    """

    request: Request
    loop: asyncio.AbstractEventLoop
    open: set[int]
    news: list[RequestOutput] = field(default_factory=list)
    waiter: asyncio.Future[None] | None = None
    timer: asyncio.TimerHandle | None = None

    def push(self, output: RequestOutput) -> None:
        if output.index not in self.open:
            return
        self.news.append(output)
        if output.finish_reason is not None:
            self.open.discard(output.index)
        if self.timer is None or not self.open:
            self._wake()

    def fail(self, why: str) -> None:
        for index in sorted(self.open):
            self.push(_dead(self.request, index, ErrorCode.ENGINE_DEAD, why))

    async def take(self, gap_s: float) -> list[RequestOutput]:
        """What there is to tell, once it may be told; the next message may go `gap_s` later."""
        if not self.news or (self.timer is not None and self.open):
            self.waiter = self.loop.create_future()
            try:
                await self.waiter
            finally:
                self.waiter = None
        self.stop_timer()
        if gap_s and self.open:
            self.timer = self.loop.call_later(gap_s, self._on_time)
        news, self.news = self.news, []
        return news

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def _on_time(self) -> None:
        self.timer = None
        if self.news:
            self._wake()

    def _wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class EngineFace(ABC):
    """The streams of one engine.

    messages() and stream() may be called from any event loop; abort() and stats() from any thread.
    traits  of the engine, once start() has returned
    """

    def __init__(self) -> None:
        self.traits = EngineTraits()
        self._streams: dict[str, _Stream] = {}  # by the engine's id
        self._key_of: dict[str, str] = {}  # request_id -> the engine's id
        self._numbers = itertools.count()
        self._closed, self._epitaph = False, "the engine was stopped"
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._snapshot = EngineStats()
        self._last_turn = time.monotonic()

    def start(self, timeout_s: float | None = None) -> None:
        """Build the engine and wait until it can serve. Errors: what building the engine raised;
        TimeoutError."""
        self._launch()
        if not self._ready.wait(timeout_s):
            raise TimeoutError(f"the engine was not ready in {timeout_s} s")
        if self._failure is not None:
            raise self._failure

    @property
    def alive(self) -> bool:
        """Whether the engine can serve: built, running, and not stuck (a step that takes a minute
        is)."""
        return (
            self._ready.is_set()
            and not self._closed
            and self._is_running()
            and time.monotonic() - self._last_turn < STUCK_S
        )

    def stats(self) -> EngineStats:
        """The latest snapshot, at most a step or 20 ms old."""
        return self._snapshot

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End one sequence of a request, or all of them. Unknown ids are ignored: they may just
        have finished."""
        key = self._key_of.get(request_id)
        if key is not None:
            self._send(Abort(key, index))

    async def stream(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one request as they come; the rest as `messages`."""
        async with aclosing(self.messages(request)) as messages:
            async for message in messages:
                for output in message:
                    yield output

    async def messages(
        self, request: Request, gap_s: float = 0.0
    ) -> AsyncGenerator[list[RequestOutput], None]:
        """The outputs of one request in few messages, until each of its sequences has finished:
        the first at once, later ones at least `gap_s` apart, the last without waiting.

        In a message each sequence has one output, its tokens joined. Closing or cancelling the
        generator aborts the request in the engine before its next step. The same request_id may be
        used again as soon as its stream is closed.
        """
        problem = request.sampling.problem()
        indices = (0,) if problem else request.indices
        refusal = self._refusal(request, problem)
        if refusal is not None:
            yield [_dead(request, index, *refusal) for index in indices]
            return
        # The engine gets an id of this stream's own: what is left of an earlier stream with the
        # same request_id must not reach this one.
        key = f"{request.request_id}#{next(self._numbers)}"
        stream = _Stream(request, asyncio.get_running_loop(), set(indices))
        self._streams[key], self._key_of[request.request_id] = stream, key
        self._send(Submit(replace(request, request_id=key)))
        if self._closed:  # it closed meanwhile, perhaps before it saw this stream
            stream.fail(self._epitaph)
        try:
            while stream.open or stream.news:
                yield join_outputs(await stream.take(gap_s), request.request_id)
        finally:
            stream.stop_timer()
            del self._streams[key], self._key_of[request.request_id]
            if stream.open:
                self._send(Abort(key))

    @abstractmethod
    def stop(self, timeout_s: float = 10.0) -> None:
        """End the engine; running requests get an error."""

    def _refusal(self, request: Request, problem: str | None) -> tuple[ErrorCode, str] | None:
        if problem:
            return ErrorCode.BAD_REQUEST, problem
        if request.request_id in self._key_of:
            words = f"request_id {request.request_id!r:.80} is already running"
            return ErrorCode.BAD_REQUEST, words
        return None if self.alive else (ErrorCode.ENGINE_DEAD, "the engine is not running")

    # What a thread and a process do each in their own way

    @abstractmethod
    def _launch(self) -> None:
        """Have the engine built; `_ready` is set in the end, after `_failure` or `traits`."""

    @abstractmethod
    def _is_running(self) -> bool:
        """Whether the thread or process is there."""

    @abstractmethod
    def _send(self, command: Command) -> None:
        """To the engine, before its next step. Nothing happens if it is gone."""

    # Called by whatever listens to the engine

    def _tell(self, outputs: Iterable[RequestOutput], stats: EngineStats | None) -> None:
        """Take in what one turn made: one message to each event loop, however many its streams."""
        self._last_turn = time.monotonic()
        if stats is not None:
            self._snapshot = stats
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, RequestOutput]]] = {}
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                by_loop.setdefault(stream.loop, []).append((stream, output))
        for loop, items in by_loop.items():
            # An event loop may have closed while its streams were running.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_push, items)

    def _close(self, epitaph: str) -> None:
        """No more comes: what runs ends with these words, what comes is refused. Once."""
        if self._closed:
            return
        self._epitaph, self._closed = epitaph, True
        for stream in list(self._streams.values()):
            with contextlib.suppress(RuntimeError):
                stream.loop.call_soon_threadsafe(stream.fail, epitaph)


def join_outputs(outputs: Sequence[RequestOutput], request_id: str) -> list[RequestOutput]:
    """One output for each sequence: tokens and logprobs joined, the rest from its last."""
    by_index: dict[int, list[RequestOutput]] = {}
    for output in outputs:
        by_index.setdefault(output.index, []).append(output)
    return [
        replace(
            parts[-1],
            request_id=request_id,
            new_token_ids=tuple(i for part in parts for i in part.new_token_ids),
            logprobs=tuple(entry for part in parts for entry in part.logprobs),
            prompt_logprobs=tuple(entry for part in parts for entry in part.prompt_logprobs),
        )
        for parts in by_index.values()
    ]


def _push(items: list[tuple[_Stream, RequestOutput]]) -> None:
    for stream, output in items:
        stream.push(output)


def _dead(request: Request, index: int, code: ErrorCode, why: str) -> RequestOutput:
    return RequestOutput(
        request.request_id,
        index,
        finish_reason=FinishReason.ERROR,
        error_code=code,
        error=why,
        num_prompt_tokens=len(request.token_ids),
    )
