"""The asyncio face of an engine: streams, hang-ups, aborts, a broken engine, two event loops.

Everything over a thread and over a child process. Not here: messages and gaps
(test_engine_face.py).
"""

import asyncio
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from adapter_store.ref import AdapterRef
from model_runner.config import EngineConfig
from model_runner.engine import Engine
from model_runner.engine_face import EngineFace
from model_runner.engine_loop import EngineLoop
from model_runner.engine_process import EngineProcess
from model_runner.request import ErrorCode, FinishReason, Request, SamplingParams
from tests.model_runner import broken_engines
from tests.model_runner.demo import ADAPTER_DIRS, BASE_DIR
from tests.ready_engine import ReadyEngine

CONFIG = EngineConfig(model=str(BASE_DIR), max_model_len=1024, kv_bytes=32 << 20)
PIRATE = AdapterRef("pirate", str(ADAPTER_DIRS["pirate"]))


ENGINE = functools.partial(Engine, CONFIG)
FACES = pytest.mark.parametrize("face", [EngineLoop, EngineProcess])


@pytest.fixture(scope="module", params=[EngineLoop, EngineProcess])
def loop(request):
    loop = request.param(ENGINE)
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


async def collect(loop: EngineFace, request: Request) -> list[int]:
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
    monkeypatch.setattr(type(loop), "alive", False)
    refused = [o async for o in loop.stream(greedy("new", 5))]
    assert [o.error_code for o in refused] == [ErrorCode.ENGINE_DEAD]
    monkeypatch.undo()
    assert [o async for o in stream][-1].finish_reason is FinishReason.LENGTH


async def test_whatever_n_is_the_stream_ends(loop):
    for n in (0, 200, None):
        sampling = SamplingParams(n=n, max_tokens=2)
        outputs = [o async for o in loop.stream(Request(f"n{n}", (5, 6), sampling))]
        assert [o.error_code for o in outputs] == [ErrorCode.BAD_REQUEST]


@FACES
async def test_a_stopped_loop_refuses_even_while_its_engine_closes(face):
    loop = face(broken_engines.SlowlyClosingEngine)
    loop.start(60)
    stopper = threading.Thread(target=loop.stop)
    stopper.start()
    await wait_until(lambda: not loop.alive, 5)
    late = [o async for o in loop.stream(greedy("late", 5))]
    assert [o.error_code for o in late] == [ErrorCode.ENGINE_DEAD]
    assert stopper.is_alive()
    await asyncio.to_thread(stopper.join, 20)
    assert not stopper.is_alive()


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


@FACES
def test_an_engine_that_cannot_be_built_says_why(face):
    broken = face(functools.partial(EngineConfig, "/nowhere", page_tokens=0))
    with pytest.raises(ValueError, match="page_tokens"):
        broken.start(30)
    assert not broken.alive
    broken.stop()


def test_an_error_that_cannot_travel_is_told_in_words():
    broken = EngineProcess(broken_engines.refuse_to_be_built)
    with pytest.raises(RuntimeError, match="OddError: there is no such engine"):
        broken.start(30)


@FACES
async def test_a_broken_engine_fails_its_streams_and_is_not_alive(face, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    loop = face(broken_engines.ExplodingEngine)
    loop.start(60)
    outputs = [o async for o in loop.stream(greedy("victim", 900))]
    assert sum(len(o.new_token_ids) for o in outputs) == 4
    assert outputs[-1].error_code is ErrorCode.ENGINE_DEAD
    assert "the device is gone" in outputs[-1].error
    await wait_until(lambda: not loop.alive, 5)
    late = [o async for o in loop.stream(greedy("late", 5))]
    assert [o.error_code for o in late] == [ErrorCode.ENGINE_DEAD]


# Of a child process alone


async def test_a_child_that_crashes_fails_its_streams_alone():
    loop = EngineProcess(broken_engines.CrashingEngine)
    loop.start(60)
    outputs = [o async for o in loop.stream(greedy("victim", 900))]
    assert sum(len(o.new_token_ids) for o in outputs) == 4
    assert outputs[-1].error_code is ErrorCode.ENGINE_DEAD
    assert "exit code 9" in outputs[-1].error and not loop.alive
    loop.stop()


async def test_a_killed_child_is_noticed_while_it_idles():
    loop = EngineProcess(ReadyEngine)
    loop.start(60)
    os.kill(loop.pid, signal.SIGKILL)
    await wait_until(lambda: not loop.alive, 5)
    loop.stop()


def test_a_stopped_child_is_gone():
    loop = EngineProcess(ReadyEngine)
    loop.start(60)
    loop.stop()
    assert not _exists(loop.pid)


def test_a_child_does_not_outlive_a_killed_parent():
    code = (
        "from model_runner.engine_process import EngineProcess\n"
        "from tests.ready_engine import ReadyEngine\n"
        "import time\n"
        "loop = EngineProcess(ReadyEngine); loop.start(60); print(loop.pid, flush=True)\n"
        "time.sleep(100)\n"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert _exists(pid)
        parent.kill()
    end = time.monotonic() + 20
    while _exists(pid) and time.monotonic() < end:
        time.sleep(0.02)
    assert not _exists(pid)


def _exists(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
