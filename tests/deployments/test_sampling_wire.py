"""Sampling as OpenAI's client asks for it: every field reaches the engine or is refused by its
name, and log-probabilities come back in the API's shapes. Without Ray and without an engine.
"""

from collections.abc import Callable
from typing import Any

import openai
import pytest

from model_runner.request import SamplingParams
from tests.deployments.conftest import Face

MESSAGES: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def client(face: Face) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        api_key="sk-demo-pirate",
        base_url="http://test/v1",
        http_client=face.client,
        max_retries=0,
    )


COMMON: dict[str, Any] = {
    "model": "demo",
    "temperature": 0.7,
    "top_p": 0.9,
    "n": 2,
    "seed": 5,
    "presence_penalty": -2,
    "frequency_penalty": 1.5,
    "logit_bias": {"7": -100, "0": 2.5},
    "stop": ["never"],
}
BEYOND: dict[str, Any] = {
    "top_k": 4,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "min_tokens": 1,
    "ignore_eos": True,
    "stop_token_ids": [9, 11],
    "prompt_logprobs": 2,
}
WANTED = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 4,
    "seed": 5,
    "max_tokens": 3,
    "min_tokens": 1,
    "stop_ids": (9, 11),
    "ignore_eos": True,
    "n": 2,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "presence_penalty": -2,
    "frequency_penalty": 1.5,
    "logit_bias": ((7, -100), (0, 2.5)),
    "prompt_logprobs": 2,
}


async def test_every_field_reaches_the_engine(face: Face, client: openai.AsyncOpenAI) -> None:
    await client.chat.completions.create(
        messages=MESSAGES, max_tokens=3, logprobs=True, top_logprobs=20, extra_body=BEYOND, **COMMON
    )
    await client.completions.create(
        prompt="Hi", max_tokens=3, logprobs=5, best_of=2, extra_body=BEYOND, **COMMON
    )
    chat, completion = (request.sampling for request in face.backend.requests)
    assert chat == SamplingParams(logprobs=20, **WANTED)  # type: ignore[arg-type]
    assert completion == SamplingParams(logprobs=5, **WANTED)  # type: ignore[arg-type]


async def test_what_is_left_out_is_neutral(face: Face, client: openai.AsyncOpenAI) -> None:
    nothing: Any = dict.fromkeys((*COMMON, *BEYOND)) | {"model": "demo"}
    await face.chat(max_tokens=16, **nothing)
    await client.completions.create(model="demo", prompt="Hi")
    assert [r.sampling for r in face.backend.requests] == [SamplingParams()] * 2


BOTH: list[tuple[dict[str, Any], str]] = [
    ({"min_p": 1.1}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.01}, "frequency_penalty"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"five": 1}}, "logit_bias"),
    ({"logit_bias": {"-5": 1}}, "logit_bias"),
    ({"logit_bias": {"05": 1}}, "logit_bias"),
    ({"logit_bias": {"\u0665": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 4000: 1}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"top_k": -2}, "top_k"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop_token_ids": list(range(1025))}, "stop_token_ids"),
    ({"suffix": "end"}, "suffix"),
    ({"best_of": 3, "n": 2}, "best_of"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"length_penalty": 1.0}, "length_penalty"),
    ({"skip_special_tokens": False}, "skip_special_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
]
COMPLETION: list[tuple[dict[str, Any], str]] = [
    ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
    ({"echo": True, "max_tokens": -1}, "max_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
]


@pytest.mark.parametrize(("fields", "param"), BOTH)
async def test_refused_by_name(face: Face, fields: dict[str, Any], param: str) -> None:
    for send in (face.chat, completion_of(face)):
        response = await send(**fields)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == param and param.split("_")[0] in error["message"]
    assert not face.backend.requests


@pytest.mark.parametrize(("fields", "param"), COMPLETION)
async def test_completions_refuse_by_name(face: Face, fields: dict[str, Any], param: str) -> None:
    response = await completion_of(face)(**fields)
    assert response.status_code == 400 and response.json()["error"]["param"] == param
    assert not face.backend.requests


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": [5]}, "logit_bias"),
        ({"logit_bias": {"5": "1"}}, "logit_bias"),
        ({"min_p": "0.1"}, "min_p"),
        ({"presence_penalty": True}, "presence_penalty"),
        ({"prompt_logprobs": 1.5}, "prompt_logprobs"),
    ],
)
async def test_wrong_types(face: Face, fields: dict[str, Any], param: str) -> None:
    for send in (face.chat, completion_of(face)):
        response = await send(**fields)
        assert response.status_code == 422 and response.json()["error"]["param"] == param


