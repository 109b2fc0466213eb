"""A request whose replica is lost goes on elsewhere: no id twice, none missing, and never a third
replica. One whose connection broke goes on from what its replica still knows.

The replicas are stood in for by the calls of a deployment handle. Not here: real ones that are
killed (test_kills.py), and that an engine goes on from given ids (model_runner's test_resume.py).
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve.exceptions import BackPressureError

from deployments.config import ServiceConfig
from deployments.frontend import Frontend
from deployments.ingress import build_api
from deployments.kept_answers import GRACE_S, MAX_CLOSED, ORPHAN_S, KeptAnswers
from deployments.placement.view import Place
from deployments.pulse import SHUNNED_S, Pulse
from deployments.replica_backend import ReplicaBackend, _is_there
from model_runner.engine_face import join_outputs
from model_runner.request import (
    ErrorCode,
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from model_runner.tokenizer import Tokenizer
from tests.deployments.conftest import FakeControl
from tests.guards import take_out

LENGTH = 12
Script = Callable[[Request], AsyncIterator[list[RequestOutput]]]


def draw(index: int, position: int) -> int:
    """The id that every engine draws there."""
    return 1000 * index + position


def run_engine(
    request: Request, sizes: list[int], stop_after: int | None = None
) -> list[list[RequestOutput]]:
    """The messages of one run: each brings every open sequence as many ids as `sizes` says in turn.

    stop_after  messages until the run breaks off
    """
    given = request.resumed or ((),) * request.sampling.n
    at = {i: len(ids) for i, ids in enumerate(given) if ids is not None}
    messages = []
    while at and (stop_after is None or len(messages) < stop_after):
        size = sizes[len(messages) % len(sizes)]
        message = []
        for index, start in list(at.items()):
            end = min(start + size, LENGTH - index)  # they end at different times
            at[index] = end
            is_last = end == LENGTH - index
            if is_last:
                del at[index]
            message.append(
                RequestOutput(
                    request.request_id,
                    index,
                    tuple(draw(index, p) for p in range(start, end)),
                    finish_reason=FinishReason.LENGTH if is_last else None,
                    num_cached_tokens=len(request.resumed),
                    adapter_digest="content",
                    num_output_tokens=end,
                )
            )
        messages.append(message)
    return messages


def script(
    sizes: list[int], stop_after: int | None = None, loss: Exception | None = None
) -> Script:
    """One call: it runs to its end, or breaks off with `loss` (None: it just ends)."""

    async def messages(request: Request) -> AsyncIterator[list[RequestOutput]]:
        for message in run_engine(request, sizes, stop_after):
            yield message
        if stop_after is not None and loss is not None:
            raise loss

    return messages


def refuse(exc: Exception) -> Script:
    return script([1], 0, exc)


def say(code: ErrorCode) -> Script:
    """A replica, or its engine, that does not take the request."""

    async def messages(request: Request) -> AsyncIterator[list[RequestOutput]]:
        reason = FinishReason.ERROR
        yield [RequestOutput(request.request_id, finish_reason=reason, error_code=code)]

    return messages


def engine_dies(after: int) -> Script:
    """The actor lives on and says that its engine does not."""

    async def messages(request: Request) -> AsyncIterator[list[RequestOutput]]:
        for message in run_engine(request, [1], after):
            yield message
        error, reason = ErrorCode.ENGINE_DEAD, FinishReason.ERROR
        for index in range(request.sampling.n):
            yield [RequestOutput(request.request_id, index, (), (), reason, error, "stopped")]

    return messages


@dataclass
class FakeHandle:
    """A deployment handle whose calls follow the scripts, one a call; replica i takes call i."""

    scripts: list[Script]
    requests: list[Request] = field(default_factory=list)
    avoided: list[tuple[str, ...]] = field(default_factory=list)
    shunned: list[tuple[str, ...]] = field(default_factory=list)
    may_spill: list[bool] = field(default_factory=list)
    aborted: list[tuple[Any, ...]] = field(default_factory=list)
    recalls: dict[str, Any] = field(default_factory=dict)  # by seat
    num_cancelled: int = 0

    def options(self, method_name: str = "", **_: Any) -> Any:
        if not method_name:
            return self
        return SimpleNamespace(remote=self._recall if method_name == "recall" else self._call)

    def broadcast(self, *call: Any) -> Any:
        """As Ray's: nothing is sent before somebody waits for it."""

        async def send(return_exceptions: bool) -> list[None]:
            self.aborted.append(call)
            return []

        return SimpleNamespace(results_async=send)

    async def _recall(self, request_id: str, place: Place) -> list[RequestOutput] | None:
        assert not place.may_spill, "the question itself would be told that it has spilled"
        told = self.recalls.get(place.homes[0])
        if isinstance(told, Exception):
            raise told
        if told == "silent":
            await asyncio.Event().wait()
        return told

    def _call(self, request: Request, place: Place) -> Any:
        place.taken_by.append(f"replica-{len(self.requests)}")
        self.requests.append(request)
        self.avoided.append(place.avoid)
        self.shunned.append(place.shun)
        self.may_spill.append(place.may_spill)
        messages = self.scripts.pop(0)(request)

        def cancel() -> None:
            self.num_cancelled += 1

        class Response:
            def __aiter__(self) -> "Response":
                return self

            async def __anext__(self) -> list[RequestOutput]:
                return await anext(messages)

        response = Response()
        response.cancel = cancel  # type: ignore[attr-defined]
        return response


