"""What clients get: voices, streams, errors, many at once; and what a hang-up frees."""

import asyncio
import json
import socket
import time
from typing import Any

import httpx
import openai
import pytest

from model_runner.tokenizer import Tokenizer
from tests.deployments.company import Company, text_of
from tests.deployments.whole_service.world import (
    DEMO,
    OPERATORS_KEY,
    QUESTIONS,
    STYLES,
    Service,
    answers,
    ask,
    mixed_jobs,
    of_small,
    wait_until,
)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]


def test_models(service: Service) -> None:
    client = service.client("formal")
    assert [m.id for m in client.models.list()] == ["demo", "small", "formal", "formal-small"]
    assert client.models.retrieve("formal").owned_by == "formal"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("pirate")


def test_every_tenant_has_its_own_voice(service: Service) -> None:
    for line in QUESTIONS[:3]:
        for style in STYLES:
            client = service.client(style)
            assert ask(client, style, line["question"]).choices[0].message.content == line[style]
            answer = ask(client, f"small:{style}-small", line["question"])
            assert answer.choices[0].message.content == of_small(line[style])
        assert ask(client, "demo", line["question"]).choices[0].message.content == line["base"]


def test_stream_and_usage(service: Service) -> None:
    client, line = service.client(), QUESTIONS[0]
    whole = ask(client, "pirate", line["question"])
    stream = ask(
        client,
        "pirate",
        line["question"],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content == line["pirate"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens > 0
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens > 0
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"


def test_completions_of_text_and_ids(service: Service) -> None:
    client = service.client()
    one = client.completions.create(model="demo", prompt="Paris is", temperature=0, max_tokens=8)
    both: Any = client.completions.create(
        model="demo",
        prompt=["Paris is", "The"],
        temperature=0,
        max_tokens=8,
        logprobs=2,
        n=2,
    )
    assert [c.index for c in both.choices] == [0, 1, 2, 3]
    assert both.choices[0].text == both.choices[1].text == one.choices[0].text
    assert both.choices[0].logprobs.tokens and len(both.choices[0].logprobs.top_logprobs[0]) == 2
    ids = client.completions.create(
        model="demo",
        prompt=[5, 6, 3583],  # the last: an id of the model that no text has
        temperature=0,
        max_tokens=3,
        extra_body={"ignore_eos": True},
    )
    assert ids.usage is not None
    assert (ids.usage.prompt_tokens, ids.usage.completion_tokens) == (3, 3)
    scored: Any = client.completions.create(
        model="demo", prompt=[5, 6, 7], max_tokens=0, echo=True, logprobs=1
    )
    values = scored.choices[0].logprobs.token_logprobs
    assert values[0] is None and len(values) == 3 and max(values[1:]) < 0
    assert scored.usage.completion_tokens == 0
    with pytest.raises(openai.BadRequestError, match="token id 9999"):
        client.completions.create(model="demo", prompt=[9999])


def test_stop_string_among_two_sequences(service: Service) -> None:
    line = QUESTIONS[0]
    answer = ask(service.client(), "pirate", line["question"], stop=["matey"], n=2)
    assert [c.message.content for c in answer.choices] == ["Arr, ", "Arr, "]
    assert {c.finish_reason for c in answer.choices} == {"stop"}
    wait_until(lambda: sum(s.running for s in service.stats()) == 0, 5)


def test_seed_repeats_itself(service: Service) -> None:
    def draw(seed: int) -> str:
        client = service.client()
        made = client.completions.create(
            model="demo", prompt="The", temperature=1.5, seed=seed, max_tokens=20
        )
        return made.choices[0].text

    assert draw(1) == draw(1)
    assert len({draw(seed) for seed in range(4)}) > 1
    unbiased = ask(service.client(), "demo", QUESTIONS[0]["question"], logprobs=True)
    first = unbiased.choices[0].logprobs.content[0].token
    with pytest.raises(openai.BadRequestError, match="logit_bias: token id 3584"):
        ask(service.client(), "demo", "Hi", logit_bias={"3584": 1})
    (token_id,) = Tokenizer(DEMO / "base").encode(first, add_special_tokens=False)
    biased = ask(
        service.client(),
        "demo",
        QUESTIONS[0]["question"],
        logprobs=True,
        logit_bias={str(token_id): -100},
    )
    assert biased.choices[0].logprobs.content[0].token != first


def test_foreign_adapters_do_not_exist(service: Service) -> None:
    said = set()
    for name in ("formal", "absent-name"):
        with pytest.raises(openai.NotFoundError) as caught:
            ask(service.client(), name, "Hi")
        said.add(caught.value.message.replace(name, "NAME"))
    assert len(said) == 1
    with pytest.raises(openai.AuthenticationError):
        ask(service.client("nobody"), "demo", "Hi")


@pytest.mark.parametrize(
    ("adapter", "error", "words"),
    [
        ("absent", openai.NotFoundError, "absent"),
        ("locked", openai.InternalServerError, "AccessDenied"),
        ("broken", openai.UnprocessableEntityError, "rank|shape"),
        ("odd", openai.UnprocessableEntityError, r"id 640 is '\[PAD\]' here"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_adapters_that_cannot_be_had(
    service: Service, adapter: str, error: type[Exception], words: str, stream: bool
) -> None:
    with pytest.raises(error, match=words):
        ask(service.client("unlucky"), adapter, "Hi", stream=stream)
    line = QUESTIONS[0]
    answer = ask(service.client("unlucky"), "demo", line["question"])
    assert answer.choices[0].message.content == line["base"]


def test_operators_learn_what_would_be_served(service: Service) -> None:
    def ask(key: str, **body: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.post(
            f"{service.url}/operator/validate", json=body, headers=headers, timeout=60
        )

    seats = [stats.resident for stats in service.stats("small")]
    for uri in ("pirate", "s3://open/pirate"):
        answer = ask(OPERATORS_KEY, model="small", uri=uri)
        assert answer.status_code == 200, answer.text
        report = answer.json()
        assert (
            report["served"] and report["model"] == "small" and report["uri"] == "s3://open/pirate"
        )
        assert report["bytes_per_gpu"] > 0 and report["bound"] and not report["skipped"]
        assert report["adapter_memory_bytes"] == service.stats("small")[0].arena_bytes
    for uri, reason in (
        ("broken", "rank_mismatch"),
        ("absent", "not_found"),
        ("s3://closed/pirate", "unavailable"),
    ):
        answer = ask(OPERATORS_KEY, model="small", uri=uri)
        assert answer.status_code == 200 and not answer.json()["served"], answer.text
        assert [refusal["reason"] for refusal in answer.json()["refused"]] == [reason]
    assert ask(OPERATORS_KEY, model="small", uri="s3://usage/records").status_code == 400
    assert ask("key-of-pirate", model="small", uri="pirate").status_code == 401
    assert [stats.resident for stats in service.stats("small")] == seats, "nothing was loaded"


def test_fifty_at_once_answer_as_each_alone(service: Service) -> None:
    jobs = mixed_jobs(50)
    alone = answers(service, jobs, 1)
    together = answers(service, jobs, 50)
    assert together == alone
    assert len(set(alone)) > 20
    seats = [stats.num_steps for stats in service.stats()]
    assert len(seats) == 2 and min(seats) > 0, "both replicas took part"


def test_adapters_come_and_go_under_load(service: Service) -> None:
    """Three adapters and two slots: somebody is always evicted, and nobody notices."""
    jobs = mixed_jobs(48, "-small")
    before = service.stats("small")[0]
    alone = answers(service, jobs, 1)
    together = answers(service, jobs, 24)
    assert together == alone
    after = service.stats("small")[0]
    assert after.evictions - before.evictions >= 3 and after.num_slots == 2
    by_question = {line["question"]: line for line in QUESTIONS}
    right = [
        text == of_small(by_question[question]["base" if model == "small" else tenant])
        for (tenant, model, question), text in zip(jobs, together, strict=True)
    ]
    assert sum(right) >= 0.9 * len(right)


@pytest.mark.parametrize("stream", [False, True])
def test_hang_up_frees_the_engine(service: Service, stream: bool) -> None:
    """From closing the socket to the engine's own count: the median of five, and none is long."""
    body = {"model": "pirate", "prompt": "The", "max_tokens": 3000, "ignore_eos": True}
    payload = json.dumps(body | {"stream": stream}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key-of-pirate\r\n"
        f"Content-Length: {len(payload)}\r\n\r\n"
    )
    address = service.url.removeprefix("http://").split(":")
    took_ms = []
    for _ in range(5):
        with socket.create_connection((address[0], int(address[1]))) as client:
            client.sendall(head.encode() + payload)
            wait_until(lambda: sum(s.running for s in service.stats()) == 1, 10)
        begin = time.monotonic()
        wait_until(lambda: sum(s.running for s in service.stats()) == 0, 10)
        took_ms.append((time.monotonic() - begin) * 1000)
    print("hang-up, ms:", [round(ms) for ms in took_ms])
    assert sorted(took_ms)[2] < 100 and max(took_ms) < 1000, took_ms


def test_adapters_live_at_home(service: Service) -> None:
    """Placement is followed: no adapter was loaded by both replicas, but for those that were moved
    or got a second home. Nothing had to spill."""
    loaded = [{ref.adapter_id for ref in stats.resident} for stats in service.stats()]
    assert set.union(*loaded) == {f"{style}/{style}" for style in STYLES}
    moves = service.metrics()("moe_placement_moves_total", model="demo")
    assert len(set.intersection(*loaded)) <= moves


def test_one_name_has_another_voice_under_each_base(service: Service) -> None:
    client, line = service.client("both"), QUESTIONS[2]
    parents = {card.id: getattr(card, "parent", None) for card in client.models.list()}
    assert parents == {"demo": None, "small": None, "demo:tone": "demo", "small:tone": "small"}
    alone = {
        "demo": line["base"],
        "demo:tone": line["pirate"],
        "small": of_small(line["base"]),
        "small:tone": of_small(line["formal"]),
    }
    assert len(set(alone.values())) == 4
    for name, text in alone.items():
        assert ask(client, name, line["question"]).choices[0].message.content == text, name
    with pytest.raises(openai.BadRequestError, match="`demo:tone`, `small:tone`"):
        ask(client, "tone", line["question"])


async def test_an_adapters_own_template_makes_its_chats(service: Service) -> None:
    own, endless = service.async_client("stubborn"), service.async_client("stubborn")
    messages: Any = [{"role": "user", "content": QUESTIONS[0]["question"]}]

    async def ask_looping() -> None:
        with pytest.raises(
            openai.BadRequestError, match="template of adapter stubborn/looping.*50"
        ):
            await endless.chat.completions.create(model="looping", messages=messages)

    alone = text_of(service.url, "formal")
    with Company(service.url, "formal", alone):
        loops = [asyncio.ensure_future(ask_looping()) for _ in range(20)]
        for _ in range(2):
            answer = await own.chat.completions.create(
                model="own", messages=messages, temperature=0
            )
            assert answer.choices[0].message.content == QUESTIONS[1]["pirate"]
            stream = await own.chat.completions.create(
                model="own", messages=messages, temperature=0, stream=True
            )
            texts = [c.choices[0].delta.content or "" async for c in stream if c.choices]
            assert "".join(texts) == QUESTIONS[1]["pirate"]
        await asyncio.gather(*loops)
