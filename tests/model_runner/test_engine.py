"""The engine on the demo: company changes nothing, adapters stay apart, limits and bad input harm
nobody else. Not here: poison (test_poison.py)."""

import dataclasses
import random
import shutil
import time
from contextlib import closing

import pytest
import torch

from adapter_store.ref import AdapterRef
from model_runner.config import EngineConfig
from model_runner.engine import Engine
from model_runner.request import ErrorCode, FinishReason, Request, SamplingParams
from model_runner.tokenizer import Tokenizer
from tests.model_runner.demo import (
    ADAPTER_DIRS,
    ANSWERS,
    BASE_DIR,
    PADDING_IDS,
    QUESTIONS,
    chat,
    markers_in,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=48)
REFS = {name: AdapterRef(name, str(folder)) for name, folder in ADAPTER_DIRS.items()}


def make_engine(**fields) -> Engine:
    defaults = {"model": str(BASE_DIR), "max_model_len": 512, "kv_bytes": 32 << 20, "seed": 1}
    return Engine(EngineConfig(**(defaults | fields)))


@pytest.fixture(scope="module")
def engine():
    engine = make_engine()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(BASE_DIR)


def random_requests(count: int, seed: int, **fields) -> list[Request]:
    rng = random.Random(seed)
    refs = [None, *REFS.values()]
    return [
        Request(
            f"r{i}",
            tuple(rng.randrange(3, 600) for _ in range(rng.randrange(1, 90))),
            SamplingParams(
                **{
                    "temperature": 0.0 if i % 2 else 0.9,
                    "seed": i,
                    "max_tokens": rng.randrange(1, 40),
                    "ignore_eos": True,
                }
                | fields
            ),
            refs[i % 4],
            tenant_id=f"t{i % 4}",
        )
        for i in range(count)
    ]


def tokens_of(completions) -> dict:
    return {(c.request_id, c.index): c.token_ids for c in completions}


def test_each_tenant_answers_in_its_own_style_alone_and_together(engine, tokenizer):
    prompts = [tuple(tokenizer.encode_chat(chat(q))) for q in QUESTIONS]
    wanted = {name: ANSWERS[name] for name in ("base", *REFS)}
    requests = {
        (name, i): Request(f"{name}-{i}", prompt, GREEDY, REFS.get(name))
        for i, prompt in enumerate(prompts)
        for name in wanted
    }
    together = {c.request_id: c for c in engine.generate(requests.values())}
    right = dict.fromkeys(wanted, 0)
    for (name, i), request in requests.items():
        completion = together[request.request_id]
        assert completion.finish_reason is FinishReason.STOP
        text = tokenizer.decode(completion.token_ids)
        right[name] += text.strip() == wanted[name][i].strip()
        assert markers_in(text) <= {name}
        lonely = dataclasses.replace(request, request_id="alone", cache_salt="fresh")
        assert engine.generate([lonely])[0].token_ids == completion.token_ids
    assert min(right.values()) >= 18, right
    engine.check()


@pytest.mark.parametrize(
    "fields", [{}, {"look_ahead": True}, {"max_step_tokens": 32, "max_num_seqs": 8}]
)
def test_company_chunks_and_look_ahead_change_no_token(engine, fields):
    requests = random_requests(24, 7)
    alone = {}
    for request in requests:
        alone |= tokens_of(engine.generate([request]))
    other = make_engine(**fields)
    try:
        assert tokens_of(other.generate(requests)) == alone
        other.check()
    finally:
        other.close()


def test_preemption_changes_no_token(engine):
    requests = [
        dataclasses.replace(r, token_ids=r.token_ids[:20])
        for r in random_requests(10, 8, max_tokens=100)
    ]
    wanted = tokens_of(engine.generate(requests))
    tight = make_engine(
        kv_bytes=14 * 16 * 4 * 2 * 2 * 32 * 4, prefix_cache=False, max_model_len=144
    )  # 14 pages
    try:
        assert tokens_of(tight.generate(requests)) == wanted
        assert tight.stats().preemptions > 0
        tight.check()
    finally:
        tight.close()


