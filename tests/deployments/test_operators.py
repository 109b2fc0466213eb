"""Operators ask whether an adapter would be served: who may, of which places, one at a time.

Over HTTP without Ray; who judges is a stand-in. Not here: the judgement (test_validate.py), the
node's actor (test_application.py), the way through Ray (whole_service/).
"""

import asyncio
import hmac
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.config import ConfigError, ServiceConfig, load_config, make_config
from deployments.frontend import Frontend
from deployments.ingress import build_api
from deployments.tenants import key_digest
from tests.deployments.conftest import DEMO, Face, FakeControl
from tests.deployments.test_ingress import assert_openai_error

KEY, OTHER_KEY = "operators-key-1", "operators-key-2"
ROOT = str(DEMO / "adapters")


@dataclass
class FakeJudge:
    """A backend that only judges: says what it is told to, once `go` lets it."""

    report: dict[str, Any] | None = field(default_factory=lambda: {"served": True})
    failure: Exception | None = None
    asked: list[str] = field(default_factory=list)
    roots: list[str] = field(default_factory=list)
    go: asyncio.Event = field(default_factory=asyncio.Event)

    async def abort(self, request_id: str, index: int) -> None: ...

    def stream(self, *_: Any) -> Any: ...

    async def validate(self, uri: str, root: str) -> dict[str, Any] | None:
        self.asked.append(uri)
        self.roots.append(root)
        await self.go.wait()
        if self.failure is not None:
            raise self.failure
        return self.report


@dataclass
class Desk:
    client: httpx.AsyncClient
    judge: FakeJudge

    async def ask(self, uri: Any = "pirate", key: str = KEY, **fields: Any) -> httpx.Response:
        body = {"model": "demo", "uri": uri} | fields
        headers = {"Authorization": f"Bearer {key}"}
        return await self.client.post("/operator/validate", json=body, headers=headers)


def operated(config: ServiceConfig, **changed: Any) -> ServiceConfig:
    """The demo's configuration with operators."""
    keys = [KEY, "sha256:" + key_digest(OTHER_KEY)]
    values = config.model_dump() | {"operator_keys": keys} | changed
    return make_config(values, "test", Path("/"))


