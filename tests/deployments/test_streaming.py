"""Coalescing, interleaving and spelling of outputs. Without HTTP."""

import asyncio
import time
from collections.abc import AsyncGenerator

import pytest

from deployments.coalescing import coalesce, join_outputs
from deployments.streaming import Tally, interleave
from model_runner.request import FinishReason, RequestOutput, TokenLogprobs
from model_runner.text import TextOutput


def output(token_id: int, index: int = 0, end: bool = False) -> RequestOutput:
    reason = FinishReason.LENGTH if end else None
    return RequestOutput("r", index, (token_id,), (TokenLogprobs(-1.0),), reason)


async def paced(
    number: int, gap_s: float, closed: list[str]
) -> AsyncGenerator[RequestOutput, None]:
    try:
        for i in range(number):
            yield output(i, end=i == number - 1)
            await asyncio.sleep(gap_s)
    finally:
        closed.append("closed")


async def test_first_at_once_then_gaps_and_nothing_lost() -> None:
    begin = time.monotonic()
    seen: list[tuple[float, RequestOutput]] = []
    async for message in coalesce(paced(60, 0.003, []), 0.04):
        assert len(message) == 1
        seen.append((time.monotonic() - begin, message[0]))
    tokens = [token for _, out in seen for token in out.new_token_ids]
    assert tokens == list(range(60))
    assert sum(len(out.logprobs) for _, out in seen) == 60
    assert seen[0][1].new_token_ids == (0,) and seen[0][0] < 0.03
    assert seen[-1][1].finish_reason is FinishReason.LENGTH
    gaps = [b[0] - a[0] for a, b in zip(seen, seen[1:], strict=False)]
    assert min(gaps[:-1]) >= 0.039  # the last one waits for nothing


async def test_the_end_does_not_wait() -> None:
    begin = time.monotonic()
    messages = [m async for m in coalesce(paced(2, 0.0, []), 5.0)]
    assert time.monotonic() - begin < 1
    assert [t for m in messages for o in m for t in o.new_token_ids] == [0, 1]


async def test_closing_closes_the_source_at_once() -> None:
    closed: list[str] = []
    stream = coalesce(paced(1000, 0.01, closed), 0.5)
    await anext(stream)
    begin = time.monotonic()
    await stream.aclose()
    assert closed == ["closed"] and time.monotonic() - begin < 0.1


async def test_cancelling_the_reader_closes_the_source() -> None:
    closed: list[str] = []

    async def read() -> None:
        async for _ in coalesce(paced(1000, 0.01, closed), 0.02):
            pass

    task = asyncio.create_task(read())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert closed == ["closed"]


async def test_an_error_of_the_source_comes_out_after_what_was_read() -> None:
    async def broken() -> AsyncGenerator[RequestOutput, None]:
        yield output(1)
        yield output(2)
        raise RuntimeError("engine broke")

    seen: list[int] = []
    with pytest.raises(RuntimeError, match="engine broke"):
        async for message in coalesce(broken(), 0.01):
            seen += message[0].new_token_ids
    assert seen == [1, 2]


def test_join_keeps_sequences_apart() -> None:
    joined = join_outputs([output(1), output(7, 1), output(2), output(8, 1, end=True)])
    assert [(o.index, o.new_token_ids, len(o.logprobs)) for o in joined] == [
        (0, (1, 2), 2),
        (1, (7, 8), 2),
    ]
    assert joined[0].finish_reason is None and joined[1].finish_reason is FinishReason.LENGTH


async def numbers(
    start: int, stop: int, closed: list[int], error: Exception | None = None
) -> AsyncGenerator[TextOutput, None]:
    try:
        for i in range(start, stop):
            await asyncio.sleep(0.001)
            yield TextOutput("r", text=str(i))
        if error is not None:
            raise error
    finally:
        closed.append(start)


async def test_interleave_gives_everything_in_each_stream_s_order() -> None:
    closed: list[int] = []
    streams = [numbers(0, 5, closed), numbers(10, 13, closed), numbers(20, 20, closed)]
    seen: dict[int, list[str]] = {}
    async for number, out in interleave(streams):
        seen.setdefault(number, []).append(out.text)
    assert seen == {0: ["0", "1", "2", "3", "4"], 1: ["10", "11", "12"]}
    assert sorted(closed) == [0, 10, 20]


@pytest.mark.parametrize("number", [1, 3])
async def test_interleave_closes_all(number: int) -> None:
    closed: list[int] = []
    stream = interleave([numbers(i * 1000, i * 1000 + 900, closed) for i in range(number)])
    await anext(stream)
    await asyncio.sleep(0.01)
    await stream.aclose()
    assert sorted(closed) == [i * 1000 for i in range(number)]


async def test_interleave_raises_what_a_stream_raised() -> None:
    closed: list[int] = []
    streams = [numbers(0, 2, closed, ValueError("bad")), numbers(1000, 1900, closed)]
    with pytest.raises(ValueError, match="bad"):
        async for _ in interleave(streams):
            pass
    assert sorted(closed) == [0, 1000]


def test_tally_counts_prompts_once_and_outputs_by_sequence() -> None:
    tally = Tally()
    for request_id in ("r-0", "r-1"):
        for index in range(2):
            for so_far in (1, 3):
                tally.add(
                    TextOutput(
                        request_id,
                        index,
                        num_prompt_tokens=10,
                        num_cached_tokens=4,
                        num_output_tokens=so_far,
                    )
                )
    usage = tally.usage()
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (20, 12, 32)
    assert usage.prompt_tokens_details.cached_tokens == 8
    assert tally.add(TextOutput("r-0", 0, num_output_tokens=5)) == 2
    assert tally.add(TextOutput("r-0", 0)) == 0
