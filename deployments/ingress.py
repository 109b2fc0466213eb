"""The HTTP face: OpenAI's routes in front of a `Frontend`, and the deployment that ties it to Ray.

What happens between a body and the engine is in frontend.py and job_maker.py.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, aclosing, suppress
from typing import Any, Protocol, TypeVar

import ray
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from ray import serve
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from deployments.admission import Job
from deployments.api_errors import CLIENT_GONE_STATUS, ApiError, internal_error
from deployments.body import BIG_BYTES, BodyLimits, Share, read_body
from deployments.config import ServiceConfig
from deployments.edge import STALL_HEADER
from deployments.frontend import Frontend, Prepare
from deployments.replica_backend import ReplicaBackend
from deployments.resumption import Resumption
from deployments.router_link import RouterLink
from deployments.serve_flags import open_log
from deployments.streaming import KEEP_ALIVE
from deployments.tenants import TenantConfig
from deployments.usage import UsageWriter
from deployments.usage_store import open_store

_log = logging.getLogger("ray.serve")
_T = TypeVar("_T")
_EVENT_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # for proxies on the way


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

    close         called once at the end: a generator that never started runs no `finally` of its
                  own
    keep_alive_s  a comment goes out after this long without an event
    late          whether that long has passed already: then a comment comes first
    """

    body_iterator: AsyncGenerator[bytes, None]

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        close: Callable[[], Awaitable[None]],
        headers: Mapping[str, str] | None = None,
        keep_alive_s: float = 15,
        late: bool = False,
    ) -> None:
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._close = close
        self._keep_alive_s = keep_alive_s
        self._late = late
        self._sent_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._close()

    async def stream_response(self, send: Send) -> None:
        """Events as they come, comments between them. What is sent is whole events, so the two
        never cut each other."""

        async def send_body(body: bytes, more: bool = True) -> None:
            self._sent_s = time.monotonic()
            await send({"type": "http.response.body", "body": body, "more_body": more})

        async with aclosing(self.body_iterator) as events:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            self._sent_s = time.monotonic() - self._keep_alive_s * self._late
            comments = asyncio.create_task(self._comment(send_body))
            try:
                async for event in events:
                    await send_body(event)
            finally:
                comments.cancel()
                await asyncio.gather(comments, return_exceptions=True)
            await send_body(b"", more=False)

    async def _comment(self, send_body: Callable[[bytes], Awaitable[None]]) -> None:
        while True:
            quiet_s = self._sent_s + self._keep_alive_s - time.monotonic()
            if quiet_s <= 0:
                await send_body(KEEP_ALIVE)
            else:
                await asyncio.sleep(quiet_s)

    async def listen_for_disconnect(self, receive: Receive) -> None:
        await _disconnected(receive)


