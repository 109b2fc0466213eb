"""Nothing outlives a kept job, however it ends. Real processes, daemons among them; no Ray here."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# The job leaves every kind of descendant, all deaf to SIGTERM: a child, one in its own session, and
# a daemon whose parent is dead. All carry the mark in their command line.
JOB = """
import os, signal, subprocess, sys, time
from pathlib import Path
from deployments.keeper import run_kept

folder, mark, stubborn = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "stubborn"
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)"

def job():
    (folder / "pid").write_text(str(os.getpid()))
    subprocess.Popen([sys.executable, "-c", deaf, mark])
    subprocess.Popen([sys.executable, "-c", deaf, mark], start_new_session=True)
    inner = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {deaf!r}, {mark!r}])"
    subprocess.run([sys.executable, "-c", inner], start_new_session=True)
    (folder / "shm").mkdir()
    (folder / "shm" / "x").write_text("x")
    if stubborn:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("running", flush=True)
    if sys.argv[3] == "fails":
        raise ValueError("the job fails")
    time.sleep(100)
    return 0

sys.exit(run_kept(job, [folder / "shm", folder / "absent"], grace_s=3.0))
"""


def start(tmp_path: Path, mode: str = "plain") -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", JOB, str(tmp_path), mark(tmp_path), mode],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # As a shell does it for what runs in the background: it must stop on SIGINT all the same.
        preexec_fn=_like_a_background_job,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    return process


def _like_a_background_job() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may be under nohup


def mark(tmp_path: Path) -> str:
    return f"kept-{tmp_path.name}-{os.getpid()}"


def alive(text: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and text.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def wait_for_nothing(tmp_path: Path, limit_s: float) -> float:
    """Seconds until no process of the job and none of its files are left."""
    begin = time.monotonic()
    while alive(mark(tmp_path)) or (tmp_path / "shm").exists():
        assert time.monotonic() - begin < limit_s, alive(mark(tmp_path))
        time.sleep(0.02)
    return time.monotonic() - begin


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_one_signal_ends_everything(tmp_path: Path, signum: int) -> None:
    process = start(tmp_path)
    assert len(alive(mark(tmp_path))) == 3 + 3  # front, keeper, worker and what the job left
    process.send_signal(signum)
    assert process.wait(10) == 0
    assert wait_for_nothing(tmp_path, 0.5) < 0.5


def test_ctrl_c_reaches_the_whole_foreground_group(tmp_path: Path) -> None:
    process = start(tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(10) == 0
    wait_for_nothing(tmp_path, 0.5)


def test_a_deaf_job_is_killed_after_the_grace(tmp_path: Path) -> None:
    process = start(tmp_path, "stubborn")
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 128 + signal.SIGKILL
    assert 2.5 < time.monotonic() - begin < 8
    wait_for_nothing(tmp_path, 0.5)


def test_the_second_signal_does_not_wait(tmp_path: Path) -> None:
    process = start(tmp_path, "stubborn")
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    process.wait(10)
    assert time.monotonic() - begin < 2.5
    wait_for_nothing(tmp_path, 0.5)


def test_a_job_that_fails_is_cleaned_up_and_reported(tmp_path: Path) -> None:
    process = start(tmp_path, "fails")
    assert process.wait(10) == 1
    assert process.stderr is not None
    assert "ValueError: the job fails" in process.stderr.read()
    wait_for_nothing(tmp_path, 0.5)


@pytest.mark.parametrize("victim", ["front", "keeper", "worker"])
def test_kill_9_of_any_one_of_the_three(tmp_path: Path, victim: str) -> None:
    process = start(tmp_path)
    worker = int((tmp_path / "pid").read_text())
    keeper = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill({"front": process.pid, "keeper": keeper, "worker": worker}[victim], signal.SIGKILL)
    wait_for_nothing(tmp_path, 8)
    assert process.wait(5) != 0


def test_the_death_of_the_parent_ends_it(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time; from pathlib import Path;"
        "subprocess.Popen([sys.executable, '-c', *sys.argv[1:]], stdout=subprocess.PIPE);"
        "time.sleep(100)"
    )
    # The outer process must not carry the mark itself when it is looked for: it is dead by then.
    outer = subprocess.Popen(
        [sys.executable, "-c", code, JOB, str(tmp_path), mark(tmp_path), "plain"], cwd=ROOT
    )
    deadline = time.monotonic() + 10
    while not (tmp_path / "shm" / "x").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    outer.kill()
    outer.wait()
    wait_for_nothing(tmp_path, 8)
