"""What a request counts, from its body to its usage record: streams, errors, stop strings, several
answers, clients that leave, a second replica. Not here: how records are kept (test_usage.py)."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.config import ServiceConfig, UsageSettings
from deployments.frontend import Frontend
from deployments.ingress import build_api
from deployments.placement.view import Place
from deployments.usage import MOVED, RUNNING, UsageRecord
from model_runner.request import ErrorCode, FinishReason, Request, RequestOutput
from model_runner.tokenizer import Tokenizer
from tests.deployments.conftest import Face, FakeControl, ScriptedBackend


class CountedBackend(ScriptedBackend):
    """Says what an engine says of queue and discards, and joins outputs as a replica does.

    lost_at  the replica is lost after so many tokens, and another one goes on
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.per_message = 1
        self.lost_at = 0
        self.error_at = 0

    async def stream(
        self, request: Request, place: Place | None, again: bool = False
    ) -> AsyncGenerator[RequestOutput, None]:
        pending: dict[int, RequestOutput] = {}
        async for output in super().stream(request, place):
            if self.error_at and output.num_output_tokens > self.error_at:
                yield replace(
                    output,
                    new_token_ids=(),
                    num_output_tokens=self.error_at,
                    finish_reason=FinishReason.ERROR,
                    error_code=ErrorCode.ENGINE_DEAD,
                )
                return
            before = pending.pop(output.index, None)
            if before is not None:
                ids = before.new_token_ids + output.new_token_ids
                output = replace(output, new_token_ids=ids)
            if not output.finish_reason and len(output.new_token_ids) < self.per_message:
                pending[output.index] = output
                continue
            moved = self.lost_at and output.num_output_tokens > self.lost_at
            discarded = 1 if output.finish_reason is FinishReason.STOP else 0
            yield replace(
                output,
                queue_s=0.3,
                attempt=2 if moved else 1,
                num_discarded_tokens=discarded,
            )


