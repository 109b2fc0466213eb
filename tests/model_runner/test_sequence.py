"""One sequence by itself: when it ends, what it bans, when a decode needs attention."""

from hashlib import blake2b

import pytest

from model_runner.request import FinishReason, Request, SamplingParams
from model_runner.scheduling.page_pool import PageTable
from model_runner.scheduling.sequence import Account, Sequence

EOS = (0, 9)


def make(max_model_len: int = 100, prompt_len: int = 4, **sampling: object) -> Sequence:
    params = SamplingParams(**{"max_tokens": 10, **sampling})  # type: ignore[arg-type]
    seq = Sequence(3, Request("r", tuple(range(20, 20 + prompt_len)), params), index=2, seed=11)
    seq.bind(0, PageTable(blake2b(), 1), Account(""), EOS, max_model_len)
    return seq


def say(seq: Sequence, *tokens: int) -> FinishReason | None:
    reason = None
    for token in tokens:
        assert reason is None
        seq.token_ids.append(token)
        reason = seq.reason_to_finish()
    return reason


def test_ends_at_max_tokens() -> None:
    seq = make(max_tokens=3)
    assert say(seq, 5, 5) is None
    assert say(seq, 5) is FinishReason.LENGTH
    assert seq.num_output == 3


def test_ends_at_the_models_length() -> None:
    assert say(make(max_model_len=6), 5, 5) is FinishReason.LENGTH


@pytest.mark.parametrize("token", [0, 9])
def test_ends_at_end_of_text_unless_ignored(token: int) -> None:
    assert say(make(), 5, token) is FinishReason.STOP
    assert say(make(ignore_eos=True), 5, token) is None


def test_ends_at_stop_ids_also_where_end_of_text_is_ignored() -> None:
    assert say(make(stop_ids=(7,), ignore_eos=True), 5, 7) is FinishReason.STOP
    assert say(make(stop_ids=(7,)), 8) is None


def test_a_stop_on_the_last_token_is_a_stop() -> None:
    assert say(make(max_tokens=2), 5, 0) is FinishReason.STOP


def test_before_min_tokens_nothing_ends_and_ends_are_banned() -> None:
    seq = make(min_tokens=2, stop_ids=(7,), logprobs=3, top_k=4, top_p=0.5, temperature=0.2)
    row = seq.make_sampling_row()
    assert row.banned_ids == (0, 7, 9)
    assert (row.temperature, row.top_p, row.top_k, row.logprobs) == (0.2, 0.5, 4, 3)
    assert (row.seed, row.index) == (11, 2)
    assert say(seq, 7, 0) is None
    assert seq.make_sampling_row().banned_ids == ()
    assert say(seq, 7) is FinishReason.STOP


def test_a_token_being_drawn_counts_for_bans() -> None:
    seq = make(min_tokens=2)
    seq.token_ids.append(5)
    assert seq.bans_end
    seq.num_pending = 1
    assert not seq.bans_end


def test_prefilling_until_only_the_newest_token_is_left() -> None:
    seq = make(prompt_len=4)
    assert seq.is_prefilling
    seq.num_computed = 3
    assert seq.is_prefilling  # of a prompt, the last token gives the first logits
    seq.num_computed, seq.num_pending = 4, 1
    assert not seq.is_prefilling
    seq.num_pending = 0
    seq.token_ids.append(5)
    assert not seq.is_prefilling
    seq.num_computed = 0  # preempted
    assert seq.is_prefilling


def test_the_next_event_is_the_first_of_page_end_ban_and_length() -> None:
    seq = make(max_tokens=10)
    seq.plan_event(8)
    assert seq.next_event == 8
    seq.plan_event(1000)
    assert seq.next_event == 4 + 10 - 1
    seq = make(min_tokens=3)
    seq.plan_event(8)
    assert seq.next_event == 4 + 3 - 1
    seq = make(mask="m")
    seq.plan_event(8)
    assert seq.next_event < 0


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_a_senseless_weight_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="'r' has weight"):
        Sequence(0, Request("r", (1,), weight=weight))


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="'r' has an empty prompt"):
        Sequence(0, Request("r", ()))
