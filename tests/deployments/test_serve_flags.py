"""Every flag is known to the Ray Serve that is installed, and read as we mean it."""

import logging
import os
import re
import socket
import subprocess
import sys
from logging.handlers import MemoryHandler
from pathlib import Path

import pytest
from click import ClickException

from deployments import application
from deployments.serve_flags import SERVE_FLAGS, open_log, set_unset, unset

PROGRAM = """
import ray.serve._private.constants as c
assert c.RAY_SERVE_THROUGHPUT_OPTIMIZED and c.RAY_SERVE_PROXY_USE_GRPC
assert c.RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH == 64 << 20
assert c.RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH == "deployments.edge:guards"
assert c.PROXY_READY_CHECK_TIMEOUT_S * c.PROXY_HEALTH_CHECK_UNHEALTHY_THRESHOLD == 60.0
assert c.HTTP_PROXY_TIMEOUT == 60
"""


def test_ray_reads_every_flag() -> None:
    assert len(SERVE_FLAGS) == 5
    words = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        words, env=os.environ | SERVE_FLAGS, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_shell_can_set_them_all() -> None:
    words = [sys.executable, "-m", "deployments.serve_flags"]
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert dict(line.split("=", 1) for line in printed.split()) == SERVE_FLAGS


def test_what_somebody_set_stays_and_the_rest_is_set() -> None:
    environment = {"RAY_SERVE_PROXY_USE_GRPC": "0", "PYTHONPATH": "/elsewhere"}
    assert unset(environment) == [name for name in SERVE_FLAGS if name not in environment]
    set_unset(environment)
    assert unset(environment) == []
    assert environment["RAY_SERVE_PROXY_USE_GRPC"] == "0"
    root = str(Path(__file__).resolve().parents[2])
    assert environment["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"] == "0"
    assert environment["PYTHONPATH"] == f"{root}{os.pathsep}/elsewhere"
    again = dict(environment)
    set_unset(again)
    assert again == environment


def test_serve_run_starts_ray_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for the application first, and starts Ray then, in the same process."""
    kept = dict(os.environ)
    monkeypatch.setattr(application.ray, "is_initialized", lambda: False)
    for name in SERVE_FLAGS:
        monkeypatch.delenv(name, raising=False)
    try:
        with pytest.raises(ClickException):
            application.app({"model": "/no/such/folder"})
        assert unset() == []
    finally:
        os.environ.clear()
        os.environ.update(kept)


def test_a_node_without_them_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in SERVE_FLAGS.items():
        monkeypatch.setenv(name, value)
    log = logging.getLogger("flags")
    open_log(log)
    assert not caplog.records
    monkeypatch.delenv("RAY_SERVE_PROXY_USE_GRPC")
    open_log(log)
    assert "without ['RAY_SERVE_PROXY_USE_GRPC']" in caplog.text


def test_lines_are_written_at_once_whatever_ray_holds_back(tmp_path: Path) -> None:
    """As Ray Serve sets a replica's log up with THROUGHPUT_OPTIMIZED."""
    path = tmp_path / "replica.log"
    file = logging.FileHandler(path)
    held = MemoryHandler(1000, logging.ERROR, file)
    log = logging.Logger("replica")
    log.addHandler(held)
    log.info("before")
    assert path.read_text() == ""
    open_log(log)
    log.info("after")
    lines = path.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    held.close()
    file.close()


def test_make_serve_ends_in_one_line_where_its_port_is_taken() -> None:
    """Ray Serve would share it, and requests would go to either program."""
    makefile = (Path(__file__).resolve().parents[2] / "Makefile").read_text()
    assert "$(BIN)/python -c '$(PORT_IS_FREE)' && flags=" in makefile
    found = re.search(r"PORT_IS_FREE := (.*?)\n(?!\t)", makefile, re.DOTALL)
    assert found is not None
    program = found[1].replace("\\\n\t", "")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        words = [sys.executable, "-c", program.replace("8000", port)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert done.stderr == f"make serve: something else listens on 127.0.0.1:{port}\n"
    assert subprocess.run(words, capture_output=True, check=False).returncode == 0
