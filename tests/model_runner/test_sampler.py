"""Draws follow the distribution, depend on (seed, index, position) alone, and keep to top_k, top_p,
bans and masks."""

import math
from dataclasses import dataclass

import pytest
import torch

import kernels.sample_token as sample_token_side
from kernels.sample_token import NOT_FINITE, sample_token
from model_runner.execution.sampler import Asked, Sampler
from model_runner.execution.uniform import draw_uniform
from model_runner.request import TokenLogprobs
from model_runner.scheduling.batch import History, SamplingRow
from tests.guards import take_out


def row(**fields) -> SamplingRow:
    return SamplingRow(
        **({"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 1, "index": 0} | fields)
    )


@dataclass
class Drawn:
    tokens: torch.Tensor
    logprobs: tuple[TokenLogprobs | None, ...]


def draw(logits: torch.Tensor, rows: list[SamplingRow], positions: list[int], masks=None) -> Drawn:
    """By the sampler, whatever the rows want; nobody has seen a token yet."""
    sampler = Sampler(logits.shape[1], len(rows), logits.device)
    sampler.masks.update(masks or {})
    asked = [Asked(i, i, i, r, positions[i], i) for i, r in enumerate(rows)]
    histories = [History(i, i, (), 0) for i, r in enumerate(rows) if r.has_penalties]
    drawn = sampler.draw(asked, histories, logits)
    logprobs = drawn.logprobs.read(len(rows)) if drawn.logprobs else (None,) * len(rows)
    return Drawn(drawn.tokens, logprobs)


def test_uniform_is_spread_and_depends_on_all_three():
    n = 20_000
    values = torch.from_numpy(draw_uniform([5] * n, [0] * n, list(range(n))))
    assert values.min() > 0 and values.max() < 1
    assert abs(values.mean() - 0.5) < 0.01
    counts = torch.histc(values, 10, 0, 1)
    assert counts.min() > 1800 and counts.max() < 2200
    assert len(set(draw_uniform([1, 2, 1, 1], [0, 0, 1, 0], [0, 0, 0, 1]).tolist())) == 4
    assert draw_uniform([-1], [0], [0]) == draw_uniform([2**64 - 1], [0], [0])


def test_uniform_is_splitmix64():
    """The published constants, in plain integers."""
    mask = (1 << 64) - 1

    def plain(seed: int, index: int, position: int) -> float:
        x = seed & mask
        for word in (index, position):
            x = (x + 0x9E3779B97F4A7C15 * (word + 1)) & mask
            x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
            x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
            x ^= x >> 31
        return ((x >> 41) + 0.5) / (1 << 23)

    cases = [(0, 0, 0), (7, 3, 1000), (-5, 127, 131071), (2**63 - 1, 1, 2)]
    assert draw_uniform(*zip(*cases, strict=True)).tolist() == [plain(*c) for c in cases]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_tempered_distribution(temperature):
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5])
    n = 20_000
    rows = [row(temperature=temperature)] * n
    tokens = draw(logits.expand(n, 5).clone(), rows, list(range(n))).tokens
    found = torch.bincount(tokens, minlength=5) / n
    wanted = (logits / temperature).softmax(-1)
    assert (found - wanted).abs().max() < 4 * math.sqrt(0.25 / n)


def test_greedy_takes_the_best_and_ignores_seed():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    tokens = draw(logits, [row(temperature=0.0, seed=s) for s in range(4)], [3, 4, 5, 6]).tokens
    assert tokens.tolist() == logits.argmax(-1).tolist()


def test_company_and_order_do_not_change_a_draw():
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(6, 64, generator=generator)
    rows = [row(seed=s, top_p=0.9 if s % 2 else 1.0, temperature=0.7) for s in range(6)]
    together = draw(logits, rows, list(range(6))).tokens.tolist()
    alone = [draw(logits[i : i + 1], [rows[i]], [i]).tokens.item() for i in range(6)]
    turned = draw(logits.flip(0), rows[::-1], list(range(6))[::-1]).tokens.tolist()[::-1]
    assert together == alone == turned


