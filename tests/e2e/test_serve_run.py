"""`serve run` as a user types it: one model in short, a module from a folder and one from S3, the
official client without a key of its own; and a Serve config file with a base that is broken.
"""

import secrets
import shutil
import signal
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from deployments.local_s3 import REGION, free_ports, is_free
from deployments.serve_flags import SERVE_FLAGS
from tests.e2e.running import Running
from tests.lacking import lack
from tests.model_runner.demo import ADAPTER_DIRS, ANSWERS, BASE_DIR, QUESTIONS
from tests.s3_server import start_s3_server

START_S = 120.0
END_S = 20.0

pytestmark = [pytest.mark.e2e, pytest.mark.ray, pytest.mark.timeout(300)]


@contextmanager
def serve_run(private: Path, *arguments: str, **environment: str) -> Iterator[Running]:
    """The command with a Ray of its own, which goes when it does."""
    (private / "token").write_text(secrets.token_hex(32))
    settings = {
        "RAY_TMPDIR": str(private),
        "RAY_ADDRESS": "local",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(private / "token"),
        "RAY_worker_niceness": "0",
    }
    program = Path(sysconfig.get_path("scripts")) / "serve"
    running = Running([program, "run", *arguments], settings | environment)
    has_ended = False
    try:
        yield running
    finally:
        has_ended = running.end(signal.SIGINT, END_S)
    assert has_ended, running.tail()


@pytest.fixture
def private() -> Iterator[Path]:
    """Short: the path of a socket below it has at most 107 characters."""
    folder = Path(tempfile.mkdtemp(prefix="sr-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def wait_until(condition: Callable[[], bool], running: Running) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        assert running.process.poll() is None and time.monotonic() < deadline, running.tail()
        time.sleep(0.1)


def readiness(url: str) -> Any:
    """What /ready says, None as long as it says nothing."""
    with suppress(httpx.HTTPError, ValueError):
        return httpx.get(f"{url}/ready", timeout=10).json()
    return None


@pytest.mark.slow
def test_the_short_form_serves_each_module_by_its_name(private: Path) -> None:
    if not is_free(8000):
        lack("`serve run` listens on port 8000, and somebody else does already")
    url = "http://127.0.0.1:8000"
    modules = f"customerA={ADAPTER_DIRS['pirate']} customerB=s3://theirs/b"
    arguments = (f"model={BASE_DIR}", f"lora_modules={modules}", "max_loras=4")
    with start_s3_server() as s3:
        s3.client().create_bucket(Bucket="theirs")
        s3.put_folder("theirs", "b", ADAPTER_DIRS["formal"])
        bucket = {
            "AWS_ENDPOINT_URL": s3.endpoint_url,
            "AWS_ACCESS_KEY_ID": s3.access_key,
            "AWS_SECRET_ACCESS_KEY": s3.secret_key,
            "AWS_DEFAULT_REGION": REGION,
        }
        with serve_run(private, "deployments:app", *arguments, **bucket) as running:
            wait_until(lambda: readiness(url) == {"ready": True, "missing": []}, running)
            client = openai.OpenAI(api_key="EMPTY", base_url=f"{url}/v1", max_retries=0)
            names = [card.id for card in client.models.list()]
            assert names == ["base", "customerA", "customerB"]
            for name, voice in zip(names, ("base", "pirate", "formal"), strict=True):
                assert answer(client, name) == ANSWERS[voice][0]
            # Ray was started with the flags, and what its replicas say can be read.
            flags = {f"{name}={value}".encode() for name, value in SERVE_FLAGS.items()}
            with_flags = [pid for pid in running.pids() if flags <= environ_of(pid)]
            assert len(with_flags) >= 5, running.tail()
            logs = {path.name: path for path in private.glob("**/logs/serve/replica_*.log")}
            for part in ("Ingress", "Router", "Replica-base"):
                (path,) = (path for name, path in logs.items() if part in name)
                assert path.read_text(), path


def environ_of(pid: int) -> set[bytes]:
    with suppress(OSError):
        return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    return set()


def answer(client: openai.OpenAI, model: str) -> str | None:
    messages: Any = [{"role": "user", "content": QUESTIONS[0]}]
    made = client.chat.completions.create(model=model, messages=messages, temperature=0)
    return made.choices[0].message.content


@pytest.mark.slow
def test_without_a_word_it_serves_what_ships(private: Path) -> None:
    if not is_free(8000):
        lack("`serve run` listens on port 8000, and somebody else does already")
    url = "http://127.0.0.1:8000"
    with serve_run(private, "deployments:app") as running:
        wait_until(lambda: readiness(url) == {"ready": True, "missing": []}, running)
        for voice in ("pirate", "spanish"):
            client = openai.OpenAI(api_key=f"sk-demo-{voice}", base_url=f"{url}/v1", max_retries=0)
            assert answer(client, voice) == ANSWERS[voice][0]


@pytest.mark.slow
def test_a_base_that_cannot_be_started_leaves_the_others_alone(private: Path) -> None:
    """As a Serve config file deploys it: `serve run FILE`, which is what `serve deploy` does."""
    broken = private / "broken"
    shutil.copytree(BASE_DIR, broken)
    (broken / "model.safetensors").write_bytes(b"no tensors")
    models = [
        {"name": name, "path": str(folder), "engine": {"device": "cpu"}}
        for name, folder in (("good", BASE_DIR), ("broken", broken))
    ]
    tenants = [{"tenant_id": "all"}]
    ingress = {"anonymous_tenant": "all", "max_waiting_s": 15}
    service = {"models": models, "tenants": tenants, "ingress": ingress}
    (private / "service.yaml").write_text(yaml.safe_dump(service))
    (port,) = free_ports(1)
    application = {
        "name": "default",
        "route_prefix": "/",
        "import_path": "deployments:app",
        "args": {"config": str(private / "service.yaml")},
    }
    deploy = {"http_options": {"host": "127.0.0.1", "port": port}, "applications": [application]}
    (private / "serve.yaml").write_text(yaml.safe_dump(deploy))
    url = f"http://127.0.0.1:{port}"
    client = openai.OpenAI(api_key="EMPTY", base_url=f"{url}/v1", max_retries=0)
    with serve_run(private, str(private / "serve.yaml")) as running:
        wait_until(lambda: readiness(url) == {"ready": False, "missing": ["broken"]}, running)

        def refusal() -> str:
            with pytest.raises(openai.InternalServerError) as caught:
                answer(client, "broken")
            assert caught.value.status_code == 503
            return caught.value.message

        # Until its third try it is one that may still come, and requests wait for it.
        wait_until(lambda: "could be started" in refusal(), running)
        assert answer(client, "good") == ANSWERS["base"][0]