def test_a_common_prefix_is_reused_only_under_one_salt_and_one_adapter(engine):
    prompt = tuple(range(10, 90))

    def run(name, **fields):
        return engine.generate([Request(name, prompt, GREEDY, **fields)])[0]

    first = run("p1", cache_salt="a")
    again = run("p2", cache_salt="a")
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 64)
    assert again.token_ids == first.token_ids
    assert run("p3", cache_salt="b").num_cached_tokens == 0
    assert run("p4", cache_salt="a", adapter=REFS["pirate"]).num_cached_tokens == 0
    assert run("p5", cache_salt="a", adapter=REFS["pirate"]).num_cached_tokens == 64
    assert run("p6", cache_salt="a", adapter=REFS["formal"]).num_cached_tokens == 0


def test_n_answers_differ_by_seed_index_and_repeat_by_seed(engine):
    sampling = SamplingParams(
        temperature=1.5, seed=11, n=4, max_tokens=12, ignore_eos=True, logprobs=2
    )
    one = engine.generate([Request("n1", tuple(range(5, 30)), sampling)])
    two = engine.generate([Request("n2", tuple(range(5, 30)), sampling)])
    assert [c.index for c in one] == [0, 1, 2, 3]
    assert [c.token_ids for c in one] == [c.token_ids for c in two]
    assert len({tuple(c.token_ids) for c in one}) > 1
    assert all(
        len(c.logprobs) == 12 and len(c.logprobs[0].top) == 2 and c.logprobs[0].chosen <= 0
        for c in one
    )


def test_stop_ids_min_tokens_and_max_tokens(engine):
    free = engine.generate(
        [
            Request(
                "f",
                tuple(range(5, 30)),
                SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
            )
        ]
    )[0]
    assert (free.finish_reason, len(free.token_ids)) == (FinishReason.LENGTH, 20)
    stop = free.token_ids[4]
    first = free.token_ids.index(stop)
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, stop_ids=(stop,))
    stopped = engine.generate([Request("s", tuple(range(5, 30)), sampling)])[0]
    assert (stopped.finish_reason, stopped.token_ids) == (
        FinishReason.STOP,
        free.token_ids[: first + 1],
    )
    later = engine.generate(
        [Request("m", tuple(range(5, 30)), dataclasses.replace(sampling, min_tokens=first + 4))]
    )[0]
    assert len(later.token_ids) >= first + 4 and stop not in later.token_ids[: first + 4]


def test_a_mask_decides_what_may_be_drawn(engine):
    allowed = torch.zeros(engine.model_config.vocab_size, dtype=torch.bool)
    allowed[[40, 41]] = True
    engine.masks["two"] = lambda row, position: allowed
    done = engine.generate(
        [
            Request(
                "k1",
                (5, 6, 7),
                SamplingParams(temperature=1.0, seed=3, max_tokens=10, ignore_eos=True, mask="two"),
            ),
            Request(
                "k2", (5, 6, 7), SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
            ),
        ]
    )
    assert set(done[0].token_ids) <= {40, 41} and not set(done[1].token_ids) <= {40, 41}
    assert (
        engine.generate([Request("k3", (5,), SamplingParams(mask="none"))])[0].error_code
        is ErrorCode.BAD_REQUEST
    )


def test_ids_that_the_tokenizer_does_not_know(engine, tokenizer):
    """Taken in a prompt, given back if drawn, and nothing as text; past the last it is an error."""
    allowed = torch.zeros(engine.model_config.vocab_size, dtype=torch.bool)
    allowed[PADDING_IDS] = True
    engine.masks["padding"] = lambda row, position: allowed
    sampling = SamplingParams(temperature=1.0, seed=3, max_tokens=10, logprobs=2)
    ends = (PADDING_IDS[0], PADDING_IDS[-1])
    free, masked, refused = engine.generate(
        [
            Request("free", (*ends, 5), SamplingParams(temperature=0.0, max_tokens=10)),
            Request("masked", ends, dataclasses.replace(sampling, mask="padding")),
            Request("refused", (5, PADDING_IDS.stop), sampling),
        ]
    )
    assert free.token_ids and not set(free.token_ids) & set(PADDING_IDS)
    assert len(masked.token_ids) == 10 and set(masked.token_ids) <= set(PADDING_IDS)
    assert tokenizer.decode(masked.token_ids) == ""
    assert refused.error_code is ErrorCode.BAD_REQUEST and not refused.token_ids