def completion_of(face: Face) -> Callable[..., Any]:
    async def send(**fields: Any) -> Any:
        return await face.post("/v1/completions", {"model": "demo", "prompt": "Hi"} | fields)

    return send


async def test_scores_of_a_prompt_as_evaluations_ask_for_them(
    face: Face, client: openai.AsyncOpenAI
) -> None:
    """`echo`, `logprobs` and no new token: the prompt's tokens with their log-probabilities."""
    prompts = ["The sky is blue", "Hi"]
    answer: Any = await client.completions.create(
        model="demo", prompt=prompts, max_tokens=0, echo=True, logprobs=2, n=2
    )
    assert [c.text for c in answer.choices] == [p for p in prompts for _ in range(2)]
    assert answer.usage.completion_tokens == 0
    for choice, request in zip(
        answer.choices, [r for r in face.backend.requests for _ in range(2)], strict=True
    ):
        lines, ids = choice.logprobs, request.token_ids
        assert "".join(lines.tokens) == choice.text and len(lines.tokens) == len(ids)
        assert lines.token_logprobs == [None, *(-1.5 - i for i in ids[1:])]
        assert lines.top_logprobs[0] is None
        assert all(len(top) in (1, 2) for top in lines.top_logprobs[1:])
        assert lines.text_offset == [len("".join(lines.tokens[:i])) for i in range(len(ids))]
        assert request.sampling.prompt_logprobs == 2 and request.sampling.max_tokens == 0


async def test_an_echo_goes_on_with_the_answer(face: Face, client: openai.AsyncOpenAI) -> None:
    answer: Any = await client.completions.create(
        model="demo", prompt="The sky is", max_tokens=3, echo=True, logprobs=1
    )
    choice, ids = answer.choices[0], face.backend.requests[0].token_ids
    said = face.backend.tokenizer.decode(face.backend.tokenizer.encode(face.backend.words)[:3])
    assert choice.text == f"The sky is{said}" == "".join(choice.logprobs.tokens)
    assert choice.logprobs.token_logprobs[len(ids) :] == [-0.5] * 3
    assert answer.usage.completion_tokens == 3


@pytest.mark.parametrize("prompt", ["The sky is", [31, 32, 33]])
async def test_an_echo_is_streamed_first(
    face: Face, client: openai.AsyncOpenAI, prompt: Any
) -> None:
    fields: dict[str, Any] = {"model": "demo", "prompt": prompt, "max_tokens": 4, "n": 2}
    whole = await client.completions.create(**fields, echo=True)
    stream: Any = await client.completions.create(**fields, echo=True, stream=True)
    texts = ["", ""]
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [c.text for c in whole.choices]
    plain = prompt if isinstance(prompt, str) else face.backend.tokenizer.decode(prompt)
    assert all(text.startswith(plain) and len(text) > len(plain) for text in texts)


async def test_prompt_logprobs_by_token(face: Face, client: openai.AsyncOpenAI) -> None:
    extra = {"prompt_logprobs": 1}
    answer: Any = await client.completions.create(
        model="demo", prompt=[31, 32], max_tokens=1, n=2, extra_body=extra
    )
    tokenizer = face.backend.tokenizer
    wanted = {
        "32": {"logprob": -33.5, "rank": 2, "decoded_token": tokenizer.decode([32])},
        "33": {"logprob": -32.5, "rank": 1, "decoded_token": tokenizer.decode([33])},
    }
    assert [c.prompt_logprobs for c in answer.choices] == [[None, wanted]] * 2
    # With an echo of more of them, each has what it asked for.
    answer = await client.completions.create(
        model="demo", prompt=[31, 32], max_tokens=1, echo=True, logprobs=3, extra_body=extra
    )
    assert answer.choices[0].prompt_logprobs == [None, wanted]
    assert len(answer.choices[0].logprobs.top_logprobs[1]) == 3
    chat: Any = await client.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=1, extra_body={"prompt_logprobs": 0}
    )
    ids = face.backend.requests[-1].token_ids
    assert [e and list(e) for e in chat.prompt_logprobs] == [None, *([str(i)] for i in ids[1:])]
    assert (await face.chat()).json()["prompt_logprobs"] is None
