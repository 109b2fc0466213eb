"""Run a job so that nothing it started outlives it: no process, no port, no file in shared memory.

Not for production, where the container's runtime does this. Linux only (prctl, /proc).
Three processes:

    front    the one the user sees: takes Ctrl-C and SIGTERM, waits
    keeper   a session of its own, so Ctrl-C passes it by; the front's death ends a pipe it reads
    worker   runs the job; everything that the job starts is below it

Front and keeper are "subreapers": a process whose parent died becomes a child of the keeper (of the
front, if the keeper is dead) and not of init, so the survivor finds every descendant and kills it.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.1
_SWEEP_S = 10.0


def run_kept(job: Callable[[], int], leftovers: Iterable[Path] = (), grace_s: float = 15.0) -> int:
    """Run `job` in a process below this one; return its exit code when all it started is gone.

    The first Ctrl-C, SIGTERM or SIGHUP, or the death of our parent, sends SIGINT to the job,
    where it raises SystemExit. After `grace_s` seconds, or at the second signal, all is killed.
    leftovers  files and folders removed at the end, however it came.
    Call it from the main thread of a process that has no other thread: it forks.
    """
    leftovers = tuple(leftovers)
    _adopt_orphans()
    die_with_parent(signal.SIGTERM)
    read_end, write_end = os.pipe()
    keeper = os.fork()
    if keeper == 0:
        os.close(write_end)
        os._exit(_exit_code(lambda: _keep(job, read_end, leftovers, grace_s)))
    os.close(read_end)

    def ask_to_stop(signum: int, frame: object) -> None:
        with contextlib.suppress(OSError):  # the keeper is gone already
            os.write(write_end, b"x")

    # A shell starts what runs in the background with SIGINT ignored; whoever sends it means it.
    signal.signal(signal.SIGINT, ask_to_stop)
    signal.signal(signal.SIGTERM, ask_to_stop)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup stays nohup
        signal.signal(signal.SIGHUP, ask_to_stop)
    _, status = os.waitpid(keeper, 0)
    _sweep(leftovers)  # finds nothing, unless the keeper itself was killed
    return os.waitstatus_to_exitcode(status)


def die_with_parent(signum: int = signal.SIGKILL) -> None:
    """Have the kernel send `signum` to this process when its parent ends. Fit for `preexec_fn`."""
    _prctl(_PR_SET_PDEATHSIG, signum)


def _keep(
    job: Callable[[], int], read_end: int, leftovers: tuple[Path, ...], grace_s: float
) -> int:
    os.setsid()
    _adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    worker = os.fork()
    if worker == 0:
        os.close(read_end)
        die_with_parent()
        os._exit(_work(job))
    try:
        exit_code = _watch(worker, read_end, grace_s)
    finally:
        _sweep(leftovers)
    return 128 + signal.SIGKILL if exit_code is None else exit_code % 256


def _watch(worker: int, read_end: int, grace_s: float) -> int | None:
    """Wait until the worker ends; its exit code, or None where it has to be killed."""
    pipes = [read_end]
    deadline: float | None = None
    while deadline is None or time.monotonic() < deadline:
        if select.select(pipes, [], [], _POLL_S)[0]:
            message = os.read(read_end, 1)
            if not message:
                pipes.clear()  # the front is gone, and the pipe stays readable from now on
            elif deadline is not None:
                return None  # asked a second time
            if deadline is None:
                deadline = time.monotonic() + grace_s
                os.kill(worker, signal.SIGINT)
        for pid, status in _reap():
            if pid == worker:
                return os.waitstatus_to_exitcode(status)
    return None


def _work(job: Callable[[], int]) -> int:
    def leave(signum: int, frame: object) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGINT, leave)  # not SIGTERM: Ray answers that one with a stack trace
    return _exit_code(job)


def _exit_code(job: Callable[[], int]) -> int:
    """Run a forked process's part to its end: nothing may escape into the code of the fork."""
    code = 1
    try:
        code = job()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(OSError, ValueError):  # whoever read our output may be gone
        sys.stdout.flush()
        sys.stderr.flush()
    return code


def _sweep(leftovers: Iterable[Path]) -> None:
    """Kill every descendant of this process, wait for the last, then remove the leftovers."""
    deadline = time.monotonic() + _SWEEP_S
    while (pids := _descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for _ in _reap():
            pass
        time.sleep(0.02)
    for path in leftovers:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _reap() -> Iterable[tuple[int, int]]:
    """Collect the children that have ended, the adopted ones too, without waiting."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended


def _descendants(root: int) -> list[int]:
    """Every living process below `root`, from the parent field of /proc/PID/stat."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                # The name in parentheses may itself hold spaces and parentheses.
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry))
    found: list[int] = []
    parents = [root]
    while parents:
        below = children.get(parents.pop(), [])
        found += below
        parents += below
    return found


def _adopt_orphans() -> None:
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")
