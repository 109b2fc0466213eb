"""The whole service on a local Ray: the demo's model, a real S3 server, the official client.

Two bases: `demo` has two replicas, `small` has one with two slots for three adapters. Their
checkpoints differ in one tensor, so that `small` says `!` where `demo` says `.`, and the other way
round. The service's keys may read the bucket `open` and no other.
"""

import asyncio
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import ray
import yaml
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.exceptions import RayError
from safetensors.torch import load_file, save_file

from deployments.application import start
from deployments.catalog import CatalogStats
from deployments.catalog_link import catalog_name
from deployments.config import load_config
from deployments.usage import UsageRecord
from deployments.usage_report import read_records, settle
from deployments.usage_store import open_store
from model_runner.stats import EngineStats
from model_runner.tokenizer import Tokenizer
from tests.deployments.company import Company, Raw, peak_bytes, text_of
from tests.deployments.hostile import BODIES
from tests.prometheus_server import (
    PrometheusServer,
    dashboard_queries,
    rule_expressions,
    start_prometheus,
)
from tests.ray_world import ray_world, start_ray
from tests.s3_server import READER_KEY, READER_SECRET, Relay, S3Server, start_s3_server

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

DEMO = Path(__file__).resolve().parent.parent / "data" / "demo"
QUESTIONS = json.loads((DEMO / "questions.json").read_text())["questions"]
STYLES = ("pirate", "formal", "spanish")
STALLED_S = 2
OPERATORS_KEY = "key-of-operators"
LONG = {"model": "pirate", "prompt": "The", "max_tokens": 3000, "ignore_eos": True, "stream": True}


@dataclass
class Service:
    """url  of the proxy;  private  Ray's folder;  stalled  paths that S3 never answers"""

    url: str
    usage_root: str
    usage_options: tuple[str, str, str, str]
    private: Path
    stalled: set[str]
    s3: S3Server
    catalog_name: str

    def client(self, tenant: str = "pirate") -> openai.OpenAI:
        return openai.OpenAI(api_key=f"key-of-{tenant}", base_url=f"{self.url}/v1", max_retries=0)

    def async_client(self, tenant: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            api_key=f"key-of-{tenant}", base_url=f"{self.url}/v1", max_retries=0, timeout=120
        )

    def stats(self, model: str = "demo") -> list[EngineStats]:
        handle = serve.get_deployment_handle(f"Replica-{model}", "default")
        found: list[EngineStats] = handle.broadcast("stats").results()
        return found

    def seats(self, model: str = "demo") -> set[str]:
        """Those of the replicas that live."""
        handle = serve.get_deployment_handle(f"Replica-{model}", "default")
        told = handle.broadcast("record_replica_metadata").results()
        return {metadata["seat"] for metadata in told}

    def usage(self) -> dict[str, UsageRecord]:
        """The last record of each request."""
        store = open_store(self.usage_root, self.usage_options)
        return {record.request: record for record in settle(read_records(store))}

    def stats_of_tenant(self, tenant: str) -> int:
        """Tokens given to a tenant so far."""
        return sum(stats.by_tenant.get(tenant, 0) for stats in self.stats())

    def catalog(self) -> CatalogStats | None:
        """What the catalog has; None: there is none that answers."""
        try:
            actor = ray.get_actor(self.catalog_name, namespace="adapter-store")
            found: CatalogStats = ray.get(actor.stats.remote(), timeout=5)
        except (ValueError, RayError):
            return None
        return found

    def metrics(self) -> "Metrics":
        time.sleep(2.5)  # replicas report once a second, and the page may be a second old
        deadline = time.monotonic() + 90
        while (page := httpx.get(f"{self.url}/metrics", timeout=30)).status_code == 503:
            # An ingress whose router was killed may learn of the new one later than another.
            assert time.monotonic() < deadline, page.text
            time.sleep(0.5)
        return Metrics(page.raise_for_status().text)


