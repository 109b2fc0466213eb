"""What stands between the sockets and Serve's proxy, in the proxy's own process: bounds on heads,
uploads and readers, and what a client may say to Serve itself.

Serve calls `guards` where the environment names it before Ray starts:
RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=deployments.edge:guards. Without it the service is the
same to honest clients. Not here: keys, tenants, and what a body means (ingress.py).
"""

import asyncio
import json
import os
import re
import socket
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from typing import Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from deployments.api_errors import ApiError, overloaded
from deployments.body import BIG_BYTES

STALL_HEADER = "x-edge-max-stalled-s"
"""Of the ingress' answers, for this file alone: `ingress.max_stalled_s`, which no proxy knows."""

MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 100
HEAD_WITHIN_S = 10.0
MAX_CONNECTIONS = 4096
MAX_BODY_BYTES = 65 << 20  # above what a configuration may allow: the ingress refuses first
MAX_UPLOADS_BYTES = 512 << 20
_MAX_STALLED_S = 30.0  # until the ingress has answered once on this connection
_SEND_BUFFER_BYTES = 256 << 10
_LINGER_S = 2.0

# Serve takes orders from these: which replica, how long, whether to notice that the client left.
_SERVES_OWN = {
    "serve_multiplexed_model_id",
    "x_request_timeout_seconds",
    "x_request_disconnect_disabled",
    os.environ.get("RAY_SERVE_SESSION_ID_HEADER_KEY", "x-session-id").lower().replace("-", "_"),
}
_LABEL = re.compile(rb"[!-~]{1,128}")


def guards() -> list[Middleware]:
    """What Serve puts around its proxy; the connections' class goes into uvicorn's own table.

    uvicorn bounds heads with h11 alone, which it does not take where httptools is installed.
    """
    HTTP_PROTOCOLS["auto"] = f"{BoundedHttp.__module__}:{BoundedHttp.__name__}"
    return [Middleware(Edge)]


class BoundedHttp(HttpToolsProtocol):
    """One connection of uvicorn's, with an end to what it may send, keep open, or leave unread."""

    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _max_stalled_s = _MAX_STALLED_S
    _in_head = True
    _num_headers = 0
    _head_bytes = 0
    _began_in_this_part = False
    _refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
            return
        sock = transport.get_extra_info("socket")
        if sock is not None:
            # What a reader leaves unread lies in the kernel first: not without bound.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self.limit_stall(_MAX_STALLED_S)
        self._await_head()

    def limit_stall(self, seconds: float) -> None:
        """The kernel drops a peer that takes nothing for this long, gone silent or not reading."""
        self._max_stalled_s = seconds
        sock = self.transport.get_extra_info("socket")
        if sock is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(self._max_stalled_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._began_in_this_part = False
        super().data_received(data)
        if self._in_head and not self._began_in_this_part and not self._refused:
            # httptools keeps an unfinished header to itself: it is counted here.
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, "the request's head is too large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["limit_stall"] = self.limit_stall  # type: ignore[typeddict-unknown-key]
        self._num_headers = self._head_bytes = 0
        self._began_in_this_part = True
        self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Trailers of a body come here as well, and count like the head they follow."""
        self._num_headers += 1
        self._head_bytes += len(name) + len(value)
        if self._num_headers > MAX_HEADERS or self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, f"the request's head has too many headers, more than {MAX_HEADERS}")
            raise ValueError  # ends the parser's work on this part
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.more_body:  # refused before its end: the rest is passed over, for a while
            self.loop.call_later(self._max_stalled_s, self._end_upload, self.cycle)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _await_head(self) -> None:
        self._in_head = True
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._head_timer = self.loop.call_later(HEAD_WITHIN_S, self._head_is_late)

    def _head_is_late(self) -> None:
        self._refuse(408, "the request's head came too slowly")

    def _end_upload(self, cycle: Any) -> None:
        if cycle.more_body and self.cycle is cycle:
            self.transport.abort()

    def _refuse(self, status: int, words: str) -> None:
        """Answer what no application sees; keep reading for a moment, or the answer is lost."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()  # an answer is on its way already: no second one into it
            return
        body = _body(ApiError(status, words))
        head = f"HTTP/1.1 {status} \r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        with suppress(OSError, NotImplementedError, RuntimeError):
            self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.abort)


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
        answer = _Answer(send, upload, limit_stall, label, scope["path"])
        try:
            await self._app(scope, upload.receive, answer.send)
            if upload.refusal is not None and not answer.started:
                await answer.fail(upload.refusal)
        finally:
            upload.end()

    def take(self, num_bytes: int) -> None:
        """Count bytes of uploads in, or out where negative."""
        self._uploading_bytes += num_bytes

    @property
    def is_full(self) -> bool:
        return self._uploading_bytes > MAX_UPLOADS_BYTES


class _Upload:
    """One request's body on its way into the proxy, which keeps all that it is given."""

    def __init__(self, edge: Edge, receive: Receive) -> None:
        self._edge = edge
        self._receive = receive
        self._num_bytes = 0
        self._open = True
        self.refusal: ApiError | None = None

    async def receive(self) -> Message:
        message = await self._receive()
        size = len(message.get("body", b""))
        if not size or not self._open:
            return message
        self._num_bytes += size
        self._edge.take(size)
        if self._num_bytes > MAX_BODY_BYTES:
            self.refusal = ApiError(413, "the body is too large", code="body_too_large")
        elif self._edge.is_full and self._num_bytes > BIG_BYTES:
            self.refusal = overloaded("too many large requests at once: try again", 503)
        # To Serve the client is gone: that is how a request is ended before its answer.
        return {"type": "http.disconnect"} if self.refusal else message

    def end(self) -> None:
        """Its bytes have been taken, or are not wanted any more."""
        if self._open:
            self._open = False
            self._edge.take(-self._num_bytes)


class _Answer:
    """One answer on its way out of the proxy."""

    def __init__(
        self,
        send: Send,
        upload: _Upload,
        limit_stall: Callable[[float], None] | None,
        label: bytes,
        path: str,
    ) -> None:
        self._send = send
        self._upload = upload
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
        self._upload.end()
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
