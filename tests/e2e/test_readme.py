"""What the README says can be done as it stands there. Not here: the demo (test_demo)."""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")

pytestmark = pytest.mark.e2e


def test_the_python_example_runs() -> None:
    code, _ = re.findall(r"```python\n(.*?)```", README, re.S)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    base, adapted = done.stdout.strip().splitlines()
    assert "Tokyo" in base and "Arr" not in base
    assert "Arr, matey! Tokyo" in adapted


def test_the_client_that_comes_back() -> None:
    """Its connection breaks twice: before the first event, and after two of them."""
    _, code = re.findall(r"```python\n(.*?)```", README, re.S)
    events = [("a", {"text": "Hel"}), ("b", {"text": "lo"}), ("c", {"text": "!"})]
    asked: list[str] = []

    @contextlib.contextmanager
    def stream(method: str, url: str, json: object, headers: dict[str, str]) -> Iterator[Any]:
        asked.append(headers.get("Last-Event-ID", ""))
        yield SimpleNamespace(iter_lines=partial(lines, len(asked)))

    def lines(connection: int) -> Iterator[str]:
        if connection == 1:
            raise httpx.ConnectError("refused")
        first = [name for name, _ in events].index(asked[-1]) + 1 if asked[-1] else 0
        for name, chunk in events[first : 2 if connection == 2 else None]:
            yield from (": keep-alive", "", f"id: {name}", f"data: {json.dumps(chunk)}", "")
        if connection == 2:
            raise httpx.ReadError("reset")
        yield from ("data: [DONE]", "")

    shown: list[dict[str, str]] = []
    client = SimpleNamespace(stream=stream, TransportError=httpx.TransportError)
    names = {"httpx": client, "contextlib": contextlib, "json": json, "show": shown.append}
    exec(code, names | {"key": "k", "url": "u", "body": {}})
    assert [chunk["text"] for chunk in shown] == ["Hel", "lo", "!"]
    assert asked == ["", "", "b"]


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