def client_of(config: ServiceConfig, judge: FakeJudge) -> httpx.AsyncClient:
    api = build_api(Frontend(config, b"k" * 32, {"demo": judge}), FakeControl())
    transport = httpx.ASGITransport(api, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


@pytest.fixture
async def desk(demo_config: ServiceConfig) -> AsyncIterator[Desk]:
    judge = FakeJudge()
    judge.go.set()
    config = operated(demo_config)
    tenants = [tenant.model_dump() for tenant in config.tenants]
    tenants[0]["allowed_uris"] = [ROOT, "s3://bucket/of-pirate", "file:///far"]
    async with client_of(operated(config, tenants=tenants), judge) as client:
        yield Desk(client, judge)


async def test_without_keys_there_is_no_such_address(face: Face) -> None:
    for key in (KEY, "sk-demo-pirate", ""):
        response = await face.post("/operator/validate", {"model": "demo", "uri": "pirate"}, key)
        error = assert_openai_error(response, 404)
        unknown = assert_openai_error(await face.post("/operator/nothing", {}, key), 404)
        assert error["message"].replace("validate", "nothing") == unknown["message"]


async def test_only_operators_are_answered(desk: Desk) -> None:
    for key in (KEY, OTHER_KEY):
        response = await desk.ask(key=key)
        assert response.status_code == 200 and response.json() == {"served": True}
    for key in ("sk-demo-pirate", "", "operators-key-3", "sha256:" + key_digest(KEY)):
        assert_openai_error(await desk.ask(key=key), 401)
    for headers in ({}, {"Authorization": f"Basic {KEY}"}, {"x-tenant-id": KEY}):
        response = await desk.client.post("/operator/validate", content=b"{}", headers=headers)
        assert_openai_error(response, 401)
    twice = [("Authorization", f"Bearer {KEY}"), ("Authorization", f"Bearer {OTHER_KEY}")]
    response = await desk.client.post("/operator/validate", content=b"{}", headers=twice)
    assert_openai_error(response, 400)
    headers = {"Authorization": f"Bearer {KEY}"}
    assert_openai_error(await desk.client.get("/v1/models", headers=headers), 401)
    assert_openai_error(await desk.client.get("/operator/validate", headers=headers), 405)
    assert len(desk.judge.asked) == 2


async def test_operators_keys_are_compared_in_constant_time(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every key there is, and none fits unless `hmac.compare_digest` says so."""
    asked = []

    def differ(known: str, computed: str) -> bool:
        asked.append((known, computed))
        return False

    monkeypatch.setattr(hmac, "compare_digest", differ)
    assert_openai_error(await desk.ask(key=KEY), 401)
    assert asked == [(key_digest(known), key_digest(KEY)) for known in (KEY, OTHER_KEY)]


async def test_keys_in_the_file(demo_config: ServiceConfig) -> None:
    config = operated(demo_config)
    assert KEY not in repr(config) and f"sha256:{key_digest(KEY)}" in config.operator_keys
    for keys, words in (
        (["short"], "key 0 is shorter than 8"),
        (KEY, "must be a list of strings"),
        (["sk-demo-pirate"], "operator_keys: one of them is a tenant's"),
    ):
        with pytest.raises(ConfigError, match=words) as refusal:
            operated(demo_config, operator_keys=keys)
        assert "sk-demo-pirate" not in str(refusal.value)
    assert load_config().operator_keys == ()


async def test_only_places_of_adapters_are_read(desk: Desk, tmp_path: Path) -> None:
    for uri, read, root in (
        ("pirate", f"{ROOT}/pirate", ROOT),
        (f"{ROOT}/formal", f"{ROOT}/formal", ROOT),
        ("nothing-there", f"{ROOT}/nothing-there", ROOT),
        ("s3://bucket/of-pirate/new", "s3://bucket/of-pirate/new", "s3://bucket/of-pirate"),
        ("file:///far/a", "file:///far/a", "file:///far"),
    ):
        assert (await desk.ask(uri)).status_code == 200
        assert (desk.judge.asked.pop(), desk.judge.roots.pop()) == (read, root)
    words = set()
    for uri in (
        "/etc",
        str(tmp_path),  # there
        str(tmp_path / "absent"),
        "../base",
        "pirate/../formal",  # a folder on the way may be a link
        f"{ROOT}/../base",
        f"{ROOT}x",
        "..",
        f"file://{ROOT}/pirate",
        "file:///far/%2e%2e/etc",
        "file:///far%2F..%2Fetc",
        "file://elsewhere/far/a",
        "s3://bucket",
        "s3://bucket/of-pirates",
        "s3://bucket/of-pirate/../secret",
        "s3://other/of-pirate",
        "S3://bucket/of-pirate/new",
        "http://127.0.0.1/far",
    ):
        error = assert_openai_error(await desk.ask(uri), 400)
        assert (error["param"], error["code"]) == ("uri", "uri_not_allowed"), uri
        words.add(error["message"].partition(" is not below ")[2])
    assert len(words) == 1 and not desk.judge.asked, "nothing told of what is there"


async def test_what_is_no_question_is_refused_by_name(desk: Desk) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    for body in (b"", b"[]", b"{", b'"x"', b"\xff", b"[" * 60_000):
        response = await desk.client.post("/operator/validate", content=body, headers=headers)
        assert_openai_error(response, 400)
    response = await desk.client.post(
        "/operator/validate", content=b" " * (1 << 17), headers=headers
    )
    assert_openai_error(response, 413)
    for uri in (None, 1, "", [], "x" * 3000):
        assert assert_openai_error(await desk.ask(uri), 422)["param"] == "uri"
    assert assert_openai_error(await desk.ask(load=True), 400)["param"] == "load"
    assert assert_openai_error(await desk.ask(model=None), 422)["param"] == "model"
    assert assert_openai_error(await desk.ask(model="other"), 404)["code"] == "model_not_found"
    assert not desk.judge.asked


async def test_one_at_a_time_and_nobody_waits_for_it(desk: Desk) -> None:
    desk.judge.go.clear()
    first = asyncio.create_task(desk.ask())
    while not desk.judge.asked:
        await asyncio.sleep(0)
    error = assert_openai_error(await desk.ask(), 429)
    assert error["code"] == "overloaded" and len(desk.judge.asked) == 1
    assert (await desk.client.get("/health")).status_code == 200
    desk.judge.go.set()
    assert (await first).status_code == 200
    assert (await desk.ask()).status_code == 200
    desk.judge.report = None  # its node judges for another ingress
    response = await desk.ask()
    assert_openai_error(response, 429)
    assert response.headers["retry-after"]


async def test_who_does_not_wait_keeps_nobody(desk: Desk) -> None:
    desk.judge.go.clear()
    first = asyncio.create_task(desk.ask())
    while not desk.judge.asked:
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    desk.judge.go.set()
    assert (await desk.ask()).status_code == 200


async def test_if_nobody_can_judge(desk: Desk, demo_config: ServiceConfig) -> None:
    desk.judge.failure = RuntimeError("the actor is dead at /secret/place")
    error = assert_openai_error(await desk.ask(), 503)
    assert error["type"] == "server_error" and "secret" not in error["message"]
    desk.judge.failure = None
    assert (await desk.ask()).status_code == 200
    hasty = demo_config.ingress.model_copy(update={"max_waiting_s": 0.01})
    judge = FakeJudge()
    async with client_of(operated(demo_config, ingress=hasty.model_dump()), judge) as client:
        assert_openai_error(await Desk(client, judge).ask(), 503)
