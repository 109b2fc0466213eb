"""A base model's replicas as the ingress sees them: a request goes to one, its outputs come back.

Not here: which one (request_router.py follows the placement), and what the outputs become (text).
"""

import logging
from collections.abc import AsyncGenerator
from contextlib import suppress

from ray.exceptions import RayError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
)
from ray.serve.handle import DeploymentHandle

from deployments.placement.view import Place
from model_runner.request import ErrorCode, FinishReason, Request, RequestOutput

_TROUBLE = (RayError, RayServeException)  # what a call over a handle may raise of its own
_log = logging.getLogger("ray.serve")


class ReplicaBackend:
    """A `Backend` over Ray Serve: the request router of the handle follows `place`."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        # Plain values cross: Serve's default, cloudpickle, takes many times as long for them.
        self._generate = handle.options(
            method_name="generate",
            stream=True,
            request_serialization="pickle",
            response_serialization="pickle",
        )

    async def stream(
        self, request: Request, place: Place | None
    ) -> AsyncGenerator[RequestOutput, None]:
        """A request whose replica dies before its first token is run again, once, on another."""
        for last_try in (False, True):
            begun = False
            messages = self._generate.remote(request, place=place)
            try:
                async for message in messages:
                    begun = True
                    for output in message:
                        yield output
                return
            except BackPressureError as exc:
                yield _failed(request, ErrorCode.OVERLOADED, exc.message)
                return
            except DeploymentUnavailableError:
                words = "no replica of this base model could be started"
                yield _failed(request, ErrorCode.ENGINE_DEAD, words)
                return
            except _TROUBLE as exc:
                _log.warning("request %s lost its replica: %s", request.request_id, exc)
                if begun or last_try:
                    words = "the replica that served this request is gone"
                    yield _failed(request, ErrorCode.ENGINE_DEAD, words)
                    return
            finally:
                with suppress(*_TROUBLE):  # it says again what it failed of
                    messages.cancel()

    async def abort(self, request_id: str, index: int) -> None:
        """Said to every replica of the model: the others do not know the request and do nothing."""
        self._handle.broadcast("abort", request_id, index)


def _failed(request: Request, code: ErrorCode, words: str) -> RequestOutput:
    return RequestOutput(
        request.request_id,
        finish_reason=FinishReason.ERROR,
        error_code=code,
        error=words,
    )
