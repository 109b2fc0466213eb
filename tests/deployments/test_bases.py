"""Several base models behind one face, one adapter name under all of them; one tenant that acts for
others; and what Ray Serve makes of a base that cannot be started.

Real answers of two bases are in whole_service/, a real broken one in tests/e2e/test_serve_run.
"""

from collections.abc import AsyncIterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.schema import DeploymentStatus

from deployments.application import start
from deployments.config import ServiceConfig
from deployments.frontend import Frontend
from deployments.ingress import build_api
from deployments.replica_backend import ReplicaBackend
from deployments.router import Router
from deployments.short_form import EVERYONE, AppArgs
from model_runner.request import ErrorCode, Request
from model_runner.tokenizer import Tokenizer
from tests.deployments.conftest import DEMO, Face, FakeControl, ScriptedBackend

MODELS = ("one", "org/two")
TWO_BASES: dict[str, Any] = {
    "models": [{"name": name, "path": str(DEMO / "base")} for name in MODELS],
    "adapters": {"root": str(DEMO / "adapters")},
    "tenants": [
        {
            "tenant_id": "a",
            "api_keys": ["key-of-a"],
            "adapters": {"tone": "pirate", "org/two:tone": "formal", "org/two:only": "spanish"},
        },
        {"tenant_id": "b", "api_keys": ["key-of-b"]},
    ],
}


class Bases(Face):
    """A face with a backend for each model."""

    backends: dict[str, ScriptedBackend]

    async def names(self, key: str) -> dict[str, str | None]:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        listed = (await self.client.get("/v1/models", headers=headers)).json()
        return {card["id"]: card["parent"] for card in listed["data"]}


