"""The asyncio face of the engine: streams, hang-ups, aborts, a broken engine, two event loops."""

import asyncio
import threading
import time

import pytest

from adapter_store.ref import AdapterRef
from model_runner.config import EngineConfig
from model_runner.engine import Engine
from model_runner.engine_loop import EngineLoop
from model_runner.request import ErrorCode, FinishReason, Request, SamplingParams
from tests.model_runner.demo import ADAPTER_DIRS, BASE_DIR

CONFIG = EngineConfig(model=str(BASE_DIR), max_model_len=1024, kv_bytes=32 << 20)
PIRATE = AdapterRef("pirate", str(ADAPTER_DIRS["pirate"]))


@pytest.fixture(scope="module")
def loop():
    loop = EngineLoop(lambda: Engine(CONFIG))
    loop.start(60)
    yield loop
    loop.stop()


def greedy(name: str, max_tokens: int, **fields) -> Request:
    return Request(
        name,
        (5, 6, 7, 8),
        SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
        **fields,
    )


async def collect(loop: EngineLoop, request: Request) -> list[int]:
    ids = []
    async for output in loop.stream(request):
        assert output.error_code is None, output.error
        ids += output.new_token_ids
    return ids


async def wait_until(condition, timeout_s: float) -> float:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s
        await asyncio.sleep(0.002)
    return time.monotonic() - start


async def test_many_streams_at_once_equal_the_engine_alone(loop):
    alone = await collect(loop, greedy("alone", 30))
    pirate = await collect(loop, greedy("pirate-alone", 30, adapter=PIRATE))
    many = await asyncio.gather(
        *(collect(loop, greedy(f"s{i}", 30, adapter=PIRATE if i % 2 else None)) for i in range(20))
    )
    assert all(ids == (pirate if i % 2 else alone) for i, ids in enumerate(many))
    assert len(alone) == 30 and alone != pirate


async def test_closing_a_stream_frees_the_engine_within_100_ms(loop):
    stream = loop.stream(greedy("long", 900))
    await anext(stream)
    assert loop.stats().running == 1 or await wait_until(lambda: loop.stats().running == 1, 1) < 1
    await stream.aclose()
    assert await wait_until(lambda: loop.stats().running == 0, 1) < 0.1


async def test_cancelling_a_task_aborts_its_request(loop):
    task = asyncio.create_task(collect(loop, greedy("cancelled", 900)))
    await wait_until(lambda: loop.stats().running == 1, 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await wait_until(lambda: loop.stats().running == 0, 1) < 0.1


async def test_abort_from_outside_ends_the_stream(loop):
    stream = loop.stream(greedy("aborted", 900))
    await anext(stream)
    loop.abort("aborted")
    last = [o async for o in stream][-1]
    assert last.finish_reason is FinishReason.ABORT


async def test_a_request_id_in_use_is_refused_and_the_first_goes_on(loop):
    first = asyncio.create_task(collect(loop, greedy("same", 200)))
    await wait_until(lambda: loop.stats().running == 1, 5)
    refused = [o async for o in loop.stream(greedy("same", 5))]
    assert [o.error_code for o in refused] == [ErrorCode.BAD_REQUEST]
    assert len(await first) == 200


async def test_n_answers_and_bad_requests_end_their_streams(loop):
    sampling = SamplingParams(n=3, seed=1, max_tokens=4, ignore_eos=True)
    outputs = [o async for o in loop.stream(Request("n", (5, 6), sampling))]
    assert sorted(o.index for o in outputs if o.finish_reason) == [0, 1, 2]
    bad = [o async for o in loop.stream(Request("bad", (), SamplingParams(n=2)))]
    assert [(o.index, o.error_code) for o in bad] == [
        (0, ErrorCode.BAD_REQUEST),
        (1, ErrorCode.BAD_REQUEST),
    ]


async def test_a_request_id_used_again_gets_its_own_tokens(loop):
    wanted = await collect(loop, greedy("first-time", 12))
    stream = loop.stream(greedy("again", 900))
    await anext(stream)
    await stream.aclose()
    assert await collect(loop, greedy("again", 12)) == wanted
    await wait_until(lambda: loop.stats().running == 0, 1)


async def test_a_stuck_engine_refuses_the_new_and_keeps_the_old(loop, monkeypatch):
    stream = loop.stream(greedy("old", 400))
    await anext(stream)
    monkeypatch.setattr(EngineLoop, "alive", False)
    refused = [o async for o in loop.stream(greedy("new", 5))]
    assert [o.error_code for o in refused] == [ErrorCode.ENGINE_DEAD]
    monkeypatch.undo()
    assert [o async for o in stream][-1].finish_reason is FinishReason.LENGTH


async def test_whatever_n_is_the_stream_ends(loop):
    for n in (0, 200, None):
        sampling = SamplingParams(n=n, max_tokens=2)
        outputs = [o async for o in loop.stream(Request(f"n{n}", (5, 6), sampling))]
        assert [o.error_code for o in outputs] == [ErrorCode.BAD_REQUEST]


async def test_a_stopped_loop_refuses_even_while_its_engine_closes(monkeypatch):
    loop = EngineLoop(lambda: Engine(CONFIG))
    loop.start(60)
    closing, go_on = threading.Event(), threading.Event()
    real = Engine.close

    def slow_close(self):
        closing.set()
        go_on.wait(10)
        real(self)

    monkeypatch.setattr(Engine, "close", slow_close)
    stopper = threading.Thread(target=loop.stop)
    stopper.start()
    await wait_until(closing.is_set, 5)
    assert not loop.alive
    late = [o async for o in loop.stream(greedy("late", 5))]
    assert [o.error_code for o in late] == [ErrorCode.ENGINE_DEAD]
    go_on.set()
    stopper.join(20)


def test_streams_of_two_event_loops(loop):
    results = {}

    def run(name: str) -> None:
        results[name] = asyncio.run(collect(loop, greedy(name, 20)))

    threads = [threading.Thread(target=run, args=(f"loop{i}",)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results["loop0"] == results["loop1"] and len(results["loop0"]) == 20


def test_an_engine_that_cannot_be_built_says_why():
    broken = EngineLoop(lambda: Engine(EngineConfig(model="/nowhere")))
    with pytest.raises(ValueError, match="/nowhere"):
        broken.start(30)
    assert not broken.alive


async def test_a_broken_engine_fails_its_streams_and_is_not_alive(monkeypatch):
    loop = EngineLoop(lambda: Engine(CONFIG))
    loop.start(60)
    stream = loop.stream(greedy("victim", 900))
    await anext(stream)

    def explode(self):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    monkeypatch.setattr(Engine, "step", explode)
    last = [o async for o in stream][-1]
    assert last.error_code is ErrorCode.ENGINE_DEAD and "the device is gone" in last.error
    await wait_until(lambda: not loop.alive, 5)
    late = [o async for o in loop.stream(greedy("late", 5))]
    assert [o.error_code for o in late] == [ErrorCode.ENGINE_DEAD]
