"""Models whose tokens are not the demo's, through the HTTP face: words that bring their own space,
answers in harmony's format. The backend pretends. Not here: streams that are taken up again
(test_resumption.py)."""

import json
from typing import Any

import pytest

from deployments.answer_logprobs import LogprobSpeller, TextSoFar
from model_runner.request import TokenLogprobs
from tests.deployments.conftest import Face
from tests.model_runner.vocabularies import HARMONY

ASSISTANT = "<|start|>assistant"
ANSWER = (
    "<|channel|>analysis<|message|>The user asks.<|end|>"
    f"{ASSISTANT}<|channel|>commentary<|message|>I look it up.<|end|>"
    f"{ASSISTANT}<|channel|>final<|message|>It is Tōkyō.<|return|>"
)


async def completion(face: Face, **fields: Any) -> dict[str, Any]:
    body = {"model": "demo", "prompt": "\u2581It\u2581is", "max_tokens": 20} | fields
    response = await face.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def streamed(face: Face, path: str, **fields: Any) -> list[dict[str, Any]]:
    """The choices of all chunks."""
    response = await face.post(path, {"model": "demo", "max_tokens": 90, "stream": True} | fields)
    assert response.status_code == 200, response.text
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    return [choice for line in lines for choice in json.loads(line)["choices"]]


@pytest.mark.parametrize("is_echoed", [False, True])
async def test_a_completion_goes_on_with_its_prompt(words_face: Face, is_echoed: bool) -> None:
    words_face.backend.words = "\u2581To\u2581\u2581kyo\u6771\u2581is"
    told = "\u2581It\u2581is" if is_echoed else ""  # as it was sent
    fields = {"n": 2, "echo": is_echoed}
    answer = await completion(words_face, **fields)
    assert [c["text"] for c in answer["choices"]] == [told + " To  kyo\u6771 is"] * 2
    prompt = {"prompt": "\u2581It\u2581is"}
    texts = ["", ""]
    for choice in await streamed(words_face, "/v1/completions", **prompt, **fields):
        texts[choice["index"]] += choice["text"]
    assert texts == [c["text"] for c in answer["choices"]]
    assert (await completion(words_face, stop=[" To"]))["choices"][0]["text"] == ""
    stopped = await completion(words_face, stop=["is To"])
    assert stopped["choices"][0]["stop_reason"] is None


