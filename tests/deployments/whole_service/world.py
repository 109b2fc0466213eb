"""The whole service on a local Ray: the demo's model, a real S3 server, the official client.

Two bases: `demo` has two replicas, `small` has one with two slots for three adapters. Their
checkpoints differ in one tensor, so that `small` says `!` where `demo` says `.`, and the other way
round. The service's keys may read the bucket `open` and no other.
Not here: its start (conftest.py).
"""

import asyncio
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.exceptions import RayError
from safetensors.torch import load_file, save_file

from deployments.catalog import CatalogStats
from deployments.usage import UsageRecord
from deployments.usage_report import read_records, settle
from deployments.usage_store import open_store
from model_runner.stats import EngineStats
from model_runner.tokenizer import Tokenizer
from tests.s3_server import S3Server

DEMO = Path(__file__).resolve().parents[2] / "data" / "demo"
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
