"""A base model's replicas as the ingress sees them: a request goes to one, its outputs come back.
Where that one is lost, the answer goes on from its ids on another.

Not here: which one (request_router.py follows the placement), and what the outputs become (text).
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, nullcontext, suppress
from dataclasses import replace
from typing import Any

import ray
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from deployments.kept_answers import base_id
from deployments.placement.view import Place
from deployments.progress import Progress
from deployments.pulse import Pulse
from model_runner.request import ErrorCode, Request, RequestOutput

MAX_ATTEMPTS = 2
"""A request that was running on so many replicas when they died may be what kills them."""

RECALL_S = 1.0
MAX_ASKED = 16
"""So long, and so many of them, replicas are asked for an answer that was begun; then it is made
anew. When an ingress dies, all of its clients come at once."""

OTHERS_S = 0.2
"""So long, once one of them knows the answer, the others may still say that they know more of
it."""

_FULL_RETRY_S = 0.1
_LOOKUPS = ThreadPoolExecutor(4, "lookups")
"""Not the loop's own threads: those may all be busy with prompts, which is no replica's fault."""

_log = logging.getLogger("ray.serve")


class _Lost(Exception):
    """The replica that ran a request does so no longer."""


class _Silent(_Lost):
    """It does not answer, but it may again."""


class ReplicaBackend:
    """A `Backend` over Ray Serve: the request router of the handle follows `place`.

    patience_s  how long an answer that broke off waits for a replica to take it over
    caller      the name of this process' actor: replicas look whether it lives
    control     another handle of the same deployment, for all calls but `generate`: it has a queue
                of its own, so they are not refused where too many requests wait
    """

    def __init__(
        self,
        handle: DeploymentHandle,
        patience_s: float = 300.0,
        caller: str = "",
        control: DeploymentHandle | None = None,
    ) -> None:
        # Plain values cross: Serve's default, cloudpickle, takes many times as long for them.
        plain = {"request_serialization": "pickle", "response_serialization": "pickle"}
        self._generate = handle.options(**plain).options(method_name="generate", stream=True)
        self._patience_s = patience_s
        self._caller = caller
        self._control = control or handle
        self._recalled = self._control.options(**plain).options(method_name="recall")
        self._validated = self._control.options(**plain).options(method_name="validate")
        self._running: dict[str, Progress] = {}
        self._pulse = Pulse(_is_there)
        self._tasks: set[asyncio.Future[Any]] = set()

    async def stream(
        self, request: Request, place: Place | None, again: bool = False
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a request. If its replica dies, is stopped, or loses its engine, another one goes on
        at once from the ids that came; if that one is lost too, the request fails: REPLICAS_LOST.

        Replicas that were lost are avoided: for a while the request routers still know them. Those
        that were silent are, too, where there are others.
        request  its id is of this connection alone; runs of one answer share what is before "/"
        again    it ran before, for a connection that broke: from the ids of then where a replica
                 still knows them, else from its beginning
        """
        # Made anew for other extras, it has another name: its first run may not be over there.
        progress = Progress(request, (request.extras_key or "")[:8])
        self._running[request.request_id] = progress
        lost: tuple[str, ...] = ()
        try:
            for output in await self._recall(request, place) if again else ():
                yield progress.take(output)
            while not progress.has_ended:
                seat = replace(
                    place or Place(),
                    avoid=lost,
                    shun=self._pulse.shunned(),
                    taken_by=[],
                    caller=self._caller,
                    # What has begun somewhere must not be refused for want of room elsewhere.
                    may_spill=(place is None or place.may_spill) and not progress.has_begun,
                )
                try:
                    async with aclosing(self._attempt(progress, seat)) as outputs:
                        async for output in outputs:
                            yield output
                except BackPressureError as exc:
                    yield progress.failure(ErrorCode.OVERLOADED, exc.message)
                    return
                except DeploymentUnavailableError:
                    words = "no replica of this base model could be started"
                    yield progress.failure(ErrorCode.ENGINE_DEAD, words)
                    return
                except _Lost as loss:
                    by = tuple(seat.taken_by[-1:])
                    _log.warning("request %s lost its replica %s: %s", progress.name, by, loss)
                    if not isinstance(loss, _Silent):
                        lost += by
                    if progress.attempt == MAX_ATTEMPTS and not progress.has_ended:
                        words = f"{MAX_ATTEMPTS} replicas were lost while they served this request"
                        yield progress.failure(ErrorCode.REPLICAS_LOST, words)
                        return
        finally:
            if self._running.get(request.request_id) is progress:
                del self._running[request.request_id]

    async def validate(self, uri: str, root: str) -> dict[str, Any] | None:
        """What a replica's node makes of an adapter, see `Replica.validate`. Errors: those of a
        call."""
        report: dict[str, Any] | None = await self._validated.remote(uri, root)
        return report

    async def abort(self, request_id: str, index: int) -> None:
        """Said to every replica of the model: the others do not know the request and do nothing."""
        progress = self._running.get(request_id)
        if progress is not None:
            progress.end(index)
            self._tell("abort", progress.name, index)

    def _tell(self, *call: Any) -> None:
        """Call every replica, and wait for none. A broadcast is sent when its results are asked
        for."""
        told = self._control.broadcast(*call).results_async(return_exceptions=True)
        task = asyncio.ensure_future(told)
        self._tasks.add(task)
        task.add_done_callback(self._told)

    def _told(self, task: "asyncio.Future[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.warning("a call to all replicas failed: %s", task.exception())

    async def _recall(self, request: Request, place: Place | None) -> list[RequestOutput]:
        """What the replica that knows most has told of the request, which ends wherever it is
        known; [] if no replica knows it."""
        place = place or Place()
        name, loop = base_id(request.request_id), asyncio.get_running_loop()
        seats = tuple(dict.fromkeys(place.homes + place.seats))[:MAX_ASKED]
        # To each seat apart, for a dead one takes its time; it is another's turn then, who says no.
        asked = [
            asyncio.ensure_future(self._ask(name, Place((seat,), seat, may_spill=False)))
            for seat in seats
        ]
        pending, until, known = set(asked), loop.time() + RECALL_S, list[list[RequestOutput]]()
        try:
            while pending and loop.time() < until:
                done, pending = await asyncio.wait(
                    pending,
                    timeout=until - loop.time(),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                known += [outputs for task in done if (outputs := task.result()) is not None]
                if known:
                    until = min(until, loop.time() + OTHERS_S)
        finally:
            for task in asked:
                task.cancel()
        if pending:
            _log.warning("not every replica was asked for request %s", request.request_id)
        return max(known, key=_num_ids, default=[])

    async def _ask(self, request_id: str, place: Place) -> list[RequestOutput] | None:
        try:
            outputs: list[RequestOutput] | None = await self._recalled.remote(
                request_id, place=place
            )
            return outputs
        except Exception as exc:
            _log.warning("a replica could not be asked for request %s: %s", request_id, exc)
            return None

    async def _attempt(
        self, progress: Progress, place: Place
    ) -> AsyncGenerator[RequestOutput, None]:
        """One run, on one replica. Errors: _Lost; BackPressureError; DeploymentUnavailableError.

        The last one that there may be is not given up for silence: Ray will tell if it is dead.
        """
        has_begun, request = progress.has_begun, progress.next_attempt()
        wait = _Wait()
        watch = self._pulse.watching(place.taken_by, wait.give_up)
        with watch if progress.attempt < MAX_ATTEMPTS else nullcontext():
            messages, message = await self._begin(request, place, wait, has_begun)
            try:
                while message is not None:
                    for output in message:
                        if output.error_code is ErrorCode.ENGINE_DEAD:
                            raise _Lost(output.error)
                        yield progress.take(output)
                    message = await wait.next(messages)
                if not progress.has_ended:
                    raise _Lost("its stream ended before the answer did")
            finally:
                _cancel(messages)

    async def _begin(
        self, request: Request, place: Place, wait: "_Wait", insist: bool
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
                        message = await wait.next(messages)
                        if not _is_full(message):
                            return messages, message
                        _cancel(messages)
                    except BaseException as exc:
                        _cancel(messages)
                        if not (insist and isinstance(exc, BackPressureError)):
                            raise
                    await asyncio.sleep(_FULL_RETRY_S)
        except TimeoutError:
            raise _Lost(f"no replica took the request over in {self._patience_s} s") from None


class _Wait:
    """For the messages of one run, until somebody gives it up."""

    def __init__(self) -> None:
        self._timeout: asyncio.Timeout | None = None

    def give_up(self) -> None:
        """The replica does not answer: whoever waits for it is told so."""
        if self._timeout is not None:
            self._timeout.reschedule(0.0)

    async def next(self, messages: Any) -> list[RequestOutput] | None:
        """The next message, None after the last.

        Errors: BackPressureError; DeploymentUnavailableError; _Lost for whatever else the call
        raises: actors that died or cannot be reached raise one thing over Ray's own transport, and
        others over gRPC.
        """
        try:
            async with asyncio.timeout(None) as self._timeout:
                message: list[RequestOutput] | None = await anext(messages, None)
            return message
        except (BackPressureError, DeploymentUnavailableError):
            raise
        except Exception as exc:
            if self._timeout is not None and self._timeout.expired():
                raise _Silent("it does not answer") from exc
            raise _Lost(f"{type(exc).__name__}: {exc}") from exc
        finally:
            self._timeout = None


def _is_full(message: list[RequestOutput] | None) -> bool:
    """Whether others had taken a replica's last place when the request came there."""
    return any(output.error_code is ErrorCode.OVERLOADED for output in message or ())


def _num_ids(outputs: list[RequestOutput]) -> int:
    return sum(len(output.new_token_ids) for output in outputs)


def _cancel(messages: Any) -> None:
    with suppress(Exception):  # it says again what it failed of
        messages.cancel()


async def _is_there(replica: str) -> None:
    """Ask an actor of Serve, beside its requests. Errors: what Ray raises if it is not there."""
    loop = asyncio.get_running_loop()
    actor = await loop.run_in_executor(_LOOKUPS, ray.get_actor, replica, "serve")
    await actor.get_num_ongoing_requests.remote()