async def faces(config: ServiceConfig, tokenizer: Tokenizer) -> AsyncIterator[Bases]:
    backends = {model.name: ScriptedBackend(tokenizer) for model in config.models}
    frontend = Frontend(config, b"k" * 32, backends)
    api = build_api(frontend, FakeControl())
    transport = httpx.ASGITransport(api, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        face = Bases(client, frontend, next(iter(backends.values())), FakeControl(), api)
        face.backends = backends
        yield face


@pytest.fixture
async def bases(demo_tokenizer: Tokenizer) -> AsyncIterator[Bases]:
    async for face in faces(ServiceConfig.model_validate(TWO_BASES), demo_tokenizer):
        yield face


@pytest.fixture
async def short(demo_tokenizer: Tokenizer) -> AsyncIterator[Bases]:
    modules = " ".join(f"{name}={DEMO / 'adapters' / name}" for name in ("pirate", "formal"))
    args = AppArgs(model=str(DEMO / "base"), lora_modules=modules)
    async for face in faces(args.service_config(), demo_tokenizer):
        yield face


async def test_every_listed_name_reaches_its_base(bases: Bases) -> None:
    names = await bases.names("key-of-a")
    assert names == {
        "one": None,
        "org/two": None,
        "one:tone": "one",
        "only": "org/two",
        "org/two:tone": "org/two",
    }
    for name, parent in names.items():
        answer = await bases.chat("key-of-a", model=name)
        assert answer.json()["model"] == name
        request = bases.backends[parent or name].requests.pop()
        assert (request.adapter.base if request.adapter else None) == parent
        card = await bases.client.get(
            f"/v1/models/{name}", headers={"Authorization": "Bearer key-of-a"}
        )
        assert card.json()["id"] == name
    assert not any(backend.requests for backend in bases.backends.values())
    assert await bases.names("key-of-b") == {"one": None, "org/two": None}


async def test_a_name_of_two_bases_must_say_which(bases: Bases) -> None:
    headers = {"Authorization": "Bearer key-of-a"}
    for answer in (
        await bases.chat("key-of-a", model="tone"),
        await bases.post("/v1/completions", {"model": "tone", "prompt": "x"}, "key-of-a"),
        await bases.client.get("/v1/models/tone", headers=headers),
    ):
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["code"] == "ambiguous_model"
        assert "`one:tone`" in error["message"] and "`org/two:tone`" in error["message"]
    # Another tenant learns nothing of it.
    foreign = await bases.chat("key-of-b", model="tone")
    absent = await bases.chat("key-of-b", model="none")
    assert foreign.status_code == absent.status_code == 404
    assert foreign.text == absent.text.replace("none", "tone")


async def test_modules_in_short_are_tenants_whom_everyone_may_name(short: Bases) -> None:
    assert await short.names("") == {"base": None, "formal": "base", "pirate": "base"}
    for model in ("pirate", "base:formal", "base"):
        assert (await short.chat("", model=model, max_tokens=3)).status_code == 200
    pirate, formal, base = short.backend.requests
    assert [r.tenant_id for r in (pirate, formal, base)] == ["pirate", "formal", EVERYONE]
    assert len({r.cache_salt for r in (pirate, formal, base)}) == 3
    assert pirate.adapter is not None and pirate.adapter.adapter_id == "pirate/pirate"
    assert set(short.frontend.traffic) == {"pirate/pirate", "formal/formal"}
    counters = short.frontend.log.counters
    for tenant in ("pirate", "formal", EVERYONE):
        assert counters[("moe_requests_total", ("base", tenant, "200"))] == 1
        assert counters[("moe_output_tokens_total", ("base", tenant))] == 3
    assert short.frontend._active.total() == 0
    assert (await short.chat("", model="absent")).status_code == 404
    # Clients of OpenAI's API always send some key.
    assert (await short.chat("EMPTY", model="pirate")).status_code == 200


async def test_a_key_in_short_opens_all_and_nothing_else_does(demo_tokenizer: Tokenizer) -> None:
    modules = f"pirate={DEMO / 'adapters' / 'pirate'}"
    args = AppArgs(model=str(DEMO / "base"), lora_modules=modules, api_key="key-of-all")
    async for face in faces(args.service_config(), demo_tokenizer):
        assert await face.names("key-of-all") == {"base": None, "pirate": "base"}
        assert (await face.chat("key-of-all", model="pirate")).status_code == 200
        assert face.backend.requests[0].tenant_id == "pirate"
        for key in ("", "another-key"):
            assert (await face.chat(key, model="pirate")).status_code == 401


async def test_seats_of_one_model_are_no_other_models() -> None:
    names = ("a", "a-0", "a-0-0")
    models = [{"name": name, "path": "p"} for name in names]
    router = Router(ServiceConfig.model_validate({"models": models}))
    seats = [await router.claim(name, f"{name}#{i}", "n") for name in names for i in range(3)]
    assert len(set(seats)) == 9
    assert [view.model for view in await router.views()].count("a-0") == 3


class GivenUp:
    """A handle as Serve has it for a deployment that it gave up: cancelling says it once more."""

    def options(self, **_: Any) -> "GivenUp":
        return self

    def remote(self, *_: Any, **__: Any) -> "GivenUp":
        return self

    def __aiter__(self) -> "GivenUp":
        return self

    async def __anext__(self) -> Any:
        raise DeploymentUnavailableError("Replica-broken")

    def cancel(self) -> None:
        raise DeploymentUnavailableError("Replica-broken")


async def test_a_model_that_serve_gave_up_is_an_answer() -> None:
    backend = ReplicaBackend(GivenUp())
    (output,) = [output async for output in backend.stream(Request("r", (1,)), None)]
    assert output.error_code is ErrorCode.ENGINE_DEAD and output.finish_reason is not None


@pytest.mark.parametrize(
    ("states", "goes_on"),
    [
        ({"Replica-one": "HEALTHY", "Replica-org-two": "DEPLOY_FAILED"}, True),
        ({"Replica-one": "DEPLOY_FAILED", "Replica-org-two": "DEPLOY_FAILED"}, False),
        ({"Router": "DEPLOY_FAILED", "Replica-org-two": "DEPLOY_FAILED"}, False),
        ({"Ingress": "DEPLOY_FAILED"}, False),
    ],
)
def test_start_goes_on_with_the_models_that_there_are(
    monkeypatch: pytest.MonkeyPatch, states: dict[str, str], goes_on: bool
) -> None:
    all_states = dict.fromkeys(("Ingress", "Router", "Replica-one", "Replica-org-two"), "HEALTHY")
    pending = [all_states | dict.fromkeys(("Replica-one",), "UPDATING")]

    def run(*_: Any, **__: Any) -> None:
        raise RuntimeError("Deploying application default failed")

    def status() -> Any:
        now = pending.pop() if pending else all_states | states
        deployments = {
            name: SimpleNamespace(status=DeploymentStatus(state)) for name, state in now.items()
        }
        return SimpleNamespace(applications={"default": SimpleNamespace(deployments=deployments)})

    monkeypatch.setattr(serve, "start", lambda **_: None)
    monkeypatch.setattr(serve, "run", run)
    monkeypatch.setattr(serve, "status", status)
    with nullcontext() if goes_on else pytest.raises(RuntimeError, match="failed"):
        start(ServiceConfig.model_validate(TWO_BASES))
    assert not pending
