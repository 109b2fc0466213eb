"""Adapters that bring a chat template and defaults: what a request becomes, through the real face.

Behind it stands a backend that compares extras as engines do. Not here: what templates may do
(tests/model_runner/test_template_sandbox.py).
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import httpx
import pytest

from adapter_store.extras import NO_EXTRAS, AdapterExtras
from deployments.config import ServiceConfig
from deployments.frontend import Frontend
from deployments.ingress import build_api
from deployments.placement.view import Place
from model_runner.request import ErrorCode, FinishReason, Request, RequestOutput
from model_runner.tokenizer import Tokenizer
from tests.deployments.conftest import Face, FakeControl, ScriptedBackend

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
OWN = AdapterExtras("own: {{ messages[0].content }}{{ eos_token }}", (("eos_token", "<|im_end|>"),))


class ComparingBackend(ScriptedBackend):
    """brings  what adapters have now, by adapter_id"""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.brings: dict[str, AdapterExtras] = {}

    async def stream(
        self, request: Request, place: Place | None, again: bool = False
    ) -> AsyncGenerator[RequestOutput, None]:
        extras = self.brings.get(request.adapter.adapter_id, NO_EXTRAS) if request.adapter else None
        if extras is not None and request.extras_key != extras.key:
            self.requests.append(request)
            await asyncio.sleep(self.gap_s)
            for index in range(request.sampling.n):
                yield RequestOutput(
                    request.request_id,
                    index,
                    finish_reason=FinishReason.ERROR,
                    error_code=ErrorCode.OTHER_EXTRAS,
                    error="other extras",
                    extras=extras,
                )
            return
        async for output in super().stream(request, place, again):
            yield output


@pytest.fixture
async def own(demo_config: ServiceConfig, demo_tokenizer: Tokenizer) -> AsyncIterator[Face]:
    backend = ComparingBackend(demo_tokenizer)
    frontend = Frontend(demo_config, b"k" * 32, {"demo": backend})
    api = build_api(frontend, FakeControl())
    transport = httpx.ASGITransport(api, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield Face(client, frontend, backend, FakeControl(), api)
    frontend.stop()


def bring(face: Face, extras: AdapterExtras, name: str = "pirate") -> None:
    assert isinstance(face.backend, ComparingBackend)
    face.backend.brings[f"{name}/{name}"] = extras


async def prompts(face: Face, count: int = 1, **fields: Any) -> list[str]:
    """The prompts that a chat was sent with: those that were refused, and the last."""
    before = len(face.backend.requests)
    answer = await face.chat(**{"model": "pirate"} | fields)
    assert answer.status_code == 200, answer.text
    sent = face.backend.requests[before:]
    assert len(sent) == count
    return [face.backend.tokenizer._fast.decode(list(r.token_ids), False) for r in sent]


BASES = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


async def test_the_adapters_template_makes_its_chats_and_no_others(own: Face) -> None:
    bring(own, OWN)
    assert await prompts(own, 2) == [BASES, "own: Hi<|im_end|>"], "the engine tells it once"
    assert await prompts(own) == ["own: Hi<|im_end|>"]
    assert await prompts(own, model="demo") == [BASES]
    assert await prompts(own, model="formal", key="sk-demo-formal") == [BASES]
    usage = (await own.chat(model="pirate")).json()["usage"]
    assert usage["prompt_tokens"] == len(own.backend.requests[-1].token_ids)


@pytest.mark.parametrize("n", [1, 3])
async def test_streamed_too(own: Face, n: int) -> None:
    bring(own, OWN)
    answer = await own.chat(model="pirate", stream=True, n=n)
    assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
    chunks = [
        json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")
    ]
    texts = [""] * n
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == [own.backend.words] * n
    assert len(own.backend.requests) == 2 and not own.backend.running


async def test_a_replaced_adapter_brings_another(own: Face) -> None:
    for extras, want, sent in [
        (NO_EXTRAS, BASES, 1),
        (OWN, "own: Hi<|im_end|>", 2),
        (AdapterExtras("new"), "new", 2),
        (NO_EXTRAS, BASES, 2),
    ]:
        bring(own, extras)
        assert (await prompts(own, sent))[-1] == want
        assert await prompts(own) == [want]


async def test_what_the_bases_template_refuses_the_adapters_may_take(own: Face) -> None:
    messages = [{"role": "critic", "content": "Hm"}]
    refused = await own.chat(model="demo", messages=messages)
    assert refused.status_code == 400 and "unknown role: critic" in refused.text
    refused = await own.chat(model="pirate", messages=messages)
    assert refused.status_code == 400 and "unknown role: critic" in refused.text
    bring(own, OWN)
    assert (await prompts(own, 2, messages=messages))[-1] == "own: Hm<|im_end|>"


async def test_a_template_that_fails_is_a_400_that_names_it(own: Face) -> None:
    bring(own, AdapterExtras(LOOP))
    for stream in (False, True):
        answer = await own.chat(model="pirate", stream=stream)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == "messages" and error["type"] == "invalid_request_error"
        assert "chat template of adapter pirate/pirate failed" in error["message"]
        assert "50 ms" in error["message"]
    assert (
        await own.post("/v1/completions", {"model": "pirate", "prompt": "x"})
    ).status_code == 200
    # Once mended it is used at once.
    bring(own, OWN)
    assert (await prompts(own, 2))[-1] == "own: Hi<|im_end|>"
    bring(own, AdapterExtras("{{ raise_exception('no') }}"))
    assert (await own.chat(model="pirate")).status_code == 400
    bring(own, OWN)
    assert (await prompts(own))[-1] == "own: Hi<|im_end|>"


async def test_one_that_failed_is_asked_for_again(own: Face) -> None:
    """A template may refuse some messages and take others."""
    picky = AdapterExtras("{% if messages|length > 1 %}{{ raise_exception('one') }}{% endif %}ok")
    bring(own, picky)
    assert (await prompts(own, 2))[-1] == "ok"
    two = [{"role": "user", "content": "a"}] * 2
    before = len(own.backend.requests)
    assert (await own.chat(model="pirate", messages=two)).status_code == 400
    assert len(own.backend.requests) == before + 1, "it could have been mended since"
    assert (await prompts(own, 2))[-1] == "ok"


async def test_malformed_messages_reach_no_engine(own: Face) -> None:
    answer = await own.chat(model="pirate", messages=[{"role": 5}])
    assert answer.status_code == 400 and not own.backend.requests


async def test_loops_of_one_tenant_keep_no_other(own: Face) -> None:
    bring(own, AdapterExtras(LOOP))
    bring(own, OWN, "formal")
    for key, name in (("sk-demo-pirate", "pirate"), ("sk-demo-formal", "formal")):
        await own.chat(key, model=name)  # both workers may be there now
    loops = [asyncio.ensure_future(own.chat(model="pirate")) for _ in range(20)]
    await asyncio.sleep(0)
    for key, model in (("sk-demo-formal", "formal"), ("sk-demo-spanish", "spanish")) * 2:
        begun = time.monotonic()
        answer = await own.chat(key, model=model, max_tokens=1)
        assert answer.status_code == 200 and time.monotonic() - begun < 5
    assert sum(loop.done() for loop in loops) < 20, "they answered beside the loops"
    for answer in await asyncio.gather(*loops):
        assert answer.status_code == 400 and "chat template of adapter" in answer.text


@pytest.mark.parametrize("path", ["chat", "completion"])
async def test_defaults_win_over_the_bases_and_lose_to_the_requests(own: Face, path: str) -> None:
    sampling = (("temperature", 0.7), ("top_k", 5), ("top_p", 0.9))
    bring(own, AdapterExtras(sampling=sampling, eos_ids=(7, 9)))

    async def drawn(model: str = "pirate", **fields: Any) -> Any:
        if path == "chat":
            answer = await own.chat(model=model, **fields)
        else:
            body = {"model": model, "prompt": ["Hi", "You"]} | fields
            answer = await own.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        found = own.backend.requests[-1].sampling
        return found.temperature, found.top_k, found.top_p, found.stop_ids

    assert await drawn("demo") == (0, 0, 1, ()), "do_sample: false"
    for _ in range(2):  # told by the engine, then known
        assert await drawn() == (0.7, 5, 0.9, (7, 9))
    assert await drawn(temperature=0, top_k=-1) == (0, 0, 0.9, (7, 9))
    assert await drawn(top_p=1, stop_token_ids=[3]) == (0.7, 5, 1, (3, 7, 9))
    assert await drawn(ignore_eos=True) == (0.7, 5, 0.9, ())
    assert await drawn("demo") == (0, 0, 1, ())


async def test_defaults_may_be_switched_off(
    demo_config: ServiceConfig, demo_tokenizer: Tokenizer
) -> None:
    model = demo_config.models[0].model_copy(update={"generation_defaults": False})
    config = demo_config.model_copy(update={"models": (model,)})
    backend = ComparingBackend(demo_tokenizer)
    backend.brings["pirate/pirate"] = AdapterExtras(sampling=(("temperature", 0.7),))
    frontend = Frontend(config, b"k" * 32, {"demo": backend})
    tenant = next(t for t in config.tenant_configs() if t.tenant_id == "pirate")
    job = await frontend.jobs.completion(tenant, b'{"model": "pirate", "prompt": "x"}', "0" * 32)
    await frontend.whole(job, frontend.meter(tenant))
    assert len(backend.requests) == 2 and backend.requests[-1].sampling.temperature == 1


async def begun_elsewhere(own: Face) -> list[str]:
    """The ids of a stream's events, none of which its ingress remembers anything of."""
    bring(own, OWN)
    first = await own.chat(model="pirate", stream=True, seed=1)
    for text in own.frontend._texts.values():
        for adapter in list(text.chats._known):
            text.chats.forget(adapter)
    own.backend.requests.clear()
    return ids_of(first)


