"""Routing and scaling where they are real: a small Ray, three base models over one checkpoint.

`fixed` has two replicas that take two requests at a time, and nothing spills; `elastic` has one to
three replicas, of four sequences each; `narrow` has one that takes two, and three may wait for it.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
import ray
import yaml
from ray import serve

from deployments.application import start
from deployments.config import load_config
from deployments.metrics import MetricDelta
from deployments.placement.view import Place
from model_runner.stats import EngineStats
from tests.deployments.conftest import DEMO
from tests.ray_world import ray_world, start_ray

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
STYLES = ("pirate", "formal", "spanish")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ray_world({}) as world:
        engine = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "max_loras": 8}
        model = {"path": str(DEMO / "base"), "num_cpus": 0.05, "engine": engine}
        fixed = {
            "name": "fixed",
            "num_replicas": 2,
            "max_ongoing_requests": 2,
            "spill_after_s": 600,
        }
        elastic = {"name": "elastic", "min_replicas": 1, "max_replicas": 3, "scale_down_after_s": 2}
        narrow = {"name": "narrow", "max_ongoing_requests": 2, "max_queued_requests": 3}
        tenant = {
            "tenant_id": "t",
            "api_keys": ["key-of-t"],
            "adapters": {
                f"{style}-{number}": {"uri": style, "base": base}
                for style in STYLES
                for base in ("fixed", "elastic")
                for number in (base, f"{base}-2")
            },
            "limits": {"max_concurrent_requests": 500},
        }
        settings = {
            "models": [model | fixed, model | elastic, model | narrow],
            "adapters": {
                "root": str(DEMO / "adapters"),
                "host_cache_dir": str(world.private / "tier"),
            },
            "tenants": [tenant],
            "http": {"port": world.port},
        }
        path = world.private / "config.yaml"
        path.write_text(yaml.safe_dump(settings))
        start_ray()
        start(load_config(path))
        found = f"http://127.0.0.1:{world.port}"
        wait_until(lambda: httpx.get(f"{found}/ready", timeout=60).status_code == 200, 240)
        yield found


def wait_until(condition: Callable[[], Any], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.05)


def client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=200)
    headers = {"Authorization": "Bearer key-of-t"}
    return httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=300)


async def complete(http: httpx.AsyncClient, model: str, prompt: Any, **fields: Any) -> Any:
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0} | fields
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def stream(http: httpx.AsyncClient, model: str, max_tokens: int) -> list[str]:
    """The texts of a streamed completion, chunk by chunk."""
    body = {
        "model": model,
        "prompt": "Once",
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    texts = []
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            data = line.removeprefix("data: ")
            if line.startswith("data: ") and data != "[DONE]":
                chunk = json.loads(data)
                assert "error" not in chunk, chunk
                texts += [choice["text"] for choice in chunk["choices"]]
    return texts


async def stats(model: str) -> list[EngineStats]:
    handle = serve.get_deployment_handle(f"Replica-{model}", "default")
    found: list[EngineStats] = await handle.broadcast("stats").results_async()
    return found


def actors(part: str) -> list[str]:
    named = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in named if part in actor["name"]]


async def test_sixteen_sub_calls_of_one_request_do_not_hang(url: str) -> None:
    async with client(url) as http:
        answer = await complete(http, "pirate-fixed", ["The"] * 16)
        assert len(answer["choices"]) == 16
        assert len({choice["text"] for choice in answer["choices"]}) == 1


async def calls_get_into_a_full_replica(names: list[str]) -> None:
    """What is said about the two that fill it does not wait for their ends."""
    handle = serve.get_deployment_handle("Replica-narrow", "default")
    seat = Place(("narrow-0",), "narrow-0", may_spill=False)
    async with asyncio.timeout(20):
        (found,) = await stats("narrow")
        assert found.running == 2, "no more than that"
        validate = handle.options(method_name="validate")
        report = await validate.remote(str(DEMO / "adapters" / "pirate"), str(DEMO))
        assert report["served"]
        await handle.broadcast("abort", names[0], 0).results_async()
        recalled = await handle.options(method_name="recall").remote(names[1], place=seat)
        assert sum(len(output.new_token_ids) for output in recalled)


async def test_beyond_its_queue_a_base_refuses_and_serves_the_rest(url: str) -> None:
    """Two answers run, and of ten more requests three may wait."""
    body = {"model": "narrow", "prompt": "The", "max_tokens": 8, "temperature": 0}
    endless = body | {"max_tokens": 3000, "ignore_eos": True, "stream": True}
    async with client(url) as http, AsyncExitStack() as running:
        streams, names = [], []  # a stream that nobody holds is closed
        for _ in range(2):
            answer = await running.enter_async_context(
                http.stream("POST", "/v1/completions", json=endless)
            )
            assert answer.status_code == 200
            ours, *_ = answer.headers.get_list("x-request-id", split_commas=True)
            names.append(ours.removeprefix("cmpl-") + "-0")
            streams.append(answer.aiter_lines())
            assert (await anext(streams[-1])).startswith("id: "), "it runs"
        flood = [
            asyncio.create_task(http.post("/v1/completions", json=body | {"stream": bool(n % 2)}))
            for n in range(10)
        ]
        refused = []
        async with asyncio.timeout(60):
            for done in asyncio.as_completed(flood):
                refused.append(await done)
                if len(refused) == 7:
                    break
        for found in refused:
            assert found.status_code == 503 and found.headers["retry-after"] == "1", found.text
            assert found.json()["error"]["code"] == "overloaded"
        assert [task.done() for task in flood].count(False) == 3
        await calls_get_into_a_full_replica(names)
        await running.aclose()  # the two leave, and those that wait take their places
        statuses = [(await task).status_code for task in flood]
        assert statuses.count(200) == 3 and statuses.count(503) == 7
        assert (await http.post("/v1/completions", json=body)).status_code == 200


async def test_saturation_misplaces_nobody(url: str) -> None:
    names = [f"{style}-{kind}" for style in STYLES for kind in ("fixed", "fixed-2")]
    async with client(url) as http:
        await asyncio.gather(*(complete(http, names[n % 6], "The") for n in range(90)))
        page = (await http.get("/metrics")).text
    resident = [{ref.adapter_id for ref in found.resident} for found in await stats("fixed")]
    assert sum(map(len, resident)) == len(set.union(*resident)) == 6, resident
    moves = [line for line in page.splitlines() if line.startswith("moe_placement_moves_total{")]
    assert moves and all(line.endswith(" 0.0") for line in moves), moves


async def test_a_new_router_goes_on_from_the_old_map(url: str) -> None:
    router = serve.get_deployment_handle("Router", "default")
    before = await router.sync.remote(-1, {}, MetricDelta())
    [victim] = actors("#Router#")
    ray.kill(ray.get_actor(victim, namespace="serve"))
    async with client(url) as http:
        for style in STYLES:
            await complete(http, f"{style}-fixed", "The")
    wait_until(lambda: actors("#Router#") not in ([], [victim]), 60)
    after = before
    deadline = time.monotonic() + 60
    while after is None or after.version == before.version or not after.homes:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)
        after = await router.sync.remote(-1, {}, MetricDelta())
    assert after.homes == before.homes and after.seats == before.seats
    assert await router.moves.remote() == ()


async def test_replicas_follow_the_load_and_streams_outlive_their_stop(url: str) -> None:
    async with client(url) as http:
        alone = "".join(await stream(http, "pirate-elastic", 300))
        assert len(actors("Replica-elastic")) == 1
        flood = [
            asyncio.create_task(stream(http, f"{style}-elastic", 300))
            for style in STYLES
            for _ in range(14)
        ]
        while len(await stats("elastic")) < 2:  # what runs as the load grows
            assert not all(task.done() for task in flood), "the load is gone, and nothing grew"
            await asyncio.sleep(0.2)
        texts = ["".join(texts) for texts in await asyncio.gather(*flood)]
        assert texts[:14] == [alone] * 14
        # What the new one has to do while the number falls again: one stream after the other.
        async with asyncio.timeout(300):
            while len(actors("Replica-elastic")) > 1:
                found = await asyncio.gather(*(stream(http, "pirate-elastic", 100) for _ in "ab"))
                assert all(alone.startswith("".join(texts)) for texts in found)
        page = (await http.get("/metrics")).text
    assert 'moe_replicas{model="elastic"} 1.0' in page