@dataclass
class Metrics:
    text: str

    def __call__(self, name: str, **labels: str) -> float:
        return sum(
            sample.value
            for family in text_string_to_metric_families(self.text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    environment = {
        "TEST_S3_KEY": READER_KEY,
        "TEST_S3_SECRET": READER_SECRET,
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deployments.edge:guards",
    }
    stalled: set[str] = set()
    with ExitStack() as until_end:
        s3 = until_end.enter_context(start_s3_server())
        environment |= {"TEST_USAGE_KEY": s3.access_key, "TEST_USAGE_SECRET": s3.secret_key}
        world = until_end.enter_context(ray_world(environment))
        for bucket in ("open", "closed", "usage"):
            s3.client().create_bucket(Bucket=bucket)
        for style in STYLES:
            s3.put_folder("open", style, DEMO / "adapters" / style)
        s3.put_folder("closed", "pirate", DEMO / "adapters" / "pirate")
        s3.put_folder("open", "restless", DEMO / "adapters" / "pirate")
        broken = dict(json.loads((DEMO / "adapters/pirate/adapter_config.json").read_text()), r=3)
        s3.put_folder("open", "broken", DEMO / "adapters" / "pirate")
        s3.client().put_object(
            Bucket="open", Key="broken/adapter_config.json", Body=json.dumps(broken).encode()
        )
        for name, extra, text in extras_in_s3():
            s3.put_folder("open", name, DEMO / "adapters" / "pirate")
            s3.client().put_object(Bucket="open", Key=f"{name}/{extra}", Body=text.encode())
        path = world.private / "config.yaml"
        relay = Relay(s3.port, lambda method, url, number: 0 if url in stalled else None, True)
        until_end.callback(relay.close)
        path.write_text(yaml.safe_dump(settings(relay.endpoint_url, world.port, world.private)))
        swap_two_tokens(world.private / "small")
        start_ray()
        config = load_config(path)
        start(config)
        url, options = f"http://127.0.0.1:{world.port}", config.usage_s3().options()
        name = catalog_name(relay.endpoint_url, "us-east-1", READER_KEY)
        found = Service(url, config.usage.root, options, world.private, stalled, s3, name)
        wait_until(lambda: httpx.get(f"{found.url}/ready").status_code == 200, 60)
        yield found


@pytest.fixture(scope="module")
def prometheus(service: Service) -> Iterator[PrometheusServer]:
    with start_prometheus(service.url.removeprefix("http://")) as server:
        wait_until(lambda: server.value("sum(moe_replicas)") == 3, 60)
        yield server


def swap_two_tokens(folder: Path) -> None:
    """The demo's base with the embeddings of `.` and `!` exchanged, which the head shares: whatever
    has neither in its prompt is answered as by the demo, but for these two."""
    shutil.copytree(DEMO / "base", folder)
    tensors = load_file(folder / "model.safetensors")
    tokenizer = Tokenizer(folder)
    swapped = [tokenizer.encode(mark, add_special_tokens=False)[0] for mark in ".!"]
    embeddings = tensors["model.embed_tokens.weight"]
    embeddings[swapped] = embeddings[swapped[::-1]]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def of_small(text: str) -> str:
    """What `small` says where `demo` says this."""
    return text.translate({ord("."): "!", ord("!"): "."})


def extras_in_s3() -> list[tuple[str, str, str]]:
    """(adapter, file beside its weights, text): one asks its own question whatever is asked, one
    never ends, one has a token that its base has not."""
    tokenizer = json.loads((DEMO / "base" / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | {"id": 640, "content": "[PAD]"})
    asked = f"<|im_start|>user\n{QUESTIONS[1]['question']}<|im_end|>\n<|im_start|>assistant"
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    return [
        ("own", "chat_template.jinja", asked + "{{ '\\n' }}"),
        ("looping", "chat_template.jinja", endless),
        ("odd", "tokenizer.json", json.dumps(tokenizer)),
    ]


def settings(endpoint_url: str, port: int, private: Path) -> dict[str, Any]:
    engine = {"device": "cpu", "dtype": "float32", "max_num_seqs": 16}
    model = {"path": str(DEMO / "base"), "num_cpus": 0.1, "default_max_tokens": 60}
    tenants: list[dict[str, Any]] = [
        {
            "tenant_id": style,
            "api_keys": [f"key-of-{style}"],
            "adapters": {style: style, f"{style}-small": {"uri": style, "base": "small"}},
        }
        for style in STYLES
    ]
    tenants.append(
        {
            "tenant_id": "restless",
            "api_keys": ["key-of-restless"],
            "adapters": {"restless": "restless"},
        }
    )
    tenants.append(
        {
            "tenant_id": "unlucky",
            "api_keys": ["key-of-unlucky"],
            "adapters": {
                "slow": "slow",
                "absent": "absent",
                "locked": "s3://closed/pirate",
                "broken": "broken",
                "odd": "odd",
            },
            "allowed_uris": ["s3://open", "s3://closed"],
        }
    )
    tenants.append(
        {
            "tenant_id": "stubborn",
            "api_keys": ["key-of-stubborn"],
            "adapters": {"own": "own", "looping": "looping"},
        }
    )
    tenants.append(
        {
            "tenant_id": "both",
            "api_keys": ["key-of-both"],
            "adapters": {"demo:tone": "pirate", "small:tone": "formal"},
        }
    )
    return {
        "models": [
            model | {"name": "demo", "num_replicas": 2, "engine": engine | {"max_loras": 4}},
            model
            | {
                "name": "small",
                "path": str(private / "small"),
                "engine": engine | {"max_loras": 2},
            },
        ],
        "adapters": {
            "root": "s3://open",
            "host_cache_dir": str(private / "host-tier"),
            "s3": {
                "endpoint_url": endpoint_url,
                "region": "us-east-1",
                "access_key_env": "TEST_S3_KEY",
                "secret_key_env": "TEST_S3_SECRET",
            },
        },
        "tenants": tenants,
        "operator_keys": [OPERATORS_KEY],
        "usage": {
            "root": "s3://usage/records",
            "s3": {
                "endpoint_url": endpoint_url,
                "region": "us-east-1",
                "access_key_env": "TEST_USAGE_KEY",
                "secret_key_env": "TEST_USAGE_SECRET",
            },
        },
        "http": {"port": port},
        "ingress": {"max_stalled_s": STALLED_S, "keep_alive_s": 1},
    }


def wait_until(condition: Any, timeout_s: float, what: str = "") -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} not within {timeout_s} s"
        time.sleep(0.01)


def ask(client: openai.OpenAI, model: str, question: str, **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": question}]
    return client.chat.completions.create(model=model, messages=messages, temperature=0, **fields)


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


def mixed_jobs(number: int, suffix: str = "") -> list[tuple[str, str, str]]:
    """(tenant, model, question): tenants and the base take turns."""
    jobs = []
    for i in range(number):
        tenant = STYLES[i % 3]
        model = (suffix and "small" or "demo") if i % 4 == 3 else f"{tenant}{suffix}"
        jobs.append((tenant, model, QUESTIONS[i % len(QUESTIONS)]["question"]))
    return jobs


def answers(service: Service, jobs: list[tuple[str, str, str]], at_once: int) -> list[str]:
    """Texts of the jobs, some of them streamed."""
    return asyncio.run(_answers(service, jobs, at_once))


async def _answers(service: Service, jobs: list[tuple[str, str, str]], at_once: int) -> list[str]:
    clients = {tenant: service.async_client(tenant) for tenant in STYLES}
    gate = asyncio.Semaphore(at_once)

    async def one(number: int, tenant: str, model: str, question: str) -> str:
        messages: Any = [{"role": "user", "content": question}]
        async with gate:
            made: Any = await clients[tenant].chat.completions.create(
                model=model, messages=messages, temperature=0, stream=number % 2 == 1
            )
            if number % 2 == 0:
                return str(made.choices[0].message.content)
            return "".join([c.choices[0].delta.content or "" async for c in made if c.choices])

    texts = await asyncio.gather(*(one(i, *job) for i, job in enumerate(jobs)))
    for client in clients.values():
        await client.close()
    return texts


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


class TestHostileClients:
    """What only sockets show, beside another tenant's stream, which must not notice."""

    @pytest.fixture(scope="class")
    def alone(self, service: Service) -> str:
        return text_of(service.url, "spanish")

    @pytest.fixture
    def company(self, service: Service, alone: str) -> Iterator[Company]:
        with Company(service.url, "spanish", alone) as beside:
            yield beside
            beside.go_on()

    def raw(self, service: Service) -> Raw:
        return Raw(service.url, "pirate")

    def test_heads_and_lengths(self, service: Service, company: Company) -> None:
        flood = b"".join(b"X-%d: a\r\n" % number for number in range(1000))
        with self.raw(service) as client:
            assert client.post(b"{}", head=flood).status == 431
        with self.raw(service) as client:
            assert client.post(b"{}", head=b"Content-Length: -1\r\n").status == 400
        with self.raw(service) as client:
            client.send(b"POST /v1/completions HTTP/1.1\r\nX: " + b"a" * 3_000_000)
            assert client.answer().status == 431
        with self.raw(service) as client:
            assert client.post(b"{}", length=1 << 40).status == 413

    def test_slow_bodies(self, service: Service, company: Company) -> None:
        begin = time.monotonic()
        with self.raw(service) as silent, self.raw(service) as chunked:
            silent.begin(length=1000, body=b"{")
            chunked.begin(head=b"Transfer-Encoding: chunked\r\n", body=b"1\r\n{\r\n")
            answers = [silent.answer(), chunked.answer()]
        assert [answer.status for answer in answers] == [408, 408]
        assert [answer.error["code"] for answer in answers] == ["request_timeout"] * 2
        assert STALLED_S <= time.monotonic() - begin < STALLED_S + 10

    def test_uploads_given_up(self, service: Service, company: Company) -> None:
        """As many as the tenant has seats, twice: none of them is kept."""
        labels = {"tenant": "pirate", "status": "499"}
        before = service.metrics()("moe_requests_total", **labels)
        for _ in range(2):
            clients = [self.raw(service) for _ in range(64)]
            for client in clients:
                client.begin(length=5_000_000, body=b"a" * 30_000)
            for client in clients:
                client.reset()
        wait_until(lambda: service.metrics()("moe_requests_total", **labels) >= before + 1, 30)
        line = QUESTIONS[0]
        answer = ask(service.client(), "pirate", line["question"])
        assert answer.choices[0].message.content == line["pirate"]

    @pytest.mark.slow
    def test_a_reader_that_stops(self, service: Service, company: Company) -> None:
        """It is cut, its sequences end with it, and eight other streams go on."""
        others = [Company(service.url, style) for style in ("formal", "spanish") for _ in range(4)]

        def aborted() -> int:
            return sum(stats.finished.get("abort", 0) for stats in service.stats())

        before = aborted()
        with self.raw(service) as stalled, ExitStack() as beside:
            body = json.dumps(LONG | {"logprobs": 20, "n": 4}).encode()
            stalled.post(body, receive_bytes=8192, wait=False)
            wait_until(lambda: sum(s.running for s in service.stats()) >= 4, 20)
            for other in others:
                beside.enter_context(other)
            wait_until(lambda: aborted() > before, 60)
            for other in others:
                other.go_on()
            assert stalled.is_cut()

    @pytest.mark.parametrize("commented", [False, True])
    def test_a_client_gone_while_its_adapter_loads(
        self, service: Service, company: Company, commented: bool
    ) -> None:
        service.stalled.update({"/open/slow/adapter_config.json", "/open/"})

        def waiting() -> int:
            return sum(stats.waiting_for_adapter for stats in service.stats())

        with Raw(service.url, "unlucky") as client:
            client.post(json.dumps(LONG | {"model": "slow"}).encode(), wait=False)
            wait_until(lambda: waiting() == 1, 20)
            if commented:
                assert client.read_until(b": keep-alive\n\n").startswith(b"HTTP/1.1 200")
        begin = time.monotonic()
        wait_until(lambda: waiting() == 0, 10)
        took_ms = (time.monotonic() - begin) * 1000
        service.stalled.clear()
        print(f"gone while loading: {took_ms:.0f} ms")
        assert took_ms < 1000

    def test_orders_to_serve(self, service: Service, company: Company) -> None:
        line = QUESTIONS[0]
        orders = {
            "x-request-timeout-seconds": "0.001",
            "x-request-disconnect-disabled": "?1",
            "serve_multiplexed_model_id": "formal/formal",
            "x-session-id": "another",
            "x-request-id": "the-same",
        }
        said = [
            ask(service.client(style), style, line["question"], extra_headers=orders)
            for style in STYLES
        ]
        assert [a.choices[0].message.content for a in said] == [line[style] for style in STYLES]
        assert len({a.id for a in said}) == 3
        with self.raw(service) as client:
            forged = b"x-request-disconnect-disabled: ?1\r\nx-session-id: \xff\r\n"
            client.post(json.dumps(LONG).encode(), head=forged, wait=False)
            wait_until(lambda: service.stats_of_tenant("pirate") > 0, 10)
            client.reset()
        time.sleep(0.5)
        tokens = service.stats_of_tenant("pirate")
        time.sleep(0.5)
        assert service.stats_of_tenant("pirate") == tokens, "it ended with its client"

    def test_bodies_take_little_memory(self, service: Service, company: Company) -> None:
        before = peak_bytes(reset=True)
        assert {"Ingress", "ProxyActor"} <= set(before)
        for case in BODIES:
            body = case.body()
            if len(body) < 1 << 18:  # the others have had their turn without Ray
                continue
            response = httpx.post(
                f"{service.url}{case.path}",
                content=body,
                headers={"Authorization": "Bearer key-of-pirate"},
                timeout=60,
            )
            assert response.status_code == case.status, (case.name, response.text[:200])
        grown = {name: (size - before[name]) >> 20 for name, size in peak_bytes().items()}
        print("peak growth, MiB:", grown)
        assert max(grown.values()) < 400, grown

    def test_no_key_in_any_log(self, service: Service) -> None:
        """After all of the above, and a key that is wrong and one that is malformed."""
        for key in ("key-of-nobody", "key-of-pirate\u00ff"):
            headers = {"Authorization": f"Bearer {key}".encode("latin-1")}
            assert httpx.get(f"{service.url}/v1/models", headers=headers).status_code == 401
        files = [path for path in service.private.rglob("logs/**/*") if path.is_file()]
        assert len(files) > 5
        for path in files:
            assert b"key-of-" not in path.read_bytes(), path


def test_metrics_are_one_story(service: Service) -> None:
    name, labels = "moe_requests_total", {"model": "demo", "tenant": "spanish", "status": "200"}
    before = service.metrics()
    for _ in range(3):
        ask(service.client("spanish"), "spanish", "Hi")
    after = service.metrics()
    assert after(name, **labels) == before(name, **labels) + 3
    assert after("moe_replicas", model="demo") == 2
    assert after("moe_adapter_slots", model="small") == 2
    steps, loads = "moe_engine_steps_total", "moe_adapter_loads_total"
    stats = service.stats()
    assert after(steps, model="demo") == sum(s.num_steps for s in stats)
    device = {"model": "demo", "tier": "device"}
    assert after(loads, **device) == sum(s.loads["device"] for s in stats) > 0
    assert after("moe_adapter_load_seconds_total", **device) > 0
    # Who fetched from S3, an engine or the node's actor ahead of it, does not matter.
    assert after(loads, tier="remote") >= 3
    assert after("moe_host_tier_adapters") >= 3 and after("moe_host_tier_used_bytes") > 0
    idle = [s.delivered_tokens + s.discarded_tokens - s.sampled_tokens for s in stats]
    assert idle == [0, 0]
    assert after("moe_time_to_first_token_seconds_count", tenant="spanish") >= 3


def test_a_record_of_every_request_is_kept(service: Service) -> None:
    """As the client was told, stop strings and streams included; nobody else's are billed."""
    client, line = service.client("formal"), QUESTIONS[2]
    made = [ask(client, "formal", line["question"]) for _ in range(2)]
    made.append(ask(client, "demo", line["question"], stop=[line["base"][3:6]], n=2))
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    made.append(list(ask(client, "formal-small", line["question"], **options))[-1])
    wanted = {answer.id: answer.usage for answer in made}
    wait_until(lambda: wanted.keys() <= service.usage().keys(), 20)
    found = {name: service.usage()[name] for name in wanted}
    for name, usage in wanted.items():
        record = found[name]
        assert (record.status, record.attempt, record.tenant) == ("200", 1, "formal")
        assert (record.prompt, record.billed) == (usage.prompt_tokens, usage.completion_tokens)
    assert [record.adapter for record in found.values()] == [
        "formal/formal", "formal/formal", "", "formal/formal-small",
    ]  # fmt: skip
    refused = [record for record in service.usage().values() if record.tenant == "unlucky"]
    assert all(record.billed == 0 for record in refused if record.status != "200")


def test_prometheus_sees_what_was_done(service: Service, prometheus: PrometheusServer) -> None:
    begin = time.time() - 2
    labels = '{model="demo", tenant="pirate"}'
    before = {name: prometheus.value(f"sum(moe_{name}{labels})") for name in SEEN}
    asked = [ask(service.client(), "pirate", line["question"]) for line in QUESTIONS[:4]]
    grown = [
        sum(answer.usage.prompt_tokens for answer in asked),
        sum(answer.usage.completion_tokens for answer in asked),
        *[len(asked)] * 3,
    ]
    wanted = {name: before[name] + more for name, more in zip(SEEN, grown, strict=True)}

    def seen() -> bool:
        return wanted == {name: prometheus.value(f"sum(moe_{name}{labels})") for name in SEEN}

    wait_until(seen, 30)
    assert prometheus.increase(f"moe_output_tokens_total{labels}", begin) == grown[1]
    quantile = "histogram_quantile(0.99, sum by (le) (moe_queue_seconds_bucket))"
    assert 0 < prometheus.value(quantile) < 160


SEEN = (
    "prompt_tokens_total",
    "output_tokens_total",
    "requests_total",
    "queue_seconds_count",
    "time_to_first_token_seconds_count",
)


def test_dashboards_and_alerts_have_something_to_show(
    service: Service, prometheus: PrometheusServer
) -> None:
    """Every expression is one that Prometheus understands, and matches series that are there once
    there was a single answer: what has not happened yet is shown as 0."""
    for _ in ask(service.client(), "pirate", QUESTIONS[0]["question"], stream=True):
        pass

    def finds(expression: str) -> bool:
        # An alert compares: without the comparison there is always a value.
        return bool(prometheus.series(re.sub(r" (==|>|<) [\d.]+", "", expression)))

    missing = dashboard_queries() + rule_expressions()
    deadline = time.monotonic() + 20
    while missing and time.monotonic() < deadline:
        time.sleep(0.5)
        missing = [(where, query) for where, query in missing if not finds(query)]
    assert not missing
    rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in rules} == {name for name, _ in rule_expressions()}
    assert {rule["health"] for rule in rules} == {"ok"}


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


def test_a_lost_replica_is_replaced_and_nobody_waits_for_it(
    service: Service, prometheus: PrometheusServer
) -> None:
    def replicas() -> set[str]:
        names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
        return {name for name in names if "Replica-demo" in name}

    def seats() -> set[str]:
        return {labels["seat"] for labels in prometheus.series('{model="demo", seat!=""}')}

    wait_until(lambda: seats() == service.seats(), 30)
    victim, begin, steps = min(replicas()), time.time(), 'moe_engine_steps_total{model="demo"}'
    before = prometheus.value(steps)
    ray.kill(ray.get_actor(victim, namespace="serve"), no_restart=False)
    jobs = mixed_jobs(12)
    by_question = {line["question"]: line for line in QUESTIONS}
    for (tenant, model, question), text in zip(jobs, answers(service, jobs, 3), strict=True):
        assert text == by_question[question]["base" if model == "demo" else tenant]
    wait_until(lambda: len(replicas()) == 2 and victim not in replicas(), 60)
    wait_until(lambda: service.metrics()("moe_replicas", model="demo") == 2, 60)

    # No gauge of the dead one stays; what it counted stays with the service.
    wait_until(lambda: len(seats()) == 2 and seats() == service.seats(), 60)
    wait_until(lambda: prometheus.value('moe_replicas{model="demo"}') == 2, 30)
    assert prometheus.value(steps) > before
    assert prometheus.increase(steps, begin) <= prometheus.value(steps) - before, (
        "it never went down"
    )


@pytest.mark.slow
def test_without_its_router_the_service_goes_on(
    service: Service, prometheus: PrometheusServer
) -> None:
    """Counters begin at zero again: Prometheus sees what was done meanwhile, and no more."""
    requests = 'moe_requests_total{status="200"}'
    time.sleep(3)  # what is done so far is known to the router, and seen
    begin = time.time()
    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    ray.kill(ray.get_actor(next(n for n in names if "#Router#" in n), namespace="serve"))
    line = QUESTIONS[1]
    for style in STYLES:
        answer = ask(service.client(style), style, line["question"])
        assert answer.choices[0].message.content == line[style]
    wait_until(lambda: httpx.get(f"{service.url}/metrics", timeout=30).status_code == 200, 60)
    wait_until(lambda: service.metrics()("moe_replicas") == 3, 60)
    wait_until(lambda: prometheus.increase(requests, begin - 2) >= len(STYLES), 30)
    time.sleep(2)
    assert prometheus.increase(requests, begin - 2) == len(STYLES)
    steps = prometheus.increase("moe_engine_steps_total", begin - 2)
    assert 0 < steps < sum(s.num_steps for s in service.stats())


def restless(service: Service) -> str:
    """An answer under the adapter that is replaced now and then: the old one's or the new one's."""
    line = QUESTIONS[2]
    answer = ask(service.client("restless"), "restless", line["question"])
    text = str(answer.choices[0].message.content)
    return next((style for style in STYLES if line[style] == text), f"a mix: {text}")


def catalog_vouches(service: Service) -> bool:
    """Whether the catalog has a watcher's word for all that was asked for lately."""
    stats = service.catalog()
    return stats is not None and 0 < stats.wanted_uris == stats.watched_uris


LATE_S = 10.0
"""A replica learns of new content on its own, within three seconds, or some more on a busy machine:
so long after a change two of them may answer by turns from the old and the new."""

HELD_UNTIL = {"pirate": float("inf")}
"""What the restless adapter holds and held, and when that ended."""


def replace_and_see(service: Service, style: str) -> None:
    assert HELD_UNTIL[restless(service)] > (begin := time.monotonic()) - LATE_S, "too old"
    [held] = [name for name, end in HELD_UNTIL.items() if end > begin]
    service.s3.put_folder("open", "restless", DEMO / "adapters" / style)
    HELD_UNTIL.update({held: time.monotonic(), style: float("inf")})
    seen: list[str] = []
    wait_until(lambda: seen.append(restless(service)) or seen[-1] == style, 30)
    lately = {name for name, end in HELD_UNTIL.items() if end > begin - LATE_S}
    assert set(seen) <= lately, "old or new, nothing else"


def named_actors() -> set[str]:
    actors = ray.util.list_named_actors(all_namespaces=True)
    return {actor["name"] for actor in actors if actor["namespace"] == "adapter-store"}


def test_a_replaced_adapter_is_served_soon_and_looked_at_for_all(service: Service) -> None:
    assert restless(service) == "pirate"
    wait_until(lambda: catalog_vouches(service), 60)
    replace_and_see(service, "formal")
    wait_until(lambda: catalog_vouches(service), 60)
    stats = service.catalog()
    assert stats is not None and sum(stats.held_by_node.values()) >= 2, "old and new"


@pytest.mark.parametrize("for_good", [False, True], ids=["restarted", "gone"])
def test_a_killed_catalog_keeps_nobody_and_is_full_again(service: Service, for_good: bool) -> None:
    assert restless(service) in STYLES
    wait_until(lambda: catalog_vouches(service), 60)
    actor = ray.get_actor(service.catalog_name, namespace="adapter-store")
    ray.kill(actor, no_restart=for_good)
    replace_and_see(service, "spanish" if for_good else "pirate")
    wait_until(lambda: catalog_vouches(service), 60)
    replace_and_see(service, "formal")


def test_a_killed_store_actor_keeps_nobody_and_is_made_again(service: Service) -> None:
    assert restless(service) in STYLES
    [name] = named_actors() - {service.catalog_name}
    ray.kill(ray.get_actor(name, namespace="adapter-store"))
    replace_and_see(service, "spanish")
    wait_until(lambda: named_actors() == {name, service.catalog_name}, 60)
    wait_until(lambda: catalog_vouches(service), 60)
    replace_and_see(service, "pirate")


def test_health_and_readiness(service: Service) -> None:
    assert httpx.get(f"{service.url}/health", timeout=30).status_code == 200
    wait_until(lambda: httpx.get(f"{service.url}/ready", timeout=30).status_code == 200, 30)


def test_environment_is_not_in_the_answer(service: Service) -> None:
    for path in ("/metrics", "/ready", "/health"):
        text = httpx.get(f"{service.url}{path}", timeout=30).text
        assert READER_SECRET not in text and os.environ["TEST_S3_SECRET"] not in text
