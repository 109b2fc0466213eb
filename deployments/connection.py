"""One connection to Serve's proxy, with an end to what a client may send, keep open, or leave
unread.

uvicorn bounds heads with h11 alone, which it does not take where httptools is installed, and it
waits for ever for a head, and for a reader. Not here: what a request means (edge.py, ingress.py).
"""

import asyncio
import json
import socket
from contextlib import suppress
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from deployments.api_errors import ApiError

MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 100
HEAD_WITHIN_S = 10.0
MAX_CONNECTIONS = 4096
MAX_STALLED_S = 30.0
"""Until the ingress has answered once on this connection (edge.py)."""

LINGER_S = 2.0
_SEND_BUFFER_BYTES = 64 << 10


class BoundedHttp(HttpToolsProtocol):
    """One connection of uvicorn's, with an end to what it may send, keep open, or leave unread."""

    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _max_stalled_s = MAX_STALLED_S
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
        self.limit_stall(MAX_STALLED_S)
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
        waiting = self.timeout_keep_alive_task
        super().data_received(data)
        if self._in_head and not self._began_in_this_part and not self._refused:
            # httptools keeps an unfinished header to itself: it is counted here.
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, "the request's head is too large")
        elif self._is_idle:
            # uvicorn has given up its wait for the next request, which this did not begin: it was
            # an empty line, or the end of a body that nobody wanted.
            until = waiting.when() if waiting else self.loop.time() + self.timeout_keep_alive
            self.timeout_keep_alive_task = self.loop.call_at(until, self.timeout_keep_alive_handler)

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

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self.cycle is not None:
            self.cycle.more_body = False  # also of a body that was passed over

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # Refused before its end: the rest is passed over, for a while. A pipelined one may be next.
        if self.cycle.response_complete and self.cycle.more_body:
            self.loop.call_later(self._max_stalled_s, self._end_upload, self.cycle)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    @property
    def _is_idle(self) -> bool:
        """Whether all that came has been answered, and passed over."""
        cycle = self.cycle
        if cycle is None or self._in_head or self._refused:
            return False
        return bool(cycle.response_complete and not cycle.more_body)

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
            if self.cycle.response_started:
                self.transport.abort()  # an answer is on its way: no second one into it
                return
            self.cycle.disconnected = True  # as when the connection is lost
            self.cycle.message_event.set()
        body = json.dumps(ApiError(status, words).body()).encode()
        head = f"HTTP/1.1 {status} \r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        with suppress(OSError, NotImplementedError, RuntimeError):
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.abort)
