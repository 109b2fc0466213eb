"""The HTTP face in front of a backend that pretends: shapes, errors, limits, hang-ups.

Without Ray and without an engine.
"""

import asyncio
import json
import re
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from deployments.config import ServiceConfig
from deployments.frontend import Frontend
from deployments.ingress import EventStream, build_api
from model_runner.request import ErrorCode
from model_runner.tokenizer import Tokenizer
from tests.deployments.conftest import Face, FakeControl, ScriptedBackend
from tests.model_runner.demo import PADDING_IDS
from tests.sse_client import read_events


def events(response: httpx.Response) -> list[Any]:
    found = list(read_events(response.text.split("\n")))
    assert found[-1].data == "[DONE]"
    return [json.loads(event.data) for event in found[:-1]]


def assert_openai_error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    return error


class Call:
    """One request over ASGI whose messages are seen as they come."""

    def __init__(self, face: Face, body: bytes, more_body: bool = False) -> None:
        self.inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.inbox.put_nowait({"type": "http.request", "body": body, "more_body": more_body})
        self.status = 0
        self.text = ""
        self.ended = False
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": "/v1/chat/completions",
            "raw_path": b"/v1/chat/completions",
            "root_path": "",
            "scheme": "http",
            "query_string": b"",
            "headers": [(b"authorization", b"Bearer sk-demo-pirate")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self.task = asyncio.create_task(face.api(scope, self.inbox.get, self.send))

    async def send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.text += message.get("body", b"").decode()
            self.ended = not message.get("more_body", False)

    def hang_up(self) -> None:
        self.inbox.put_nowait({"type": "http.disconnect"})


def call(face: Face, **fields: Any) -> Call:
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    return Call(face, json.dumps(body | fields).encode())


def quick_comments(face: Face, **values: Any) -> None:
    settings = face.frontend.config.ingress.model_copy(update={"keep_alive_s": 0.05} | values)
    face.frontend.config = face.frontend.config.model_copy(update={"ingress": settings})


async def test_chat(face: Face) -> None:
    answer = (await face.chat(max_tokens=100, temperature=0)).json()
    assert answer["object"] == "chat.completion" and answer["model"] == "demo"
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": face.backend.words,
        "refusal": None,
    }
    assert answer["choices"][0]["finish_reason"] == "stop"
    request = face.backend.requests[0]
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(request.token_ids)
    assert usage["completion_tokens"] == len(face.backend.tokenizer.encode(face.backend.words))
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    assert request.adapter is None and request.tenant_id == "pirate"
    assert request.sampling.temperature == 0 and request.sampling.max_tokens == 100


async def test_chat_streams_the_same(face: Face) -> None:
    response = await face.chat(stream=True, stream_options={"include_usage": True}, n=2)
    chunks = events(response)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    texts = {0: "", 1: ""}
    ends = {}
    for chunk in chunks[:-1]:
        assert chunk["usage"] is None
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content", "")
        ends[choice["index"]] = choice["finish_reason"]
    assert texts == {0: face.backend.words, 1: face.backend.words}
    assert ends == {0: "stop", 1: "stop"}
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    last = chunks[-1]
    num_tokens = len(face.backend.tokenizer.encode(face.backend.words))
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 2 * num_tokens


async def test_no_usage_in_a_stream_that_did_not_ask(face: Face) -> None:
    assert all("usage" not in chunk for chunk in events(await face.chat(stream=True)))


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_ends_one_of_two(face: Face, stream: bool) -> None:
    response = await face.chat(stop=[" friend"], n=2, stream=stream)
    if stream:
        text = "".join(
            c["choices"][0]["delta"].get("content", "")
            for c in events(response)
            if c["choices"][0]["index"] == 0
        )
    else:
        choice = response.json()["choices"][0]
        text = choice["message"]["content"]
        assert choice["finish_reason"] == "stop" and choice["stop_reason"] == " friend"
    assert text == "Hello there,"
    assert [index for _, index in face.backend.aborted] == [0]
    assert not face.backend.running


