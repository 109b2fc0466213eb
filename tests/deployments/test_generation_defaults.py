"""generation_config.json as defaults of sampling: read once, overruled by every request."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from deployments.application import build
from deployments.config import ConfigError, ServiceConfig
from deployments.frontend import Frontend
from deployments.generation_defaults import read_generation_defaults
from model_runner.request import SamplingParams
from model_runner.tokenizer import Tokenizer
from tests.deployments.conftest import DEMO, ScriptedBackend

GIVEN = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": 2}


def model_folder(tmp_path: Path, said: Any) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(DEMO / "base", folder, ignore=shutil.ignore_patterns("model.safetensors"))
    (folder / "generation_config.json").write_text(json.dumps(said))
    return folder


def config(folder: Path, **fields: Any) -> ServiceConfig:
    model = {"name": "m", "path": str(folder)} | fields
    tenants = [{"tenant_id": "t"}]
    return ServiceConfig.model_validate({"models": [model], "tenants": tenants})


async def sampling(
    config: ServiceConfig, tokenizer: Tokenizer, path: str = "chat", **fields: Any
) -> SamplingParams:
    """What the engine is told of a request with these fields."""
    frontend = Frontend(config, b"k" * 32, {"m": ScriptedBackend(tokenizer)})
    (tenant,) = config.tenant_configs()
    if path == "chat":
        body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]} | fields
        job = await frontend.jobs.chat(tenant, json.dumps(body).encode(), "0" * 32)
    else:
        body = {"model": "m", "prompt": "Hi"} | fields
        job = await frontend.jobs.completion(tenant, json.dumps(body).encode(), "0" * 32)
    return job.requests[0].sampling


@pytest.mark.parametrize("path", ["chat", "completion"])
async def test_what_a_request_leaves_open(
    tmp_path: Path, demo_tokenizer: Tokenizer, path: str
) -> None:
    service = config(model_folder(tmp_path, GIVEN))

    async def drawn(**fields: Any) -> tuple[float, float, int]:
        found = await sampling(service, demo_tokenizer, path, **fields)
        return found.temperature, found.top_p, found.top_k

    assert await drawn() == (0.6, 0.95, 20)
    assert await drawn(temperature=None) == (0.6, 0.95, 20)
    assert await drawn(temperature=0, top_k=-1) == (0, 0.95, 0)
    assert await drawn(temperature=1, top_p=1, top_k=0) == (1, 1, 0)


async def test_switched_off(tmp_path: Path, demo_tokenizer: Tokenizer) -> None:
    service = config(model_folder(tmp_path, GIVEN), generation_defaults=False)
    found = await sampling(service, demo_tokenizer)
    assert (found.temperature, found.top_p, found.top_k) == (1, 1, 0)


async def test_no_sampling_is_greedy(tmp_path: Path, demo_tokenizer: Tokenizer) -> None:
    folder = model_folder(tmp_path, {"do_sample": False, "temperature": 0.6, "top_k": 50})
    found = await sampling(config(folder), demo_tokenizer)
    assert found.temperature == 0
    found = await sampling(config(folder), demo_tokenizer, temperature=0.8)
    assert (found.temperature, found.top_k) == (0.8, 50)


def test_what_files_say(tmp_path: Path) -> None:
    assert read_generation_defaults(tmp_path) == {}
    for number, (said, found) in enumerate(
        [
            ({}, {}),
            ({"temperature": None, "top_k": -1, "max_length": 9}, {"top_k": 0}),
            (GIVEN, {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
        ]
    ):
        assert read_generation_defaults(model_folder(tmp_path / str(number), said)) == found


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "Expecting"), ("[]", "an object"), ('{"top_p": 2}', "top_p must be a number in")],
)
def test_a_broken_file_is_told_of_before_anything_starts(
    tmp_path: Path, text: str, words: str
) -> None:
    folder = model_folder(tmp_path, {})
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=f"models: m: .*generation_config.json: .*{words}"):
        build(config(folder))
