"""What stands around Serve's proxy, in the proxy's own process: bounds on uploads, what a client
may say to Serve itself, and Serve's own errors in OpenAI's words.

Serve calls `guards` where the environment names it before Ray starts:
RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=deployments.edge:guards. Without it the service is the
same to honest clients. Not here: sockets (connection.py), keys, tenants, and what a body means
(ingress.py).
"""

import json
import os
import re
from collections.abc import Callable, MutableMapping
from typing import Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import HTTP_PROTOCOLS

from deployments.api_errors import ApiError, overloaded
from deployments.body import BIG_BYTES
from deployments.connection import BoundedHttp

STALL_HEADER = "x-edge-max-stalled-s"
"""Of the ingress' answers, for this file alone: `ingress.max_stalled_s`, which no proxy knows."""

MAX_BODY_BYTES = 65 << 20  # above what a configuration may allow: the ingress refuses first
MAX_UPLOADS_BYTES = 512 << 20

# Serve takes orders from these: which replica, how long, whether to notice that the client left.
_SERVES_OWN = {
    "serve_multiplexed_model_id",
    "x_request_timeout_seconds",
    "x_request_disconnect_disabled",
    os.environ.get("RAY_SERVE_SESSION_ID_HEADER_KEY", "x-session-id").lower().replace("-", "_"),
}
_LABEL = re.compile(rb"[!-~]{1,128}")


def guards() -> list[Middleware]:
    """What Serve puts around its proxy; the connections' class goes into uvicorn's own table, for
    Serve leaves the choice of it to uvicorn."""
    HTTP_PROTOCOLS["auto"] = f"{BoundedHttp.__module__}:{BoundedHttp.__name__}"
    return [Middleware(Edge)]


class Edge:
    """Around Serve's proxy: clients' orders to Serve are left out, uploads bounded, and Serve's
    own errors told as OpenAI tells them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._uploading_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit_stall = scope.pop("limit_stall", None)  # what stays in the scope is pickled
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        label = _take_orders(scope)
        upload = _Upload(self, receive)
        answer = _Answer(send, limit_stall, label, scope["path"])
        await self._app(scope, upload.receive, answer.send)
        if upload.refusal is not None and not answer.started:
            await answer.fail(upload.refusal)

    def take(self, num_bytes: int) -> None:
        """Count bytes of uploads in, or out where negative."""
        self._uploading_bytes += num_bytes

    def has_room(self, num_bytes: int) -> bool:
        return self._uploading_bytes + num_bytes <= MAX_UPLOADS_BYTES


class _Part(dict[str, Any]):
    """A message with a part of a body, counted for as long as it lies in this process: until the
    ingress has fetched it, or the request is over. On its way to the ingress it is a plain one."""

    def __init__(self, message: Message, edge: Edge) -> None:
        super().__init__(message)
        self._edge, self._size = edge, len(message["body"])
        edge.take(self._size)

    def __del__(self) -> None:
        self._edge.take(-self._size)

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (dict(self),)


class _Upload:
    """One request's body on its way into the proxy, which keeps what the ingress has not fetched.

    How long an answer takes is no matter here: what is being answered has been fetched. But for a
    small body's only part: Serve holds that until its request is over.
    """

    def __init__(self, edge: Edge, receive: Receive) -> None:
        self._edge = edge
        self._receive = receive
        self._num_bytes = 0
        self._end: Message | None = None
        self.refusal: ApiError | None = None

    async def receive(self) -> Message:
        if self._end is not None:
            message, self._end = self._end, None
            return message
        message = await self._receive()
        size = len(message.get("body", b""))
        if not size:
            return message
        self._num_bytes += size
        is_big = self._num_bytes > BIG_BYTES
        if self._num_bytes > MAX_BODY_BYTES:
            self.refusal = ApiError(413, "the body is too large", code="body_too_large")
        elif is_big and not self._edge.has_room(size):
            self.refusal = overloaded("too many large requests at once: try again", 503)
        if self.refusal is not None:
            # To Serve the client is gone: that is how a request is ended before its answer.
            return {"type": "http.disconnect"}
        if is_big and not message["more_body"]:
            # Serve holds a request's last message until it is over: let that be an empty one.
            self._end = {**message, "body": b""}
            message = {**message, "more_body": True}
        return _Part(message, self._edge)


class _Answer:
    """One answer on its way out of the proxy."""

    def __init__(
        self,
        send: Send,
        limit_stall: Callable[[float], None] | None,
        label: bytes,
        path: str,
    ) -> None:
        self._send = send
        self._limit_stall = limit_stall
        self._label = label
        self._is_serves = path.startswith("/-/")
        self._replaced = False
        self.started = False

    async def send(self, message: Message) -> None:
        if self._replaced:
            return
        if message["type"] != "http.response.start":
            await self._send(message)
            return
        self.started = True
        headers = [(bytes(name).lower(), bytes(value)) for name, value in message["headers"]]
        status = message["status"]
        content = dict(headers).get(b"content-type", b"")
        if status >= 400 and content.startswith(b"text/plain") and not self._is_serves:
            await self.fail(_serves_error(status))
            self._replaced = True
            return
        await self._send({**message, "headers": self._cleaned(headers)})

    async def fail(self, error: ApiError) -> None:
        """An error instead of an answer."""
        self.started = True
        body = _body(error)
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        pairs = [(k.lower().encode(), v.encode()) for k, v in (headers | error.headers()).items()]
        await self._send({"type": "http.response.start", "status": error.status, "headers": pairs})
        await self._send({"type": "http.response.body", "body": body})

    def _cleaned(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Without what is ours alone, and with one request id: ours, where Serve added its own."""
        kept: list[tuple[bytes, bytes]] = []
        for name, value in headers:
            if name == STALL_HEADER.encode():
                if self._limit_stall is not None:
                    self._limit_stall(float(value))
            elif name != b"x-request-id" or all(other != name for other, _ in kept):
                kept.append((name, value))
        if self._label:
            kept.append((b"x-client-request-id", self._label))
        return kept


def _take_orders(scope: MutableMapping[str, Any]) -> bytes:
    """Leave out the headers that Serve obeys. The client's request id is given back, as a label:
    two equal ones must not meet in Serve."""
    label = b""
    kept = []
    for name, value in scope["headers"]:
        plain = name.decode("latin-1").lower().replace("-", "_")
        if plain == "x_request_id":
            label = value if _LABEL.fullmatch(value) else b""
        elif plain not in _SERVES_OWN and not plain.startswith("x_serve_"):
            kept.append((name, value))
    scope["headers"] = kept
    return label


def _serves_error(status: int) -> ApiError:
    """An error that Serve made, without its words: they are meant for the operator."""
    if status in (429, 503):
        return overloaded("the service is overloaded or starting: try again", status)
    if status == 404:
        return ApiError(404, "there is no service at this address")
    if status == 408:
        return ApiError(408, "the request took too long", code="request_timeout")
    return ApiError(status, "internal error", kind="server_error")


def _body(error: ApiError) -> bytes:
    return json.dumps(error.body()).encode()
