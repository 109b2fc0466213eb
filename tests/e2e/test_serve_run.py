"""`serve run deployments:app` as a user types it: one model in short, a module from a folder and
one from S3, the official client without a key of its own.
"""

import secrets
import shutil
import signal
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from deployments.local_s3 import REGION, is_free
from tests.e2e.running import Running
from tests.model_runner.demo import ADAPTER_DIRS, ANSWERS, BASE_DIR, QUESTIONS
from tests.s3_server import start_s3_server

URL = "http://127.0.0.1:8000"
START_S = 120.0
END_S = 40.0

pytestmark = [pytest.mark.e2e, pytest.mark.ray, pytest.mark.timeout(240)]


@pytest.fixture
def serve_run() -> Iterator[Running]:
    if not is_free(8000):
        pytest.skip("`serve run` listens on port 8000, and somebody else does already")
    private = Path(tempfile.mkdtemp(prefix="sr-", dir="/tmp"))
    (private / "token").write_text(secrets.token_hex(32))
    with start_s3_server() as s3:
        s3.client().create_bucket(Bucket="theirs")
        s3.put_folder("theirs", "b", ADAPTER_DIRS["formal"])
        command = [
            Path(sysconfig.get_path("scripts")) / "serve",
            "run",
            "deployments:app",
            f"model={BASE_DIR}",
            f"lora_modules=customerA={ADAPTER_DIRS['pirate']} customerB=s3://theirs/b",
            "max_loras=4",
        ]
        environment = {
            "RAY_TMPDIR": str(private),
            "RAY_ADDRESS": "local",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(private / "token"),
            "RAY_worker_niceness": "0",
            "AWS_ENDPOINT_URL": s3.endpoint_url,
            "AWS_ACCESS_KEY_ID": s3.access_key,
            "AWS_SECRET_ACCESS_KEY": s3.secret_key,
            "AWS_DEFAULT_REGION": REGION,
        }
        running = Running(command, environment)
        try:
            yield running
        finally:
            running.end(signal.SIGINT, END_S)
            shutil.rmtree(private, ignore_errors=True)


def test_the_short_form_serves_each_module_by_its_name(serve_run: Running) -> None:
    deadline = time.monotonic() + START_S
    while not is_ready():
        assert serve_run.process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    client = openai.OpenAI(api_key="EMPTY", base_url=f"{URL}/v1", max_retries=0)
    names = [card.id for card in client.models.list()]
    assert names == ["base", "customerA", "customerB"]
    for name, voice in zip(names, ("base", "pirate", "formal"), strict=True):
        messages: Any = [{"role": "user", "content": QUESTIONS[0]}]
        answer = client.chat.completions.create(model=name, messages=messages, temperature=0)
        assert answer.choices[0].message.content == ANSWERS[voice][0]


def is_ready() -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{URL}/ready", timeout=10).status_code == 200
    return False
