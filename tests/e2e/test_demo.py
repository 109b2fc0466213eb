"""The README's first command from outside: its printed lines work, its end leaves nothing."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.local_s3 import is_free, weed_binary
from tests.e2e.running import ROOT, Running
from tests.model_runner.demo import markers_in

FIRST_ANSWER_S = 40.0
END_S = 35.0

pytestmark = [pytest.mark.e2e, pytest.mark.ray, pytest.mark.timeout(240)]


WITHOUT_S3 = """
import sys
import deployments.demo as demo
demo.weed_binary = lambda: None
sys.exit(demo.main())
"""


class RunningDemo(Running):
    """The demo."""

    def __init__(self, *words: str) -> None:
        super().__init__([sys.executable, *(words or ("-m", "deployments.demo"))])

    def curl_lines(self) -> list[str]:
        return [line.strip() for line in self.lines if line.startswith("curl ")]

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


@pytest.fixture
def demo() -> Iterator[RunningDemo]:
    running = RunningDemo()
    try:
        yield running
    finally:
        # After a failure: it cleans up better than we can.
        running.end(signal.SIGTERM, END_S)


def _check_nothing_is_left(
    demo: RunningDemo, stopped_at: float, traces: set[Path], ports: list[int]
) -> None:
    demo.wait_until_gone(END_S - (time.monotonic() - stopped_at))
    # Whoever cleaned up is gone too by now, so nobody is about to remove what is still there.
    assert not [path for path in traces if path.exists()]
    assert [port for port in ports if not is_free(port)] == []


def _ports(demo: RunningDemo) -> list[int]:
    return [int(port) for port in set(re.findall(r"127\.0\.0\.1:(\d+)", "".join(demo.lines)))]


def _said(curl_line: str) -> str:
    return subprocess.run(
        shlex.split(curl_line), capture_output=True, text=True, timeout=60, check=True
    ).stdout


def _answer(curl_line: str) -> str:
    return str(json.loads(_said(curl_line))["choices"][0]["message"]["content"])


def _streamed(curl_line: str) -> str:
    *events, last = [line for line in _said(curl_line).splitlines() if line.startswith("data: ")]
    assert last == "data: [DONE]"
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def test_printed_lines_answer_and_ctrl_c_leaves_nothing(demo: RunningDemo) -> None:
    # Of whoever else works on this machine: what they take, its first answer waits longer.
    share = max(1.0, os.getloadavg()[0])
    demo.wait_until_printed("Ctrl-C ends it")
    first, second, third, base, stream = demo.curl_lines()
    answers = [_answer(first)]
    took_s = time.monotonic() - demo.begin
    answers += [_answer(second), _answer(third), _answer(base)]
    assert [len(markers_in(text)) for text in answers] == [1, 1, 1, 0], answers
    assert len(set().union(*map(markers_in, answers))) == 3
    assert _streamed(stream) == answers[-1]
    assert all("Tokyo" in text for text in answers), answers
    assert took_s < FIRST_ANSWER_S * share
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
def test_without_an_s3_server_for_this_machine_it_says_so_and_serves_the_folder() -> None:
    demo = RunningDemo("-c", WITHOUT_S3)
    try:
        demo.wait_until_printed("Ctrl-C ends it")
        assert any("no SeaweedFS for this machine" in line for line in demo.lines), demo.lines
        assert not any("s3://" in line for line in demo.lines), demo.lines
        first, *_ = demo.curl_lines()
        assert len(markers_in(_answer(first))) == 1
    finally:
        demo.end(signal.SIGTERM, END_S)


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
        env=os.environ | {"RUNNING_TEST_MARK": mark},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    demo = RunningDemo.__new__(RunningDemo)
    demo.mark = f"RUNNING_TEST_MARK={mark}"
    deadline = time.monotonic() + 60
    while len(demo.pids()) < 10 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(demo.pids()) >= 10, "Ray did not start"
    traces = demo.traces()
    stopped_at = time.monotonic()
    parent.kill()
    parent.wait()
    _check_nothing_is_left(demo, stopped_at, traces, [])
