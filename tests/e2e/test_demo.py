"""The README's first command from outside: its printed lines work, its end leaves nothing."""

import contextlib
import json
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.local_s3 import is_free, weed_binary
from tests.model_runner.demo import markers_in

ROOT = Path(__file__).resolve().parents[2]
FIRST_ANSWER_S = 40.0
END_S = 35.0

pytestmark = [pytest.mark.e2e, pytest.mark.ray, pytest.mark.timeout(240)]


class RunningDemo:
    """The demo in a session of its own; its processes carry a mark in their environment."""

    def __init__(self, *arguments: str) -> None:
        self.mark = f"DEMO_TEST_MARK={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        self.begin = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "deployments.demo", *arguments],
            cwd=ROOT,
            env=os.environ | {name: value},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def wait_until_printed(self, words: str, limit_s: float = 120.0) -> None:
        deadline = time.monotonic() + limit_s
        while not any(words in line for line in self.lines):
            try:
                line = self._queue.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                line = None
            assert line is not None, f"{words!r} was not printed:\n{''.join(self.lines)}"
            self.lines.append(line)

    def curl_lines(self) -> list[str]:
        return [line.strip() for line in self.lines if line.startswith("curl ")]

    def pids(self) -> list[int]:
        """Every living process that the demo started, itself included."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def traces(self) -> set[Path]:
        """What these processes have where others can see it: folders, sockets, shared memory."""
        found: set[str] = set()
        for pid in self.pids():
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
                for name in re.findall(r"/tmp/(demo-\w+)", command):
                    found |= {f"/tmp/{name}", f"/dev/shm/{name}"}
                for role, port in re.findall(r"-(\w+)\.port\.grpc=(\d+)", command):
                    found.add(f"/tmp/seaweedfs-{role}-grpc-{port}.sock")
                found |= set(re.findall(r"/dev/shm/\S+", Path(f"/proc/{pid}/maps").read_text()))
                found |= {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
        return {Path(name) for name in found if name.startswith(("/dev/shm/", "/tmp/"))}

    def wait_until_gone(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while self.pids():
            assert time.monotonic() < deadline, _names(self.pids())
            time.sleep(0.05)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(line)
        self._queue.put(None)


def _names(pids: list[int]) -> list[str]:
    names = []
    for pid in pids:
        with contextlib.suppress(OSError):
            names.append(f"{pid}: {Path(f'/proc/{pid}/cmdline').read_bytes()[:200]!r}")
    return names


@pytest.fixture
def demo() -> Iterator[RunningDemo]:
    running = RunningDemo()
    try:
        yield running
    finally:
        running.process.terminate()  # after a failure: it cleans up better than we can
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.process.wait(END_S)
        for pid in running.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _check_nothing_is_left(
    demo: RunningDemo, stopped_at: float, traces: set[Path], ports: list[int]
) -> None:
    demo.wait_until_gone(END_S - (time.monotonic() - stopped_at))
    # Whoever cleaned up is gone too by now, so nobody is about to remove what is still there.
    assert not [path for path in traces if path.exists()]
    assert [port for port in ports if not is_free(port)] == []


def _ports(demo: RunningDemo) -> list[int]:
    return [int(port) for port in set(re.findall(r"127\.0\.0\.1:(\d+)", "".join(demo.lines)))]


def _answer(curl_line: str) -> str:
    done = subprocess.run(
        shlex.split(curl_line), capture_output=True, text=True, timeout=60, check=True
    )
    return str(json.loads(done.stdout)["choices"][0]["message"]["content"])


def test_printed_lines_answer_and_ctrl_c_leaves_nothing(demo: RunningDemo) -> None:
    quiet = os.getloadavg()[0] < 1
    demo.wait_until_printed("Ctrl-C ends it")
    first, second, base = demo.curl_lines()
    answers = [_answer(first)]
    took_s = time.monotonic() - demo.begin
    answers += [_answer(second), _answer(base)]
    assert [len(markers_in(text)) for text in answers] == [1, 1, 0], answers
    assert markers_in(answers[0]) != markers_in(answers[1])
    assert all("Tokyo" in text for text in answers), answers
    if quiet:  # on a machine that is busy with other things, seconds say nothing
        assert took_s < FIRST_ANSWER_S
    assert any("s3://" in line for line in demo.lines) == (weed_binary() is not None)

    traces, ports = demo.traces(), _ports(demo)
    assert len([path for path in traces if path.exists()]) >= 2 and ports
    stopped_at = time.monotonic()
    os.killpg(demo.process.pid, signal.SIGINT)  # what a terminal does: the whole foreground group
    assert demo.process.wait(END_S) == 0
    _check_nothing_is_left(demo, stopped_at, traces, ports)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ctrl-c twice", "sigterm", "kill -9", "sigterm while starting"])
def test_every_other_end_leaves_nothing(demo: RunningDemo, way: str) -> None:
    demo.wait_until_printed("starting Ray" if way.endswith("starting") else "Ctrl-C ends it")
    if way.endswith("starting"):
        time.sleep(4)  # into the middle of it
    traces, ports = demo.traces(), _ports(demo)
    assert len([path for path in traces if path.exists()]) >= 2 and ports
    stopped_at = time.monotonic()
    if way == "ctrl-c twice":
        os.killpg(demo.process.pid, signal.SIGINT)
        time.sleep(0.5)
        os.killpg(demo.process.pid, signal.SIGINT)
    else:
        os.kill(demo.process.pid, signal.SIGKILL if way == "kill -9" else signal.SIGTERM)
    demo.process.wait(END_S)
    _check_nothing_is_left(demo, stopped_at, traces, ports)


@pytest.mark.slow
def test_the_death_of_its_parent_ends_it() -> None:
    """A demo whose shell or `make` is gone must not stay behind."""
    code = (
        "import subprocess, sys, time; subprocess.run([sys.executable, '-m', 'deployments.demo'])"
    )
    mark = uuid.uuid4().hex
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"DEMO_TEST_MARK": mark},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    demo = RunningDemo.__new__(RunningDemo)
    demo.mark = f"DEMO_TEST_MARK={mark}"
    deadline = time.monotonic() + 60
    while len(demo.pids()) < 10 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(demo.pids()) >= 10, "Ray did not start"
    traces = demo.traces()
    stopped_at = time.monotonic()
    parent.kill()
    parent.wait()
    _check_nothing_is_left(demo, stopped_at, traces, [])
