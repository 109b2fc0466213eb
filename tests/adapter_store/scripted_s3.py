"""An S3 server of a few lines that fails as it is told: stalls, refuses, throttles.

Not for what S3 itself does (tests/s3_server.py has a real one).
"""

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

STALL = 0
"""Instead of a status: say nothing until the server ends."""


class ScriptedS3:
    """Serves objects by "bucket/key"; counts requests by (method, path).

    script  (method, path, number of that request) -> status, STALL, or None = as it should be
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.script: Callable[[str, str, int], int | None] = lambda method, path, number: None
        self.requests: Counter[tuple[str, str]] = Counter()
        self.ended = threading.Event()
        self.stalled = 0
        self._lock = threading.Lock()
        self.endpoint_url = ""

    def put_folder(self, prefix: str, folder: Path) -> None:
        for path in folder.iterdir():
            self.objects[f"{prefix}/{path.name}"] = path.read_bytes()

    def count(self, method: str, part: str) -> int:
        with self._lock:
            return sum(n for (m, path), n in self.requests.items() if m == method and part in path)

    def behaviour(self, method: str, path: str) -> int | None:
        with self._lock:
            self.requests[method, path] += 1
            number = self.requests[method, path]
        status = self.script(method, path, number)
        if status == STALL:
            with self._lock:
                self.stalled += 1
            self.ended.wait(60)
        return status


def _handler(server: ScriptedS3) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def answer(self, with_body: bool) -> None:
            path = self.path.partition("?")[0].lstrip("/")
            status = server.behaviour(self.command, path)
            body = server.objects.get(path)
            if status is None:
                status = 404 if body is None else 200
            if status == STALL:
                self.close_connection = True
                return
            if body is None or status != 200:
                code = {404: "NoSuchKey", 503: "SlowDown", 403: "AccessDenied"}.get(status, "Bad")
                body = f"<Error><Code>{code}</Code><Message>as told</Message></Error>".encode()
            etag = hashlib.md5(body).hexdigest()
            if status == 200 and (wanted := self.headers.get("Range")):
                first, last = wanted.removeprefix("bytes=").split("-")
                body, status = body[int(first) : int(last) + 1], 206
            with suppress(OSError):
                self.send_response(status)
                self.send_header("ETag", f'"{etag}"')
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if with_body:
                    self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    return Handler


@contextmanager
def start_scripted_s3() -> Iterator[ScriptedS3]:
    """On a free port of 127.0.0.1."""
    scripted = ScriptedS3()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(scripted))
    server.daemon_threads = True
    scripted.endpoint_url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield scripted
    finally:
        scripted.ended.set()
        server.shutdown()
        server.server_close()
