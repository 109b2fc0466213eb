"""Streams that are taken up again: from every event, cut anew, for every kind of answer.

The backend pretends. Not here: what breaks streams (test_kills.py).
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from deployments.resumption import Resumption
from model_runner.engine_face import join_outputs
from model_runner.request import Request, RequestOutput
from tests.deployments.conftest import Face, ScriptedBackend
from tests.guards import take_out
from tests.sse_client import Event, read_events

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 90}
PROMPTS = {"model": "demo", "prompt": ["Hi", "there"], "n": 2, "max_tokens": 5}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "logprobs": ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}),
    "stop": ("/v1/chat/completions", CHAT | {"stop": [" How"], "n": 2}),
    "completions": ("/v1/completions", PROMPTS),
    "offsets": ("/v1/completions", PROMPTS | {"logprobs": 1, "seed": 3}),
}


CHANNELS = (
    "<|channel|>analysis<|message|>A town<|end|><|start|>assistant<|channel|>commentary<|message|>"
    "I look.<|end|><|start|>assistant<|channel|>analysis<|message|>Hm. How?<|end|><|start|>"
    "assistant<|channel|>final<|message|>It is Tokyo. How now?<|return|>"
)


async def post(
    face: Face, name: str, cursor: str = "", key: str = "sk-demo-pirate", **fields: Any
) -> httpx.Response:
    path, body = BODIES[name]
    body = body | {"stream": True, "stream_options": {"include_usage": True}} | fields
    face.backend.aborted.clear()
    headers = {"Authorization": f"Bearer {key}".encode()}
    if cursor:
        headers["Last-Event-ID"] = cursor.encode("latin-1")
    return await face.client.post(path, json=body, headers=headers)


def events_of(response: httpx.Response) -> list[Event]:
    assert response.status_code == 200, response.text
    found = list(read_events(response.text.split("\n")))
    assert found[-1].data == "[DONE]"
    return found[:-1]


def cut_anew(face: Face, seed: int) -> None:
    """From now on the backend's outputs come in messages of random sizes."""
    plain, rng = ScriptedBackend._outputs, random.Random(seed)

    async def outputs(request: Request) -> AsyncIterator[RequestOutput]:
        pending: list[RequestOutput] = []
        async for output in plain(face.backend, request):
            pending.append(output)
            if rng.random() < 0.4:
                for joined in join_outputs(pending, request.request_id):
                    yield joined
                pending = []
        for joined in join_outputs(pending, request.request_id):
            yield joined

    face.backend._outputs = outputs  # type: ignore[method-assign]


def joined(events: list[Event]) -> dict[Any, Any]:
    """What a client makes of its events, whatever they were cut into."""
    answer: dict[Any, Any] = {}
    for event in events:
        chunk = json.loads(event.data)
        answer.setdefault("of", (chunk["id"], chunk["created"], chunk["object"]))
        assert answer["of"] == (chunk["id"], chunk["created"], chunk["object"])
        if not chunk["choices"]:
            answer["usage"] = chunk["usage"]
            continue
        (choice,) = chunk["choices"]
        new = {"text": "", "reasoning": "", "roles": 0, "lines": [], "ends": []}
        seen = answer.setdefault(choice["index"], new)
        delta = choice.get("delta", {})
        seen["text"] += choice.get("text", "") + delta.get("content", "")
        seen["reasoning"] += delta.get("reasoning_content", "")
        seen["roles"] += "role" in delta
        lines = choice["logprobs"] or {}
        seen["lines"] += lines.get("content") or list(
            zip(lines.get("tokens", ()), lines.get("text_offset", ()), strict=True)
        )
        if choice["finish_reason"]:
            seen["ends"].append((choice["finish_reason"], choice.get("stop_reason")))
    return answer


@pytest.mark.parametrize("name", BODIES)
async def test_from_every_event_the_rest_comes_once(face: Face, name: str) -> None:
    await from_every_event(face, name)


