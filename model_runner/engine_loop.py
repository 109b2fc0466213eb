"""`EngineLoop`: one thread steps an engine; an asyncio face in front. Not here: text, HTTP, Ray.

Requests enter through a queue and outputs leave in one message per step and event loop, however
many streams there are.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from model_runner.engine import Engine
from model_runner.request import ErrorCode, FinishReason, Request, RequestOutput
from model_runner.stats import EngineStats

IDLE_WAIT_S = 0.2
LOAD_POLL_S = 0.001  # how often a waiting engine looks whether an adapter arrived
SNAPSHOT_S = 0.02


@dataclass(eq=False)
class _Stream:
    """One request's way back: its event loop, and how many of its n sequences still run."""

    request: Request
    loop: asyncio.AbstractEventLoop
    outputs: "asyncio.Queue[RequestOutput]"
    open: set[int] = field(default_factory=set)


class EngineLoop:
    """Runs `make_engine()` in a thread of its own, from construction to stop.

    stream() may be called from any event loop; abort() and stats() from any thread.
    """

    def __init__(self, make_engine: Callable[[], Engine]) -> None:
        self._make_engine = make_engine
        self._commands: queue.SimpleQueue[Callable[[Engine], None]] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
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
            and self._thread.is_alive()
            and time.monotonic() - self._last_turn < 60
        )

    def stats(self) -> EngineStats:
        """The latest snapshot, at most a step or 20 ms old."""
        return self._snapshot

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End one sequence of a request, or all of them. Unknown ids are ignored: they may just
        have finished."""
        self._commands.put(lambda engine: engine.abort(request_id, index))

    async def stream(self, request: Request) -> AsyncIterator[RequestOutput]:
        """The outputs of one request, until each of its sequences has finished.

        Closing or cancelling the generator aborts the request in the engine before its next step.
        """
        if request.request_id in self._streams:
            yield _dead(
                request,
                0,
                ErrorCode.BAD_REQUEST,
                f"request_id {request.request_id!r} is already running",
            )
            return
        stream = _Stream(request, asyncio.get_running_loop(), asyncio.Queue())
        stream.open.update(range(request.sampling.n))
        self._streams[request.request_id] = stream
        self._commands.put(lambda engine: engine.submit(request))
        if not self.alive:
            self._fail_streams("the engine is not running")
        try:
            while stream.open:
                output = await stream.outputs.get()
                if output.finish_reason is not None:
                    stream.open.discard(output.index)
                yield output
        finally:
            self._streams.pop(request.request_id, None)
            if stream.open:
                self.abort(request.request_id)

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
        self._ready.set()
        try:
            while not self._stopping.is_set():
                self._turn(engine)
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._fail_streams(
                f"the engine stopped: {self._failure}"
                if self._failure
                else "the engine was stopped"
            )
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
                by_loop.setdefault(stream.loop, []).append((stream, output))
        for loop, items in by_loop.items():
            with contextlib.suppress(
                RuntimeError
            ):  # the loop closed while its streams were running
                loop.call_soon_threadsafe(_hand_over, items)

    def _fail_streams(self, why: str) -> None:
        for stream in list(self._streams.values()):
            outputs = [
                (stream, _dead(stream.request, i, ErrorCode.ENGINE_DEAD, why))
                for i in sorted(stream.open)
            ]
            with contextlib.suppress(RuntimeError):
                stream.loop.call_soon_threadsafe(_hand_over, outputs)


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
