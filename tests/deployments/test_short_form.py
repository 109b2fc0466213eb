"""The arguments of `serve run deployments:app`: what they mean, what is refused. No cluster."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from deployments import short_form
from deployments.config import ConfigError, load_config
from deployments.short_form import EVERYONE, AppArgs
from deployments.tenants import key_digest
from tests.deployments.conftest import DEMO

BASE = str(DEMO / "base")
PIRATE = str(DEMO / "adapters" / "pirate")


def args(**given: str) -> AppArgs:
    """As Ray makes them: what comes from a command line is text."""
    return AppArgs.model_validate(given)


def test_nothing_is_the_demo_and_a_file_is_that_file(tmp_path: Path) -> None:
    assert args().service_config() == load_config()
    path = tmp_path / "mine.yaml"
    path.write_text(f"models: [{{name: mine, path: {BASE}}}]")
    assert args(config=str(path)).service_config() == load_config(path)


def test_one_model_in_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_form, "glob", lambda pattern: [])
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    monkeypatch.chdir(DEMO)
    given = args(
        model="base",
        lora_modules="customerA=adapters/pirate  customerB=s3://bucket/b",
        max_loras="4",
        max_lora_rank="16",
        num_replicas="2",
        default_max_tokens="77",
        cuda_graphs="false",
    )
    config = given.service_config()
    (model,) = config.models
    assert (model.name, model.path) == ("base", BASE)
    assert (model.num_replicas, model.default_max_tokens, model.num_gpus) == (2, 77, 0)
    assert model.engine == {"max_loras": 4, "max_lora_rank": 16, "cuda_graphs": False}
    assert config.adapters.s3.endpoint_url == "http://127.0.0.1:1"
    assert config.ingress.anonymous_tenant == EVERYONE
    a, b, everyone = config.tenant_configs()
    assert [a.tenant_id, b.tenant_id] == ["customerA", "customerB"]
    assert a.adapters["customerA"].uri == PIRATE
    assert b.adapters["customerB"].uri == "s3://bucket/b"
    assert a.adapters["customerA"].base == b.adapters["customerB"].base == "base"
    assert not a.api_key_digests and not b.api_key_digests
    assert everyone.acts_for == ("customerA", "customerB")
    assert everyone.limits.max_concurrent_requests == config.ingress.max_concurrent_requests


def test_name_and_key(tmp_path: Path) -> None:
    config = args(model=BASE, served_model_name="org/demo", api_key="a-long-key").service_config()
    assert config.models[0].name == "org/demo" and config.ingress.anonymous_tenant == ""
    (everyone,) = config.tenant_configs()
    assert everyone.api_key_digests == (key_digest("a-long-key"),)


def test_a_gpu_is_taken_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_form, "glob", lambda pattern: ["/dev/nvidia0", "/dev/nvidia1"])
    num_gpus = [
        args(model=BASE, **more).service_config().models[0].num_gpus
        for more in ({}, {"device": "cpu"}, {"num_gpus": "0.5"})
    ]
    assert num_gpus == [1, 0, 0.5]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"confg": "x"}, "unknown argument 'confg'; did you mean 'config'"),
        ({"model": BASE, "max_lora": "4"}, "did you mean 'max_loras'"),
        ({"model": BASE, "path": "x"}, "unknown argument 'path'"),
        ({"config": "x.yaml", "max_loras": "4"}, "'max_loras' belongs into it"),
        ({"config": "x.yaml", "model": BASE}, "'model' belongs into it"),
        ({"lora_modules": "a=b"}, "'lora_modules' needs a model"),
        ({"num_replicas": "2"}, "'num_replicas' needs a model"),
    ],
)
def test_arguments_that_do_not_fit(given: dict[str, str], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        args(**given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": "org/model"}, "model: .*org/model is no folder with a model"),
        ({"lora_modules": "pirate"}, "lora_modules: 'pirate' is not NAME=URI"),
        ({"lora_modules": "a="}, "'a=' is not NAME=URI"),
        ({"lora_modules": "a='b"}, "lora_modules: No closing quotation"),
        ({"lora_modules": "a=/nowhere"}, "a: /nowhere is no folder with an adapter"),
        ({"lora_modules": "a=s3://b/c a=s3://b/d"}, "'a' is there twice"),
        ({"lora_modules": "base=s3://b/c"}, "adapter 'base': a name must not be a base model's"),
        ({"lora_modules": "a/b=s3://b/c"}, "'a/b' cannot be the name of a module"),
        ({"lora_modules": f"{EVERYONE}=s3://b/c"}, "cannot be the name of a module"),
        ({"lora_modules": "a=gs://b/c", "max_loras": "many"}, "max_loras"),
        ({"num_replicas": "0"}, "num_replicas"),
        ({"max_loras": "-1"}, "max_loras must not be negative"),
        ({"served_model_name": "a:b"}, "models.0.name"),
        ({"api_key": "short"}, "shorter than 8"),
    ],
)
def test_values_that_mean_nothing(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        args(**{"model": BASE} | given).service_config()


def test_a_key_is_not_repeated_by_errors() -> None:
    for given in ({"confg": "x"}, {"config": "x.yaml"}, {"model": BASE, "num_gpus": "x"}):
        with pytest.raises(ValueError) as caught:
            args(api_key="hidden-word", **given).service_config()
        assert "hidden" not in str(caught.value)
