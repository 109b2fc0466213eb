"""Clients for tests of a running service: one that streams beside what is tested and must not
notice it, and one of raw sockets. Not for use outside tests."""

import json
import socket
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx

_BODY = {"prompt": "The", "max_tokens": 60, "ignore_eos": True, "temperature": 0, "stream": True}


class Company:
    """Streams the same answer again and again until it is left; every answer must be the same.

    texts  the answers so far, the first one as it was told alone
    """

    def __init__(self, url: str, tenant: str, alone: str = "") -> None:
        self._url = url
        self._tenant = tenant
        self._leave = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._trouble: BaseException | None = None
        self.num_chunks = 0
        self.texts = [alone]

    def __enter__(self) -> Self:
        self._thread.start()
        self.go_on(1)
        return self

    def __exit__(self, *_: object) -> None:
        self._leave.set()
        self._thread.join(60)
        assert self._trouble is None, self._trouble
        assert len(self.texts) > 1 and len(set(self.texts[self.texts[0] == "" :])) == 1

    def go_on(self, num_chunks: int = 10) -> None:
        """Wait until that many more chunks have come."""
        want, deadline = self.num_chunks + num_chunks, time.monotonic() + 30
        while self.num_chunks < want:
            assert self._trouble is None, self._trouble
            assert time.monotonic() < deadline, "the stream beside has stopped"
            time.sleep(0.01)

    def _run(self) -> None:
        try:
            while not self._leave.is_set():
                self.texts.append(text_of(self._url, self._tenant, self._count))
        except BaseException as exc:
            self._trouble = exc

    def _count(self) -> None:
        self.num_chunks += 1


def text_of(url: str, tenant: str, count: Any = lambda: None) -> str:
    """One answer of this tenant's adapter, streamed."""
    body = _BODY | {"model": tenant}
    headers = {"Authorization": f"Bearer key-of-{tenant}"}
    text = []
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body, headers=headers, timeout=60
    ) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                count()
                text += [choice["text"] for choice in json.loads(line[6:])["choices"]]
    return "".join(text)


@dataclass
class Answer:
    status: int
    headers: str
    error: dict[str, Any]


class Raw:
    """One connection, byte for byte."""

    def __init__(self, url: str, tenant: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._address = host, int(port)
        self._tenant = tenant
        self._socket: socket.socket | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            self._socket.close()

    def _connect(self, receive_bytes: int = 0) -> socket.socket:
        if self._socket is None:
            self._socket = socket.socket()
            if receive_bytes:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
            self._socket.settimeout(60)
            self._socket.connect(self._address)
        return self._socket

    def send(self, data: bytes) -> None:
        """What the server still takes of it."""
        try:
            self._connect().sendall(data)
        except ConnectionError:
            return

    def begin(
        self,
        head: bytes = b"",
        body: bytes = b"",
        length: int | None = None,
        receive_bytes: int = 0,
    ) -> None:
        """A request, maybe not all of its body."""
        self._connect(receive_bytes)
        lines = "POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
        lines += f"Authorization: Bearer key-of-{self._tenant}\r\n"
        if length is not None:
            lines += f"Content-Length: {length}\r\n"
        self.send(lines.encode() + head + b"\r\n" + body)

    def post(
        self,
        body: bytes,
        head: bytes = b"",
        length: int | None = None,
        receive_bytes: int = 0,
        wait: bool = True,
    ) -> Answer:
        if length is None and b"Content-Length" not in head:
            length = len(body)
        self.begin(head, body, length, receive_bytes)
        return self.answer() if wait else Answer(0, "", {})

    def read_until(self, mark: bytes) -> bytes:
        found, connection = b"", self._connect()
        while mark not in found:
            part = connection.recv(1 << 16)
            assert part, found[-500:]
            found += part
        return found

    def answer(self) -> Answer:
        """The answer, which must be an error of OpenAI's shape."""
        head, _, body = self.read_until(b"\r\n\r\n").partition(b"\r\n\r\n")
        while body.count(b"{") == 0 or body.count(b"{") > body.count(b"}"):
            body += self._connect().recv(1 << 16)
        text = body[body.index(b"{") : body.rindex(b"}") + 1]
        return Answer(int(head.split()[1]), head.decode().lower(), json.loads(text)["error"])

    def reset(self) -> None:
        """Leave without a good-bye."""
        connection = self._connect()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()

    def is_cut(self) -> bool:
        """Whether the server has ended the connection: reads what is left of it."""
        connection = self._connect()
        try:
            while connection.recv(1 << 16):
                pass
        except ConnectionError:
            return True
        return True


def peak_bytes(reset: bool = False) -> dict[str, int]:
    """The largest resident size so far of this test's proxy and ingress, by their names.

    reset  begin a new peak, which is their size now
    """
    found = {}
    for name in ("Ingress", "ProxyActor"):
        for process in _descendants():
            title = (process / "cmdline").read_bytes()
            if title.startswith(b"ray::") and name.encode() in title:
                if reset:
                    (process / "clear_refs").write_text("5")
                lines = (process / "status").read_text().splitlines()
                peak = next(line for line in lines if line.startswith("VmHWM"))
                found[name] = int(peak.split()[1]) << 10
    return found


def _descendants() -> list[Path]:
    """Processes below this one: other Rays may run on the machine."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(path.name)] = int(fields[1])
    family, grown = {int(Path("/proc/self").resolve().name)}, True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in family} - family
        family |= more
        grown = bool(more)
    return [Path("/proc") / str(pid) for pid in family]