@pytest.mark.parametrize(
    ("prompt", "number"),
    [("Hi there", 1), (["Hi", "there"], 2), ([5, 6, 7], 1), ([[5, 6], [7]], 2)],
)
async def test_completion_prompts(face: Face, prompt: Any, number: int) -> None:
    body = {"model": "demo", "prompt": prompt, "n": 2, "max_tokens": 3}
    answer = (await face.post("/v1/completions", body)).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * number))
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert answer["usage"]["completion_tokens"] == 3 * 2 * number
    assert len(face.backend.requests) == number
    if prompt == [[5, 6], [7]]:
        assert [request.token_ids for request in face.backend.requests] == [(5, 6), (7,)]
        assert answer["usage"]["prompt_tokens"] == 3


async def test_completion_logprobs(face: Face) -> None:
    body = {"model": "demo", "prompt": "Hi", "logprobs": 2, "max_tokens": 4}
    choice = (await face.post("/v1/completions", body)).json()["choices"][0]
    lines = choice["logprobs"]
    assert "".join(lines["tokens"]) == choice["text"]
    assert lines["token_logprobs"] == [-0.5] * 4
    assert [len(top) for top in lines["top_logprobs"]] == [2] * 4
    assert lines["text_offset"] == [
        len("".join(lines["tokens"][:i])) for i in range(len(lines["tokens"]))
    ]