@pytest.mark.parametrize("name", ["chat", "logprobs", "stop"])
async def test_of_two_kinds_of_text_too(harmony_face: Face, name: str) -> None:
    harmony_face.backend.words = CHANNELS
    answer = await from_every_event(harmony_face, name)
    texts = {(answer[i]["text"], answer[i]["reasoning"]) for i in range(1 + (name == "stop"))}
    end = "" if name == "stop" else " How now?"
    assert texts == {(f"I look.\nIt is Tokyo.{end}", "A town\nHm. How?")}


async def from_every_event(face: Face, name: str) -> dict[Any, Any]:
    """The whole answer, once its rest has come after every event."""
    whole = events_of(await post(face, name))
    seeds = [request.sampling.seed for request in face.backend.requests]
    assert not any(face.backend.again)
    assert all(event.id for event in whole[:-1]) and not whole[-1].id, "all but the usage"
    for number, event in enumerate(whole[:-1]):
        cut_anew(face, number)
        face.backend.requests.clear()
        rest = events_of(await post(face, name, event.id))
        assert joined(whole[: number + 1] + rest) == joined(whole)
        assert [request.sampling.seed for request in face.backend.requests] == seeds
        assert face.backend.again[-len(seeds) :] == [True] * len(seeds)
        if number % 4 == 0 and len(rest) > 2:  # and it breaks once more
            again = events_of(await post(face, name, rest[1].id))
            assert joined(whole[: number + 1] + rest[:2] + again) == joined(whole)
    return joined(whole)


async def test_two_connections_to_one_answer_end_each_for_itself(face: Face) -> None:
    """One aborts a choice that met its stop string; the other has not come so far."""
    whole = events_of(await post(face, "stop"))
    face.backend.gap_s = 0.01
    first = asyncio.create_task(post(face, "stop", whole[0].id))
    while len(face.backend.requests) < 2:
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    second = asyncio.create_task(post(face, "stop", whole[0].id))
    for answer in await asyncio.gather(first, second):
        assert joined(whole[:1] + events_of(answer)) == joined(whole)
    assert len({name for name, _ in face.backend.aborted}) == 2


async def test_draws_differ_by_request_and_prompt_unless_a_seed_is_named(face: Face) -> None:
    for _ in range(2):
        await post(face, "completions")
    assert len({request.sampling.seed for request in face.backend.requests}) == 4
    face.backend.requests.clear()
    await post(face, "offsets")
    assert {request.sampling.seed for request in face.backend.requests} == {3}


async def test_a_cursor_is_good_for_its_own_request_alone(face: Face) -> None:
    cursor = events_of(await post(face, "chat"))[2].id
    forged = cursor[:-3] + ("A" if cursor[-3] != "A" else "B") + cursor[-2:]
    for response in (
        await post(face, "chat", cursor, key="sk-demo-formal"),
        await post(face, "chat", cursor, temperature=0.5),
        await post(face, "logprobs", cursor),
        await post(face, "chat", forged),
        await post(face, "chat", cursor[:20]),
        await post(face, "chat", "\u00e9"),
        await post(face, "chat", cursor * 1000),
    ):
        assert response.status_code == 400, response.text
        assert response.json()["error"]["code"] == "invalid_cursor"
    assert (await post(face, "chat", cursor, key="sk-nobody")).status_code == 401
    assert len(face.backend.requests) == 1 and face.frontend._active.total() == 0


async def other_words_are_no_rest(face: Face) -> None:
    whole = events_of(await post(face, "chat"))
    for words in ("Hullo there, friend. How are you?", "Hel"):
        face.backend.words = words
        response = await post(face, "chat", whole[4].id)
        (event,) = events_of(response)
        assert json.loads(event.data)["error"]["code"] == "not_repeatable", event
    assert not face.backend.running and face.frontend._active.total() == 0


async def test_other_words_are_no_rest(face: Face) -> None:
    await other_words_are_no_rest(face)


async def test_other_words_pass_without(face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "if is_there and now.digest != goal.digest:"
    take_out(monkeypatch, Resumption, "_split", line, "if False:")
    with pytest.raises((AssertionError, ValueError)):
        await other_words_are_no_rest(face)


async def test_streams_of_many_choices_have_no_ids(face: Face) -> None:
    whole = events_of(await post(face, "chat", n=20))
    assert len(whole) > 40 and not any(event.id for event in whole)