async def answer(
    handle: FakeHandle, n: int = 1, patience_s: float = 10
) -> tuple[dict[int, list[int]], RequestOutput]:
    """The ids of each sequence, and the last output."""
    backend = ReplicaBackend(handle, patience_s)  # type: ignore[arg-type]
    request = Request("r", (1,), SamplingParams(max_tokens=LENGTH, n=n, seed=1))
    outputs = [output async for output in backend.stream(request, None)]
    ids: dict[int, list[int]] = {}
    for output in outputs:
        assert output.request_id == "r"
        ids.setdefault(output.index, []).extend(output.new_token_ids)
        if output.error_code is None:
            assert output.num_output_tokens == len(ids[output.index])
    assert handle.num_cancelled == len(handle.requests)
    assert not backend._running
    return ids, outputs[-1]


def whole(n: int = 1) -> dict[int, list[int]]:
    return {i: [draw(i, p) for p in range(LENGTH - i)] for i in range(n)}


LOSSES = [
    ActorDiedError(),
    ActorUnavailableError("gone", b"1" * 16),
    RuntimeError("what gRPC raises"),
    None,
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda e: type(e).__name__)
@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, LENGTH),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.integers(1, 3),
)
def test_no_id_is_lost_or_told_twice(
    loss: Exception | None, cut: int, first: list[int], then: list[int], n: int
) -> None:
    handle = FakeHandle([script(first, cut, loss), script(then)])
    ids, last = asyncio.run(answer(handle, n))
    assert ids == whole(n)
    assert last.finish_reason is FinishReason.LENGTH
    assert not (cut and last.num_cached_tokens), "what the first replica had cached is what counts"


async def test_the_second_replica_is_told_what_came_and_the_first_is_avoided() -> None:
    handle = FakeHandle([script([11], 1, ActorDiedError()), script([1])])
    ids, _ = await answer(handle, 2)
    assert ids == whole(2)
    first, second = handle.requests
    assert first.resumed == () and second.resumed == (tuple(whole()[0][:11]), None)
    assert (first.request_id, second.request_id) == ("r", "r/2")
    assert (first.adapter_digest, second.adapter_digest) == ("", "content")
    assert handle.avoided == [(), ("replica-0",)]


async def test_an_engine_that_stopped_counts_as_lost() -> None:
    handle = FakeHandle([engine_dies(5), script([2])])
    ids, last = await answer(handle, 2)
    assert ids == whole(2) and last.finish_reason is FinishReason.LENGTH
    assert handle.avoided == [(), ("replica-0",)]