async def test_drawn_ids_that_no_text_has(
    face: Face, demo_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model may have more rows than its tokenizer has tokens: they are told as empty text."""
    ids = demo_tokenizer.encode("Hi")
    drawn = [PADDING_IDS[0], *ids, PADDING_IDS[-1]]
    monkeypatch.setattr(face.backend, "tokenizer", SimpleNamespace(encode=lambda words: drawn))
    body = {"model": "demo", "prompt": "Hi", "logprobs": 1}
    choice = (await face.post("/v1/completions", body)).json()["choices"][0]
    assert choice["text"] == "Hi" and len(choice["logprobs"]["tokens"]) == len(drawn)
    assert choice["logprobs"]["tokens"][0] == choice["logprobs"]["tokens"][-1] == ""
    chunks = events(await face.chat(stream=True, logprobs=True))
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "Hi"
    lines = [line for c in chunks for line in c["choices"][0]["logprobs"]["content"]]
    assert [bytes(line["bytes"]).decode() for line in lines] == choice["logprobs"]["tokens"]


async def test_chat_logprobs(face: Face) -> None:
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 1, "max_tokens": 2}
    choice = (await face.chat(**fields)).json()["choices"][0]
    assert len(choice["logprobs"]["content"]) == 2
    line = choice["logprobs"]["content"][0]
    assert line["logprob"] == -0.5 and bytes(line["bytes"]).decode() == line["token"]
    assert line["top_logprobs"][0]["token"] == line["token"]
    chunks = events(await face.chat(stream=True, **fields))
    lines = [c["choices"][0]["logprobs"]["content"] for c in chunks]
    assert sum(lines, []) == choice["logprobs"]["content"]


async def test_model_names(face: Face) -> None:
    for name in ("pirate", "demo:pirate"):
        assert (await face.chat(model=name)).status_code == 200
        adapter = face.backend.requests[-1].adapter
        assert adapter is not None and adapter.adapter_id == "pirate/pirate"
    headers = {"Authorization": "Bearer sk-demo-pirate"}
    listed = (await face.client.get("/v1/models", headers=headers)).json()
    assert [card["id"] for card in listed["data"]] == ["demo", "pirate"]
    card = (await face.client.get("/v1/models/pirate", headers=headers)).json()
    assert card["parent"] == "demo" and card["object"] == "model"


async def test_foreign_and_unknown_adapters_look_alike(face: Face) -> None:
    def words(response: httpx.Response, name: str) -> str:
        assert_openai_error(response, 404)
        assert response.headers.get("content-length") or response.text
        return response.text.replace(name, "NAME")

    for pattern in ("{}", "demo:{}"):
        seen = set()
        for name in ("formal", "absent"):
            model = pattern.format(name)
            seen.add(words(await face.chat(model=model), name))
            headers = {"Authorization": "Bearer sk-demo-pirate"}
            got = await face.client.get(f"/v1/models/{model}", headers=headers)
            seen.add(words(got, name))
        assert len(seen) == 1, seen
    assert_openai_error(await face.chat(model="other:pirate"), 404)
    assert not face.backend.requests


async def test_credentials(face: Face) -> None:
    wrong = assert_openai_error(await face.chat(key="sk-wrong-key"), 401)
    assert wrong == assert_openai_error(await face.chat(key=""), 401)
    basic = {"Authorization": "Basic sk-demo-pirate"}
    response = await face.client.get("/v1/models", headers=basic)
    assert_openai_error(response, 401)
    # Nobody may say who he is by a header that the configuration does not trust.
    response = await face.client.get("/v1/models", headers={"x-tenant-id": "pirate"})
    assert_openai_error(response, 401)


async def test_trusted_header_and_anonymous(demo_config: ServiceConfig, face: Face) -> None:
    settings = demo_config.ingress.model_copy(
        update={"trusted_tenant_header": "x-tenant-id", "anonymous_tenant": "spanish"}
    )
    config = demo_config.model_copy(update={"ingress": settings})
    frontend = Frontend(config, b"k" * 32, {"demo": face.backend})
    transport = httpx.ASGITransport(build_api(frontend, FakeControl()))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:

        async def names(**headers: str) -> list[str]:
            response = await client.get("/v1/models", headers=headers)
            return [card["id"] for card in response.json().get("data", [])]

        key = "Bearer sk-demo-pirate"
        assert await names(**{"x-tenant-id": "formal"}) == ["demo", "formal"]
        assert await names(**{"x-tenant-id": "formal", "authorization": key}) == ["demo", "formal"]
        assert await names(authorization=key) == ["demo", "pirate"]
        assert await names() == ["demo", "spanish"]
        assert await names(**{"x-tenant-id": "nobody"}) == []
        assert await names(authorization="Bearer wrong-key") == []


async def test_salt_is_the_tenants_own(face: Face) -> None:
    await face.chat()
    await face.chat(user="someone else")
    await face.chat(key="sk-demo-formal")
    first, second, other = (request.cache_salt for request in face.backend.requests)
    assert first == second != other and len(first) == 64


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"best_of": 4}, "best_of"),
        ({"echo": True}, "echo"),
        ({"nonsense": 1}, "nonsense"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"seed": 2**70}, "seed"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stop": [str(i) for i in range(30)]}, "stop"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ],
)
async def test_refused_by_name(face: Face, fields: dict[str, Any], param: str) -> None:
    error = assert_openai_error(await face.chat(**fields), 400)
    assert error["param"] == param and param in error["message"]
    assert not face.backend.requests


async def test_neutral_values_pass(face: Face) -> None:
    response = await face.chat(
        frequency_penalty=0,
        presence_penalty=0.0,
        logit_bias={},
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        user="me",
        metadata={"a": "b"},
        store=False,
        top_k=-1,
        stop=None,
        messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
    )
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"stream": 1}, "stream"),
        ({"n": 1.5}, "n"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
    ],
)
async def test_wrong_types(face: Face, fields: dict[str, Any], param: str) -> None:
    assert assert_openai_error(await face.chat(**fields), 422)["param"] == param


async def test_malformed_bodies(face: Face) -> None:
    headers = {"Authorization": "Bearer sk-demo-pirate"}
    path = "/v1/chat/completions"
    for body in (b"", b"{", b"\xff\xfe", b'{"model": "demo",}'):
        response = await face.client.post(path, content=body, headers=headers)
        assert_openai_error(response, 400)
    nan = b'{"model": "demo", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}'
    for body in (b"[]", nan):
        response = await face.client.post(path, content=body, headers=headers)
        assert_openai_error(response, 422)
    response = await face.client.post(path, content=b'{"model": "demo"}', headers=headers)
    assert assert_openai_error(response, 400)["param"] == "messages"
    for prompt in ("", [], [[]]):
        response = await face.post("/v1/completions", {"model": "demo", "prompt": prompt})
        assert response.status_code in (400, 422) and "error" in response.json()


async def test_paths_and_methods(face: Face) -> None:
    assert_openai_error(await face.client.get("/v1/nothing"), 404)
    assert_openai_error(await face.client.get("/v1/chat/completions"), 405)
    # No redirect: it would name the host that the request named, and lose TLS.
    assert_openai_error(await face.client.post("/v1/chat/completions/", json={}), 404)
    assert (await face.client.get("/health")).json() == {"status": "ok"}
    assert (await face.client.get("/ready")).status_code == 200
    face.control.absent = ["demo"]
    assert (await face.client.get("/ready")).status_code == 503
    assert (await face.client.get("/metrics")).headers["content-type"].startswith("text/plain")


async def test_body_is_bounded(face: Face) -> None:
    limit = face.frontend.config.ingress.max_body_bytes

    async def drip() -> Any:
        for _ in range(limit // 65536 + 2):
            yield b" " * 65536

    headers = {"Authorization": "Bearer sk-demo-pirate"}
    response = await face.client.post("/v1/completions", content=b" " * limit, headers=headers)
    assert assert_openai_error(response, 400)["code"] == "invalid_json"
    for content in (b" " * (limit + 1), drip()):
        response = await face.client.post("/v1/completions", content=content, headers=headers)
        assert_openai_error(response, 413)


async def test_bugs_have_openai_shape_too(face: Face) -> None:
    face.backend.tokenizer = None  # type: ignore[assignment]
    error = assert_openai_error(await face.chat(), 500)
    assert "NoneType" not in error["message"]
    assert face.frontend._active.total() == 0


# What clients are told, written out: clients try 503 again, and nothing else of these.
STATUSES = {
    ErrorCode.BAD_REQUEST: (400, "bad_request"),
    ErrorCode.PROMPT_TOO_LONG: (400, "context_length_exceeded"),
    ErrorCode.ADAPTER_NOT_FOUND: (404, "adapter_not_found"),
    ErrorCode.ADAPTER_INVALID: (422, "adapter_invalid"),
    ErrorCode.ADAPTER_TOO_LARGE: (422, "adapter_too_large"),
    ErrorCode.OTHER_EXTRAS: (503, "adapter_changes"),
    ErrorCode.ADAPTER_UNAVAILABLE: (503, "adapter_unavailable"),
    ErrorCode.NOT_FINITE: (500, "not_finite"),
    ErrorCode.OVERLOADED: (503, "overloaded"),
    ErrorCode.NO_ROOM: (503, "overloaded"),
    ErrorCode.ENGINE_DEAD: (503, "engine_dead"),
    ErrorCode.REPLICAS_LOST: (500, "replicas_lost"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("code", list(ErrorCode))
async def test_engine_errors_have_their_status(face: Face, code: ErrorCode, stream: bool) -> None:
    status, word = STATUSES[code]
    face.backend.failure = (code, "this and that")
    response = await face.chat(stream=stream)
    error = assert_openai_error(response, status)
    assert error["message"] == "this and that" and error["code"] == word
    assert ("retry-after" in response.headers) == (response.status_code == 503)


async def test_failure_in_mid_stream_is_an_event(face: Face) -> None:
    async def broken(request: Any) -> Any:
        outputs = ScriptedBackend._outputs(face.backend, request)
        yield await anext(outputs)
        face.backend.failure = (ErrorCode.ENGINE_DEAD, "gone")
        yield await anext(ScriptedBackend._outputs(face.backend, request))

    face.backend._outputs = broken  # type: ignore[method-assign]
    chunks = events(await face.chat(stream=True))
    assert "choices" in chunks[0] and chunks[-1]["error"]["code"] == "engine_dead"


async def test_nobody_waits_for_ever(face: Face) -> None:
    face.backend.gap_s = 5
    settings = face.frontend.config.ingress.model_copy(update={"max_waiting_s": 0.05})
    face.frontend.config = face.frontend.config.model_copy(update={"ingress": settings})
    for stream in (False, True):
        assert_openai_error(await face.chat(stream=stream), 503)
    assert not face.backend.running and face.frontend._active.total() == 0


async def test_too_many_at_once(face: Face) -> None:
    face.backend.gap_s = 0.01
    answers = await asyncio.gather(*(face.chat() for _ in range(70)))
    statuses = [answer.status_code for answer in answers]
    assert statuses.count(200) == 64 and statuses.count(429) == 6
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert assert_openai_error(refused, 429)["type"] == "rate_limit_error"
    assert refused.headers["retry-after"] == "1"
    assert (await face.chat()).status_code == 200
    assert face.frontend._active.total() == 0


async def test_too_many_at_once_of_all_tenants_together(face: Face) -> None:
    face.backend.gap_s = 0.01
    settings = face.frontend.config.ingress.model_copy(update={"max_concurrent_requests": 5})
    face.frontend.config = face.frontend.config.model_copy(update={"ingress": settings})
    keys = ("sk-demo-pirate", "sk-demo-formal")
    answers = await asyncio.gather(*(face.chat(key) for key in keys * 4))
    assert sorted(answer.status_code for answer in answers) == [200] * 5 + [429] * 3
    for refused in (answer for answer in answers if answer.status_code == 429):
        assert "5 requests at once" in assert_openai_error(refused, 429)["message"]
        assert refused.headers["retry-after"] == "1"
    assert (await face.chat()).status_code == 200
    assert face.frontend._active.total() == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_hang_up_closes_the_stream(face: Face, stream: bool) -> None:
    """The client leaves after its first chunk, or while it waits: its request is gone at once."""
    face.backend.gap_s = 0.02
    face.backend.words = "word " * 400
    leaving = call(face, stream=stream, max_tokens=400)
    await asyncio.sleep(0.15)
    assert len(face.backend.running) == 1
    leaving.hang_up()
    await asyncio.sleep(0.05)
    assert not face.backend.running
    await asyncio.wait_for(leaving.task, 1)
    assert face.frontend._active.total() == 0
    counters = face.frontend.log.counters
    assert counters[("moe_hangups_total", ("demo", "pirate"))] == 1
    assert counters[("moe_requests_total", ("demo", "pirate", "499"))] == 1
    assert bool(leaving.text) == stream


async def test_comments_while_a_stream_waits(face: Face) -> None:
    """Before the first token and in every long gap; what is told is the same."""
    quick_comments(face)
    face.backend.gap_s = 0.18
    waiting = call(face, max_tokens=3)
    await asyncio.wait_for(waiting.task, 10)
    events_ = waiting.text.split("\n\n")[:-1]
    kinds = "".join("." if event == ": keep-alive" else "d" for event in events_)
    assert waiting.status == 200 and waiting.ended
    assert re.fullmatch(r"\.+d\.+d\.+d+", kinds), kinds
    face.backend.gap_s = 0.0
    plain = call(face, max_tokens=3)
    await asyncio.wait_for(plain.task, 10)
    assert "keep-alive" not in plain.text

    def told(text: str) -> list[Any]:
        lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
        return [json.loads(line)["choices"] for line in lines]

    assert told(plain.text) == told(waiting.text)


async def test_an_error_before_the_first_comment_has_its_status(face: Face) -> None:
    quick_comments(face, keep_alive_s=5)
    face.backend.gap_s = 0.05
    face.backend.failure = (ErrorCode.ADAPTER_NOT_FOUND, "no such adapter")
    early = call(face)
    await asyncio.wait_for(early.task, 10)
    assert early.status == 404 and "keep-alive" not in early.text


async def failing(request: Any) -> Any:
    await asyncio.sleep(0.12)
    raise RuntimeError("a bug")
    yield


@pytest.mark.parametrize("why", ["engine", "waited", "bug"])
async def test_an_error_after_a_comment_is_an_event(face: Face, why: str) -> None:
    quick_comments(face, max_waiting_s=0.2 if why == "waited" else 60)
    face.backend.gap_s = 5 if why == "waited" else 0.12
    face.backend.failure = (ErrorCode.ADAPTER_NOT_FOUND, "no such adapter")
    late = call(face)
    if why == "bug":
        face.backend._outputs = failing  # type: ignore[method-assign]
    await asyncio.wait_for(late.task, 10)
    assert late.status == 200 and late.text.startswith(": keep-alive\n\n") and late.ended
    *comments, told, done, empty = late.text.split("\n\n")
    assert set(comments) == {": keep-alive"} and (done, empty) == ("data: [DONE]", "")
    error = json.loads(told[6:])["error"]
    codes = {"engine": "adapter_not_found", "waited": "overloaded", "bug": None}
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == codes[why]
    status = {"engine": "404", "waited": "503", "bug": "500"}[why]
    counters = face.frontend.log.counters
    assert counters[("moe_requests_total", ("demo", "pirate", status))] == 1
    assert face.frontend._active.total() == 0 and not face.backend.running


@pytest.mark.parametrize("commented", [False, True])
async def test_hang_up_before_the_first_token(face: Face, commented: bool) -> None:
    """While it waits for a seat, or its adapter loads: gone at once, and nothing is left."""
    quick_comments(face, keep_alive_s=0.02 if commented else 60)
    face.backend.gap_s = 30
    waiting = call(face)
    async with asyncio.timeout(5):
        while not (face.backend.running and bool(waiting.text) == commented):
            await asyncio.sleep(0.005)
    began = asyncio.get_running_loop().time()
    waiting.hang_up()
    await asyncio.wait_for(waiting.task, 5)
    assert not face.backend.running and face.frontend._active.total() == 0
    assert asyncio.get_running_loop().time() - began < 0.1
    counters = face.frontend.log.counters
    assert counters[("moe_requests_total", ("demo", "pirate", "499"))] == 1


async def test_an_upload_given_up_is_a_hang_up(face: Face) -> None:
    """Not an error of ours: no 500, no seat, no bytes kept."""
    upload = Call(face, b'{"model": ' + b" " * 200_000, more_body=True)
    async with asyncio.timeout(5):
        while not face.frontend.bodies.held:
            await asyncio.sleep(0.005)
    assert face.frontend._active.total() == 1
    upload.hang_up()
    await asyncio.wait_for(upload.task, 5)
    assert not face.frontend.bodies.held and face.frontend._active.total() == 0
    counters = face.frontend.log.counters
    statuses = {key[1][2] for key in counters if key[0] == "moe_requests_total" and counters[key]}
    assert statuses == {"499"} and upload.status == 499


async def test_metrics_are_counted(face: Face) -> None:
    await face.chat(model="pirate", max_tokens=5)
    await face.chat(key="sk-demo-formal", model="absent")
    counters = face.frontend.log.counters
    labels = ("demo", "pirate")
    prompt = len(face.backend.requests[0].token_ids)
    assert counters[("moe_requests_total", (*labels, "200"))] == 1
    # Series are there before the first of their kind.
    assert counters[("moe_requests_total", (*labels, "500"))] == 0
    assert counters[("moe_hangups_total", labels)] == 0
    assert counters[("moe_requests_total", ("", "formal", "404"))] == 1
    assert counters[("moe_prompt_tokens_total", labels)] == prompt
    assert counters[("moe_output_tokens_total", labels)] == 5
    assert counters[("moe_cached_tokens_total", labels)] == 2
    histograms = face.frontend.log.histograms
    assert sum(histograms[("moe_time_to_first_token_seconds", labels)][0]) == 1
    assert sum(histograms[("moe_inter_token_seconds", labels)][0]) == 4
    assert face.frontend.traffic == {"pirate/pirate": prompt + 5}


async def test_a_client_gone_before_the_first_event_closes_what_never_started() -> None:
    """A seat that such an answer kept would be the tenant's for ever."""
    ended: list[str] = []

    async def events() -> Any:
        try:
            yield b"data: 1"
        finally:
            ended.append("events")

    async def close() -> None:
        ended.append("close")

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        await asyncio.sleep(30)

    scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}}
    await asyncio.wait_for(EventStream(events(), close)(scope, receive, send), 5)
    assert ended == ["close"]
