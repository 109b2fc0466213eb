"""`EngineLoop`: one thread steps an engine; an asyncio face in front. Not here: text, HTTP, Ray.

Requests enter through a queue and outputs leave in one message per step and event loop, however
many streams there are.
"""

import asyncio
import contextlib
import itertools
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

from model_runner.engine import Engine
from model_runner.request import ErrorCode, FinishReason, Request, RequestOutput
from model_runner.stats import EngineStats

IDLE_WAIT_S = 0.2
LOAD_POLL_S = 0.001  # how often a waiting engine looks whether an adapter arrived
SNAPSHOT_S = 0.02
STUCK_S = 60.0


@dataclass(eq=False)
class _Stream:
    """One request's way back: its event loop, and how many of its n sequences still run."""

    request: Request
    loop: asyncio.AbstractEventLoop
    outputs: "asyncio.Queue[RequestOutput]"
    open: set[int]


class EngineLoop:
    """Runs `make_engine()` in a thread of its own, from construction to stop.

    stream() may be called from any event loop; abort() and stats() from any thread.
    """

    def __init__(self, make_engine: Callable[[], Engine]) -> None:
        self._make_engine = make_engine
        self._commands: queue.SimpleQueue[Callable[[Engine], None]] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}  # by the engine's id
        self._key_of: dict[str, str] = {}  # request_id -> the engine's id
        self._numbers = itertools.count()
        self._closed, self._epitaph = False, "the engine was stopped"
        self._ready, self._stopping = threading.Event(), threading.Event()
        self._failure: BaseException | None = None
        self._snapshot, self._snapshot_at = EngineStats(), 0.0
        self._last_turn = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, timeout_s: float | None = None) -> None:
        """Start the thread and wait until the engine can serve. Errors: what building the engine
        raised; TimeoutError."""
        self._thread.start()
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
            and self._thread.is_alive()
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
            self._commands.put(lambda engine: engine.abort(key, index))

    async def stream(self, request: Request) -> AsyncIterator[RequestOutput]:
        """The outputs of one request, until each of its sequences has finished.

        Closing or cancelling the generator aborts the request in the engine before its next step.
        The same request_id may be used again as soon as its stream is closed.
        """
        problem = request.sampling.problem()
        indices = (0,) if problem else request.indices
        refusal = self._refusal(request, problem)
        if refusal is not None:
            for index in indices:
                yield _dead(request, index, *refusal)
            return
        # The engine gets an id of this stream's own: what is left of an earlier stream with the
        # same request_id must not reach this one.
        key = f"{request.request_id}#{next(self._numbers)}"
        stream = _Stream(request, asyncio.get_running_loop(), asyncio.Queue(), set(indices))
        self._streams[key], self._key_of[request.request_id] = stream, key
        mine = replace(request, request_id=key)
        self._commands.put(lambda engine: engine.submit(mine))
        if self._closed:  # it closed meanwhile, perhaps before it saw this stream
            self._fail(stream, self._epitaph)
        try:
            while stream.open:
                output = await stream.outputs.get()
                if output.finish_reason is not None:
                    stream.open.discard(output.index)
                yield output
        finally:
            del self._streams[key], self._key_of[request.request_id]
            if stream.open:
                self._commands.put(lambda engine: engine.abort(key))

    def _refusal(self, request: Request, problem: str | None) -> tuple[ErrorCode, str] | None:
        if problem:
            return ErrorCode.BAD_REQUEST, problem
        if request.request_id in self._key_of:
            words = f"request_id {request.request_id!r:.80} is already running"
            return ErrorCode.BAD_REQUEST, words
        return None if self.alive else (ErrorCode.ENGINE_DEAD, "the engine is not running")

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread; running requests get an error."""
        self._stopping.set()
        self._commands.put(lambda engine: None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    # The engine's thread

    def _run(self) -> None:
        try:
            engine = self._make_engine()
        except BaseException as error:
            self._failure = error
            self._ready.set()
            return
        self._snapshot = engine.stats()
        self._last_turn = time.monotonic()
        self._ready.set()
        try:
            while not self._stopping.is_set():
                self._turn(engine)
        except BaseException as error:
            self._failure = error
            self._epitaph = f"the engine stopped: {type(error).__name__}: {error}"
            raise
        finally:
            self._closed = True
            for stream in list(self._streams.values()):
                self._fail(stream, self._epitaph)
            with contextlib.suppress(Exception):
                engine.close()

    def _turn(self, engine: Engine) -> None:
        self._last_turn = time.monotonic()
        worked = engine.has_work
        with contextlib.suppress(queue.Empty):
            command = (
                self._commands.get(timeout=IDLE_WAIT_S)
                if not worked
                else self._commands.get_nowait()
            )
            command(engine)
            while True:
                self._commands.get_nowait()(engine)
        if engine.has_work:
            outputs = engine.step()
            self._deliver(outputs)
            if not outputs and not engine.is_stepping:
                time.sleep(LOAD_POLL_S)
        now = time.monotonic()
        if now - self._snapshot_at > SNAPSHOT_S or not engine.has_work:
            self._snapshot, self._snapshot_at = engine.stats(), now

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, RequestOutput]]] = {}
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                told = replace(output, request_id=stream.request.request_id)
                by_loop.setdefault(stream.loop, []).append((stream, told))
        for loop, items in by_loop.items():
            with contextlib.suppress(
                RuntimeError
            ):  # the loop closed while its streams were running
                loop.call_soon_threadsafe(_hand_over, items)

    def _fail(self, stream: _Stream, why: str) -> None:
        outputs = [
            _dead(stream.request, i, ErrorCode.ENGINE_DEAD, why) for i in sorted(stream.open)
        ]
        with contextlib.suppress(RuntimeError):
            stream.loop.call_soon_threadsafe(_hand_over, [(stream, o) for o in outputs])


def _hand_over(items: list[tuple[_Stream, RequestOutput]]) -> None:
    for stream, output in items:
        stream.outputs.put_nowait(output)


def _dead(request: Request, index: int, code: ErrorCode, why: str) -> RequestOutput:
    return RequestOutput(
        request.request_id,
        index,
        finish_reason=FinishReason.ERROR,
        error_code=code,
        error=why,
        num_prompt_tokens=len(request.token_ids),
    )
