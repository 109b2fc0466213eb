"""Renders chat templates that tenants wrote, in processes of their own (template_worker.py).

One owner's templates wait for each other and for nobody else's. Not for a base model's template,
which its operator chose (tokenizer.py).
"""

import asyncio
import hashlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import LifoQueue
from typing import Any
from weakref import WeakValueDictionary, finalize

from model_runner.template_worker import receive, send

WORKERS = 2
_WORKER = Path(__file__).with_name("template_worker.py")
_PATIENCE_S = 30.0  # a child is ended long before; this is for a worker that is gone or stuck
_START_S = 60.0
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "TZ")


class TemplateFailure(ValueError):
    """A template gave no text; the message says why."""


class TemplateSandbox:
    """Starts nothing before the first template. One event loop calls it.

    num_workers  processes, each started when those before it are busy
    """

    def __init__(self, num_workers: int = WORKERS) -> None:
        self._threads = ThreadPoolExecutor(num_workers, "chat-template")
        self._idle: LifoQueue[_Worker] = LifoQueue()
        for _ in range(num_workers):
            self._idle.put(_Worker())
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def render(self, owner: str, template: str, known: Mapping[str, object]) -> str:
        """The text of a template.

        owner  whose it is: one of theirs at a time;  known  what it may use, plain values
        Errors:  TemplateFailure: it is broken, raises, or takes too much of time, memory or text.
        """
        values = json.dumps(known).encode()
        turn = self._turns.setdefault(owner, asyncio.Lock())
        await turn.acquire()
        try:
            loop = asyncio.get_running_loop()
            work = loop.run_in_executor(self._threads, self._render, template.encode(), values)
        except BaseException:
            turn.release()
            raise

        def ended(work: "asyncio.Future[str]") -> None:
            turn.release()
            if not work.cancelled():
                work.exception()  # heard, whether somebody waits or not

        work.add_done_callback(ended)
        return await asyncio.shield(work)  # a thread goes on: its owner's turn is over when it ends

    def close(self) -> None:
        """End the workers."""
        self._threads.shutdown(wait=True)
        while not self._idle.empty():
            self._idle.get().close()

    def _render(self, template: bytes, values: bytes) -> str:
        worker = self._idle.get()
        try:
            said = worker.ask(template, values)
        finally:
            self._idle.put(worker)
        if said[:1] == b"T":
            return said[1:].decode()
        raise TemplateFailure(said[1:].decode("utf-8", "replace"))


class _Worker:
    """One process, started when it is needed and again if it has died. One thread at a time."""

    def __init__(self) -> None:
        self._line: socket.socket | None = None
        self._end: Any = None

    def ask(self, template: bytes, values: bytes) -> bytes:
        """Its answer. Errors: RuntimeError if it dies of this twice."""
        name = hashlib.sha256(template).digest()
        for _ in range(2):
            try:
                line = self._line or self._start()
                line.settimeout(_PATIENCE_S)
                for frame in (name, template, values):
                    send(line, frame)
                return receive(line)
            except (OSError, EOFError):
                self.close()
        raise RuntimeError("the process that renders chat templates does not answer")

    def close(self) -> None:
        """End it, by force."""
        if self._end is not None:
            self._end()
        self._line = self._end = None

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            # Next to no environment: keys are there. -I: nothing but what is installed.
            process = subprocess.Popen(
                [sys.executable, "-I", str(_WORKER)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                cwd="/",
            )
        self._line, self._end = ours, finalize(self, _end, process, ours)
        ours.settimeout(_START_S)
        receive(ours)
        return ours


def _end(process: subprocess.Popen[bytes], line: socket.socket) -> None:
    line.close()
    with suppress(OSError):
        process.kill()
    process.wait()
