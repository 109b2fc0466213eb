"""A base model's replicas as the ingress sees them: a request goes to one, its outputs come back.
Where that one is lost, the answer goes on from its ids on another.

Not here: which one (request_router.py follows the placement), and what the outputs become (text).
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle

from deployments.placement.view import Place
from deployments.progress import Progress
from model_runner.request import ErrorCode, Request, RequestOutput

MAX_ATTEMPTS = 2
"""A request that was running on so many replicas when they died may be what kills them."""

_FULL_RETRY_S = 0.1
_log = logging.getLogger("ray.serve")


class _Lost(Exception):
    """The replica that ran a request does so no longer."""


class ReplicaBackend:
    """A `Backend` over Ray Serve: the request router of the handle follows `place`.

    patience_s  how long an answer that broke off waits for a replica to take it over
    """

    def __init__(self, handle: DeploymentHandle, patience_s: float = 300.0) -> None:
        self._handle = handle
        self._generate = handle.options(method_name="generate", stream=True)
        self._patience_s = patience_s
        self._running: dict[str, Progress] = {}

    async def stream(
        self, request: Request, place: Place | None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a request. If its replica dies, is stopped, or loses its engine, another one goes on
        at once from the ids that came; if that one is lost too, the request fails: ENGINE_DEAD.

        Replicas that were lost are avoided: for a while the request routers still know them.
        """
        progress = self._running[request.request_id] = Progress(request)
        lost: tuple[str, ...] = ()
        try:
            while not progress.has_ended:
                seat = replace(place or Place(()), avoid=lost, taken_by=[])
                try:
                    async with aclosing(self._attempt(progress, seat)) as outputs:
                        async for output in outputs:
                            yield output
                except BackPressureError as exc:
                    yield progress.failure(ErrorCode.OVERLOADED, exc.message)
                    return
                except _Lost as loss:
                    lost += tuple(seat.taken_by[-1:])
                    _log.warning("request %s lost its replica %s: %s", progress.name, lost, loss)
                    if progress.attempt == MAX_ATTEMPTS and not progress.has_ended:
                        words = f"{MAX_ATTEMPTS} replicas were lost while they served this request"
                        yield progress.failure(ErrorCode.ENGINE_DEAD, words)
                        return
        finally:
            del self._running[request.request_id]

    async def abort(self, request_id: str, index: int) -> None:
        """Said to every replica of the model: the others do not know the request and do nothing."""
        progress = self._running.get(request_id)
        if progress is not None:
            progress.end(index)
            self._handle.broadcast("abort", progress.name, index)

    async def _attempt(
        self, progress: Progress, place: Place
    ) -> AsyncGenerator[RequestOutput, None]:
        """One run, on one replica. Errors: _Lost; BackPressureError."""
        request = progress.next_attempt()
        messages, message = await self._begin(request, place, progress.attempt > 1)
        try:
            while message is not None:
                for output in message:
                    if output.error_code is ErrorCode.ENGINE_DEAD:
                        raise _Lost(output.error)
                    yield progress.take(output)
                message = await _next(messages)
            if not progress.has_ended:
                raise _Lost("its stream ended before the answer did")
        finally:
            messages.cancel()

    async def _begin(
        self, request: Request, place: Place, insist: bool
    ) -> tuple[Any, list[RequestOutput] | None]:
        """The stream of messages and its first one.

        insist  wait for room (at most patience_s): what has begun is not turned away
        """
        deadline = asyncio.get_running_loop().time() + self._patience_s if insist else None
        try:
            async with asyncio.timeout_at(deadline):
                while True:
                    messages = self._generate.remote(request, place=place)
                    try:
                        return messages, await _next(messages)
                    except BaseException as exc:
                        messages.cancel()
                        if not (insist and isinstance(exc, BackPressureError)):
                            raise
                    await asyncio.sleep(_FULL_RETRY_S)
        except TimeoutError:
            raise _Lost(f"no replica took the request over in {self._patience_s} s") from None


async def _next(messages: Any) -> list[RequestOutput] | None:
    """The next message, None after the last.

    Errors: BackPressureError; _Lost for whatever else the call raises: actors that died or cannot
    be reached raise one thing over Ray's own transport, and others over gRPC.
    """
    try:
        message: list[RequestOutput] | None = await anext(messages, None)
        return message
    except BackPressureError:
        raise
    except Exception as exc:
        raise _Lost(f"{type(exc).__name__}: {exc}") from exc
