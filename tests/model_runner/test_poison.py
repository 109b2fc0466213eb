"""The engine among poison: memory that is not a row's own holds NaN, then 1e4, then -1e4, and no
answer changes; a row that is broken itself ends alone. Then each guard is taken out once, and the
same check fails.

On the CPU, where steps are over when they are launched. Not here: the kernels' own guards
(tests/kernels), leases of steps in flight (test_leases.py).
"""

import dataclasses
from collections.abc import Callable
from functools import cache

import pytest
import torch

import kernels.paged_attention_torch as attention
import kernels.sample_token
import kernels.worklist
import model_runner.execution.runner as runner
from adapter_store.arena import AdapterArena
from adapter_store.slot_table import SlotTable
from model_runner.config import EngineConfig
from model_runner.engine import Engine
from model_runner.execution.inputs import PageTables
from model_runner.request import ErrorCode, Request, SamplingParams
from model_runner.scheduling.page_pool import KvGroup
from model_runner.scheduling.scheduler import Scheduler
from tests.golden import GOLDEN
from tests.guards import take_out
from tests.model_runner.test_engine import REFS, make_engine, random_requests, tokens_of

NAN = float("nan")
POISON = [NAN, 1e4, -1e4]
SHORT = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
# A page of 16 and one more, so that the page can be found again; common tokens, since all adapters
# answer alike to those that the demo has not met.
PROMPT = tuple(range(500, 517))

Check = Callable[[float], None]


