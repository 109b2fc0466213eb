"""Interleaving and spelling of outputs. Without HTTP."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from deployments.streaming import Tally, interleave
from model_runner.sequence_text import TextOutput


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
