"""The folder of the host tier goes with its last user, however many there are."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.host_tier import HostTierFolder


def test_the_last_one_takes_it_away(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    first, second = HostTierFolder(str(folder)), HostTierFolder(str(folder))
    (folder / "packed").mkdir()
    first.leave()
    first.leave()
    assert (folder / "packed").is_dir()
    second.leave()
    assert not list(tmp_path.iterdir())
    third = HostTierFolder(str(folder))
    assert folder.is_dir()
    third.leave()
    assert not list(tmp_path.iterdir())


def test_a_killed_user_holds_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    code = (
        "import sys, time; from deployments.host_tier import HostTierFolder; "
        f"held = HostTierFolder({str(folder)!r}); print('held', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"held\n"
    ours = HostTierFolder(str(folder))
    os.kill(child.pid, signal.SIGKILL)
    child.wait(10)
    child.stdout.close()
    ours.leave()
    assert not list(tmp_path.iterdir())


def test_a_folder_of_somebody_else_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/dev/shm is everybody's, and our name in it can be guessed."""
    folder = tmp_path / "tier"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    for path in (folder, tmp_path / "link"):
        with pytest.raises(PermissionError, match=f"{path} is another user's"):
            HostTierFolder(str(path))
    assert folder.is_dir()