def ids_of(answer: httpx.Response) -> list[str]:
    return [line[4:] for line in answer.text.splitlines() if line.startswith("id: ")]


async def resume(own: Face, cursor: str) -> httpx.Response:
    messages = [{"role": "user", "content": "Hi"}]
    body = {"model": "pirate", "messages": messages, "stream": True, "seed": 1}
    headers = {"Authorization": "Bearer sk-demo-pirate", "Last-Event-ID": cursor}
    return await own.client.post("/v1/chat/completions", json=body, headers=headers)


async def test_a_stream_is_taken_up_again_by_an_ingress_that_knows_nothing(own: Face) -> None:
    ids = await begun_elsewhere(own)
    rest = await resume(own, ids[1])
    assert rest.status_code == 200 and "error" not in rest.text
    assert ids_of(rest) == ids[2:]
    asked, sent = own.backend.requests
    name, _, mark = sent.request_id.partition("/")
    assert asked.request_id == f"{name}-extras/{mark}" and own.backend.again[-1]


async def test_who_gives_up_takes_nothing_from_who_asks_again(own: Face) -> None:
    """A client that waited too long for the first answer comes back to the same ingress."""
    ids = await begun_elsewhere(own)
    own.backend.gap_s = 0.02
    first = asyncio.create_task(resume(own, ids[1]))
    while not own.backend.requests:
        await asyncio.sleep(0)
    second = asyncio.create_task(resume(own, ids[1]))
    while len(own.backend.requests) < 2:
        await asyncio.sleep(0)
    first.cancel()
    assert ids_of(await second) == ids[2:]
    assert own.backend.again[1:] == [True], "it went on from what is known of it"
    names = [request.request_id for request in own.backend.requests]
    assert len(set(names)) == len(names) == 3, "no engine took one for another"


async def test_it_changes_faster_than_it_can_be_used(own: Face) -> None:
    class Restless(dict[str, AdapterExtras]):
        count = 0

        def get(self, *_: Any) -> AdapterExtras:  # type: ignore[override]
            self.count += 1
            return AdapterExtras(f"number {self.count}")

    assert isinstance(own.backend, ComparingBackend)
    own.backend.brings = Restless()
    answer = await own.chat(model="pirate")
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "adapter_changes"
