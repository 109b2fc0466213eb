"""Parts of the service die under streams, on three nodes, and no client notices more than a pause.

The short form kills one of each that holds streams; the long one every kind at every k, as the
campaign does (tests/bench/chaos.py). Not here: how long the pauses are, which is judged on a quiet
machine.
"""

import asyncio
import json
from collections.abc import Iterator
from itertools import product
from typing import Any

import httpx
import pytest

from tests.bench.chaos import KINDS, TOKENS, Campaign
from tests.ray_cluster import Nodes, three_nodes, wait_until
from tests.sse_client import ReconnectingStream

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with three_nodes() as nodes:
        yield nodes


@pytest.fixture(scope="module")
def campaign(nodes: Nodes) -> Campaign:
    return Campaign(nodes, PATIENCE_S)


def endless(nodes: Nodes, client: httpx.AsyncClient) -> ReconnectingStream:
    body = {
        "model": "demo",
        "prompt": "The",
        "max_tokens": 3000,
        "ignore_eos": True,
        "stream": True,
    }
    headers = {"Authorization": "Bearer key-of-pirate"}
    return ReconnectingStream(client, f"{nodes.url}/v1/completions", body, headers, PATIENCE_S)


def num_running(nodes: Nodes) -> int:
    return sum(view.stats.running for view in nodes.views())


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tokens"), list(product(KINDS, TOKENS)))
def test_streams_survive_every_kill(campaign: Campaign, kind: str, tokens: int) -> None:
    result = campaign.run(kind, tokens)
    assert not result.errors and not result.num_wrong, str(result)
    assert result.num_stopped, "it came too late to hurt anybody"


@pytest.mark.slow
def test_a_request_that_lost_two_replicas_is_no_third_ones(nodes: Nodes) -> None:
    def kill_its_replica() -> bool:
        view = nodes.busy()
        if view.stats.running:
            nodes.kill(nodes.busy_replica())
        return bool(view.stats.running)

    async def lose_two() -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            chunks = endless(nodes, client).chunks()
            for _ in range(2):
                await anext(chunks)
                await asyncio.to_thread(wait_until, kill_its_replica, PATIENCE_S)
            async for _ in chunks:
                pass

    with pytest.raises(RuntimeError) as caught:
        asyncio.run(lose_two())
    error: dict[str, Any] = json.loads(str(caught.value))["error"]
    assert error["code"] == "replicas_lost" and "2 replicas were lost" in error["message"]
    nodes.wait_whole()
    assert num_running(nodes) == 0


@pytest.mark.slow
def test_what_a_dead_ingress_left_running_ends(nodes: Nodes) -> None:
    async def begin_and_leave() -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            await anext(endless(nodes, client).chunks())
            await asyncio.to_thread(nodes.kill, nodes.busy_ingress())

    asyncio.run(begin_and_leave())
    wait_until(lambda: num_running(nodes) == 0, PATIENCE_S, "the engines are idle")
    nodes.wait_whole()


def test_streams_survive_a_replica_and_an_ingress(campaign: Campaign) -> None:
    for kind, tokens in (("replica", 50), ("ingress", 1)):
        result = campaign.run(kind, tokens)
        assert not result.errors and not result.num_wrong, str(result)
        assert result.num_stopped and (kind != "ingress" or result.num_reconnected), str(result)


@pytest.mark.slow
def test_streams_survive_their_node(campaign: Campaign) -> None:
    """The last one: the node does not come back."""
    result = campaign.hit("node", 1)
    assert not result.errors and not result.num_wrong, str(result)
    assert result.num_stopped, str(result)