@pytest.fixture
async def face(
    demo_config: ServiceConfig, demo_tokenizer: Tokenizer, tmp_path: Path
) -> AsyncIterator[Face]:
    backend = CountedBackend(demo_tokenizer)
    usage = UsageSettings(root=str(tmp_path))
    config = demo_config.model_copy(update={"usage": usage})
    frontend = Frontend(config, b"k" * 32, {"demo": backend})
    api = build_api(frontend, FakeControl())
    transport = httpx.ASGITransport(api, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield Face(client, frontend, backend, FakeControl(), api)


def records(face: Face) -> list[UsageRecord]:
    assert face.frontend.usage is not None
    return face.frontend.usage.take(0)


def counters(face: Face, *names: str) -> list[float]:
    """Values under model and tenant of the pirate."""
    found = face.frontend.log.counters
    return [found.get((f"moe_{name}_total", ("demo", "pirate")), 0) for name in names]


def tokens_of(record: UsageRecord) -> tuple[int, int, int]:
    return record.delivered, record.discarded, record.recomputed


async def complete(face: Face, **fields: Any) -> httpx.Response:
    return await face.post("/v1/completions", {"model": "pirate", "prompt": "The"} | fields)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_leaves_one_record(face: Face, stream: bool) -> None:
    answer = await complete(face, max_tokens=5, stream=stream)
    (record,) = records(face)
    (request,) = face.backend.requests
    assert record.request == answer.headers["x-request-id"]
    assert (record.attempt, record.status) == (1, "200")
    assert (record.tenant, record.model, record.adapter) == ("pirate", "demo", "pirate/pirate")
    assert (record.prompt, record.cached) == (len(request.token_ids), 2)
    assert tokens_of(record) == (5, 0, 0)
    assert record.started <= record.ended and record.started.endswith("+00:00")
    assert counters(face, "output_tokens", "discarded_tokens") == [5, 0]
    (queue,) = [v for k, v in face.frontend.log.histograms.items() if k[0] == "moe_queue_seconds"]
    assert sum(queue[0]) == 1 and queue[1] == pytest.approx(0.3)
    assert face.frontend.log.traffic == {"pirate": record.prompt + 5}
    assert records(face) == [], "told once"


@pytest.mark.parametrize("per_message", [1, 3, 100])
@pytest.mark.parametrize("stream", [False, True])
async def test_billed_up_to_and_with_the_stop(face: Face, per_message: int, stream: bool) -> None:
    """However many tokens come at once: what came past the stop string is discarded."""
    face.backend.per_message = per_message
    whole = face.backend.tokenizer.encode(face.backend.words)
    await complete(face, max_tokens=64, stop=["friend"], stream=stream)
    (record,) = records(face)
    text, needed = "", 0
    while "friend" not in text:
        needed += 1
        text = face.backend.tokenizer.decode(whole[:needed])
    assert record.delivered == record.billed == needed < len(whole)
    came = min(-(-needed // per_message) * per_message, len(whole))
    told_by_engine = int(came == len(whole))
    assert record.discarded == came - needed + told_by_engine
    assert counters(face, "output_tokens", "discarded_tokens") == [needed, record.discarded]


async def test_several_prompts_and_answers_are_one_request(face: Face) -> None:
    await complete(face, prompt=["The", "A capital"], n=2, max_tokens=4)
    (record,) = records(face)
    prompt = sum(len(request.token_ids) for request in face.backend.requests)
    assert (record.prompt, record.cached) == (prompt, 2 * 2)
    assert tokens_of(record) == (2 * 2 * 4, 0, 0)
    (queue,) = [v for k, v in face.frontend.log.histograms.items() if k[0] == "moe_queue_seconds"]
    assert sum(queue[0]) == 2


async def test_what_ends_by_itself_counts_what_its_engine_threw_away(face: Face) -> None:
    await complete(face, max_tokens=100)
    (record,) = records(face)
    assert record.delivered == len(face.backend.tokenizer.encode(face.backend.words))
    assert record.discarded == 1


async def test_a_prompt_that_was_all_that_was_wanted_is_billed(face: Face) -> None:
    async def echo(request: Request, *_: Any, **__: Any) -> AsyncGenerator[RequestOutput, None]:
        yield RequestOutput(
            request.request_id,
            finish_reason=FinishReason.LENGTH,
            num_prompt_tokens=len(request.token_ids),
            num_discarded_tokens=1,
        )

    face.backend.stream = echo  # type: ignore[method-assign]
    await complete(face, prompt=[5, 6, 7], max_tokens=0, echo=True)
    (record,) = records(face)
    assert (record.status, record.prompt, *tokens_of(record)) == ("200", 3, 0, 1, 0)


async def test_refusals_cost_nothing_and_are_told_apart(face: Face) -> None:
    answers = [await complete(face, model="absent"), await complete(face, temperature="hot")]
    face.backend.failure = (ErrorCode.ADAPTER_NOT_FOUND, "none")
    answers.append(await complete(face))
    found = records(face)
    assert [record.status for record in found] == [str(a.status_code) for a in answers]
    assert all(400 <= answer.status_code < 500 for answer in answers)
    assert len({record.request for record in found}) == 3
    assert {(record.prompt, *tokens_of(record)) for record in found} == {(0, 0, 0, 0)}
    assert counters(face, "prompt_tokens", "output_tokens") == [0, 0]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_in_the_middle(face: Face, stream: bool) -> None:
    """A stream has given what it gave; an answer that was never sent has given nothing."""
    face.backend.error_at = 3
    await complete(face, max_tokens=50, stream=stream)
    (record,) = records(face)
    assert record.status == "503" and record.prompt > 0
    assert tokens_of(record) == ((3, 0, 0) if stream else (0, 3, 0))
    assert counters(face, "output_tokens", "discarded_tokens") == ([3, 0] if stream else [0, 3])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_second_replica_is_a_second_attempt(face: Face, stream: bool) -> None:
    """Sums over attempts bill each prompt and each token once."""
    face.backend.lost_at = 4
    await complete(face, max_tokens=9, stream=stream)
    first, second = records(face)
    assert first.request == second.request
    assert (first.attempt, first.status) == (1, MOVED)
    assert (second.attempt, second.status) == (2, "200")
    assert (first.prompt > 0, first.cached) == (True, 2)
    assert (second.prompt, second.cached) == (0, 0)
    assert tokens_of(first) == (4, 0, 0)
    assert tokens_of(second) == (5, 0, first.prompt + 4 - 2)
    assert counters(face, "output_tokens", "recomputed_tokens") == [9, second.recomputed]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_running_request_is_told_as_it_goes(face: Face, stream: bool) -> None:
    face.backend.gap_s = 0.02
    task = asyncio.create_task(complete(face, max_tokens=8, stream=stream))
    seen: list[UsageRecord] = []
    while not task.done():
        seen += records(face)
        await asyncio.sleep(0.01)
    await task
    seen += records(face)
    assert {record.request for record in seen} == {task.result().headers["x-request-id"]}
    assert {record.status for record in seen[:-1]} == {RUNNING}
    assert (seen[-1].status, seen[-1].delivered) == ("200", 8)
    delivered = [record.delivered for record in seen[:-1]]
    assert delivered == sorted(delivered)
    assert (max(delivered) > 0) == stream, (
        "an answer that is sent whole is not given before its end"
    )


async def test_an_adapter_of_another_tenant_is_that_tenants_bill(face: Face) -> None:
    """Where one serves all, an adapter's owner is billed and counted, whoever asked."""
    formal = face.frontend._directory.tenant("formal")
    resolve = face.frontend._directory.resolve
    face.frontend._directory.resolve = lambda *args: replace(resolve(*args), owner=formal)  # type: ignore
    await complete(face, max_tokens=3)
    (record,) = records(face)
    assert record.tenant == "formal"
    found = face.frontend.log.counters
    assert found[("moe_output_tokens_total", ("demo", "formal"))] == 3
    assert dict(face.frontend.log.traffic) == {"formal": record.prompt + 3}


async def test_who_is_turned_away_at_the_door_is_counted(face: Face) -> None:
    face.frontend._active["pirate"] = face.frontend.config.tenants[0].limits.max_concurrent_requests
    assert (await complete(face)).status_code == 429
    assert (await face.chat(key="sk-nobody")).status_code == 401
    found = face.frontend.log.counters
    assert found[("moe_requests_total", ("", "pirate", "429"))] == 1
    assert found[("moe_requests_total", ("", "", "401"))] == 1
    assert records(face) == []
