"""The HTTP face: OpenAI's routes in front of a `Frontend`, and the deployment that ties it to Ray.

What happens between a body and the engine is in frontend.py.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, Protocol, TypeVar

import ray
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from ray import serve
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from deployments.admission import Job
from deployments.api_errors import CLIENT_GONE_STATUS, ApiError
from deployments.config import ServiceConfig
from deployments.frontend import Frontend
from deployments.replica_backend import ReplicaBackend
from deployments.router_link import RouterLink
from deployments.tenants import TenantConfig

_log = logging.getLogger("ray.serve")
_T = TypeVar("_T")
_Prepare = Callable[[TenantConfig, bytes, str], Awaitable[Job]]


class ClientGone(Exception):
    """The client closed its socket before the answer."""


class ControlPlane(Protocol):
    """What the face asks of the rest of the service."""

    async def metrics(self) -> bytes:
        """All series in Prometheus' text form."""
        ...

    async def missing(self) -> list[str]:
        """The base models that no replica serves just now."""
        ...


class EventStream(StreamingResponse):
    """Server-sent events whose generator is closed as soon as the client is gone.

    close  called once at the end: a generator that never started runs no `finally` of its own
    """

    body_iterator: AsyncGenerator[bytes, None]

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        close: Callable[[], Awaitable[None]],
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._close()

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self.body_iterator):
            await super().stream_response(send)

    async def listen_for_disconnect(self, receive: Receive) -> None:
        await _disconnected(receive)


def build_api(frontend: Frontend, control: ControlPlane) -> FastAPI:
    """The application: every answer that is an error has OpenAI's shape."""
    api = FastAPI(
        title="Multi-tenant MoE LoRA serving", docs_url=None, redoc_url=None, openapi_url=None
    )

    @api.exception_handler(ApiError)
    async def on_api_error(_: Request, exc: ApiError) -> Response:
        return JSONResponse(exc.body(), exc.status, exc.headers())

    @api.exception_handler(HTTPException)
    async def on_http_error(request: Request, exc: HTTPException) -> Response:
        words = {404: f"Unknown request URL: {request.method} {request.url.path:.200}"}
        message = words.get(exc.status_code, str(exc.detail))
        return JSONResponse(ApiError(exc.status_code, message).body(), exc.status_code, exc.headers)

    @api.exception_handler(Exception)
    async def on_bug(_: Request, exc: Exception) -> Response:
        _log.error("a request failed unexpectedly", exc_info=exc)
        return JSONResponse(ApiError(500, "internal error", kind="server_error").body(), 500)

    @api.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @api.get("/ready")
    async def ready() -> Response:
        missing = await control.missing()
        return JSONResponse({"ready": not missing, "missing": missing}, 503 if missing else 200)

    @api.get("/metrics")
    async def metrics() -> Response:
        text = await control.metrics()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @api.get("/v1/models")
    async def models(request: Request) -> Response:
        listed = frontend.models(frontend.tenant_of(request.headers))
        return JSONResponse(listed.model_dump())

    @api.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        card = frontend.model(frontend.tenant_of(request.headers), name)
        return JSONResponse(card.model_dump())

    @api.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _answer(frontend, request, frontend.chat)

    @api.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _answer(frontend, request, frontend.completion)

    return api


async def _answer(frontend: Frontend, request: Request, prepare: _Prepare) -> Response:
    tenant = frontend.tenant_of(request.headers)
    meter = frontend.meter(tenant)
    try:
        body = await _body(request, frontend.config.ingress.max_body_bytes)
        cursor = request.headers.get("last-event-id")
        resumption = frontend.resumption(tenant, request.url.path, body, cursor)
        job = await prepare(tenant, body, resumption.answer_id)
        resumption.begin(job)
        meter.began(job)
        headers = {"x-request-id": job.writer.answer_id}
        if not job.stream:
            answer = await _unless_gone(request.receive, frontend.whole(job, meter))
            return Response(answer, media_type="application/json", headers=headers)
        outputs = frontend.outputs(job, meter, resumption.has_begun)
        first = await _unless_gone(request.receive, frontend.first(outputs))
        events = frontend.events(job, meter, outputs, first, resumption)
        return EventStream(events, partial(frontend.close, meter, outputs), headers)
    except ClientGone:
        meter.finish(CLIENT_GONE_STATUS)
        return Response(status_code=CLIENT_GONE_STATUS)
    except asyncio.CancelledError:
        meter.finish(CLIENT_GONE_STATUS)
        raise
    except ApiError as exc:
        meter.finish(exc.status)
        raise
    except Exception:
        meter.finish(500)
        raise


async def _body(request: Request, limit_bytes: int) -> bytes:
    """The request's body, at most `limit_bytes` of it in memory. Errors: ApiError 413."""
    too_large = ApiError(413, f"the body is larger than {limit_bytes} bytes", code="body_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit_bytes:
            raise too_large
    return bytes(body)


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`, which is cancelled as soon as the client is gone.

    Errors: ClientGone.
    """
    task, watch = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    """Return when the client is gone.

    Serve says so by an error where its proxy has dropped the request already.
    """
    with suppress(RayError):
        while (await receive())["type"] != "http.disconnect":
            pass


@serve.ingress()
class Ingress:
    """The deployment: a `Frontend` over the replicas' handles.

    Serve asks it for its application once it is made.
    """

    def __init__(
        self,
        config: ServiceConfig,
        salt_key: bytes,
        router: DeploymentHandle,
        replicas: dict[str, DeploymentHandle],
    ) -> None:
        patience_s, me = config.ingress.max_waiting_s, ray.get_runtime_context().get_actor_name()
        backends = {
            name: ReplicaBackend(handle, patience_s, me or "") for name, handle in replicas.items()
        }
        self._frontend = Frontend(config, salt_key, backends)
        self._link = RouterLink(self._frontend, router)
        self._sync = asyncio.create_task(self._link.run())

    def __serve_build_asgi_app__(self) -> FastAPI:
        return build_api(self._frontend, self._link)