async def never_a_third() -> None:
    for second in (script([1], 2, ActorDiedError()), engine_dies(0)):
        handle = FakeHandle([script([1], 3, ActorDiedError()), second, script([1])])
        _, last = await answer(handle)
        assert last.error_code is ErrorCode.REPLICAS_LOST and "2 replicas were lost" in last.error
        assert len(handle.requests) == 2


async def test_never_a_third() -> None:
    await never_a_third()


async def test_a_third_runs_without(monkeypatch: pytest.MonkeyPatch) -> None:
    take_out(monkeypatch, ReplicaBackend, "stream", "progress.attempt == MAX_ATTEMPTS", "False")
    with pytest.raises(AssertionError):
        await never_a_third()


@pytest.mark.parametrize(("stream", "num_messages"), [(False, 0), (False, 3), (True, 0)])
async def test_who_lost_two_replicas_gets_a_500(
    demo_config: ServiceConfig, demo_tokenizer: Tokenizer, stream: bool, num_messages: int
) -> None:
    """And not a 503, which clients try again: nobody knows that it was not the request itself."""
    lost = script([1], num_messages, ActorDiedError())
    handle = FakeHandle([lost, lost, script([1])])
    backend: Any = ReplicaBackend(handle)  # type: ignore[arg-type]
    api = build_api(Frontend(demo_config, b"k" * 32, {"demo": backend}), FakeControl())
    body = {"model": "demo", "prompt": "The", "max_tokens": LENGTH, "stream": stream}
    headers = {"Authorization": "Bearer sk-demo-pirate"}
    transport = httpx.ASGITransport(api, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 500 and "retry-after" not in response.headers
    assert response.json()["error"]["code"] == "replicas_lost"
    assert len(handle.requests) == 2, "a third replica was asked"


async def test_what_came_with_its_end_is_not_run_again() -> None:
    """The replica dies between an answer's last message and the end of its stream."""
    handle = FakeHandle([script([4], 3, ActorDiedError())])
    ids, last = await answer(handle)
    assert ids == whole() and last.finish_reason is FinishReason.LENGTH
    assert len(handle.requests) == 1


async def test_a_sequence_that_nobody_wants_is_not_run_again() -> None:
    """Its stop string came; the replica died before it heard of that."""
    handle = FakeHandle([script([1], 3, ActorDiedError()), script([1])])
    backend = ReplicaBackend(handle)  # type: ignore[arg-type]
    request = Request("r", (1,), SamplingParams(max_tokens=LENGTH, n=2, seed=1))
    async for output in backend.stream(request, None):
        if output.index == 0 and output.num_output_tokens == 2:
            await backend.abort("r", 0)
    await asyncio.sleep(0)
    assert handle.aborted == [("abort", "r", 0)]
    assert handle.requests[1].resumed == (None, tuple(whole(2)[1][:3]))
    await backend.abort("r", 1)  # long over
    await asyncio.sleep(0)
    assert len(handle.aborted) == 1


BUSY = BackPressureError(num_queued_requests=1, max_queued_requests=1)


async def test_full_replicas_turn_away_what_is_new_and_not_what_has_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deployments.replica_backend._FULL_RETRY_S", 0.0)
    _, last = await answer(FakeHandle([refuse(BUSY)]))
    assert last.error_code is ErrorCode.OVERLOADED
    lost = script([1], 3, ActorDiedError())
    handle = FakeHandle([lost, refuse(BUSY), refuse(BUSY), script([1])])
    ids, _ = await answer(handle)
    assert ids == whole()


async def test_who_comes_after_the_last_place_was_taken_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two ingresses saw the same one: what is new and what has begun alike."""
    monkeypatch.setattr("deployments.replica_backend._FULL_RETRY_S", 0.0)
    full, lost = say(ErrorCode.OVERLOADED), script([1], 3, ActorDiedError())
    handle = FakeHandle([full, full, lost, full, script([1])])
    ids, last = await answer(handle)
    assert ids == whole() and last.finish_reason is FinishReason.LENGTH
    assert handle.avoided == [(), (), (), ("replica-2",), ("replica-2",)]


async def test_control_calls_have_a_queue_of_their_own() -> None:
    handle = FakeHandle([script([LENGTH - 4])])
    told = run_engine(Request("r", (1,), SamplingParams(max_tokens=LENGTH)), [4], 1)[0]
    control = FakeHandle([], recalls={"mine": told})
    backend = ReplicaBackend(handle, control=control)  # type: ignore[arg-type]
    request = Request("r/again", (1,), SamplingParams(max_tokens=LENGTH))
    async for _ in backend.stream(request, Place(("mine",)), again=True):
        await backend.abort("r/again", 0)
    await asyncio.sleep(0)
    assert control.aborted and not handle.aborted and not handle.requests


async def test_it_does_not_wait_for_ever_for_another_replica() -> None:
    async def nothing(request: Request) -> AsyncIterator[list[RequestOutput]]:
        await asyncio.Event().wait()
        yield []

    ids, last = await answer(FakeHandle([script([1], 3, ActorDiedError()), nothing]), 1, 0.01)
    assert ids == {0: whole()[0][:3]} and last.error_code is ErrorCode.REPLICAS_LOST


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of replicas that do not answer."""
    silent: set[str] = set()

    async def is_there(replica: str) -> None:
        if replica == "replica-0" and replica in silent:
            await asyncio.Event().wait()
        if replica in silent:
            raise ActorDiedError()

    monkeypatch.setattr("deployments.replica_backend._is_there", is_there)
    monkeypatch.setattr("deployments.pulse.PERIOD_S", 0.005)
    return silent


def falls_silent(after: int, now: asyncio.Event) -> Script:
    """A replica whose node is cut off for a time: nothing comes, not even an error."""

    async def messages(request: Request) -> AsyncIterator[list[RequestOutput]]:
        for number, message in enumerate(run_engine(request, [1])):
            if number == after:
                await now.wait()
            yield message

    return messages


@pytest.mark.parametrize("after", [0, 1, 5])
async def test_a_silent_replica_is_lost_like_a_dead_one(after: int, silence: set[str]) -> None:
    silence.add("replica-0")
    handle = FakeHandle([falls_silent(after, asyncio.Event()), script([2])])
    ids, last = await answer(handle)
    assert ids == whole() and last.finish_reason is FinishReason.LENGTH
    assert handle.avoided == [(), ()] and handle.shunned == [(), ("replica-0",)]


async def test_what_was_silent_gets_nothing_new_for_a_while(silence: set[str]) -> None:
    silence.add("replica-0")
    handle = FakeHandle([falls_silent(1, asyncio.Event()), *[script([LENGTH])] * 3])
    backend = ReplicaBackend(handle)  # type: ignore[arg-type]
    request = Request("r", (1,), SamplingParams(max_tokens=LENGTH, seed=1))
    for _ in range(2):
        assert [output async for output in backend.stream(request, None)]
    assert handle.shunned[2] == ("replica-0",)
    until = backend._pulse._shunned_until["replica-0"]
    assert 0 < until - asyncio.get_running_loop().time() < SHUNNED_S
    backend._pulse._shunned_until["replica-0"] = asyncio.get_running_loop().time()
    assert backend._pulse.shunned() == ()


async def test_what_falls_silent_again_is_shunned_again(silence: set[str]) -> None:
    silence.add("replica-0")
    pulse = Pulse(lambda _: asyncio.Event().wait())
    for _ in range(2):
        lost = asyncio.Event()
        with pulse.watching(["replica-0"], lost.set):
            await asyncio.wait_for(lost.wait(), 10)
        assert pulse.shunned() == ("replica-0",)
        pulse._shunned_until["replica-0"] = asyncio.get_running_loop().time()


async def test_one_that_takes_its_time_and_the_last_one_are_not_given_up(silence: set[str]) -> None:
    """They answer, or there is no third: however long they are silent in between."""
    goes_on = asyncio.Event()
    asyncio.get_running_loop().call_later(0.2, goes_on.set)
    handle = FakeHandle([falls_silent(3, goes_on)])
    await answer(handle)
    assert len(handle.requests) == 1
    silence |= {"replica-0", "replica-1"}
    goes_on = asyncio.Event()
    asyncio.get_running_loop().call_later(0.2, goes_on.set)
    handle = FakeHandle([falls_silent(3, asyncio.Event()), falls_silent(0, goes_on)])
    ids, _ = await answer(handle)
    assert ids == whole()


async def test_prompts_in_every_thread_make_no_replica_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The threads of the loop tokenize long prompts, any tenant's: a flood of them fills all."""

    async def answers() -> int:
        return 0

    actor = SimpleNamespace(get_num_ongoing_requests=SimpleNamespace(remote=answers))
    monkeypatch.setattr("ray.get_actor", lambda name, namespace: actor)
    is_over = threading.Event()
    executor = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(executor)
    prompt = asyncio.get_running_loop().run_in_executor(None, is_over.wait, 30)
    try:
        await asyncio.wait_for(_is_there("replica-0"), 5)
    finally:
        is_over.set()
        await prompt


async def test_closing_cancels_the_call() -> None:
    handle = FakeHandle([script([1])])
    stream = ReplicaBackend(handle).stream(Request("r", (1,)), None)  # type: ignore[arg-type]
    await anext(stream)
    await stream.aclose()
    assert handle.num_cancelled == 1


# A connection that broke


async def told_by(request: Request, kept: KeptAnswers, num_messages: int) -> None:
    """A replica runs the request; whoever listens leaves after some messages."""
    messages = kept.note(request, script([2])(request))  # type: ignore[arg-type]
    async with aclosing(messages):
        for _ in range(num_messages):
            await anext(messages, None)


async def again(handle: FakeHandle, n: int = 1) -> dict[int, list[int]]:
    """The ids that another ingress gives."""
    backend = ReplicaBackend(handle)  # type: ignore[arg-type]
    request = Request("r/again", (1,), SamplingParams(max_tokens=LENGTH, n=n, seed=1))
    place = Place(("dead", "slow"), seats=("other", "mine", "slow"))
    ids: dict[int, list[int]] = {}
    async for output in backend.stream(request, place, again=True):
        assert output.request_id == "r/again" and output.error_code is None
        ids.setdefault(output.index, []).extend(output.new_token_ids)
    return ids


async def test_what_was_recalled_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client has a part of it: no full queue and no seat without room refuses the rest."""
    monkeypatch.setattr("deployments.replica_backend._FULL_RETRY_S", 0.0)
    monkeypatch.setattr("deployments.replica_backend.OTHERS_S", 0.0)
    told = run_engine(Request("r", (1,), SamplingParams(max_tokens=LENGTH)), [3], 1)[0]
    handle = FakeHandle([refuse(BUSY), script([1])], recalls={"mine": told})
    assert await again(handle) == whole()
    assert handle.may_spill == [False, False]


@pytest.mark.parametrize("shorter", ["other", "mine"])
async def test_the_replica_that_knows_most_is_believed(shorter: str) -> None:
    """One was silent, and another went on: both know a part of it, and one of them is slow."""
    request = Request("r", (1,), SamplingParams(max_tokens=LENGTH))
    recalls = {
        seat: join(run_engine(request, [2], 1 if seat == shorter else 3))
        for seat in ("other", "mine")
    }
    handle = FakeHandle([script([1])], recalls=recalls | {"slow": "silent"})
    assert await again(handle) == whole()
    assert handle.requests[0].resumed == (tuple(whole()[0][:6]),)


@pytest.mark.parametrize("code", [ErrorCode.NO_ROOM, ErrorCode.OTHER_EXTRAS])
async def test_a_refusal_is_no_answer(code: ErrorCode) -> None:
    """A spill seat without room, or a prompt made for other extras: the answer is elsewhere, or
    comes under the same name."""
    kept = KeptAnswers()
    request = Request("r", (1,), SamplingParams(max_tokens=LENGTH, n=2))
    messages = kept.note(request, say(code)(request))  # type: ignore[arg-type]
    await anext(messages)
    assert kept.recall("r") is None
    assert [_ async for _ in messages] == [] and not kept._closed
    await told_by(request, kept, 1)
    found = kept.recall("r")
    late = kept.note(replace(request, request_id="r/2"), say(code)(request))  # type: ignore[arg-type]
    assert [_ async for _ in late]
    assert found is not None and kept.recall("r") == found, "it hides nothing either"


async def test_an_answer_that_failed_on_its_way_is_told_with_its_failure() -> None:
    async def fails(request: Request) -> AsyncIterator[list[RequestOutput]]:
        yield [RequestOutput(request.request_id, 0, (1, 2))]
        reason, code = FinishReason.ERROR, ErrorCode.NOT_FINITE
        yield [RequestOutput(request.request_id, 0, finish_reason=reason, error_code=code)]

    kept, request = KeptAnswers(), Request("r", (1,), SamplingParams(max_tokens=LENGTH))
    assert [_ async for _ in kept.note(request, fails(request))]  # type: ignore[arg-type]
    (_, (output,)) = kept.recall("r") or ("", [])
    assert output.new_token_ids == (1, 2) and output.error_code is ErrorCode.NOT_FINITE


@pytest.mark.parametrize("num_messages", [1, 4, 20])
async def test_it_goes_on_from_what_its_replica_knows(num_messages: int) -> None:
    kept = KeptAnswers()
    request = Request("r", (1,), SamplingParams(max_tokens=LENGTH, n=2, seed=1))
    await told_by(request, kept, num_messages)
    found = kept.recall("r")
    assert found is not None and found[0] == "r"
    recalls = {"dead": ActorDiedError(), "slow": "silent", "other": None, "mine": found[1]}
    handle = FakeHandle([script([1])], recalls=recalls)
    assert await again(handle, 2) == whole(2)
    if num_messages == 20:  # it had ended
        assert not handle.requests
        return
    (rest,) = handle.requests
    given = tuple(tuple(ids[: 2 * num_messages]) for ids in whole(2).values())
    assert rest.resumed == given
    assert rest.request_id == "r/again"


async def test_it_is_made_anew_where_nobody_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.replica_backend.RECALL_S", 0.01)
    for recalls in ({}, {"slow": "silent"}):
        handle = FakeHandle([script([3], 2, ActorDiedError()), script([1])], recalls=recalls)
        assert await again(handle) == whole()
        first, second = handle.requests
        assert first.resumed == () and len(second.resumed[0] or ()) == 6
        assert len({first.request_id, second.request_id, "r"}) == 3


async def test_what_was_told_in_part_elsewhere_is_not_recalled() -> None:
    kept = KeptAnswers()
    sampling = SamplingParams(max_tokens=LENGTH, n=2, seed=1)
    half = Request("r/2", (1,), sampling, resumed=((1, 2), None))
    await told_by(half, kept, 1)
    assert kept.recall("r") is None, "what came of the other sequence is not known here"
    ids = Request("r/2", (1,), sampling, resumed=(tuple(whole(2)[0][:2]), ()))
    await told_by(ids, kept, 1)
    name, outputs = kept.recall("r") or ("", [])
    assert name == "r/2"
    assert {o.index: list(o.new_token_ids) for o in outputs} == {
        0: whole(2)[0][:4],
        1: whole(2)[1][:2],
    }
    with_logprobs = replace(ids, sampling=replace(sampling, logprobs=1))
    await told_by(with_logprobs, kept, 1)
    assert kept.recall("r") is None, "the log-probabilities of the first ids are not known here"


async def test_answers_are_kept_for_a_while_and_not_all() -> None:
    now = 0.0
    kept = KeptAnswers(lambda: now)
    for name in ("a", "b"):
        await told_by(Request(name, (1,), SamplingParams(max_tokens=LENGTH)), kept, 1)
        now += GRACE_S - 1
    assert kept.recall("a") is None and kept.recall("b") is not None
    now += 5
    assert kept.recall("b") is None and not kept._closed
    for number in range(MAX_CLOSED + 3):
        await told_by(Request(str(number), (1,), SamplingParams(max_tokens=LENGTH)), kept, 1)
    assert kept.recall("2") is None and kept.recall("3") is not None
    assert len(kept._closed) == MAX_CLOSED and not kept._running


async def test_old_answers_go_where_nothing_new_comes() -> None:
    now = 0.0
    kept = KeptAnswers(lambda: now)
    await told_by(Request("r", (1,), SamplingParams(max_tokens=LENGTH)), kept, 1)
    now += GRACE_S + 1
    assert kept.orphans(()) == [] and not kept._closed and not kept._size


async def test_what_is_kept_is_bounded_and_the_largest_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deployments.kept_answers.MAX_KEPT", 40)
    kept = KeptAnswers()
    entry = TokenLogprobs(-0.5, ((1, -0.5),) * 4)

    async def long(request: Request) -> AsyncIterator[list[RequestOutput]]:
        for number in range(9):
            logprobs = (entry,) * len(request.sampling.stop_ids)
            yield [RequestOutput(request.request_id, 0, (number,), logprobs)]

    large = Request("large", (1,), SamplingParams(stop_ids=(1,), logprobs=4))
    streams = [
        kept.note(request, long(request))  # type: ignore[arg-type]
        for request in (large, Request("a", (1,)), Request("b", (1,)))
    ]
    for _ in range(9):
        assert [len(await anext(stream)) for stream in streams] == [1] * 3, "all of it goes out"
        assert kept._size <= 40
    assert kept.recall("large") is None
    for name in "ab":
        found = kept.recall(name)
        assert found is not None and len(found[1][0].new_token_ids) == 9
    for stream in streams:
        await stream.aclose()
    assert kept._size == 18


async def test_what_ends_a_recalled_request_is_no_news_of_it() -> None:
    kept = KeptAnswers()
    request = Request("r", (1,), SamplingParams(max_tokens=LENGTH))
    messages = kept.note(request, script([2])(request))  # type: ignore[arg-type]
    await anext(messages)
    found = kept.recall("r")
    assert [_ async for _ in messages], "the old stream hears of its abort"
    assert found == kept.recall("r") == ("r", run_engine(request, [2], 1)[0])


async def test_requests_of_dead_callers_end_after_a_while() -> None:
    now = 0.0
    kept = KeptAnswers(lambda: now)
    request = Request("r/2", (1,), SamplingParams(max_tokens=LENGTH))
    messages = kept.note(request, script([2])(request), "ingress")  # type: ignore[arg-type]
    await anext(messages)
    assert kept.callers() == {"ingress"}
    assert kept.orphans({"another"}) == kept.orphans({"ingress"}) == []
    now += ORPHAN_S - 1
    await anext(messages)
    assert kept.orphans({"ingress"}) == []
    now += 1
    assert kept.orphans({"ingress"}) == ["r/2"]
    assert [_ async for _ in messages], "its abort"
    assert kept.callers() == set() and kept.orphans({"ingress"}) == []
    assert kept.recall("r") == ("r/2", join(run_engine(request, [2], 2)))


async def test_a_request_made_anew_hides_no_orphan() -> None:
    """It was told in part elsewhere, so nobody could go on from it: both runs have its name."""
    now = 0.0
    kept = KeptAnswers(lambda: now)
    sampling = SamplingParams(max_tokens=LENGTH, n=2)
    half = Request("r/2", (1,), sampling, resumed=((1, 2), None))
    old = kept.note(half, script([2])(half), "dead")  # type: ignore[arg-type]
    anew = Request("r/mark", (1,), sampling)
    new = kept.note(anew, script([2])(anew), "ingress")  # type: ignore[arg-type]
    for messages in (old, new):
        await anext(messages)
    assert kept.callers() == {"dead", "ingress"} and kept.orphans({"dead"}) == []
    found = kept.recall("r")
    assert found is not None and found[0] == "r/mark", "the newest run of it"
    now += ORPHAN_S
    assert kept.orphans({"dead"}) == ["r/2"]
    for messages in (new, old):
        await messages.aclose()
    assert not kept.callers() and kept.recall("r") == found


def join(messages: list[list[RequestOutput]]) -> list[RequestOutput]:
    outputs = [output for message in messages for output in message]
    return join_outputs(outputs, outputs[0].request_id) if outputs else []
