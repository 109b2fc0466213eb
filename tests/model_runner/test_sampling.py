"""Every knob of `SamplingParams` against a reference in numpy, on the demo: each alone and all
together, greedy and drawn, in one batch with rows that want nothing, whose tokens stay what they
were. Then the same tokens with look-ahead, in chunks, after preemption, among n, and elsewhere.

Not here: the sampler without an engine (test_sampler.py), stop strings (test_text.py).
"""

import dataclasses
import random
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from adapter_store.ref import AdapterRef
from model_runner.config import EngineConfig
from model_runner.engine import Engine
from model_runner.execution.token_counts import TokenCounts
from model_runner.request import Completion, ErrorCode, FinishReason, Request, SamplingParams
from model_runner.scheduling.running import RunningSet
from tests.guards import take_out
from tests.model_runner.demo import ADAPTER_DIRS, BASE_DIR

EOS = 2
REFS = (None, *(AdapterRef(name, str(folder)) for name, folder in ADAPTER_DIRS.items()))
LOUD = {"repetition_penalty": 1.6, "presence_penalty": 1.8, "frequency_penalty": 1.2}
BIAS = ((EOS, -100.0), (40, 6.5), (41, 6.0), (300, -3.0), (324, -9.0), (323, -100.0))
# Alone, then together. Those after the first two change nothing that is greedy.
KNOBS: dict[str, dict] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "min_p": {"min_p": 0.2},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "repetition": {"repetition_penalty": 2.5},
    "repetition_greedy": {"repetition_penalty": 2.5, "temperature": 0.0},
    "repetition_below_one": {"repetition_penalty": 0.8},
    "presence": {"presence_penalty": 1.9},
    "frequency": {"frequency_penalty": 1.5},
    "frequency_greedy": {"frequency_penalty": 2.0, "temperature": 0.0},
    "frequency_negative": {"frequency_penalty": -1.5},
    "bias": {"logit_bias": BIAS},
    "bias_greedy": {"logit_bias": BIAS, "temperature": 0.0},
    "logprobs": {"logprobs": 5},
    "min_tokens": {"min_tokens": 6, "ignore_eos": False, "stop_ids": (290, 300, 323, 324)},
    "all_greedy": {"logit_bias": BIAS, "temperature": 0.0, "logprobs": 3, "min_tokens": 4} | LOUD,
    "all": {"logit_bias": BIAS, "min_p": 0.05, "top_k": 40, "top_p": 0.9, "logprobs": 20} | LOUD,
}


def make_engine(**fields) -> Engine:
    defaults = {"model": str(BASE_DIR), "max_model_len": 512, "kv_bytes": 32 << 20, "seed": 1}
    return Engine(EngineConfig(**(defaults | fields)))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = make_engine(prefix_cache=False)
    yield engine
    engine.close()


