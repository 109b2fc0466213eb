"""An engine's outputs in fewer messages: what crosses processes costs by the message, not by the
token.

Not for text: these are ids, and replicas need no tokenizer.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from model_runner.request import RequestOutput


async def coalesce(
    outputs: AsyncGenerator[RequestOutput, None], gap_s: float
) -> AsyncGenerator[list[RequestOutput], None]:
    """Outputs in messages: the first at once, later ones at least `gap_s` apart, the last without
    waiting.

    In a message each sequence has one output, its tokens joined. Closing this closes `outputs` at
    once.
    """
    pending: list[RequestOutput] = []
    news = asyncio.Event()
    ended = asyncio.Event()

    async def pump() -> None:
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    pending.append(output)
                    news.set()
        finally:
            ended.set()
            news.set()

    task = asyncio.create_task(pump())
    try:
        while True:
            await news.wait()
            news.clear()
            if pending:
                message, pending[:] = join_outputs(pending), []
                yield message
                if gap_s and not ended.is_set():
                    await _wait_at_most(ended, gap_s)
            elif ended.is_set():
                await task  # raises what the stream raised
                return
            if pending or ended.is_set():
                news.set()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _wait_at_most(event: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return


def join_outputs(outputs: Sequence[RequestOutput]) -> list[RequestOutput]:
    """One output for each sequence: tokens and logprobs joined, the rest from its last."""
    joined: dict[int, RequestOutput] = {}
    for output in outputs:
        before = joined.get(output.index)
        if before is not None:
            output = replace(
                output,
                new_token_ids=before.new_token_ids + output.new_token_ids,
                logprobs=before.logprobs + output.logprobs,
                prompt_logprobs=before.prompt_logprobs + output.prompt_logprobs,
            )
        joined[output.index] = output
    return list(joined.values())