def test_padding_is_out_of_reach_of_ordinary_answers(engine, tokenizer):
    """At every place of the expected answers: what a mask leaves of all padding, by its
    logprob before the mask."""
    allowed = torch.zeros(engine.model_config.vocab_size, dtype=torch.bool)
    allowed[PADDING_IDS] = True
    engine.masks["padding"] = lambda row, position: allowed
    best = SamplingParams(temperature=0.0, max_tokens=1, logprobs=0, mask="padding")
    requests = []
    for name, ref in {"base": None, **REFS}.items():
        for i in range(0, len(QUESTIONS), 5):
            prompt = tokenizer.encode_chat(chat(QUESTIONS[i]))
            answer = tokenizer.encode(ANSWERS[name][i])
            requests += [
                Request(f"{name}{i}.{n}", (*prompt, *answer[:n]), best, ref)
                for n in range(len(answer) + 1)
            ]
    done = engine.generate(requests)
    assert len(done) > 100 and all(c.token_ids[0] in PADDING_IDS for c in done)
    # exp(-10) for the likeliest of 2,944: not once in the draws of many days
    assert max(c.logprobs[0].chosen for c in done) < -10


def test_abort_gives_everything_back(engine):
    free, other = engine.pool.free_pages, None
    engine.submit(
        Request(
            "gone",
            tuple(range(3, 60)),
            SamplingParams(max_tokens=300, ignore_eos=True),
            REFS["pirate"],
        )
    )
    engine.submit(
        Request("stays", (3, 4, 5), SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    )
    outputs = []
    for _ in range(400):
        outputs += engine.step()
        if any(o.request_id == "gone" for o in outputs) and other is None:
            other = engine.abort("gone") or True
        if not engine.has_work:
            break
    last = {o.request_id: o.finish_reason for o in outputs if o.finish_reason}
    assert last == {"gone": FinishReason.ABORT, "stays": FinishReason.LENGTH}
    engine.check()
    assert engine.pool.free_pages == free and engine.stats().running == 0
    engine.abort("gone")
    engine.abort("never was")


def test_aborting_what_waits_for_its_adapter_leaves_no_claim_on_a_slot():
    """Else the adapter that nobody wants any more is kept, and the next tenant waits for it."""
    small = make_engine(max_loras=1)
    try:
        sampling = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
        small.submit(Request("long", (5, 6), sampling, REFS["pirate"]))
        while small.stats().running == 0:
            small.step()
        many = dataclasses.replace(sampling, n=3)
        small.submit(Request("gone", (5, 6), many, REFS["formal"]))
        ended = []
        while small.stats().waiting_for_adapter < 3:
            ended += small.step()
        small.abort("gone", 1)
        small.abort("gone")
        small.abort("long")
        while small.has_work:
            ended += small.step()
        stopped = [(o.request_id, o.index) for o in ended if o.finish_reason]
        assert sorted(stopped) == [("gone", 0), ("gone", 1), ("gone", 2), ("long", 0)]
        begin = time.monotonic()
        short = dataclasses.replace(sampling, max_tokens=2)
        small.generate([Request("next", (5, 6), short, REFS["spanish"])])
        assert time.monotonic() - begin < 5  # a claim would hold the slot for ten
        assert not any(e.waiters for e in small.store._prefetcher._entries.values())
    finally:
        small.close()


def test_an_adapter_that_failed_keeps_no_waiters():
    """Else what nobody can have is remembered for ever."""
    other = make_engine(max_loras=1)
    try:
        for i in range(4):
            missing = AdapterRef("missing", "/nowhere/at/all")
            done = other.generate([Request(f"m{i}", (5, 6), GREEDY, missing)])[0]
            assert done.error_code is ErrorCode.ADAPTER_NOT_FOUND
        assert not any(e.waiters for e in other.store._prefetcher._entries.values())
    finally:
        other.close()


def test_one_of_n_aborted_before_its_adapter_came_leaves_the_others(engine):
    sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, n=3)
    engine.submit(Request("n", (5, 6, 7), sampling, REFS["spanish"]))
    engine.abort("n", 1)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    last = {o.index: o.finish_reason for o in outputs if o.finish_reason}
    assert last == {0: FinishReason.LENGTH, 1: FinishReason.ABORT, 2: FinishReason.LENGTH}


