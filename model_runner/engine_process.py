"""`EngineProcess`: an engine in a child process, which shares neither Python's lock nor a crash
with its parent. Same face as `EngineLoop`. Not here: what a step does (engine_loop.py).

The two speak through a pair of sockets: commands go in, one message a step comes out for all
streams.
"""

import contextlib
import functools
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from model_runner.engine_face import Command, EngineFace, EngineTraits
from model_runner.engine_loop import Commands, Steppable, death_words, step_engine
from model_runner.request import RequestOutput
from model_runner.stats import EngineStats

SWITCH_INTERVAL_S = 5e-5  # the engine must not wait 5 ms, Python's default, for another thread
ORPHAN_GRACE_S = 10.0
_CODE = "import sys; from model_runner.engine_process import run_child; run_child(int(sys.argv[1]))"


@dataclass(frozen=True)
class _Ready:
    traits: EngineTraits
    stats: EngineStats


@dataclass(frozen=True)
class _Failed:
    """The engine could not be built, or broke."""

    error: BaseException


class EngineProcess(EngineFace):
    """Runs `make_engine()` in a child process, from start to stop.

    make_engine  goes there by pickle: `functools.partial(Engine, config)`
    The child ends when its parent does, however that ends. A child that dies fails its streams.
    """

    def __init__(self, make_engine: Callable[[], Steppable]) -> None:
        super().__init__()
        self._make_engine = make_engine
        self._sending = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    @property
    def pid(self) -> int:
        """The child's, 0 before it was started."""
        return self._child.pid if self._child else 0

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the child, by force after `timeout_s`; running requests get an error."""
        self._close(self._epitaph)
        if self._child is None:
            return
        self._write(None)
        try:
            self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def _launch(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # By its own command line: it inherits no lock and no thread, and needs nothing of the
            # module that this process began with.
            self._child = subprocess.Popen(
                [sys.executable, "-c", _CODE, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            )
        self._pipe = Connection(ours.detach())
        self._write(self._make_engine)
        threading.Thread(target=self._listen, name="engine-news", daemon=True).start()

    def _is_running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def _send(self, command: Command) -> None:
        self._write(command)

    def _write(self, value: object) -> None:
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        assert self._pipe is not None
        # A child that is gone is noticed where its news are read.
        with self._sending, contextlib.suppress(OSError):
            self._pipe.send_bytes(data)

    def _listen(self) -> None:
        """Take in the child's news until its last. One thread reads for all event loops."""
        assert self._pipe is not None and self._child is not None
        error: BaseException | None = None
        with contextlib.suppress(EOFError, OSError):
            while error is None:
                match pickle.loads(self._pipe.recv_bytes()):
                    case outputs, stats:
                        self._tell(outputs, stats)
                    case _Ready(traits, stats):
                        self.traits = traits
                        self._tell((), stats)
                        self._ready.set()
                    case _Failed(reason):
                        error = reason
        if error is None:
            code = self._child.wait()
            error = RuntimeError(f"its process ended with exit code {code}")
        self._failure = error
        self._close(death_words(error))
        self._ready.set()


# The child


def run_child(fd: int) -> None:
    """Build the engine that the parent asks for over this socket; step it until told to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    pipe = Connection(fd)
    commands: Commands = queue.SimpleQueue()
    stopping = threading.Event()
    try:
        make_engine: Callable[[], Steppable] = pickle.loads(pipe.recv_bytes())
        listener = threading.Thread(target=_obey_parent, args=(pipe, commands, stopping))
        listener.daemon = True
        listener.start()
        engine = make_engine()
    except BaseException as error:
        _say(pipe, _Failed(_portable(error)))
        sys.exit(1)
    try:
        traits = EngineTraits(engine.targets, engine.dtype, engine.num_gpus)
        _say(pipe, _Ready(traits, engine.stats()))
        step_engine(engine, commands, functools.partial(_tell, pipe), stopping)
    except BaseException as error:
        _say(pipe, _Failed(_portable(error)))
        raise
    finally:
        with contextlib.suppress(Exception):
            engine.close()


def _obey_parent(pipe: Connection, commands: Commands, stopping: threading.Event) -> None:
    """Pass commands on. The end comes as None, or as the parent's own end."""
    with contextlib.suppress(EOFError, OSError):
        while (command := pickle.loads(pipe.recv_bytes())) is not None:
            commands.put(command)
    stopping.set()
    commands.put(None)
    time.sleep(ORPHAN_GRACE_S)
    os._exit(1)


def _tell(pipe: Connection, outputs: Sequence[RequestOutput], stats: EngineStats | None) -> None:
    _say(pipe, (outputs, stats))


def _say(pipe: Connection, value: object) -> None:
    with contextlib.suppress(OSError):  # a parent that is gone: the listener ends this process
        pipe.send_bytes(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))


def _portable(error: BaseException) -> BaseException:
    """The error itself, or its words where it cannot travel."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
