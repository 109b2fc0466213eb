"""The engine's counters add up over random lives: every token drawn was delivered or discarded,
once, in all and for each sequence. Not here: what the tokens are (test_engine.py)."""

import random
import time
from collections import Counter
from dataclasses import replace

import pytest

from adapter_store.ref import AdapterRef
from model_runner.config import EngineConfig
from model_runner.engine import Engine
from model_runner.execution.runner import PendingStep
from model_runner.request import ErrorCode, FinishReason, Request, SamplingParams
from tests.model_runner.demo import ADAPTER_DIRS, BASE_DIR

REFS = [None, *(AdapterRef(name, str(folder)) for name, folder in ADAPTER_DIRS.items())]
ABSENT = AdapterRef("absent", "/there/is/none")
# Room for 14 pages of the demo: three sequences at most, so that some are sent back.
TIGHT = {"kv_bytes": 14 * 16 * 4 * 2 * 2 * 32 * 4, "prefix_cache": False, "max_model_len": 144}


def make_request(number: int, rng: random.Random) -> Request:
    """The first stops at once, the second's adapter is nowhere; what the others do is chance."""
    ids = tuple(rng.randrange(3, 600) for _ in range(rng.randrange(10, 30)))
    sampling = SamplingParams(
        temperature=rng.choice([0.0, 1.5]),
        seed=number,
        max_tokens=rng.randrange(30, 100),
        stop_ids=tuple(range(640)) if number == 0 else tuple(rng.sample(range(3, 600), 2)),
        ignore_eos=rng.random() < 0.8,
        n=3 if number % 8 == 2 else rng.choice([1, 1, 1, 3]),
    )
    ref = ABSENT if number == 1 else rng.choice(REFS)
    request = Request(f"r{number}", ids, sampling, ref, tenant_id=f"t{number % 3}")
    if number % 4 != 2:
        return request
    # It broke off elsewhere: of each answer some tokens are there, or all.
    given = [tuple(rng.randrange(3, 600) for _ in range(5)) for _ in range(sampling.n)]
    return replace(request, resumed=(*given[:1], *(None for _ in given[1:])))


@pytest.mark.parametrize(("look_ahead", "prefix_cache"), [(False, True), (True, False)])
def test_every_token_drawn_is_delivered_or_discarded(
    look_ahead: bool, prefix_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aborts, preemptions, stop ids, several answers, lost adapters, logits that are not finite."""
    rng = random.Random(4)
    drawn = 0
    wait = PendingStep.wait

    def wait_and_spoil(step: PendingStep):
        nonlocal drawn
        tokens, logprobs = wait(step)
        numbers = range(drawn, drawn + len(tokens))
        drawn += len(tokens)
        spoilt = [-1 if i % 150 == 149 else t for i, t in zip(numbers, tokens, strict=True)]
        return spoilt, logprobs

    monkeypatch.setattr(PendingStep, "wait", wait_and_spoil)
    fields = TIGHT | {"look_ahead": look_ahead, "prefix_cache": prefix_cache, "seed": 1}
    engine = Engine(EngineConfig(model=str(BASE_DIR), **fields))
    waiting = [make_request(number, rng) for number in range(14)]
    tenants = {request.request_id: request.tenant_id for request in waiting}
    open_ids = {(r.request_id, i) for r in waiting for i in r.indices}
    assert any(r.resumed for r in waiting) and any(len(r.resumed) > 1 for r in waiting)
    by_tenant, reasons, discarded, queued = Counter[str](), Counter[str](), 0, []
    try:
        engine.load_adapters(ref for ref in REFS if ref is not None)
        num_turns = 0
        while waiting or engine.has_work:
            num_turns += 1
            assert num_turns < 20_000
            while waiting and rng.random() < 0.5:
                engine.submit(waiting.pop())
            some = [place for place in sorted(open_ids) if place[0] not in ("r0", "r1")]
            if some and rng.random() < 0.02:
                name, index = rng.choice(some)
                engine.abort(name, rng.choice([None, index]))
            outputs = engine.step()
            if not outputs and not engine.is_stepping:
                time.sleep(0.001)  # all that is left waits for an adapter
            for output in outputs:
                by_tenant[tenants[output.request_id]] += len(output.new_token_ids)
                assert output.finish_reason or not output.num_discarded_tokens
                if output.new_token_ids:
                    queued.append(output.queue_s)
                if output.finish_reason is not None:
                    open_ids.remove((output.request_id, output.index))
                    discarded += output.num_discarded_tokens
                    reasons[str(output.error_code or output.finish_reason)] += 1
        engine.check()
        stats = engine.stats()
    finally:
        engine.close()
    assert not open_ids
    assert stats.delivered_tokens + stats.discarded_tokens == stats.sampled_tokens == drawn
    assert stats.by_tenant == +by_tenant
    assert stats.discarded_tokens == discarded > 0
    assert min(queued) >= 0 and max(queued) > 0
    met = {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT}
    met |= {ErrorCode.NOT_FINITE, ErrorCode.ADAPTER_NOT_FOUND}
    assert set(map(str, met)) <= reasons.keys(), reasons
    assert stats.preemptions > 0
    if not prefix_cache:
        assert stats.replayed_tokens > 0
    assert set(stats.loads) == set(stats.load_seconds) == {"remote", "host", "device"}


def test_preemption_draws_nothing_twice() -> None:
    """Tight or not, the same tokens are drawn; what a preempted sequence lost is counted apart."""

    def run(**fields) -> tuple[int, int, int]:
        engine = Engine(EngineConfig(model=str(BASE_DIR), seed=1, **fields))
        sampling = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        requests = [Request(f"r{i}", tuple(range(5 + i, 45 + i)), sampling) for i in range(4)]
        try:
            engine.generate(requests)
            stats = engine.stats()
        finally:
            engine.close()
        return stats.sampled_tokens, stats.preemptions, stats.replayed_tokens

    sampled, preemptions, replayed = run(**TIGHT)
    assert preemptions > 0 and replayed >= 40 * preemptions
    assert run(kv_bytes=32 << 20, max_model_len=144) == (sampled, 0, 0) == (4 * 60, 0, 0)