def requests_of(name: str, knobs: Sequence[str] = tuple(KNOBS), **fields) -> list[Request]:
    """One for each knob, each with a prompt of its own that says things twice."""
    found = []
    for number, knob in enumerate(knobs):
        rng = random.Random(knob)
        some = [rng.randrange(3, 600) for _ in range(rng.randrange(5, 40))]
        sampling = {"temperature": 2.0, "seed": number, "max_tokens": 20, "ignore_eos": True}
        sampling |= KNOBS[knob] | fields
        prompt = (*some, *some[: len(some) // 2])
        request_id = f"{name}-{knob}"
        found.append(Request(request_id, prompt, SamplingParams(**sampling), REFS[number % 4]))
    return found


def logits_of(engine: Engine, requests: Sequence[Request], outputs: Sequence[Sequence[int]]):
    """Of each request's prompt and output, by position. [T, V] float64 each"""
    parts: list[list[np.ndarray]] = [[] for _ in requests]
    items = [
        ((*r.token_ids, *out), r.adapter, lambda first, x, p=p: p.append(x.double().numpy()))
        for r, out, p in zip(requests, outputs, parts, strict=True)
    ]
    engine.score(items, lambda number, why: None)
    return [np.concatenate(part) for part in parts]


def uniform(seed: int, index: int, position: int) -> float:
    mask, x = (1 << 64) - 1, seed & ((1 << 64) - 1)
    for word in (index, position):
        x = (x + 0x9E3779B97F4A7C15 * (word + 1)) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        x ^= x >> 31
    return ((x >> 41) + 0.5) / (1 << 23)


def expected(
    logits: np.ndarray, s: SamplingParams, prompt: Sequence[int], output: Sequence[int], index: int
) -> int:
    """The token that comes after prompt and output. logits [V] float64"""
    x = logits.copy()
    for token_id, by in s.logit_bias:
        x[token_id] += by
    if len(output) < s.min_tokens:
        x[[EOS, *s.stop_ids]] = -np.inf
    for token_id in {*prompt, *output}:
        r = s.repetition_penalty
        x[token_id] = x[token_id] / r if x[token_id] > 0 else x[token_id] * r
    for token_id, count in Counter(output).items():
        x[token_id] -= s.frequency_penalty * count + s.presence_penalty
    if s.temperature == 0:
        return int(x.argmax())
    p = np.exp((x - x.max()) / s.temperature)
    p[p < s.min_p * p.max()] = 0
    order = np.argsort(-p, kind="stable")
    if s.top_k:
        p[order[s.top_k :]] = 0
    before = np.cumsum(p[order]) - p[order]
    p[order[1:][before[1:] >= s.top_p * p.sum()]] = 0
    u = uniform(s.seed or 0, index, len(prompt) + len(output))
    return int(np.searchsorted(np.cumsum(p), u * p.sum(), side="right"))


def check(engine: Engine, requests: Sequence[Request], done: Sequence[Completion]) -> None:
    """Each token is the reference's, given those before it, and so are the log-probabilities."""
    by_id = {r.request_id: r for r in requests}
    asked = [by_id[c.request_id] for c in done]
    scores = logits_of(engine, asked, [c.token_ids for c in done])
    for r, c, logits in zip(asked, done, scores, strict=True):
        s, start = r.sampling, len(r.token_ids) - 1
        assert c.token_ids and (s.logprobs is None) == (not c.logprobs)
        for i, token in enumerate(c.token_ids):
            row = logits[start + i]
            want = expected(row, s, r.token_ids, c.token_ids[:i], c.index)
            assert token == want, (r.request_id, i)
            if s.logprobs is not None:
                log = row - row.max() - np.log(np.exp(row - row.max()).sum())
                found = c.logprobs[i]
                assert found.chosen == pytest.approx(log[token], abs=1e-4)
                assert found.rank == 1 + (row > row[token]).sum()
                best = np.argsort(-row, kind="stable")[: s.logprobs]
                assert [t for t, _ in found.top] == best.tolist()
                assert [v for _, v in found.top] == pytest.approx(log[best], abs=1e-4)


def tokens_of(done: Sequence[Completion]) -> list[list[int]]:
    return [c.token_ids for c in done]


def test_each_knob_and_all_together_in_one_batch(engine: Engine) -> None:
    requests = requests_of("ref")
    done = engine.generate(requests)
    check(engine, requests, done)
    # Each knob does something: without it other tokens come.
    bare = requests_of("bare")
    bare = [
        dataclasses.replace(
            r,
            sampling=SamplingParams(
                temperature=r.sampling.temperature, seed=r.sampling.seed, max_tokens=20,
                ignore_eos=True,
            ),
        )
        for r in bare
    ]  # fmt: skip
    plain = engine.generate(bare)
    same = [k for k, a, b in zip(KNOBS, done, plain, strict=True) if a.token_ids == b.token_ids]
    assert same == ["plain", "greedy", "logprobs"]


def test_plain_rows_do_not_feel_their_neighbours(engine: Engine, monkeypatch) -> None:
    """Nor do they take another path: the sampler sees only those that ask."""
    alone = tokens_of([engine.generate([r])[0] for r in requests_of("a", ["plain", "greedy"])])
    seen = []
    draw = engine.runner._sampler.draw
    monkeypatch.setattr(
        engine.runner._sampler,
        "draw",
        lambda asked, *rest: seen.extend(asked) or draw(asked, *rest),
    )
    done = engine.generate(requests_of("b"))
    assert tokens_of(done)[:2] == alone
    assert seen and not any(a.row.is_plain for a in seen)


@pytest.mark.parametrize(
    "fields",
    [
        {"look_ahead": True},
        {"look_ahead": True, "max_step_tokens": 16, "max_num_seqs": 8},
    ],
)
def test_look_ahead_chunks_and_company_change_no_token(engine: Engine, fields) -> None:
    wanted = tokens_of(engine.generate(requests_of("w")))
    other = make_engine(**fields)
    try:
        for name in ("x", "y"):  # the second time with cached prompts, on seats that were used
            assert tokens_of(other.generate(requests_of(name))) == wanted
        other.check()
    finally:
        other.close()


LONG = ("all", "repetition_greedy", "frequency_greedy", "plain")


@pytest.mark.parametrize("look_ahead", [False, True])
def test_preemption_counts_what_was_drawn_before(engine: Engine, look_ahead: bool) -> None:
    requests = requests_of("p", LONG, max_tokens=40)
    wanted = engine.generate(requests)
    check(engine, requests, wanted)
    tight = make_engine(kv_bytes=10 * 16 * 4 * 2 * 2 * 32 * 4, prefix_cache=False,
                        max_model_len=104, look_ahead=look_ahead)  # fmt: skip
    try:
        # Their adapters are there, so that all enter in order: who is preempted hangs on no load.
        tight.generate(requests_of("warm", LONG, max_tokens=1))
        assert tokens_of(tight.generate(requests)) == tokens_of(wanted)
        assert tight.stats().preemptions > 0
        tight.check()
    finally:
        tight.close()


def test_of_n_each_counts_its_own(engine: Engine) -> None:
    requests = requests_of("n", ["all", "presence", "plain"], n=3)
    sharing = make_engine(look_ahead=True)
    try:
        done = sharing.generate(requests)
        check(engine, requests, done)
        assert len({tuple(c.token_ids) for c in done}) == 9
        # An abort gives its seat to the next, who feels nothing of it.
        sharing.submit(dataclasses.replace(requests[0], request_id="gone"))
        for _ in range(5):
            sharing.step()
        sharing.abort("gone")
        while sharing.has_work:
            sharing.step()
        again = [dataclasses.replace(r, request_id=f"{r.request_id}-2") for r in requests]
        assert tokens_of(sharing.generate(again)) == tokens_of(done)
    finally:
        sharing.close()


@pytest.mark.parametrize(
    ("owner", "name", "line", "instead", "check"),
    [
        (TokenCounts, "begin", 'self.table.index_fill_(0, views["begun_seats"], 0)', "pass",
         test_of_n_each_counts_its_own),
        (TokenCounts, "add", "(tokens >= 0).int()", "(tokens < 0).int()",
         test_of_n_each_counts_its_own),
        (RunningSet, "build", "known = tuple(seq.token_ids)",
         "known = tuple(seq.token_ids[: seq.prompt_len])",
         lambda engine: test_preemption_counts_what_was_drawn_before(engine, True)),
    ],
)  # fmt: skip
def test_without_its_guard_it_shows(
    engine: Engine, owner, name, line, instead, check, monkeypatch
) -> None:
    take_out(monkeypatch, owner, name, line, instead)
    with pytest.raises(AssertionError):
        check(engine)


# Prompt log-probabilities


def check_prompt(engine: Engine, request: Request, found: Completion) -> None:
    ids, most = request.token_ids, request.sampling.prompt_logprobs or 0
    logits = logits_of(engine, [request], [()])[0]
    log = logits - logits.max(-1, keepdims=True)
    log -= np.log(np.exp(log).sum(-1, keepdims=True))
    assert len(found.prompt_logprobs) == len(ids) - 1
    for position, entry in enumerate(found.prompt_logprobs):
        row, token = log[position], ids[position + 1]
        assert entry.chosen == pytest.approx(row[token], abs=1e-4)
        assert entry.rank == 1 + (logits[position] > logits[position][token]).sum()
        best = np.argsort(-row, kind="stable")[:most]
        assert [t for t, _ in entry.top] == best.tolist()


def prompts_of(name: str, **fields) -> list[Request]:
    rng = random.Random(9)
    return [
        Request(
            f"{name}{i}",
            tuple(rng.randrange(3, 600) for _ in range(length)),
            SamplingParams(
                **({"temperature": 0.0, "max_tokens": 6, "ignore_eos": True,
                    "prompt_logprobs": i % 3} | fields)
            ),
            REFS[i % 4],
        )
        for i, length in enumerate((1, 2, 16, 17, 60, 99))
    ]  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [{}, {"look_ahead": True, "max_step_tokens": 16, "max_num_seqs": 8}, {"max_num_seqs": 1}],
)
def test_prompt_logprobs_chunk_by_chunk(engine: Engine, fields, monkeypatch) -> None:
    """Beside others, whose tokens stay the same; in parts, of which none is a whole prompt's."""
    monkeypatch.setattr("model_runner.execution.runner.SCORE_LOGITS", 7 * 3584)
    requests, others = prompts_of("a"), requests_of("o", ["all", "plain"])
    bare = prompts_of("b", prompt_logprobs=None)
    wanted = tokens_of(engine.generate([*bare, *others]))
    other = make_engine(**fields)
    try:
        done = other.generate([*requests, *others])
        assert tokens_of(done) == wanted
        for request, completion in zip(requests, done[: len(requests)], strict=True):
            check_prompt(engine, request, completion)
        assert not done[-1].prompt_logprobs
        other.check()
    finally:
        other.close()


def test_a_cached_prompt_is_computed_for_its_logprobs_and_shared_with_others(
    engine: Engine,
) -> None:
    other = make_engine()
    try:
        *_, request = prompts_of("c", prompt_logprobs=2)
        first, again = (
            other.generate([dataclasses.replace(request, request_id=name)])[0] for name in "fg"
        )
        assert first.num_cached_tokens == again.num_cached_tokens == 0
        assert first.prompt_logprobs == again.prompt_logprobs
        check_prompt(engine, request, again)
        bare = dataclasses.replace(request.sampling, prompt_logprobs=None)
        taken = other.generate([dataclasses.replace(request, request_id="t", sampling=bare)])[0]
        assert taken.num_cached_tokens == 96 and taken.token_ids == first.token_ids
        # Of n the first tells them, and the others share its pages.
        three = dataclasses.replace(request, request_id="n", sampling=dataclasses.replace(
            request.sampling, n=3))  # fmt: skip
        told = other.generate([three])
        assert [len(c.prompt_logprobs) for c in told] == [98, 0, 0]
        assert [c.num_cached_tokens for c in told] == [0, 96, 96]
        other.check()
    finally:
        other.close()


def test_preempted_prompts_are_told_once(engine: Engine) -> None:
    requests = [
        dataclasses.replace(r, token_ids=r.token_ids[:20])
        for r in prompts_of("q", max_tokens=60, prompt_logprobs=1)[3:] * 2
    ]
    requests = [dataclasses.replace(r, request_id=f"q{i}") for i, r in enumerate(requests)]
    tight = make_engine(kv_bytes=10 * 16 * 4 * 2 * 2 * 32 * 4, max_model_len=96, look_ahead=True,
                        max_step_tokens=12, max_num_seqs=6)  # fmt: skip
    try:
        for request, completion in zip(requests, tight.generate(requests), strict=True):
            check_prompt(engine, request, completion)
        assert tight.stats().preemptions > 0
        tight.check()
    finally:
        tight.close()


def test_no_token_but_the_prompt_s(engine: Engine) -> None:
    requests = prompts_of("z", max_tokens=0, prompt_logprobs=1)
    before = engine.stats()
    # Two pages are filled to the last place.
    full = dataclasses.replace(requests[0], request_id="full", token_ids=tuple(range(3, 35)))
    requests.append(full)
    done = engine.generate(requests)
    after = engine.stats()
    for request, completion in zip(requests, done, strict=True):
        assert completion.finish_reason is FinishReason.LENGTH and not completion.token_ids
        check_prompt(engine, request, completion)
    assert after.delivered_tokens == before.delivered_tokens
    drawn = after.sampled_tokens - before.sampled_tokens
    assert drawn == after.discarded_tokens - before.discarded_tokens == len(requests)
    engine.check()


# Bad input


@pytest.mark.parametrize(
    "fields",
    [
        {"min_p": -0.1}, {"min_p": 1.5}, {"min_p": float("nan")},
        {"repetition_penalty": 0}, {"repetition_penalty": -1.0}, {"repetition_penalty": 1e-300},
        {"repetition_penalty": float("inf")}, {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1}, {"frequency_penalty": "1"},
        {"logit_bias": ((5, 101.0),)}, {"logit_bias": ((-1, 1.0),)}, {"logit_bias": {5: 1.0}},
        {"logit_bias": ((5, 1.0), (5, 2.0))}, {"logit_bias": ((5,),)}, {"logit_bias": (5, 1.0)},
        {"logit_bias": ((3584, 1.0),)}, {"logit_bias": tuple((i, 1.0) for i in range(1025))},
        {"prompt_logprobs": 21}, {"prompt_logprobs": -1}, {"prompt_logprobs": True},
        {"logprobs": 21}, {"max_tokens": -1},
    ],
)  # fmt: skip
def test_refused_by_name(engine: Engine, fields) -> None:
    done = engine.generate([Request("bad", (5, 6), SamplingParams(**fields))])[0]
    assert done.error_code is ErrorCode.BAD_REQUEST
    assert done.error.startswith(next(iter(fields)))


# On a GPU


@pytest.mark.gpu
def test_knobs_beside_graphs_and_look_ahead() -> None:
    """What can be said of bf16 without a reference: runs repeat, nothing is compiled meanwhile,
    bans hold, and a prompt's entries are all there."""
    own = make_engine(device="cuda", dtype="bfloat16", deterministic=True, kv_bytes=64 << 20,
                      max_num_seqs=32, prefix_cache=False)  # fmt: skip
    try:
        own.load_adapters([ref for ref in REFS if ref])  # so that both runs take the same steps
        runs = []
        for name in ("a", "b"):
            requests = requests_of(name, prompt_logprobs=1)
            done = own.generate(requests)
            runs.append(tokens_of(done))
            for request, completion in zip(requests, done, strict=True):
                s, ids = request.sampling, completion.token_ids
                assert len(completion.prompt_logprobs) == len(request.token_ids) - 1
                assert not (s.logit_bias and {EOS, 323} & set(ids))
                assert not {EOS, *s.stop_ids} & set(ids[: s.min_tokens])
                assert all(len(entry.top) == s.logprobs for entry in completion.logprobs)
        assert runs[0] == runs[1] and len({tuple(ids) for ids in runs[0]}) > 10
        assert not own.late_compiles()
        own.check()
    finally:
        own.close()


@pytest.mark.gpu
def test_a_gpu_draws_as_a_cpu_does() -> None:
    """The sampler alone, step after step on the same logits, in fp32; and no copy waits for the
    device meanwhile."""
    from model_runner.execution.inputs import upload
    from model_runner.execution.sampler import Asked, Sampler
    from model_runner.scheduling.batch import History, SamplingRow

    vocab, num_steps = 201_088, 12
    rows = []
    for knob in KNOBS:
        s = SamplingParams(**({"temperature": 1.1, "ignore_eos": True} | KNOBS[knob]))
        rows.append(SamplingRow(
            s.temperature, s.top_p, s.top_k, len(rows), 0, s.logprobs, s.stop_ids, "", s.min_p,
            s.repetition_penalty, s.presence_penalty, s.frequency_penalty, s.logit_bias,
        ))  # fmt: skip
    generator = torch.Generator().manual_seed(5)
    # Few tokens are likely, so that they come again and again.
    steps = 2 * torch.randn(num_steps, len(rows), vocab, generator=generator)
    steps[:, :, :50] += 9
    samplers = [Sampler(vocab, len(rows), torch.device(name)) for name in ("cpu", "cuda")]
    histories = [
        History(i, i, (*range(i, i + 30), 7, 7), 30) for i, r in enumerate(rows) if r.has_penalties
    ]
    upload({"warm": np.zeros(1, np.int64)}, torch.device("cuda"))
    wrong = 0
    for number, logits in enumerate(steps):
        asked = [Asked(i, i, i, r, 40 + number, i) for i, r in enumerate(rows)]
        begun = histories if not number else []
        found = []
        for sampler, x in zip(samplers, (logits, logits.cuda()), strict=True):
            if number:  # the first step compiles
                torch.cuda.set_sync_debug_mode("error" if x.is_cuda else "default")
            try:
                drawn = sampler.draw(asked, begun, x)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
            assert drawn.logprobs is not None
            found.append((drawn.tokens.tolist(), drawn.logprobs.read(len(rows))))
        wrong += sum(a != b for a, b in zip(found[0][0], found[1][0], strict=True))
        for mine, theirs in zip(found[0][1], found[1][1], strict=True):
            if mine is not None and theirs is not None:
                # Each sums 200,000 exponentials in an order of its own.
                values = [[v for _, v in entry.top] for entry in (mine, theirs)]
                assert values[0] == pytest.approx(values[1], abs=1e-4)
        # What follows is counted alike on both.
        samplers[1]._counts.table.copy_(samplers[0]._counts.table)
    # A cumulative sum of 200,000 numbers may round to the other side of a draw.
    assert wrong <= 0.02 * num_steps * len(rows)
