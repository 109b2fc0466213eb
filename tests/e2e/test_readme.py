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


@contextlib.contextmanager
def refuse(method: str, url: str, json: object, headers: dict[str, str]) -> Iterator[Any]:
    yield httpx.Response(401, request=httpx.Request(method, "http://127.0.0.1/v1/completions"))


def test_the_client_that_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is there, then a 503, then the connection breaks after two events."""
    _, code = re.findall(r"```python\n(.*?)```", README, re.S)
    events = [("a", {"text": "Hel"}), ("b", {"text": "lo"}), ("c", {"text": "!"})]
    asked: list[str] = []

    @contextlib.contextmanager
    def stream(method: str, url: str, json: object, headers: dict[str, str]) -> Iterator[Any]:
        asked.append(headers.get("Last-Event-ID", ""))
        if len(asked) == 1:
            raise httpx.ConnectError("refused")
        status = 503 if len(asked) == 2 else 200
        yield SimpleNamespace(iter_lines=partial(lines, len(asked)), status_code=status,
                              raise_for_status=lambda: None)  # fmt: skip

    def lines(connection: int) -> Iterator[str]:
        if connection == 2:
            return
        first = [name for name, _ in events].index(asked[-1]) + 1 if asked[-1] else 0
        for name, chunk in events[first : 2 if connection == 3 else None]:
            yield from (": keep-alive", "", f"id: {name}", f"data: {json.dumps(chunk)}", "")
        if connection == 3:
            raise httpx.ReadError("reset")
        yield from ("data: [DONE]", "")

    shown: list[dict[str, str]] = []
    monkeypatch.setattr(httpx, "stream", stream)
    names: dict[str, Any] = {}
    exec(code, names)
    names["follow"]("u", "k", {"stream": True}, shown.append)
    assert [chunk["text"] for chunk in shown] == ["Hel", "lo", "!"]
    assert asked == ["", "", "", "b"]
    monkeypatch.setattr(httpx, "stream", refuse)
    with pytest.raises(httpx.HTTPStatusError):
        names["follow"]("u", "k", {"stream": True}, shown.append)


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
    assert re.search(r"^make test( \|\| failed=1)?$", script.read_text(), re.M)
    assert re.search(r"^make test ", README, re.M)