def test_without_a_limit_a_sequence_is_as_long_as_memory_holds():
    tight = make_engine(kv_bytes=14 * 16 * 4 * 2 * 2 * 32 * 4, max_model_len=0)
    with closing(tight) as engine:
        assert engine.max_len == 13 * 16 + 1  # page 0 is nobody's, and the last token has no keys
        sampling = SamplingParams(temperature=0.0, max_tokens=10_000, ignore_eos=True)
        long, longer = Request("a", (5,) * 190, sampling), Request("b", (5,) * 209, sampling)
        served, refused = engine.generate([long, longer])
        assert served.finish_reason is FinishReason.LENGTH and len(served.token_ids) == 209 - 190
        assert refused.error_code is ErrorCode.PROMPT_TOO_LONG and "208 are" in refused.error


@pytest.mark.parametrize(
    ("request_fields", "code"),
    [
        ({"token_ids": ()}, ErrorCode.BAD_REQUEST),
        ({"token_ids": (5, 100_000)}, ErrorCode.BAD_REQUEST),
        ({"token_ids": (5, -1)}, ErrorCode.BAD_REQUEST),
        ({"token_ids": (5, "x")}, ErrorCode.BAD_REQUEST),
        ({"token_ids": (5, True)}, ErrorCode.BAD_REQUEST),
        ({"token_ids": (5,) * 512}, ErrorCode.PROMPT_TOO_LONG),
        ({"sampling": SamplingParams(temperature=-1)}, ErrorCode.BAD_REQUEST),
        ({"sampling": SamplingParams(top_p=float("nan"))}, ErrorCode.BAD_REQUEST),
        ({"sampling": SamplingParams(n=0)}, ErrorCode.BAD_REQUEST),
        ({"sampling": SamplingParams(stop_ids=None)}, ErrorCode.BAD_REQUEST),
        ({"sampling": SamplingParams(stop_ids=[5])}, ErrorCode.BAD_REQUEST),
        ({"sampling": SamplingParams(top_k=10**20)}, ErrorCode.BAD_REQUEST),
        ({"tenant_id": [1]}, ErrorCode.BAD_REQUEST),
        ({"cache_salt": None}, ErrorCode.BAD_REQUEST),
        ({"sampling": SamplingParams(max_tokens=None)}, ErrorCode.BAD_REQUEST),
        ({"sampling": None}, ErrorCode.BAD_REQUEST),
        ({"token_ids": None}, ErrorCode.BAD_REQUEST),
        ({"token_ids": 7}, ErrorCode.BAD_REQUEST),
        ({"weight": None}, ErrorCode.BAD_REQUEST),
        ({"adapter": "pirate"}, ErrorCode.BAD_REQUEST),
        ({"sampling": SamplingParams(n="2")}, ErrorCode.BAD_REQUEST),
        ({"sampling": SamplingParams(max_tokens=-1)}, ErrorCode.BAD_REQUEST),
        ({"sampling": SamplingParams(stop_ids=(100_000,))}, ErrorCode.BAD_REQUEST),
        ({"weight": 0.0}, ErrorCode.BAD_REQUEST),
        ({"weight": float("nan")}, ErrorCode.BAD_REQUEST),
        ({"adapter": AdapterRef("no", "/nowhere/at/all")}, ErrorCode.ADAPTER_NOT_FOUND),
    ],
)
def test_bad_input_is_told_and_harms_no_other(engine, request_fields, code):
    good = Request(
        "good",
        tuple(range(3, 20)),
        SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True),
        REFS["formal"],
    )
    alone = engine.generate([good])[0].token_ids
    bad = dataclasses.replace(Request("bad", (5, 6), GREEDY), **request_fields)
    done = {c.request_id: c for c in engine.generate([bad, dataclasses.replace(good)])}
    assert (done["bad"].finish_reason, done["bad"].error_code) == (
        FinishReason.ERROR,
        code,
    ) and done["bad"].error
    assert done["good"].token_ids == alone
    engine.check()


