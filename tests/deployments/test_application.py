"""Wiring without a cluster, and the node's adapter actor as a plain object."""

import asyncio
import json
import pickle
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import yaml
from click.testing import CliRunner
from ray.serve.scripts import cli

import deployments
from adapter_store import validation
from adapter_store.__main__ import main as validate_command
from adapter_store.host_cache import census
from adapter_store.ref import AdapterRef
from adapter_store.sources.source import S3Options
from deployments.adapter_actor import AdapterStoreActor, ServedModel
from deployments.application import CONTROL_PLACES, _host_cache_dir, _salt_key, app, build
from deployments.config import DEFAULT_CONFIG, ConfigError, ServiceConfig, load_config
from model_runner.assembly import read_model_config
from model_runner.config import EngineConfig
from model_runner.engine import Engine
from model_runner.models.lora_targets import list_lora_targets
from tests.deployments.conftest import DEMO


def test_serve_run_finds_the_builder() -> None:
    assert deployments.app is app
    assert app({})._bound_deployment.name == "Ingress"
    with pytest.raises(AttributeError, match="no attribute 'application_of_nobody'"):
        deployments.application_of_nobody  # noqa: B018


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["confg=x"], "arguments: unknown argument 'confg'; did you mean 'config'?"),
        (["config={tmp}/absent.yaml"], "absent.yaml"),
        (
            ["config={tmp}/service.yaml"],
            "service.yaml: http: `serve run` listens on ",
        ),
        (["model={tmp}"], "is no folder with a model"),
    ],
)
def test_serve_run_says_in_one_line_what_is_wrong_with_its_arguments(
    arguments: list[str], words: str, tmp_path: Path
) -> None:
    text = DEFAULT_CONFIG.read_text().replace("../tests", str(DEFAULT_CONFIG.parents[1] / "tests"))
    (tmp_path / "service.yaml").write_text(text + "\nhttp: {port: 8123}\n")
    given = [argument.format(tmp=tmp_path) for argument in arguments]
    done = CliRunner().invoke(cli, ["run", "deployments:app", *given])
    assert done.exit_code == 1 and not ray.is_initialized()
    [said] = [line for line in done.output.splitlines() if " INFO " not in line.replace("\t", " ")]
    assert said.startswith("Error: ") and words in said


def test_what_is_missing_is_told_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"models": [{"name": "m", "path": "nowhere"}]}))
    with pytest.raises(ConfigError, match="nowhere holds no config.json"):
        build(load_config(path))


def test_every_queue_has_its_bound(demo_config: ServiceConfig) -> None:
    (model,) = demo_config.models
    changed = model.model_copy(update={"max_queued_requests": 5, "max_ongoing_requests": 7})
    ingress = build(demo_config.model_copy(update={"models": (changed,)}))._bound_deployment
    router, replicas = (bound for bound in ingress.init_args[2:])
    queued = {
        deployment.name: (deployment.max_queued_requests, deployment.max_ongoing_requests)
        for deployment in (
            ingress,
            router._bound_deployment,
            replicas["demo"]._bound_deployment,
        )
    }
    most = demo_config.ingress.max_concurrent_requests
    # A replica takes seven requests, and what is said about them beside.
    assert queued.pop("Replica-demo") == (5, 7 + CONTROL_PLACES)
    settings = replicas["demo"]._bound_deployment._deployment_config.request_router_config
    assert settings.request_router_kwargs["control_places"] == CONTROL_PLACES
    # The ingress' own bound, which answers in OpenAI's words, must be met before Serve's.
    assert queued.pop("Ingress") == (most, most + 64)
    assert queued.pop("Router") == (1000, 1000) and not queued


