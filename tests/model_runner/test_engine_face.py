"""Outputs in few messages: the first at once, gaps between the others, the end without waiting.

The engine is a script. Real ones: test_engine_loop.py.
"""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from model_runner.engine_face import Abort, Command, EngineFace, Submit, join_outputs
from model_runner.request import (
    ErrorCode,
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)


class ScriptedFace(EngineFace):
    """An engine of a word: its test says what it tells."""

    def __init__(self) -> None:
        super().__init__()
        self.commands: list[Command] = []
        self.start()

    def _launch(self) -> None:
        self._ready.set()

    def _is_running(self) -> bool:
        return True

    def _send(self, command: Command) -> None:
        self.commands.append(command)

    def stop(self, timeout_s: float = 10.0) -> None:
        self._close("stopped by the test")

    async def key(self) -> str:
        """The id under which the last request was submitted."""
        while not self.commands:
            await asyncio.sleep(0)
        last = self.commands[-1]
        assert isinstance(last, Submit)
        return last.request.request_id

    def tell(self, key: str, *token_ids: int, index: int = 0, end: bool = False) -> None:
        for position, token_id in enumerate(token_ids):
            last = end and position == len(token_ids) - 1
            self._tell([output(token_id, index, last, key)], None)


def output(token_id: int, index: int = 0, end: bool = False, key: str = "r") -> RequestOutput:
    reason = FinishReason.LENGTH if end else None
    return RequestOutput(key, index, (token_id,), (TokenLogprobs(-1.0),), reason)


@pytest.fixture
async def face() -> AsyncIterator[ScriptedFace]:
    face = ScriptedFace()
    yield face
    assert not face._streams and not face._key_of


def request(n: int = 1) -> Request:
    return Request("r", (1, 2, 3), SamplingParams(n=n))


async def test_first_at_once_then_gaps_and_nothing_lost(face: ScriptedFace) -> None:
    async def feed() -> None:
        key = await face.key()
        for i in range(60):
            face.tell(key, i, end=i == 59)
            await asyncio.sleep(0.003)

    begin = time.monotonic()
    task = asyncio.create_task(feed())
    seen: list[tuple[float, RequestOutput]] = []
    async for message in face.messages(request(), 0.04):
        assert len(message) == 1
        seen.append((time.monotonic() - begin, message[0]))
    await task
    assert [token for _, out in seen for token in out.new_token_ids] == list(range(60))
    assert sum(len(out.logprobs) for _, out in seen) == 60
    assert {out.request_id for _, out in seen} == {"r"}
    assert seen[0][1].new_token_ids == (0,)
    assert seen[-1][1].finish_reason is FinishReason.LENGTH
    gaps = [b[0] - a[0] for a, b in zip(seen, seen[1:], strict=False)]
    assert min(gaps[:-1]) >= 0.038  # the last one waits for nothing


async def test_the_end_does_not_wait(face: ScriptedFace) -> None:
    begin = time.monotonic()
    stream = face.messages(request(), 50.0)
    first = asyncio.ensure_future(anext(stream))
    face.tell(await face.key(), 1)
    assert (await first)[0].new_token_ids == (1,)
    face.tell(await face.key(), 2, 3, end=True)
    assert [o.new_token_ids async for m in stream for o in m] == [(2, 3)]
    assert time.monotonic() - begin < 25


async def test_what_came_in_the_gap_goes_without_more_of_it(face: ScriptedFace) -> None:
    """No later step is needed to send it."""
    stream = face.messages(request(), 0.03)
    first = asyncio.ensure_future(anext(stream))
    key = await face.key()
    face.tell(key, 1)
    await first
    face.tell(key, 2)
    assert (await asyncio.wait_for(anext(stream), 20))[0].new_token_ids == (2,)
    await stream.aclose()


async def test_closing_aborts_and_forgets(face: ScriptedFace) -> None:
    stream = face.messages(request(), 50.0)
    first = asyncio.ensure_future(anext(stream))
    key = await face.key()
    face.tell(key, 1)
    await first
    await stream.aclose()
    assert face.commands[-1] == Abort(key)
    face.tell(key, 2)  # too late: nobody is there


async def test_cancelling_the_reader_aborts(face: ScriptedFace) -> None:
    async def read() -> None:
        async for _ in face.messages(request(), 0.02):
            pass

    task = asyncio.create_task(read())
    key = await face.key()
    face.tell(key, 1)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert face.commands[-1] == Abort(key)


async def test_an_ended_request_is_not_aborted(face: ScriptedFace) -> None:
    stream = face.messages(request(), 0.02)
    first = asyncio.ensure_future(anext(stream))
    face.tell(await face.key(), 1, end=True)
    await first
    assert [m async for m in stream] == []
    assert len(face.commands) == 1


async def test_an_engine_that_ends_fails_what_runs_after_what_was_read(face: ScriptedFace) -> None:
    stream = face.messages(request(n=2), 50.0)
    first = asyncio.ensure_future(anext(stream))
    key = await face.key()
    face.tell(key, 1)
    await first
    face.tell(key, 2)
    face.tell(key, 7, index=1, end=True)
    face.stop()
    (message,) = [m async for m in stream]
    assert [(o.index, o.new_token_ids, o.error_code) for o in message] == [
        (0, (2,), ErrorCode.ENGINE_DEAD),
        (1, (7,), None),
    ]
    assert message[0].error == "stopped by the test"
    assert [o.error_code async for o in face.stream(request())] == [ErrorCode.ENGINE_DEAD]


def test_join_keeps_sequences_apart() -> None:
    news = [output(1), output(7, 1), output(2), output(8, 1, end=True)]
    joined = join_outputs(news, "mine")
    assert [(o.request_id, o.index, o.new_token_ids, len(o.logprobs)) for o in joined] == [
        ("mine", 0, (1, 2), 2),
        ("mine", 1, (7, 8), 2),
    ]
    assert joined[0].finish_reason is None and joined[1].finish_reason is FinishReason.LENGTH