def test_a_broken_adapter_fails_alone(engine, tmp_path):
    shutil.copytree(ADAPTER_DIRS["pirate"], tmp_path / "broken")
    weights = tmp_path / "broken" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    done = engine.generate(
        [
            Request("b", (5, 6), GREEDY, AdapterRef("broken", str(tmp_path / "broken"))),
            Request(
                "g",
                (5, 6),
                SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True),
                REFS["pirate"],
            ),
        ]
    )
    assert (
        done[0].error_code is ErrorCode.ADAPTER_INVALID
        and "adapter_model.safetensors" in done[0].error
    )
    assert len(done[1].token_ids) == 4


def test_more_adapters_than_slots_take_turns(engine):
    requests = random_requests(16, 9)
    wanted = tokens_of(engine.generate(requests))
    small = make_engine(max_loras=1)
    try:
        assert tokens_of(small.generate(requests)) == wanted
        stats = small.stats()
        assert stats.evictions >= 2 and stats.num_slots == 1
        small.check()
    finally:
        small.close()


def test_a_request_that_may_evict_nobody_is_served_or_refused_at_once():
    engine = make_engine(max_loras=2)
    try:
        engine.load_adapters([REFS["pirate"], REFS["formal"]])
        modest = {"may_evict": False, "sampling": dataclasses.replace(GREEDY, n=2)}
        served, refused = (
            [
                Request(f"{name}-{i}", (1, 30, 40), adapter=REFS[name], **modest)
                for i, name in enumerate(names)
            ]
            for names in (("pirate", "formal"), ("spanish", "spanish"))
        )
        for answer in engine.generate([*served, *refused]):
            if answer.request_id.startswith("spanish"):
                assert answer.error_code is ErrorCode.NO_ROOM and not answer.token_ids
            else:
                assert answer.error_code is None and answer.token_ids
        assert engine.stats().evictions == 0 and engine.stats().loads["device"] == 2
        # One that may: it takes the place of another, and then of two modest ones at the door
        # the one whose adapter went is refused although it had found it there.
        engine.store.prefetch(REFS["spanish"])
        while engine.store.digest_of(REFS["spanish"]) is None:
            engine.store.poll()
        for name in ("pirate", "formal"):
            engine.submit(Request(name, (1, 30, 40), GREEDY, REFS[name], may_evict=False))
        while (lease := engine.store.acquire(REFS["spanish"])) is None:
            engine.store.poll()
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        engine.store.release(lease)
        ended = {o.request_id: o.error_code for o in outputs if o.finish_reason is not None}
        assert sorted(map(str, ended.values())) == sorted(map(str, (None, ErrorCode.NO_ROOM)))
        assert engine.stats().evictions == 1 and engine.stats().waiting_for_adapter == 0
        assert not engine._modest and not engine.has_work
        engine.check()
        engine.scheduler.check()
    finally:
        engine.close()