def test_secret_of_the_salts(demo_config: ServiceConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _salt_key(demo_config) != _salt_key(demo_config)
    named = demo_config.model_copy(update={"cache_secret_env": "TEST_CACHE_SECRET"})
    monkeypatch.setenv("TEST_CACHE_SECRET", "short")
    with pytest.raises(ConfigError, match="at least 16"):
        _salt_key(named)
    monkeypatch.setenv("TEST_CACHE_SECRET", "long enough a secret")
    assert _salt_key(named) == b"long enough a secret"


def test_host_tier_is_the_same_after_a_restart_and_another_for_others(
    demo_config: ServiceConfig,
) -> None:
    again = load_config()
    other = demo_config.model_copy(update={"models": (demo_config.models[0],) * 2})
    assert _host_cache_dir(demo_config) == _host_cache_dir(again) != _host_cache_dir(other)


def test_configuration_reaches_other_processes_whole(demo_config: ServiceConfig) -> None:
    assert pickle.loads(pickle.dumps(demo_config)) == demo_config


def test_the_replica_module_brings_neither_torch_nor_transformers() -> None:
    """A replica loads its engine itself; and it sees ids alone, so it pays for no tokenizer."""
    code = (
        "import sys, deployments.replica; assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=DEMO.parents[2], check=True, timeout=100)


async def test_adapter_actor_fetches_ahead(tmp_path: Path) -> None:
    config = EngineConfig(str(DEMO / "base"), device="cpu", host_cache_dir=str(tmp_path))
    engine = Engine(config)
    try:
        actor = AdapterStoreActor()
        for _ in range(2):
            await actor.register(
                "demo",
                engine.targets,
                torch.float32,
                64,
                str(tmp_path),
                1 << 30,
                S3Options(),
                str(DEMO / "base"),
            )
        good = [
            AdapterRef(f"t/{name}", str(DEMO / "adapters" / name)) for name in ("pirate", "formal")
        ]
        absent = AdapterRef("t/absent", str(DEMO / "adapters" / "absent"))
        digests = await actor.prefetch("demo", [*good, absent])
        assert set(digests) == set(good)
        seen = await actor.look("demo", [ref.uri for ref in (*good, absent)])
        assert seen[absent.uri] == "" and all(seen[ref.uri] for ref in good)
        packed = {path.name.split("-")[0] for path in (tmp_path / "packed").iterdir()}
        assert packed == set(digests.values())
        assert census(tmp_path) == (2, sum(p.stat().st_size for p in tmp_path.rglob("*.lora")))
        growth, failures = await actor.take_loads("demo")
        assert growth["loads"]["remote"] == 2 and growth["load_seconds"]["remote"] > 0
        assert growth["load_bytes"]["remote"] > 0 and failures == 1
        growth, failures = await actor.take_loads("demo")
        assert not failures and not any(any(by.values()) for by in growth.values()), "told once"
        # The engine finds them there: nothing is fetched again.
        engine.load_adapters(good)
        assert engine.store.stats().loads["remote"] == 0
    finally:
        engine.close()


async def test_adapter_actor_judges_one_at_a_time_as_the_command_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, tier = DEMO / "base", tmp_path / "tier"
    family, shape = read_model_config(base)
    targets = list_lora_targets(shape, family.names)
    actor = AdapterStoreActor()
    await actor.register(
        "demo", targets, torch.float32, 64, str(tier), 4 << 30, S3Options(), str(base)
    )
    served = ServedModel("demo", str(base), 64 << 20, gpus=0)
    bad = tmp_path / "bad"
    shutil.copytree(DEMO / "adapters" / "pirate", bad)
    config = json.loads((bad / "adapter_config.json").read_text())
    (bad / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    for uri in (str(DEMO / "adapters" / "pirate"), str(bad), str(tmp_path / "absent")):
        report = await actor.validate(uri, served)
        code = validate_command(
            ["validate", uri, "--model", str(base), "--device", "cpu", "--json"]
        )
        said = json.loads(capsys.readouterr().out)
        assert report is not None and json.loads(json.dumps(report)) == said | {"model": "demo"}
        assert report["served"] == (code == 0) == (uri == str(DEMO / "adapters" / "pirate"))
    assert census(tier) == (0, 0), "nothing of them stays"

    started, go = threading.Event(), threading.Event()
    real = validation.validate

    def slow(*args: Any, **options: Any) -> Any:
        started.set()
        assert go.wait(30)
        return real(*args, **options)

    monkeypatch.setattr(validation, "validate", slow)
    uri = str(DEMO / "adapters" / "pirate")
    first = asyncio.create_task(actor.validate(uri, served))
    await asyncio.to_thread(started.wait, 30)
    assert await actor.validate(uri, served) is None
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert await actor.validate(uri, served) is None, "a thread runs to its end"
    go.set()
    async with asyncio.timeout(30):
        while (report := await actor.validate(uri, served)) is None:
            await asyncio.sleep(0.01)
    assert report["served"]
