"""Requests whose adapter's content is not known yet: against a store that says what it is told to.

Not here: the engine around them, on a store of its own (test_engine.py).
"""

from collections import Counter
from typing import Any

import pytest

from adapter_store.errors import AdapterNotFound
from adapter_store.extras import NO_EXTRAS, AdapterExtras
from adapter_store.ref import AdapterRef
from model_runner.arrivals import Arrivals
from model_runner.request import ErrorCode, FinishReason, Request, SamplingParams

REF = AdapterRef("a", "file:///a")
DIGEST = "d" * 64
BOUND = AdapterRef("a", "file:///a", DIGEST)


class ScriptedStore:
    """waiting  how many wait for each ref"""

    def __init__(self) -> None:
        self.waiting: Counter[AdapterRef] = Counter()
        self.digest: str | None = None
        self.error: AdapterNotFound | None = None
        self.extras = NO_EXTRAS

    def prefetch(self, ref: AdapterRef) -> None:
        self.waiting[ref] += 1

    def forget(self, ref: AdapterRef) -> None:
        self.waiting[ref] -= 1

    def error_of(self, ref: AdapterRef) -> AdapterNotFound | None:
        return self.error

    def digest_of(self, ref: AdapterRef) -> str | None:
        return self.digest

    def extras_of(self, digest: str) -> AdapterExtras:
        return self.extras


@pytest.fixture
def store() -> ScriptedStore:
    return ScriptedStore()


def arriving(store: Any, **fields: Any) -> Arrivals:
    arrivals = Arrivals(store)
    arrivals.add(Request("r", (5, 6), SamplingParams(n=3), REF, **fields))
    assert store.waiting == {REF: 1} and len(arrivals) == 1 and "r" in arrivals
    return arrivals


def test_they_arrive_bound_to_the_content_that_is_known(store: ScriptedStore) -> None:
    arrivals = arriving(store)
    assert arrivals.poll() == ([], []) and len(arrivals) == 1
    store.digest = DIGEST
    (arrival,), outputs = arrivals.poll()
    assert arrival.request.adapter == BOUND and arrival.indices == [0, 1, 2] and not outputs
    assert not arrivals and +store.waiting == {BOUND: 3}
    assert arrivals.poll() == ([], [])


def test_what_is_aborted_on_the_way_does_not_arrive(store: ScriptedStore) -> None:
    arrivals = arriving(store)
    (output,) = arrivals.abort("r", 1)
    assert (output.index, output.finish_reason) == (1, FinishReason.ABORT)
    assert not arrivals.abort("r", 1), "told once"
    store.digest = DIGEST
    (arrival,), _ = arrivals.poll()
    assert arrival.indices == [0, 2] and +store.waiting == {BOUND: 2}


@pytest.mark.parametrize("ends", [[None], [2, 0, 1], [1, None]])
def test_where_all_are_aborted_nobody_waits(ends: list[int | None], store: ScriptedStore) -> None:
    arrivals = arriving(store)
    outputs = [output for index in ends for output in arrivals.abort("r", index)]
    assert sorted(output.index for output in outputs) == [0, 1, 2]
    assert not arrivals and not +store.waiting


def test_a_lost_adapter_is_told_to_those_that_remain(store: ScriptedStore) -> None:
    arrivals = arriving(store)
    arrivals.abort("r", 0)
    store.error = AdapterNotFound("nowhere")
    arrived, outputs = arrivals.poll()
    told = [(output.index, output.error_code, output.error) for output in outputs]
    assert not arrived and told == [(i, ErrorCode.ADAPTER_NOT_FOUND, "nowhere") for i in (1, 2)]
    assert not arrivals and not +store.waiting


def test_a_prompt_made_for_other_extras_is_told_which(store: ScriptedStore) -> None:
    arrivals = arriving(store, extras_key=NO_EXTRAS.key)
    store.digest, store.extras = DIGEST, AdapterExtras(eos_ids=(7,))
    arrived, outputs = arrivals.poll()
    assert not arrived and len(outputs) == 3
    assert {o.error_code for o in outputs} == {ErrorCode.OTHER_EXTRAS}
    assert all(o.extras == store.extras for o in outputs)
    assert not arrivals and not +store.waiting