@pytest.mark.parametrize("is_echoed", [False, True])
async def test_tokens_and_offsets_add_up_to_the_text(words_face: Face, is_echoed: bool) -> None:
    words_face.backend.words = "\u2581To\u2581\u2581kyo.\u2581is"
    ids = words_face.backend.tokenizer.encode("\u2581It\u2581is")
    fields: dict[str, Any] = {"prompt": ids, "echo": is_echoed, "logprobs": 1}
    (choice,) = (await completion(words_face, **fields))["choices"]
    lines = choice["logprobs"]
    assert choice["text"] == ("It is" if is_echoed else "") + " To  kyo. is"
    assert "".join(lines["tokens"]) == choice["text"]
    for token, offset in zip(lines["tokens"], lines["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)
    if not is_echoed:
        parts = [c["logprobs"] for c in await streamed(words_face, "/v1/completions", **fields)]
        for name in ("tokens", "text_offset", "top_logprobs"):
            assert [line for part in parts for line in part[name]] == lines[name]
        (begun,) = (await completion(words_face, **fields | {"prompt": [0]}))["choices"]
        assert "".join(begun["logprobs"]["tokens"]) == begun["text"] == "To  kyo. is"


async def chat(face: Face, words: str, **fields: Any) -> dict[str, Any]:
    face.backend.words = words
    response = await face.chat(max_tokens=90, **fields)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def test_a_chat_shows_reasoning_apart(harmony_face: Face) -> None:
    answer = await chat(harmony_face, ANSWER, logprobs=True)
    (choice,) = answer["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "I look it up.\nIt is Tōkyō.",
        "refusal": None,
        "reasoning_content": "The user asks.",
        "reasoning": "The user asks.",
    }
    ids = harmony_face.backend.tokenizer.encode(ANSWER)
    assert answer["usage"]["completion_tokens"] == len(ids)
    said = bytes(b for line in choice["logprobs"]["content"] for b in line["bytes"])
    assert said.decode() == ANSWER and len(choice["logprobs"]["content"]) == len(ids)


@pytest.mark.parametrize("fields", [{}, {"stop": ["up"]}, {"max_tokens": 12}, {"logprobs": True}])
async def test_its_stream_joins_to_the_whole(harmony_face: Face, fields: dict[str, Any]) -> None:
    harmony_face.backend.words = ANSWER
    messages = {"messages": [{"role": "user", "content": "Hi"}]}
    body = {"model": "demo", "max_tokens": 90, **messages, **fields}
    whole = (await harmony_face.post("/v1/chat/completions", body)).json()["choices"][0]
    choices = await streamed(harmony_face, "/v1/chat/completions", **body)
    deltas = [choice["delta"] for choice in choices]
    for name in ("content", "reasoning_content", "reasoning"):
        assert "".join(d.get(name, "") for d in deltas) == whole["message"].get(name, "")
    assert [d["role"] for d in deltas if "role" in d] == ["assistant"]
    assert choices[-1]["finish_reason"] == whole["finish_reason"]
    assert choices[-1].get("stop_reason") == whole["stop_reason"]
    if "max_tokens" in fields:
        assert whole["message"]["content"] == "" and whole["message"]["reasoning"]
    told = [d for d in deltas if d.get("content") or d.get("reasoning")]
    assert len(told) > 3 and not any(d.get("content") and d.get("reasoning") for d in told)


async def test_a_call_of_a_tool_is_no_content(harmony_face: Face) -> None:
    call = f"<|channel|>commentary to=functions.find <|constrain|>json<|message|>{'{}'}<|call|>"
    message = (await chat(harmony_face, call))["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("", "to=functions.find {}")


async def test_plain_answers_and_completions_stay_as_they_are(harmony_face: Face) -> None:
    message = (await chat(harmony_face, "It is Tokyo."))["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "It is Tokyo.", "refusal": None}
    harmony_face.backend.words = ANSWER
    (choice,) = (await completion(harmony_face, max_tokens=90))["choices"]
    plain = ANSWER
    for name in HARMONY:
        plain = plain.replace(name, "")
    assert choice["text"] == plain


async def test_an_answer_may_be_sent_back(harmony_face: Face) -> None:
    """With all of its fields, as clients keep it: the template takes what it knows."""
    said = (await chat(harmony_face, ANSWER))["choices"][0]["message"]
    question = {"role": "user", "content": "Hi"}
    bare = {"role": "assistant", "content": said["content"]}
    for message in (said, bare):
        await chat(harmony_face, ANSWER, messages=[question, message, question])
    first, second = harmony_face.backend.requests[-2:]
    assert first.token_ids == second.token_ids
    text = harmony_face.backend.tokenizer.decode(first.token_ids)
    assert said["content"] in text and said["reasoning"] not in text


@pytest.mark.parametrize("border", [0, 1, 2])
async def test_a_chat_s_tokens_add_up_to_its_text(words_face: Face, border: int) -> None:
    """However its stream is cut: its first word alone has no space."""
    tokenizer = words_face.backend.tokenizer
    ids = tokenizer.encode("<s>\u2581It\u2581is\u2581It")
    entries = [TokenLogprobs(-0.5, ((i, -0.5),)) for i in ids]
    so_far, speller = TextSoFar(), LogprobSpeller(tokenizer)
    parts = [
        speller.chat(ids[part], entries[part], so_far)
        for part in (slice(border), slice(border, None))
    ]
    lines = [line for part in parts for line in part.content]
    assert [line.token for line in lines] == ["<s>", "It", " is", " It"]
    assert [line.top_logprobs[0].token for line in lines] == ["<s>", "It", " is", " It"]
    assert "".join(line.token for line in lines[1:]) == tokenizer.decode(ids)