def test_top_k_and_top_p_keep_the_best():
    logits = torch.log(torch.tensor([0.5, 0.25, 0.15, 0.1])).expand(4000, 4).clone()
    positions = list(range(4000))
    only = draw(logits, [row(top_k=2)] * 4000, positions).tokens
    assert set(only.tolist()) == {0, 1}
    assert set(draw(logits, [row(top_p=0.7)] * 4000, positions).tokens.tolist()) == {0, 1}
    assert set(draw(logits, [row(top_p=0.76)] * 4000, positions).tokens.tolist()) == {0, 1, 2}
    assert set(draw(logits, [row(top_p=0.01)] * 4000, positions).tokens.tolist()) == {0}
    share = (only == 0).float().mean()
    assert abs(share - 2 / 3) < 0.03


def test_bans_and_masks_hold_for_greedy_and_drawn_rows():
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0]] * 3)
    masks = {"odd": lambda r, position: torch.tensor([False, True, False, position == 7])}
    rows = [
        row(temperature=0.0, banned_ids=(0,)),
        row(temperature=0.0, mask="odd"),
        row(banned_ids=(0, 1, 2)),
    ]
    assert draw(logits, rows, [1, 2, 3], masks).tokens.tolist() == [1, 1, 3]
    assert not any(r.is_plain for r in rows)


def test_logprobs_are_of_the_model_before_temperature_and_bans():
    logits = torch.randn(2, 10, generator=torch.Generator().manual_seed(3))
    rows = [
        row(temperature=0.0, logprobs=3, banned_ids=(int(logits[0].argmax()),)),
        row(temperature=0.0),
    ]
    drawn = draw(logits, rows, [0, 0])
    want = logits[0].log_softmax(-1)
    assert drawn.logprobs[0] is not None and drawn.logprobs[1] is None
    first = drawn.logprobs[0]
    assert first.chosen == pytest.approx(want[drawn.tokens[0]].item())
    assert [i for i, _ in first.top] == want.topk(3).indices.tolist()
    assert [v for _, v in first.top] == pytest.approx(want.topk(3).values.tolist())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_is_marked_and_harms_no_other(bad):
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(4))
    clean = sample_token(
        logits, torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0.5, 0.5, 0.5])
    ).tolist()
    logits[1, 7] = bad
    plain = sample_token(
        logits, torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0.5, 0.5, 0.5])
    ).tolist()
    assert plain == [clean[0], NOT_FINITE, clean[2]]
    general = draw(
        logits, [row(temperature=0.0), row(top_k=3), row(temperature=0.0)], [0, 0, 0]
    ).tokens.tolist()
    assert general == plain


def a_ban_hides_nothing() -> None:
    """NaN where a ban or a mask puts minus infinity is still NaN of the model's."""
    logits = torch.zeros(1, 20)
    logits[0, 7] = torch.nan
    assert draw(logits, [row(banned_ids=(7,))], [0]).tokens.tolist() == [NOT_FINITE]
    masks = {"not 7": lambda r, position: torch.arange(20) != 7}
    assert draw(logits, [row(mask="not 7")], [0], masks).tokens.tolist() == [NOT_FINITE]


def test_a_ban_hides_nothing() -> None:
    a_ban_hides_nothing()


@pytest.mark.parametrize(
    ("owner", "name", "line", "check"),
    [
        (Sampler, "draw", "torch.where(torch.isfinite(raw.amax(-1)), tokens, NOT_FINITE)",
         a_ban_hides_nothing),
        (sample_token_side, "sample_token_reference",
         "torch.where(torch.isfinite(best), tokens, NOT_FINITE)",
         lambda: test_a_row_that_is_not_finite_is_marked_and_harms_no_other(torch.nan)),
    ],
)  # fmt: skip
def test_without_its_guard_such_a_row_gets_a_token(owner, name, line, check, monkeypatch) -> None:
    take_out(monkeypatch, owner, name, line, "tokens")
    with pytest.raises(AssertionError):
        check()