def build_api(frontend: Frontend, control: ControlPlane) -> FastAPI:
    """The application: every answer that is an error has OpenAI's shape."""
    api = FastAPI(
        title="Multi-tenant MoE LoRA serving",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        # It would send a client, and its key, to whatever host its request named, without TLS.
        redirect_slashes=False,
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
        return JSONResponse(internal_error().body(), 500)

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
        listed = frontend.models(_tenant(frontend, request))
        return JSONResponse(listed.model_dump())

    @api.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        card = frontend.model(_tenant(frontend, request), name)
        return JSONResponse(card.model_dump())

    @api.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _answer(frontend, request, frontend.jobs.chat)

    @api.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _answer(frontend, request, frontend.jobs.completion)

    if frontend.operators.exist:

        @api.post("/operator/validate")
        async def validate(request: Request) -> Response:
            return JSONResponse(await _validate(frontend, request))

    return api


async def _validate(frontend: Frontend, request: Request) -> dict[str, Any]:
    """An operator's question. Errors: ApiError; 499 for one who does not wait for the answer."""
    _check_single(request, "authorization")
    frontend.operators.check(request.headers)
    with frontend.bodies.share("") as share:
        try:
            body = await _read(frontend, request, BIG_BYTES, share)
            return await _unless_gone(request.receive, frontend.operators.validate(body))
        except ClientGone:
            raise ApiError(CLIENT_GONE_STATUS, "the client is gone") from None


def _check_single(request: Request, name: str) -> None:
    """A header that is there twice is refused: a gateway may have added one of the two."""
    if name and len(request.headers.getlist(name)) > 1:
        raise ApiError(400, f"the header {name} is there more than once")


def _tenant(frontend: Frontend, request: Request) -> TenantConfig:
    """Who asks. Errors: ApiError 400, 401."""
    for name in ("authorization", frontend.config.ingress.trusted_tenant_header.lower()):
        _check_single(request, name)
    return frontend.tenant_of(request.headers)


async def _answer(frontend: Frontend, request: Request, prepare: Prepare) -> Response:
    tenant = _tenant(frontend, request)
    meter = frontend.meter(tenant)
    async with AsyncExitStack() as held:
        try:
            share = held.enter_context(frontend.bodies.share(tenant.tenant_id))
            job, resumption = await _job(frontend, request, tenant, prepare, share)
            meter.began(job)
            stalled_s = str(frontend.config.ingress.max_stalled_s)
            headers = {"x-request-id": job.writer.answer_id, STALL_HEADER: stalled_s}
            if not job.stream:
                answer = await _unless_gone(request.receive, frontend.whole(job, meter))
                return Response(answer, media_type="application/json", headers=headers)
            patience_s = frontend.config.ingress.keep_alive_s
            outputs = frontend.outputs(job, meter, resumption.has_begun)
            first = asyncio.create_task(frontend.first(outputs))
            try:
                await _unless_gone(request.receive, asyncio.wait({first}, timeout=patience_s))
                late = not first.done()
                if not late:
                    first.result()  # an error has its own status as long as nothing was sent
            except BaseException:
                await frontend.drop(outputs, first)
                raise
            events = frontend.events(job, meter, outputs, first, resumption)
            held.push_async_callback(frontend.close, meter, outputs, first)
            close = held.pop_all().aclose
            return EventStream(events, close, headers | _EVENT_HEADERS, patience_s, late)
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


async def _job(
    frontend: Frontend, request: Request, tenant: TenantConfig, prepare: Prepare, share: Share
) -> tuple[Job, Resumption]:
    """The request's body, ready to run. Errors: ApiError; ClientGone for an upload given up."""
    body = await _read(frontend, request, frontend.config.ingress.max_body_bytes, share)
    cursor = request.headers.get("last-event-id")
    resumption = frontend.resumption(tenant, request.url.path, body, cursor)
    prepared = frontend.prepared(prepare, tenant, body, resumption.answer_id)
    if share.num_bytes == 0:  # small: ready before anybody could leave
        job = await prepared
    else:
        job = await _unless_gone(request.receive, prepared)
    share.shrink_to(job.kept_bytes)
    resumption.begin(job)
    return job, resumption


async def _read(frontend: Frontend, request: Request, max_bytes: int, share: Share) -> bytes:
    """A whole body. Errors: ApiError; ClientGone for an upload given up."""
    settings = frontend.config.ingress
    limits = BodyLimits(max_bytes, settings.max_stalled_s, settings.min_body_bytes_per_s)
    try:
        declared = request.headers.get("content-length")
        return await read_body(request.stream(), declared, limits, share)
    except (ClientDisconnect, RayError):
        raise ClientGone from None


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
        open_log(_log)
        patience_s, me = config.ingress.max_waiting_s, ray.get_runtime_context().get_actor_name()
        backends = {
            name: ReplicaBackend(
                handle,
                patience_s,
                me or "",
                DeploymentHandle(handle.deployment_name, handle.app_name),
            )
            for name, handle in replicas.items()
        }
        self._frontend = Frontend(config, salt_key, backends)
        self._link = RouterLink(self._frontend, router)
        self._tasks = [asyncio.create_task(self._link.run())]
        self._writer: UsageWriter | None = None
        if self._frontend.usage is not None:
            store = open_store(config.usage.root, config.usage_s3().options())
            self._writer = UsageWriter(self._frontend.usage, store, self._frontend.log)
            self._tasks.append(asyncio.create_task(self._writer.run()))

    def __serve_build_asgi_app__(self) -> FastAPI:
        return build_api(self._frontend, self._link)

    async def __del__(self) -> None:
        """Serve awaits this when the ingress is stopped in order, after its answers."""
        if not hasattr(self, "_tasks"):
            return
        for task in self._tasks:
            task.cancel()
        if self._writer is not None:
            await self._writer.close()
        await self._link.close()  # what the writer counted last is among it
        await asyncio.to_thread(self._frontend.stop)
