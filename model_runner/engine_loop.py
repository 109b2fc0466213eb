"""`EngineLoop`: one thread steps an engine; and `step_engine`, the loop that such a thread, or a
process, runs. Not here: streams (engine_face.py), text, HTTP, Ray.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from model_runner.engine_face import Abort, Command, EngineFace, EngineTraits, Submit
from model_runner.request import Request, RequestOutput
from model_runner.stats import EngineStats

IDLE_WAIT_S = 0.2
LOAD_POLL_S = 0.001  # how often a waiting engine looks whether an adapter arrived
SNAPSHOT_S = 0.02

# None wakes an idle engine, which then sees that it is to stop.
Commands = queue.SimpleQueue[Command | None]
Tell = Callable[[Sequence[RequestOutput], EngineStats | None], None]


class Steppable(Protocol):
    """What is asked of an engine here; engine.py says what each does. Torch comes with that one."""

    @property
    def targets(self) -> Sequence[Any]: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def num_gpus(self) -> int: ...
    @property
    def has_work(self) -> bool: ...
    @property
    def is_stepping(self) -> bool: ...
    def submit(self, request: Request) -> None: ...
    def abort(self, request_id: str, index: int | None = None) -> None: ...
    def step(self) -> list[RequestOutput]: ...
    def stats(self) -> EngineStats: ...
    def close(self) -> None: ...


class EngineLoop(EngineFace):
    """Runs `make_engine()` in a thread of its own, from construction to stop."""

    def __init__(self, make_engine: Callable[[], Steppable]) -> None:
        super().__init__()
        self._make_engine = make_engine
        self._commands: Commands = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread; running requests get an error."""
        self._stopping.set()
        self._commands.put(None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _launch(self) -> None:
        self._thread.start()

    def _is_running(self) -> bool:
        return self._thread.is_alive()

    def _send(self, command: Command) -> None:
        self._commands.put(command)

    # The engine's thread

    def _run(self) -> None:
        try:
            engine = self._make_engine()
        except BaseException as error:
            self._failure = error
            self._ready.set()
            return
        store = getattr(engine, "store", None)
        self.traits = EngineTraits(engine.targets, engine.dtype, engine.num_gpus, store)
        self._tell((), engine.stats())
        self._ready.set()
        try:
            step_engine(engine, self._commands, self._tell, self._stopping)
        except BaseException as error:
            self._close(death_words(error))
            raise
        finally:
            self._close(self._epitaph)
            with contextlib.suppress(Exception):
                engine.close()


def step_engine(
    engine: Steppable, commands: Commands, tell: Tell, stopping: threading.Event
) -> None:
    """Step until `stopping`: obey what came, step, tell what is new; snapshots every 20 ms, and
    every 0.2 s of an idle engine. Errors: what the engine raises, which broke it."""
    snapshot_at = 0.0
    while not stopping.is_set():
        with contextlib.suppress(queue.Empty):
            if engine.has_work:
                _obey(engine, commands.get_nowait())
            else:
                _obey(engine, commands.get(timeout=IDLE_WAIT_S))
            while True:
                _obey(engine, commands.get_nowait())
        worked = engine.has_work
        outputs = engine.step() if worked else []
        now = time.monotonic()
        stats = None
        if now - snapshot_at > SNAPSHOT_S or not engine.has_work:
            stats, snapshot_at = engine.stats(), now
        if outputs or stats is not None:
            tell(outputs, stats)
        if worked and not outputs and not engine.is_stepping:
            time.sleep(LOAD_POLL_S)


def _obey(engine: Steppable, command: Command | None) -> None:
    match command:
        case Submit(request):
            engine.submit(request)
        case Abort(request_id, index):
            engine.abort(request_id, index)


def death_words(error: BaseException) -> str:
    """What the streams of a broken engine are told."""
    return f"the engine stopped: {type(error).__name__}: {error}"