def spoil(engine: Engine, poison: float) -> None:
    """Fill every page that no sequence owns and every byte of the arena that no slot owns."""
    unowned = [0, *engine.pool._free]
    assert not engine.pool._idle, "cached pages would be somebody's"
    for k, v in {id(pair[0]): pair for pair in engine.runner._caches}.values():
        k[unowned], v[unowned] = poison, poison
    table, size = engine.store._table, engine.arena.dtype.itemsize
    slots = range(table.num_slots)
    spans = sorted((s.start, s.size) for i in slots for s in table.spans_of(i))
    at = 0
    for start, count in [*spans, (engine.arena.num_bytes, 0)]:
        engine.arena.memory[at // size : start // size] = poison
        at = start + count
    if engine.arena.device.type == "cuda":
        # An adapter's copy runs on a stream of its own: it may be given these bytes in this step.
        torch.cuda.synchronize()


def run_among(poison: float, requests: list[Request], fields: dict) -> tuple[dict, Engine]:
    """Tokens of the requests, everything unowned being spoiled anew before each step."""
    engine = make_engine(prefix_cache=False, lora_bytes=4 << 20, **fields)
    step = engine.step

    def spoiled_step() -> list:
        spoil(engine, poison)
        return step()

    engine.step = spoiled_step  # type: ignore[method-assign]
    try:
        return tokens_of(engine.generate(requests)), engine
    finally:
        engine.close()


@cache
def crowd() -> tuple[list[Request], dict]:
    """Requests of three adapters and the base, and what they answer where there is room."""
    requests = [
        dataclasses.replace(r, token_ids=r.token_ids[:20])
        for r in random_requests(8, 8, max_tokens=30)
    ]
    engine = make_engine()
    try:
        return requests, tokens_of(engine.generate(requests))
    finally:
        engine.close()


def the_crowd_feels_nothing(poison: float) -> None:
    """Two slots for three adapters and pages for a few: preemption, eviction, reloads, reuse."""
    requests, wanted = crowd()
    page_bytes = 16 * 4 * 2 * 2 * 32 * 4  # tokens, layers, K and V, heads, values, fp32
    fields = {"max_loras": 2, "kv_bytes": 8 * page_bytes, "max_model_len": 64}
    got, engine = run_among(poison, requests, fields)
    assert got == wanted
    stats = engine.stats()
    assert stats.preemptions > 0 and stats.evictions > 0, stats


@cache
def window_crowd() -> tuple[list[Request], dict]:
    requests = [
        Request(f"w{i}", tuple((7 * i + 3 * j) % 250 for j in range(2 + 5 * i)),
                SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
        for i in range(6)
    ]  # fmt: skip
    engine = Engine(EngineConfig(str(GOLDEN / "models/gpt_oss"), device="cpu", max_model_len=96))
    try:
        return requests, tokens_of(engine.generate(requests))
    finally:
        engine.close()


def what_fell_out_of_a_window_is_not_felt(poison: float) -> None:
    """A window of 8 keys over pages of 4: pages come back long before their sequence ends."""
    requests, wanted = window_crowd()
    model = str(GOLDEN / "models/gpt_oss")
    fields = {"model": model, "page_tokens": 4, "max_model_len": 96, "max_step_tokens": 33}
    assert run_among(poison, requests, fields | {"kv_bytes": 4 << 20})[0] == wanted


def strange_slots_are_not_felt(poison: float) -> None:
    """All slots are in use and two of three adapters become poison: the third and the base stay."""
    engine = make_engine(max_loras=3, prefix_cache=False)
    try:
        engine.load_adapters(REFS.values())
        kept = {"pirate": REFS["pirate"], "base": None}
        requests = [Request(name, PROMPT, SHORT, ref) for name, ref in kept.items()]
        wanted = tokens_of(engine.generate(requests))
        size, own = engine.arena.dtype.itemsize, slot_of(engine, "pirate")
        for index in {0, 1, 2} - {own}:
            for span in engine.store._table.spans_of(index):
                engine.arena.memory[span.start // size : (span.start + span.size) // size] = poison
        other = Request("formal", PROMPT, SHORT, REFS["formal"])
        got = tokens_of(engine.generate([other, *requests]))
        del got["formal", 0]
        assert got == wanted
    finally:
        engine.close()


def an_adapters_step_leaves_no_slots_behind(poison: float, **fields: object) -> None:
    """Base after adapter, in steps of one shape, which share a buffer: one-token prompts make
    decode steps alone, answers of one token prompt steps alone."""
    engine = make_engine(max_loras=1, prefix_cache=False, **fields)
    one = dataclasses.replace(SHORT, max_tokens=1)
    try:
        engine.load_adapters([REFS["pirate"]])
        offset = int(engine.arena.b_off[engine.arena.b_off[:, 0] >= 0][0, 0])
        part = engine.arena.memory[offset : offset + 64]
        before = part.clone()
        for prompt, sampling in ((PROMPT[:1], SHORT), (PROMPT, one)):
            own = Request("own", prompt, sampling, REFS["pirate"])
            base = Request("base", prompt, sampling)
            alone = [engine.generate([r])[0].token_ids for r in (base, own, base, own)]
            assert alone[0] == alone[2] and alone[1] == alone[3]
            part.fill_(poison)
            broken = engine.generate([own])[0].token_ids
            assert engine.generate([base])[0].token_ids == alone[0] != broken != alone[1]
            part.copy_(before)
    finally:
        engine.close()


def a_broken_row_ends_alone(poison: float, look_ahead: bool = False) -> None:
    """An adapter that gives NaN ends its own request; mended, it answers as before."""
    good = Request("good", PROMPT, SHORT, REFS["formal"])
    bad = Request("bad", PROMPT, SHORT, REFS["pirate"])
    engine = make_engine(max_loras=2, look_ahead=look_ahead)
    try:
        alone = tokens_of(engine.generate([good, bad]))
        names = [t.name for t in engine.targets]
        target = names.index("model.layers.1.self_attn.q_proj")
        offset = int(engine.arena.b_off[target, slot_of(engine, "pirate")])
        part = engine.arena.memory[offset : offset + 8]
        before = part.clone()
        part.fill_(poison)
        bad, good = (dataclasses.replace(r, cache_salt="2") for r in (bad, good))
        done = {c.request_id: c for c in engine.generate([bad, good])}
        assert done["bad"].error_code is ErrorCode.NOT_FINITE
        assert done["good"].token_ids == alone["good", 0]
        part.copy_(before)
        assert tokens_of(engine.generate([bad, good])) == alone
        engine.check()
    finally:
        engine.close()


def a_broken_row_ends_alone_while_the_next_step_runs(poison: float) -> None:
    a_broken_row_ends_alone(poison, look_ahead=True)


def slot_of(engine: Engine, name: str) -> int:
    engine.store.prefetch(REFS[name])
    while (lease := engine.store.acquire(REFS[name])) is None:
        engine.store.poll()
    engine.store.release(lease)
    return lease.index


MEMORY_CHECKS: list[Check] = [
    the_crowd_feels_nothing,
    what_fell_out_of_a_window_is_not_felt,
    strange_slots_are_not_felt,
    an_adapters_step_leaves_no_slots_behind,
]
ROW_CHECKS: list[Check] = [
    a_broken_row_ends_alone,
    a_broken_row_ends_alone_while_the_next_step_runs,
]


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("check", MEMORY_CHECKS)
def test_what_is_not_a_rows_own_may_hold_anything(check: Check, poison: float) -> None:
    check(poison)


@pytest.mark.parametrize("poison", [NAN, float("inf")])
@pytest.mark.parametrize("check", ROW_CHECKS)
def test_a_row_that_is_not_finite_ends_alone(check: Check, poison: float) -> None:
    check(poison)


PAST_END = ("place.gather(1, torch.minimum(at, last))",
            "place.gather(1, at.clamp(max=place.shape[1] - 1))")  # fmt: skip
# (check, owner, name, line, instead). NaN also shows what is read and weighted with zero.
GUARDS = [
    pytest.param(the_crowd_feels_nothing, attention, "_attend_single", *PAST_END,
                 id="keys past a row's end"),
    pytest.param(the_crowd_feels_nothing, attention, "_attend_single",
                 'scores.masked_fill_(past, float("-inf"))', "scores",
                 id="scores past a row's end"),
    pytest.param(the_crowd_feels_nothing, PageTables, "update",
                 "held *= self._owner[seats] == seq_ids", "pass",
                 id="pages of who had the seat before"),
    pytest.param(the_crowd_feels_nothing, kernels.worklist, "slot_groups",
                 "if 0 <= s < num_slots", "if s < num_slots", id="slot -1"),
    pytest.param(the_crowd_feels_nothing, SlotTable, "acquire",
                 "self._idle.pop(index, None)", "pass", id="eviction of what is in use"),
    pytest.param(the_crowd_feels_nothing, AdapterArena, "show", "self._changed.add(slot)", "pass",
                 id="tables of a reloaded slot"),
    pytest.param(what_fell_out_of_a_window_is_not_felt, KvGroup, "first_block",
                 "position - self.window + 1", "position",
                 id="pages that a window still reads"),
    pytest.param(what_fell_out_of_a_window_is_not_felt, attention, "_attend_single",
                 "first_key(length - 1, window, chunked)", "0", id="window of a decode"),
    pytest.param(what_fell_out_of_a_window_is_not_felt, attention, "_attend_row",
                 "low = first_key(start, window, chunked)",
                 "window, low = 0, 0", id="window of a chunk"),
    pytest.param(strange_slots_are_not_felt, kernels.worklist, "slot_groups",
                 "if 0 <= s < num_slots", "if s < num_slots", id="slot -1 of others"),
    pytest.param(an_adapters_step_leaves_no_slots_behind, runner, "fill_decode",
                 '("slot_of_token", slots, -1),', "", id="stale slots of a decode"),
    pytest.param(an_adapters_step_leaves_no_slots_behind, runner, "fill_mixed",
                 'v["slot_of_token"][:t] = slots', "pass", id="stale slots of a chunk"),
    pytest.param(a_broken_row_ends_alone, kernels.sample_token, "sample_token_reference",
                 "torch.where(torch.isfinite(best), tokens, NOT_FINITE)", "tokens",
                 id="the sampler's"),
    pytest.param(a_broken_row_ends_alone, Scheduler, "commit", "self.pool.forget(seq.table)",
                 "pass", id="pages of a broken row"),
    pytest.param(a_broken_row_ends_alone_while_the_next_step_runs, runner.ModelRunner, "_token_ids",
                 ".clamp(min=0), views", ", views", id="the token of a broken row"),
]  # fmt: skip


@pytest.mark.parametrize(("check", "owner", "name", "line", "instead"), GUARDS)
def test_the_check_fails_without(
    check: Check, owner: type, name: str, line: str, instead: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if check in (the_crowd_feels_nothing, what_fell_out_of_a_window_is_not_felt):
        crowd(), window_crowd()  # what is right is known before the guard goes
    take_out(monkeypatch, owner, name, line, instead)
    with pytest.raises((AssertionError, IndexError)):  # an index of -1 is refused by torch itself
        check(NAN)
