"""The guards around Serve's proxy on real sockets, in front of a small application. No cluster."""

import asyncio
import json
import pickle
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
import uvicorn
from ray.serve._private.http_util import MessageQueue
from ray.serve._private.proxy import HTTPProxy

from deployments import connection, edge
from deployments.connection import BoundedHttp
from deployments.edge import STALL_HEADER, Edge, guards

KEEPALIVE = 1


class App:
    """Tells what it got; streams without end at /stream; fails as Serve does at /broken."""

    def __init__(self) -> None:
        self.scopes: list[dict[str, Any]] = []
        self.body_bytes = 0
        self.streaming = 0
        self.sent_bytes = 0
        self.waiting = MessageQueue()
        self.answer = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        if scope["path"] == "/stream":
            await self.stream(receive, send)
            return
        if scope["path"] == "/long":
            await self.work_long(receive, send)
            return
        while scope["path"] != "/early":
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            self.body_bytes += len(message["body"])
            if not message["more_body"]:
                break
        broken = scope["path"] == "/broken"
        kind = b"text/plain" if broken else b"application/json"
        headers = [(b"content-type", kind), (b"x-request-id", b"ours"), (b"X-Request-ID", b"its")]
        status = 503 if broken else 200
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"secret words of Serve"})

    async def work_long(self, receive: Any, send: Any) -> None:
        """As Serve does, and with its own parts: messages lie in a queue until the ingress asks for
        them; the answer takes its time."""
        self.waiting = MessageQueue()
        keeping = asyncio.create_task(HTTPProxy.proxy_asgi_receive(None, receive, self.waiting))
        answered = asyncio.create_task(self.answer.wait())
        await asyncio.wait({keeping, answered}, return_when="FIRST_COMPLETED")
        if answered.done():
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"long"})
        keeping.cancel()
        answered.cancel()

    def take(self) -> bytes:
        """What an ingress fetches: it comes to it pickled."""
        messages = pickle.loads(pickle.dumps(self.waiting.get_messages_nowait()))
        assert all(type(message) is dict for message in messages)
        return b"".join(message["body"] for message in messages)

    async def stream(self, receive: Any, send: Any) -> None:
        headers = [(STALL_HEADER.encode(), b"0.5")]
        self.streaming += 1
        gone = asyncio.create_task(self.disconnect(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while not gone.done():
                await send({"type": "http.response.body", "body": b"x" * 4096, "more_body": True})
                self.sent_bytes += 4096
                await asyncio.sleep(0)
        finally:
            self.streaming -= 1

    async def disconnect(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass


class Server:
    def __init__(self, app: App, port: int, connections: set[Any]) -> None:
        self.app = app
        self.port = port
        self.connections = connections

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def ask(self, request: bytes) -> bytes:
        """The answer to a request of one packet, up to the end of the connection."""
        reader, writer = await self.open()
        with suppress(ConnectionError):
            writer.write(request)
            await writer.drain()
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        return answer


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    monkeypatch.setattr(connection, "HEAD_WITHIN_S", 0.5)
    monkeypatch.setattr(connection, "MAX_STALLED_S", 0.5)
    monkeypatch.setattr(connection, "LINGER_S", 0.2)
    monkeypatch.setattr(edge, "MAX_BODY_BYTES", 1 << 20)
    monkeypatch.setitem(uvicorn.config.HTTP_PROTOCOLS, "auto", "")
    (middleware,) = guards()
    app = App()
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        middleware.cls(app, *middleware.args, **middleware.kwargs),  # as Serve does
        timeout_keep_alive=KEEPALIVE,
        lifespan="off",
        log_level="critical",
    )
    running = uvicorn.Server(config)
    task = asyncio.create_task(running.serve(sockets=[listener]))
    while not running.started:
        await asyncio.sleep(0.01)
    assert config.http_protocol_class is BoundedHttp
    try:
        yield Server(app, listener.getsockname()[1], running.server_state.connections)
    finally:
        running.should_exit = running.force_exit = True
        await asyncio.wait_for(task, 5)


def parts(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(first.split()[1]), headers, body


def assert_error(answer: bytes, status: int) -> str:
    found, headers, body = parts(answer)
    assert found == status, answer[:300]
    assert headers["content-type"] == "application/json"
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["message"])


async def until(condition: Any, timeout_s: float = 5) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


GET = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"


async def test_orders_to_serve_are_left_out(server: Server) -> None:
    orders = [
        b"serve_multiplexed_model_id: other", b"Serve-Multiplexed-Model-Id: other",
        b"x-request-timeout-seconds: 0.001", b"X_Request_Timeout_Seconds: 1",
        b"x-request-disconnect-disabled: ?1", b"x-session-id: a", b"X_Session_Id: \xff\xfe",
        b"x-serve-router-place: b", b"X-Request-Id: label-7", b"authorization: Bearer k",
    ]  # fmt: skip
    answer = await server.ask(GET + b"\r\n".join(orders) + b"\r\n\r\n")
    (scope,) = server.app.scopes
    kept = [name for name, _ in scope["headers"]]
    assert kept == [b"host", b"connection", b"authorization"]
    assert "limit_stall" not in scope, "the scope is pickled"
    status, headers, _ = parts(answer)
    assert status == 200 and answer.lower().count(b"\r\nx-request-id:") == 1
    assert headers["x-request-id"] == "ours" and headers["x-client-request-id"] == "label-7"


@pytest.mark.parametrize("label", [b"a" * 129, b"a b", b"\xff", b""])
async def test_a_request_id_that_is_no_label_is_dropped(server: Server, label: bytes) -> None:
    answer = await server.ask(GET + b"x-request-id: " + label + b"\r\n\r\n")
    assert parts(answer)[0] == 200 and b"x-client-request-id" not in answer


async def test_serves_own_errors_speak_openai(server: Server) -> None:
    answer = await server.ask(GET.replace(b"/ ", b"/broken ") + b"\r\n")
    assert "secret" not in assert_error(answer, 503)
    assert parts(answer)[1]["retry-after"] == "1"
    answer = await server.ask(GET.replace(b"/ ", b"/-/healthz ") + b"\r\n")
    assert b"secret" in answer, "what probes of Serve's own ask is left alone"


@pytest.mark.parametrize(
    "head",
    [
        b"".join(b"X-%d: a\r\n" % i for i in range(1000)) + b"\r\n",
        b"X: " + b"a" * 200_000 + b"\r\n\r\n",
        b"X: " + b"a" * 2_000_000,  # and no end
        b"".join(b"X-%d: %s\r\n" % (i, b"a" * 1000) for i in range(90)) + b"\r\n",
    ],
    ids=["many", "long", "endless", "large"],
)
async def test_header_flood(server: Server, head: bytes) -> None:
    assert_error(await server.ask(GET + head), 431)
    assert not server.app.scopes
    assert parts(await server.ask(GET + b"\r\n"))[0] == 200
    await until(lambda: not server.connections)


async def test_trailer_flood(server: Server) -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
    assert_error(await server.ask(head + b"X: a\r\n" * 100_000), 431)
    await until(lambda: not server.connections)


@pytest.mark.parametrize("begin", [b"", b"GET / HT", GET, GET + b"X: "])
async def test_head_that_never_ends(server: Server, begin: bytes) -> None:
    assert_error(await server.ask(begin), 408)
    await until(lambda: not server.connections)


@pytest.mark.parametrize(
    "request_",
    [
        b"\x16\x03\x01\x02\x00",
        b"GET\r\n\r\n",
        GET + b"Content-Length: -5\r\n\r\n",
        GET + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
        GET + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nabcde",
        GET + b"Bad Name: x\r\n\r\n",
        GET + b"X: a\r\n Y: folded\x00\r\n\r\n",
    ],
)
async def test_what_is_no_http(server: Server, request_: bytes) -> None:
    assert_error(await server.ask(request_), 400)
    await until(lambda: not server.connections)


async def test_content_length_that_says_too_little(server: Server) -> None:
    answer = await server.ask(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nabcdef")
    assert_error(answer, 400)
    await until(lambda: not server.connections)


async def test_uploads_are_bounded(server: Server) -> None:
    """A body above every configuration's limit ends here, whether anybody reads it or not."""
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n\r\n"
    assert_error(await server.ask(head + b"a" * (2 << 20)), 413)
    assert server.app.body_bytes <= 1 << 20
    await until(lambda: not server.connections)


async def test_large_uploads_share_a_budget(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge, "MAX_UPLOADS_BYTES", 300_000)
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
    _, first = await server.open()
    first.write(head % (b"/long", 250_000) + b"a" * 250_000)

    def waiting() -> int:
        return sum(len(message["body"]) for message in server.app.waiting._message_queue)

    await until(lambda: waiting() == 250_000)
    answer = await server.ask(head % (b"/", 100_000) + b"a" * 100_000)
    assert_error(answer, 503)
    assert parts(answer)[1]["retry-after"]
    small = await server.ask(head % (b"/", 1000) + b"a" * 1000)
    assert parts(small)[0] == 200, "small ones find room"
    first.transport.abort()
    await until(lambda: len(server.connections) == 0)
    server.app.waiting = MessageQueue()
    assert parts(await server.ask(head % (b"/", 100_000) + b"a" * 100_000))[0] == 200


async def test_an_upload_that_was_taken_holds_nothing_while_it_is_answered(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long answers take: one tenant's would keep everybody else's uploads out."""
    monkeypatch.setattr(edge, "MAX_UPLOADS_BYTES", 300_000)
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
    body = bytes(range(250)) * 1000
    answers, taken = [], []
    for _ in range(4):
        answers.append(asyncio.create_task(server.ask(head % (b"/long", 250_000) + body)))
        async with asyncio.timeout(5):
            while b"".join(taken) != body:
                await asyncio.sleep(0.01)
                taken.append(server.app.take())
        taken.clear()
    assert parts(await server.ask(head % (b"/", 250_000) + body))[0] == 200
    server.app.answer.set()
    assert [parts(answer)[0] for answer in await asyncio.gather(*answers)] == [200] * 4


async def test_an_upload_given_up_leaves_nothing(server: Server) -> None:
    _, writer = await server.open()
    writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 900000\r\n\r\n" + b"a" * 90_000)
    await until(lambda: server.app.body_bytes == 90_000)
    writer.transport.abort()
    await until(lambda: not server.connections)


async def test_an_upload_that_nobody_wants_ends(server: Server) -> None:
    """Refused before its end, it is passed over for a while, then cut."""
    reader, writer = await server.open()
    writer.write(b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 900000\r\n\r\na")
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    with suppress(ConnectionError):
        async with asyncio.timeout(5):
            while True:
                writer.write(b"a")
                await writer.drain()
                await asyncio.sleep(0.02)
    await until(lambda: not server.connections)
    writer.close()


async def test_an_upload_that_nobody_wants_may_end(server: Server) -> None:
    """Its client keeps the connection, as any other does."""
    reader, writer = await server.open()
    writer.write(b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\na")
    await reader.readuntil(b"secret words of Serve")
    writer.write(b"bc")
    await asyncio.sleep(0.7)  # above what an upload may take that does not end
    writer.write(GET + b"\r\n")
    assert (await reader.readuntil(b"secret words of Serve")).count(b"HTTP/1.1 200") == 1
    writer.close()


@pytest.mark.parametrize("noise", [b"\r\n", b"\n"])
async def test_empty_lines_keep_no_connection_open(server: Server, noise: bytes) -> None:
    """Any byte ends uvicorn's wait for the next request, and these begin none."""
    reader, writer = await server.open()
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    await reader.readuntil(b"0\r\n\r\n")
    with suppress(ConnectionError):
        async with asyncio.timeout(3 * KEEPALIVE):
            while server.connections:
                writer.write(noise)
                await writer.drain()
                await asyncio.sleep(0.1)
        assert await reader.read() == b"", "it is closed without a word: nothing was asked"
    writer.close()


async def test_an_unwanted_upload_that_ends_keeps_no_connection_open(server: Server) -> None:
    reader, writer = await server.open()
    writer.write(b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\na")
    await reader.readuntil(b"secret words of Serve")
    writer.write(b"bc")
    await until(lambda: not server.connections, 3 * KEEPALIVE)
    writer.close()


async def test_requests_after_empty_lines_are_answered(server: Server) -> None:
    """Each has the whole time: the wait is not what is left of another one."""
    reader, writer = await server.open()
    for _ in range(4):
        writer.write(b"\r\nGET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.wait_for(reader.readuntil(b"secret words of Serve"), 5)
        writer.write(b"\r\n")
        await asyncio.sleep(0.4 * KEEPALIVE)
    writer.close()


async def test_an_upload_behind_another_request_has_its_own_time(server: Server) -> None:
    """Pipelined: it comes while the first is answered, and nobody has refused it."""
    reader, writer = await server.open()
    post = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 90\r\nConnection: close\r\n\r\na"
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + post)
    await reader.readuntil(b"secret words of Serve")
    await asyncio.sleep(0.7)  # above what an upload may take that nobody wants
    writer.write(b"a" * 89)
    assert b"HTTP/1.1 200" in await asyncio.wait_for(reader.read(), 5)
    writer.close()


async def test_a_stalled_reader_is_cut_and_others_go_on(server: Server) -> None:
    stalled = socket.socket()
    stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    stalled.connect(("127.0.0.1", server.port))
    stalled.sendall(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
    reader, writer = await server.open()
    writer.write(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
    await until(lambda: server.app.streaming == 2)
    got = 0
    async with asyncio.timeout(10):
        while server.app.streaming == 2:
            got += len(await reader.read(1 << 16))
    assert got > 1 << 20
    assert server.app.sent_bytes - got < 4 << 20, "what lay unread was bounded"
    before = got
    while got < before + (1 << 20):
        got += len(await asyncio.wait_for(reader.read(1 << 16), 5))
    assert server.app.streaming == 1
    writer.close()
    stalled.close()
    await until(lambda: server.app.streaming == 0 and not server.connections)


async def test_a_reader_that_only_dozes_is_not_cut(server: Server) -> None:
    reader, writer = await server.open()
    writer.write(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
    for _ in range(4):
        await asyncio.sleep(0.3)  # below the limit each time
        taken = 0
        while taken < 1 << 20:
            taken += len(await asyncio.wait_for(reader.read(1 << 16), 5))
    assert server.app.streaming == 1
    writer.close()


async def test_connections_are_bounded(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(connection, "HEAD_WITHIN_S", 30)
    held = [await server.open() for _ in range(2)]
    await until(lambda: len(server.connections) == 2)
    with suppress(ConnectionError):
        assert await server.ask(GET + b"\r\n") == b""
    for _, writer in held:
        writer.close()
    await until(lambda: not server.connections)
    assert parts(await server.ask(GET + b"\r\n"))[0] == 200


async def test_websockets_are_refused(server: Server) -> None:
    key = b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    head = GET.replace(b"close", b"Upgrade") + b"Upgrade: websocket\r\n" + key
    answer = await server.ask(head + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 403")
    assert not server.app.scopes


def test_edge_wraps_any_application() -> None:
    assert guards()[0].cls is Edge
