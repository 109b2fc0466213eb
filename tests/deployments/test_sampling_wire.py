"""Sampling as OpenAI's client asks for it: every field reaches the engine or is refused by its
name, and log-probabilities come back in the API's shapes. Without Ray; at the end with an engine.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from deployments.config import ServiceConfig
from deployments.frontend import Frontend
from deployments.ingress import build_api
from deployments.placement.view import Place
from model_runner.config import EngineConfig
from model_runner.engine import Engine
from model_runner.engine_loop import EngineLoop
from model_runner.request import Request, RequestOutput, SamplingParams
from model_runner.tokenizer import Tokenizer
from tests.deployments.conftest import DEMO, Face, FakeControl
from tests.model_runner.demo import QUESTIONS

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
    neutral = SamplingParams(temperature=0)  # the demo's own default
    drawn = [r.sampling.seed for r in face.backend.requests]
    assert None not in drawn and drawn[0] != drawn[1], "a seed of its own, for another replica"
    assert [replace(r.sampling, seed=None) for r in face.backend.requests] == [neutral] * 2


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


# With the engine itself behind the face


class LocalBackend:
    """An engine of this process as the replicas of a model."""

    def __init__(self, loop: EngineLoop) -> None:
        self.loop = loop

    async def stream(
        self, request: Request, place: Place | None, again: bool = False
    ) -> AsyncGenerator[RequestOutput, None]:
        async for output in self.loop.stream(request):
            yield output

    async def abort(self, request_id: str, index: int) -> None:
        self.loop.abort(request_id, index)


@pytest.fixture(scope="module")
def engine_loop() -> Iterator[EngineLoop]:
    config = EngineConfig(
        str(DEMO / "base"), device="cpu", max_model_len=512, kv_bytes=32 << 20, look_ahead=True
    )
    loop = EngineLoop(lambda: Engine(config))
    loop.start(60)
    yield loop
    loop.stop()


@pytest.fixture
async def served(
    engine_loop: EngineLoop, demo_config: ServiceConfig
) -> AsyncIterator[openai.AsyncOpenAI]:
    frontend = Frontend(demo_config, b"k" * 32, {"demo": LocalBackend(engine_loop)})
    transport = httpx.ASGITransport(build_api(frontend, FakeControl()))
    async with httpx.AsyncClient(transport=transport) as client:
        yield openai.AsyncOpenAI(
            api_key="sk-demo-pirate",
            base_url="http://test/v1",
            http_client=client,
            max_retries=0,
        )


async def test_an_answer_echoed_has_the_logprobs_it_was_drawn_with(
    served: openai.AsyncOpenAI, demo_tokenizer: Tokenizer
) -> None:
    prompt = demo_tokenizer.encode("The capital of Japan is the city of")
    drawn: Any = await served.completions.create(
        model="demo", prompt=prompt, max_tokens=20, logprobs=3, seed=3, temperature=1.5,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    lines = drawn.choices[0].logprobs
    said = [demo_tokenizer.encode(t, add_special_tokens=False) for t in lines.tokens]
    assert all(len(ids) == 1 for ids in said)
    echoed: Any = await served.completions.create(
        model="demo", prompt=[*prompt, *(ids[0] for ids in said)], max_tokens=0, echo=True,
        logprobs=3,
    )  # fmt: skip
    again = echoed.choices[0].logprobs
    assert again.tokens[len(prompt) :] == lines.tokens
    assert again.token_logprobs[len(prompt) :] == pytest.approx(lines.token_logprobs, abs=1e-4)
    for mine, theirs in zip(again.top_logprobs[len(prompt) :], lines.top_logprobs, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)
    assert (echoed.usage.completion_tokens, echoed.usage.prompt_tokens) == (0, len(prompt) + 20)


async def test_bias_penalties_and_seeds_are_honoured(
    served: openai.AsyncOpenAI, demo_tokenizer: Tokenizer
) -> None:
    async def ask(**fields: Any) -> Any:
        return await served.chat.completions.create(
            model="demo", messages=MESSAGES, max_tokens=12, logprobs=True, **fields
        )

    plain = await ask(temperature=0)
    first = plain.choices[0].logprobs.content[0].token
    (token_id,) = demo_tokenizer.encode(first, add_special_tokens=False)
    biased = await ask(temperature=0, logit_bias={str(token_id): -100})
    assert all(line.token != first for line in biased.choices[0].logprobs.content)
    # Nothing but two tokens is likely: a penalty makes them take turns.
    two: Any = {"temperature": 0, "logit_bias": {"40": 100, "41": 99}}
    spelled = [demo_tokenizer.token_bytes(i).decode() for i in (40, 41)]
    alike = await ask(**two)
    assert alike.choices[0].message.content == spelled[0] * 12
    turns = await ask(**two, frequency_penalty=2)
    assert {line.token for line in turns.choices[0].logprobs.content} == set(spelled)
    seeded = [await ask(temperature=2, seed=7, n=2, presence_penalty=1) for _ in range(2)]
    texts = [[c.message.content for c in answer.choices] for answer in seeded]
    assert texts[0] == texts[1] and texts[0][0] != texts[0][1]
    with pytest.raises(openai.BadRequestError, match="logit_bias: token id 3584 is not in"):
        await ask(logit_bias={"3584": 1})


async def test_a_stop_string_counts_up_to_its_last_token(served: openai.AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": QUESTIONS[0]}]
    fields: Any = {"model": "demo", "messages": messages, "temperature": 0}
    free: Any = await served.chat.completions.create(**fields, logprobs=True)
    said = free.choices[0].message.content
    tokens = [line.token for line in free.choices[0].logprobs.content]
    # Over three tokens, from within the first to within the last.
    stop = "".join(tokens[:3])[1:-2]
    assert said.count(stop) == 1 and len(tokens) > 3
    for stream in (False, True):
        usage = {"stream_options": {"include_usage": True}} if stream else {}
        answer: Any = await served.chat.completions.create(
            **fields, stop=["never", stop], stream=stream, n=2, **usage
        )
        texts = ["", ""]
        chunks = [chunk async for chunk in answer] if stream else [answer]
        for choice in (choice for chunk in chunks for choice in chunk.choices):
            said_now = choice.delta if stream else choice.message
            texts[choice.index] += said_now.content or ""
        assert texts == [said[: said.index(stop)]] * 2
        assert chunks[-1].usage.completion_tokens == 2 * 3
