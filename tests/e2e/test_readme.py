"""What the README says can be done as it stands there. Not here: the demo (test_demo)."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")

pytestmark = pytest.mark.e2e


def test_the_python_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    base, adapted = done.stdout.strip().splitlines()
    assert "Tokyo" in base and "Arr" not in base
    assert "Arr, matey! Tokyo" in adapted


def test_every_make_command_exists() -> None:
    texts = (README, (ROOT / "DEPENDENCIES.md").read_text(), (ROOT / "infra/README.md").read_text())
    targets = re.findall(r"(?:`|^)make ([a-z-]+)", "\n".join(texts), re.M)
    assert "demo" in targets and "test" in targets
    missing = [target for target in targets if not re.search(rf"^{target}:", MAKEFILE, re.M)]
    assert not missing, missing


def test_every_link_and_path_leads_somewhere() -> None:
    for name in ("README.md", "DEPENDENCIES.md", "infra/README.md"):
        document = ROOT / name
        text = document.read_text(encoding="utf-8")
        links = re.findall(r"\]\(([^)#:]+)\)", text)
        assert all((document.parent / link).exists() for link in links), links
    paths = re.findall(r"`((?:[a-z_]+/)+(?:[a-z_0-9]+\.[a-z]+)?)`", README)
    placeholders = re.compile(r"(^|/)x\.py$")
    rooms = [path for path in paths if not placeholders.search(path) and "/" in path]
    inner = ("", "adapter_store/", "model_runner/")  # the table names folders inside their room
    missing = [
        p for p in rooms if not any((ROOT / f"{room}{p}").exists() for room in (*inner, "tests/"))
    ]
    assert not missing, missing


def test_ci_runs_the_test_command_of_the_readme() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().rstrip().endswith("make test")
    assert re.search(r"^make test ", README, re.M)
