"""An answer that broke off and goes on from the ids that were delivered: the same as unbroken.

In fp32 on the CPU, so ids are equal. Not here: who sends it elsewhere (the service's failover).
"""

import dataclasses
import random
from collections.abc import Iterator

import pytest

from adapter_store.ref import AdapterRef
from model_runner.config import EngineConfig
from model_runner.engine import Engine
from model_runner.engine_loop import EngineLoop
from model_runner.request import (
    Completion,
    ErrorCode,
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
)
from tests.guards import take_out
from tests.model_runner.demo import ADAPTER_DIRS, BASE_DIR

PROMPT = tuple(random.Random(5).randrange(3, 600) for _ in range(70))
PIRATE = AdapterRef("pirate", str(ADAPTER_DIRS["pirate"]))
SAMPLED = SamplingParams(temperature=1.2, seed=11, max_tokens=60, ignore_eos=True)


def make_engine(**fields: object) -> Engine:
    defaults = {
        "model": str(BASE_DIR),
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 512,
        "kv_bytes": 32 << 20,
        "max_loras": 2,
    }
    return Engine(EngineConfig(**(defaults | fields)))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Where answers are made unbroken."""
    engine = make_engine()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def other() -> Iterator[Engine]:
    """Where they go on: in small steps, so that prompt and ids come in several chunks."""
    engine = make_engine(max_step_tokens=16, max_num_seqs=8, look_ahead=True)
    yield engine
    engine.close()


def run(engine: Engine, request: Request) -> dict[int, Completion]:
    made = {c.index: c for c in engine.generate([request])}
    engine.check()
    return made


def goes_on(
    engine: Engine, request: Request, whole: dict[int, Completion], cuts: tuple[int | None, ...]
) -> None:
    """Broken off after `cuts` ids of each sequence (None: after its end), it ends the same."""
    resumed = tuple(
        None if cut is None else tuple(whole[index].token_ids[:cut])
        for index, cut in enumerate(cuts)
    )
    rest = run(engine, dataclasses.replace(request, resumed=resumed))
    assert set(rest) == {index for index, cut in enumerate(cuts) if cut is not None}
    for index, completion in rest.items():
        cut = cuts[index]
        assert completion.token_ids == whole[index].token_ids[cut:], (index, cut)
        assert completion.finish_reason == whole[index].finish_reason
        for ours, theirs in zip(completion.logprobs, whole[index].logprobs[cut:], strict=True):
            assert ours.chosen == pytest.approx(theirs.chosen, abs=1e-4)
            assert [i for i, _ in ours.top] == [i for i, _ in theirs.top]


CASES = {
    "greedy": Request("greedy", PROMPT, SamplingParams(temperature=0, max_tokens=60)),
    "seeded": Request("seeded", PROMPT, SAMPLED),
    "narrow": Request("narrow", PROMPT, dataclasses.replace(SAMPLED, top_p=0.8, top_k=40)),
    "adapter": Request("adapter", PROMPT, SAMPLED, PIRATE),
    "logprobs": Request("logprobs", PROMPT, dataclasses.replace(SAMPLED, logprobs=3)),
    "penalties": Request(
        "penalties",
        PROMPT,
        dataclasses.replace(
            SAMPLED, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.4, min_p=0.01
        ),
    ),
    "min_tokens": Request(
        "min_tokens",
        PROMPT,
        dataclasses.replace(SAMPLED, ignore_eos=False, min_tokens=52, stop_ids=tuple(range(300))),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_goes_on(engine: Engine, other: Engine, name: str) -> None:
    whole = run(engine, CASES[name])
    last = len(whole[0].token_ids) - 1
    for cut in {0, 1, min(50, last), last}:
        goes_on(other, CASES[name], whole, (cut,))


def test_a_stop_id_after_the_break_ends_it(engine: Engine, other: Engine) -> None:
    free = run(engine, Request("free", PROMPT, SAMPLED))[0].token_ids
    stop = free[30]
    sampling = dataclasses.replace(SAMPLED, stop_ids=(stop,))
    request = Request("stop", PROMPT, sampling)
    whole = run(engine, request)
    assert whole[0].finish_reason is FinishReason.STOP
    goes_on(other, request, whole, (free.index(stop) - 1,))


def test_some_of_n_go_on(engine: Engine, other: Engine) -> None:
    request = Request("n", PROMPT, dataclasses.replace(SAMPLED, n=3), PIRATE)
    whole = run(engine, request)
    for cuts in ((0, 0, 0), (7, 1, 59), (None, 3, 0), (5, None, None)):
        goes_on(other, request, whole, cuts)


def test_what_is_cached_of_the_ids_is_not_computed_again(engine: Engine) -> None:
    """On the replica that made them, or where another went on before."""
    request = Request("cached", PROMPT, SAMPLED)
    whole = run(engine, request)
    before = engine.stats().num_steps
    goes_on(engine, request, whole, (50,))
    assert engine.stats().num_steps - before <= len(whole[0].token_ids) - 50 + 2


def test_preempted_while_it_goes_on(engine: Engine) -> None:
    """Two that do not fit together: one of them is computed a third time."""
    requests = [Request(f"p{i}", PROMPT[i:], SAMPLED) for i in range(3)]
    whole = [run(engine, request)[0].token_ids for request in requests]
    page_bytes = 16 * 4 * 2 * 2 * 32 * 4
    narrow = make_engine(kv_bytes=21 * page_bytes, prefix_cache=False, max_model_len=144)
    try:
        resumed = [
            dataclasses.replace(request, resumed=(tuple(ids[:5]),))
            for request, ids in zip(requests, whole, strict=True)
        ]
        rest = narrow.generate(resumed)
        assert narrow.stats().preemptions > 0
        assert [c.token_ids for c in rest] == [ids[5:] for ids in whole]
        narrow.check()
    finally:
        narrow.close()


def test_a_prompt_is_told_once(engine: Engine, other: Engine) -> None:
    """Its log-probabilities come with the first token, so not to who has that."""
    sampling = dataclasses.replace(SAMPLED, prompt_logprobs=1, n=2)
    request = Request("told", PROMPT, sampling)
    whole = run(engine, request)
    for cuts, told in (((0, 5), 69), ((1, 5), 0)):
        resumed = tuple(tuple(whole[i].token_ids[:cut]) for i, cut in enumerate(cuts))
        rest = run(other, dataclasses.replace(request, resumed=resumed))
        assert [len(rest[i].prompt_logprobs) for i in (0, 1)] == [told, 0]
        assert all(rest[i].token_ids == whole[i].token_ids[cuts[i] :] for i in (0, 1))


@pytest.mark.parametrize(
    ("resumed", "words"),
    [
        (((1,) * 60,), "at most 59"),
        (([1, 2],), "must be None or a tuple"),
        (((1, -2),), "token id -2"),
        (((1, True),), "token id True"),
    ],
)
def test_ids_that_cannot_be(engine: Engine, resumed: object, words: str) -> None:
    request = Request("bad", PROMPT, SAMPLED, resumed=resumed)  # type: ignore[arg-type]
    (told,) = engine.generate([request])
    assert told.error_code is ErrorCode.BAD_REQUEST and words in told.error


@pytest.mark.parametrize("resumed", [(None,), ((), ()), (None, None)])
def test_a_request_without_a_sequence_to_run_cannot_be_made(resumed: object) -> None:
    with pytest.raises(ValueError, match="of n = 1 sequences"):
        Request("none", PROMPT, SAMPLED, resumed=resumed)  # type: ignore[arg-type]


async def test_a_loop_streams_only_those_that_run() -> None:
    loop = EngineLoop(make_engine)
    loop.start()
    try:
        sampling = dataclasses.replace(SAMPLED, n=3, max_tokens=6)
        resumed: tuple[tuple[int, ...] | None, ...] = (None, (5, 6), ())
        outputs: list[RequestOutput] = [
            o async for o in loop.stream(Request("some", PROMPT, sampling, resumed=resumed))
        ]
    finally:
        loop.stop()
    ends = {o.index: o.num_output_tokens for o in outputs if o.finish_reason is not None}
    assert ends == {1: 6, 2: 6}
    assert [o.num_output_tokens for o in outputs if o.index == 1] == [3, 4, 5, 6]


def test_it_does_not_go_on_without_its_ids(
    engine: Engine, other: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard: with the ids left out the checks above fail."""
    from model_runner.scheduling.sequence import Sequence

    whole = run(engine, CASES["seeded"])
    take_out(monkeypatch, Sequence, "__init__", "if request.resumed:", "if False:")
    with pytest.raises(AssertionError):
        goes_on(other, CASES["seeded"], whole, (50,))