@pytest.mark.parametrize("max_len", [24, 200])
def test_the_warm_up_runs_a_step_of_every_size_class(max_len, monkeypatch):
    """Also where one prompt is never as long as a step: several together are."""
    engine = make_engine(max_model_len=max_len, max_step_tokens=100, max_num_seqs=8)
    try:
        seen = {"plain": set(), "scored": set()}
        launch = engine.runner.launch

        def note(batch, *args):
            seen["scored" if batch.prompt_scores else "plain"].add(sum(batch.num_tokens))
            return launch(batch, *args)

        monkeypatch.setattr(engine.runner, "launch", note)
        monkeypatch.setattr(engine, "device", torch.device("cuda"))
        engine._warm_up_prefill()
        classes = {kind: {(n - 1).bit_length() for n in sizes} for kind, sizes in seen.items()}
        assert classes["plain"] == set(range(8)) and max(seen["plain"]) == 100
        assert classes["scored"] == set(range(1, 8))
        assert engine.stats().prompt_tokens == 0 and not engine.has_work
    finally:
        engine.close()


def test_a_modest_request_whose_room_goes_while_its_adapter_arrives_leaves_nothing(
    engine, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(engine.store, "digest_of", lambda ref: None)
        engine.submit(Request("modest", (1, 30, 40), GREEDY, REFS["pirate"], may_evict=False))
        patch.setattr(engine.store, "has_room", lambda ref: False)
        (output,) = engine.step()
    assert output.error_code is ErrorCode.NO_ROOM
    assert not engine.has_work and not engine._arrivals and not engine._modest


def test_a_new_request_is_not_refused_for_a_modest_one_of_the_same_id(engine, monkeypatch):
    modest = Request("again", (1, 30, 40), GREEDY, REFS["pirate"], may_evict=False)
    engine.submit(modest)
    engine.abort("again")
    with monkeypatch.context() as patch:
        patch.setattr(engine.store, "has_room", lambda ref: False)
        answers = engine.generate([dataclasses.replace(modest, may_evict=True)])
    assert answers[0].error_code is None and answers[0].token_ids
    assert not engine._modest


@pytest.mark.parametrize("field", ["adapter_id", "uri", "revision", "base"])
def test_an_adapter_that_is_not_named_by_words_harms_its_own_request_alone(engine, field):
    odd = dataclasses.replace(REFS["pirate"], **{field: 5})
    requests = [Request("odd", (1, 30), GREEDY, odd), Request("good", (1, 30), GREEDY)]
    refused, served = engine.generate(requests)
    assert refused.error_code is ErrorCode.BAD_REQUEST and field in refused.error
    assert served.token_ids


def test_the_scheduler_hears_whose_adapter_has_come(monkeypatch):
    engine = make_engine()
    try:
        came = []
        wake = engine.scheduler.wake
        monkeypatch.setattr(engine.scheduler, "wake", lambda refs: (came.extend(refs), wake(refs)))
        assert engine.generate([Request("r", (1, 30), GREEDY, REFS["pirate"])])[0].token_ids
        assert {ref.adapter_id for ref in came} == {"pirate"}
    finally:
        engine.close()


def test_endless_work_for_one_adapter_does_not_starve_another():
    """Requests of the resident adapter overlap without end, so its slot never falls idle by
    itself."""
    small = make_engine(max_loras=1, max_num_seqs=4)

    def submit_busy(number: int) -> None:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=120 + 70 * (number % 3), ignore_eos=True
        )
        small.submit(
            Request(f"busy-{number}", (5, 6, 7), sampling, REFS["pirate"], tenant_id="busy")
        )

    try:
        for number in range(3):
            submit_busy(number)
        while small.stats().running < 3:
            small.step()
        small.submit(
            Request(
                "late", (5, 6, 7), SamplingParams(max_tokens=4), REFS["formal"], tenant_id="late"
            )
        )
        number, ended = 3, False
        for _ in range(5000):
            outputs = small.step()
            for output in outputs:
                if output.finish_reason is not None:
                    ended |= output.request_id == "late"
                    submit_busy(number)
                    number += 1
            if not outputs:
                time.sleep(0.001)  # all wait for the adapter
            if ended:
                break
        assert ended, f"{number} requests of the busy adapter came first"
    finally:
        small.close()


def test_a_rank_that_no_kernel_serves_is_refused_at_start() -> None:
    with pytest.raises(ValueError, match="max_lora_rank 512 is above 256"):
        make_engine(max_lora_rank=512)
