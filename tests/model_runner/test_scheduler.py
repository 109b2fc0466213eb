"""The scheduler over random lives, and the cases that random lives meet too seldom."""

from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from model_runner.execution.inputs import PageTables
from model_runner.request import FinishReason
from model_runner.scheduling.admission import Admission
from tests.guards import take_out
from tests.model_runner.scheduling_world import EOS, FakeGate, World, adapter, answer, request

BOTH = pytest.mark.parametrize("look_ahead", [False, True])
REFS = [None, adapter("a"), adapter("b"), adapter("c"), adapter("gone")]


class Lives(RuleBasedStateMachine):
    """Arrivals, aborts, steps in any order: all adds up after each, and every answer is right."""

    @initialize(
        look_ahead=st.booleans(),
        windows=st.sampled_from([(0,), (0, 6), (0, 4, 9)]),
        num_pages=st.integers(20, 70),
        num_seqs=st.integers(1, 6),
        step_tokens=st.integers(6, 24),
        slots=st.integers(1, 3),
        prefix_cache=st.booleans(),
        makes_room=st.booleans(),
    )
    def build(
        self,
        look_ahead: bool,
        windows: tuple[int, ...],
        num_pages: int,
        num_seqs: int,
        step_tokens: int,
        slots: int,
        prefix_cache: bool,
        makes_room: bool,
    ) -> None:
        gate = FakeGate(slots)
        gate.dead.add(adapter("gone"))
        self.world = World(
            num_pages,
            4,
            windows,
            num_seqs,
            step_tokens,
            48,
            prefix_cache,
            look_ahead,
            gate,
            makes_room,
        )
        self.count = 0

    @rule(
        base=st.sampled_from([(1, 2, 3, 4, 5, 6, 7, 8, 9), (5, 5, 5, 5, 5), (3,)]),
        tail=st.lists(st.integers(1, 3), max_size=12),
        ref=st.sampled_from(REFS),
        tenant=st.sampled_from("xyz"),
        salt=st.sampled_from(["", "s"]),
        max_tokens=st.integers(0, 30),
        penalty=st.sampled_from([0, 1]),
        prompt_logprobs=st.sampled_from([None, None, 2]),
        min_tokens=st.integers(0, 6),
        stop=st.sampled_from([(), (4,), (4, 5, 6, 7)]),
        n=st.integers(1, 3),
        ignore_eos=st.booleans(),
    )
    def arrive(
        self,
        base: tuple[int, ...],
        tail: list[int],
        ref: object,
        tenant: str,
        salt: str,
        max_tokens: int,
        penalty: int,
        prompt_logprobs: int | None,
        min_tokens: int,
        stop: tuple[int, ...],
        n: int,
        ignore_eos: bool,
    ) -> None:
        prompt = (*base, *tail)
        if not self.world.scheduler.fits(min(48, len(prompt) + max(1, max_tokens))):
            return
        self.count += 1
        self.world.add(
            request(
                self.count,
                prompt,
                ref,  # type: ignore[arg-type]
                tenant,
                salt,
                max_tokens=max_tokens,
                presence_penalty=penalty,
                prompt_logprobs=prompt_logprobs,
                min_tokens=min(min_tokens, max_tokens),
                stop_ids=stop,
                n=n,
                ignore_eos=ignore_eos,
            )
        )

    @rule(steps=st.integers(1, 8))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.world.step()
            self.world.scheduler.check()

    @precondition(lambda self: self.count)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.integers(0, len(self.world.seqs) - 1))
        alive = seq_id not in self.world.finished and seq_id not in self.world.aborted
        assert self.world.abort(seq_id) == alive

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "world"):
            self.world.scheduler.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()
            self.world.check_answers()
            ended = self.world.finished.keys() | self.world.aborted
            assert ended == self.world.seqs.keys()


Lives.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestLives = Lives.TestCase


@BOTH
def test_answers_do_not_depend_on_the_look_ahead(look_ahead: bool) -> None:
    world = World(look_ahead=look_ahead, max_num_seqs=3)
    for i in range(12):
        world.add(request(i, (1 + i % 3, 2, 3), [None, adapter("a")][i % 2], max_tokens=20))
    world.drain()
    world.check_answers()
    assert len(world.finished) == 12
    reasons = {update.finish_reason for update in world.finished.values()}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    assert (world.scheduler.num_discarded > 0) == look_ahead


def test_look_ahead_names_the_row_of_the_step_before() -> None:
    world = World(look_ahead=True)
    world.add(request(0, ignore_eos=True))
    world.add(request(1, (4, 5), ignore_eos=True))
    world.step()
    batch = world.step()
    assert batch is not None
    assert batch.token_ids == ((), ()) and sorted(batch.sources) == [0, 1]
    assert batch.starts == (3, 2)
    assert [batch.position(row) for row in (0, 1)] == [4, 3]


def test_without_look_ahead_the_host_knows_every_token() -> None:
    world = World()
    world.add(request(0, ignore_eos=True))
    world.drain()
    assert all(source == -1 for batch in world.batches for source in batch.sources)
    assert [batch.num_tokens for batch in world.batches] == [(3,)] + [(1,)] * 7


@BOTH
def test_a_length_is_known_ahead_and_draws_nothing_in_vain(look_ahead: bool) -> None:
    world = World(look_ahead=look_ahead)
    for i in range(6):
        world.add(request(i, max_tokens=1 + i, ignore_eos=True))
    world.drain()
    world.check_answers()
    assert world.scheduler.num_discarded == 0


def test_a_stop_leaves_one_row_in_flight_whose_token_is_thrown_away() -> None:
    (seq_id,), world = [0], World(look_ahead=True)
    stop = answer(request(0, ignore_eos=True, max_tokens=20), 0, 64)[0][2]
    world.add(request(0, ignore_eos=True, max_tokens=20, stop_ids=(stop,)))
    world.drain()
    world.check_answers()
    assert world.finished[seq_id].finish_reason is FinishReason.STOP
    assert world.scheduler.num_discarded == 1


@BOTH
def test_decodes_come_first_and_prompts_fill_the_rest(look_ahead: bool) -> None:
    world = World(max_step_tokens=10, num_pages=100, look_ahead=look_ahead)
    world.add(request(0, ignore_eos=True, max_tokens=30))
    world.add(request(1, (2, 3), ignore_eos=True, max_tokens=30))
    world.step()
    world.add(request(2, tuple(range(1, 21)), ignore_eos=True))
    shapes = [batch.num_tokens for batch in (world.step(), world.step(), world.step()) if batch]
    assert shapes == [(1, 1, 8), (1, 1, 8), (1, 1, 4)]
    third = world.batches[-1]
    assert third.samples[2] is not None and world.batches[-2].samples[2] is None
    world.drain()
    world.check_answers()


@BOTH
def test_rows_keep_their_places_and_the_last_fills_a_gap(look_ahead: bool) -> None:
    world = World(num_pages=100, look_ahead=look_ahead)
    for i in range(4):
        world.add(request(i, (i + 1,), ignore_eos=True, max_tokens=20))
    for _ in range(4):
        world.step()
    assert world.batches[-1].seq_ids == (0, 1, 2, 3)
    world.abort(1)
    world.step()
    assert world.batches[-1].seq_ids == (0, 3, 2)
    world.drain()
    world.check_answers()


@BOTH
def test_page_lists_change_only_where_they_grow(look_ahead: bool) -> None:
    world = World(num_pages=200, windows=(0, 6), look_ahead=look_ahead)
    for i in range(3):
        world.add(request(i, (i + 1, 2, 3), ignore_eos=True, max_tokens=50))
    seen: dict[int, tuple[list[int], list[int]]] = {}
    freed = 0
    while world.scheduler.has_work:
        batch = world.step()
        for row, seq_id in enumerate(batch.seq_ids if batch else ()):
            assert batch is not None
            now = list(batch.pages[0][row]), list(batch.pages[1][row])
            assert len(now[0]) == len(now[1])
            if seq_id in seen:
                old = seen[seq_id]
                if len(now[0]) == len(old[0]):
                    assert now == old
                for before, after in zip(old, now, strict=True):
                    kept = after[: len(before)]
                    assert all(b in (a, 0) for a, b in zip(before, kept, strict=True))
                freed += now[1].count(0) > old[1].count(0)
            seen[seq_id] = now
    assert freed > 9
    world.check_answers()


@BOTH
@pytest.mark.parametrize("windows", [(0,), (0, 5)])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_storm_of_preemptions_comes_to_an_end(
    look_ahead: bool, windows: tuple[int, ...], prefix_cache: bool
) -> None:
    world = World(
        num_pages=10 * len(windows) + 2,
        windows=windows,
        max_num_seqs=6,
        max_step_tokens=12,
        max_model_len=40,
        prefix_cache=prefix_cache,
        look_ahead=look_ahead,
    )
    for i in range(20):
        prompt = tuple((i + k) % 20 + 1 for k in range(4))
        world.add(request(i, prompt, tenant="xy"[i % 2], max_tokens=30, ignore_eos=True))
    world.drain()
    world.check_answers()
    assert len(world.finished) == 20
    assert world.scheduler.num_preemptions > 10


@pytest.mark.parametrize("seed", [148, 316, 331])
def test_who_comes_back_after_no_step_at_all_has_its_new_pages(seed: int) -> None:
    """All that decode may wait for one commit: then one goes and comes back without a step of
    others in between. Few pages, short lives and look-ahead let it happen."""
    draw = Random(seed)
    windows = draw.choice([(0,), (0, 6)])
    world = World(
        draw.randint(14, 30),
        windows=windows,
        max_num_seqs=draw.randint(2, 6),
        max_step_tokens=draw.randint(8, 24),
        max_model_len=48,
        prefix_cache=draw.random() < 0.5,
        look_ahead=True,
        gate=FakeGate(2),
    )
    number = 0
    for _ in range(120):
        if draw.random() < 0.35 and number < 30:
            length = draw.choice([3, 4, 7, 8, 9])
            prompt = tuple(draw.randint(1, 5) for _ in range(length))
            new = request(number, prompt, max_tokens=draw.choice([4, 8, 12, 20]))
            if world.scheduler.fits(length + 20):
                world.add(new)
                number += 1
        if draw.random() < 0.1 and world.seqs:
            world.abort(draw.choice(list(world.seqs)))
        world.step()
    world.drain()
    world.check_answers()


@BOTH
def test_the_oldest_is_never_preempted(look_ahead: bool) -> None:
    world = World(num_pages=12, max_num_seqs=4, max_model_len=40, look_ahead=look_ahead)
    world.add(request(0, tenant="a", max_tokens=36, ignore_eos=True))
    for i in range(1, 8):
        world.add(request(i, tenant="b", weight=50.0, max_tokens=36, ignore_eos=True))
    steps = 0
    while 0 not in world.finished:
        world.step()
        steps += 1
    assert world.scheduler.num_preemptions > 0
    assert steps < 36 + 15  # it sits out a step now and then, until pages come back
    world.drain()
    world.check_answers()


@pytest.mark.parametrize(
    ("line", "instead"),
    [("self._owner.fill(-1)", "pass"),
     ("if batch.step != self._last_step + 1:", "if False:"),
     ("held *= self._owner[seats] == seq_ids", "pass")],
)  # fmt: skip
def test_kept_page_tables_are_wrong_without(
    line: str, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the seat may sit another one, or the same one, which was away and has other pages."""
    take_out(monkeypatch, PageTables, "update", line, instead)
    with pytest.raises(AssertionError, match="has pages"):
        test_the_oldest_is_never_preempted(True)


@BOTH
def test_what_was_preempted_finds_its_pages_again(look_ahead: bool) -> None:
    world = World(num_pages=14, max_num_seqs=2, max_model_len=48, look_ahead=look_ahead)
    for i in range(2):
        world.add(request(i, (i + 1, 2, 3), max_tokens=40, ignore_eos=True))
    world.drain()
    world.check_answers()
    computed = sum(sum(batch.num_tokens) for batch in world.batches)
    assert world.scheduler.num_preemptions > 0
    assert computed < 2 * 43 + 43, "everything was computed again"


@BOTH
def test_the_same_prefix_is_computed_once(look_ahead: bool) -> None:
    world = World(num_pages=200, max_step_tokens=64, look_ahead=look_ahead)
    prompt = tuple(range(1, 22))
    (first,) = world.add(request(0, prompt))
    world.drain()
    second, other = world.add(request(1, prompt)) + world.add(request(2, prompt, salt="other"))
    foreign = world.add(request(3, prompt, adapter("a")))[0]
    world.drain()
    world.check_answers()
    cached = {i: world.seqs[i].num_cached_tokens for i in (first, second, other, foreign)}
    assert cached == {first: 0, second: 20, other: 0, foreign: 0}
    assert world.scheduler.num_cached_tokens == 20
    assert world.scheduler.num_prompt_tokens == 4 * 21


@BOTH
def test_siblings_wait_for_the_first_and_share_its_prompt(look_ahead: bool) -> None:
    world = World(num_pages=200, max_num_seqs=8, max_step_tokens=16, look_ahead=look_ahead)
    ids = world.add(request(0, tuple(range(1, 42)), n=4, max_tokens=6, ignore_eos=True))
    world.drain()
    world.check_answers()
    assert [world.seqs[i].num_cached_tokens for i in ids] == [0, 40, 40, 40]
    assert len({tuple(world.delivered[i]) for i in ids}) == 4


@BOTH
def test_siblings_of_an_aborted_first_go_on(look_ahead: bool) -> None:
    world = World(look_ahead=look_ahead)
    ids = world.add(request(0, tuple(range(1, 42)), n=3))
    world.step()
    world.abort(ids[0])
    world.abort(ids[2])
    world.drain()
    world.check_answers()
    assert list(world.finished) == [ids[1]]


@BOTH
@pytest.mark.parametrize("wakes", [True, False])
def test_a_flood_of_waiting_adapters_keeps_nobody_else(look_ahead: bool, wakes: bool) -> None:
    world = World(look_ahead=look_ahead, gate=FakeGate(2), wakes=wakes)
    far = [adapter(f"far{i}") for i in range(200)]
    world.gate.absent.update(far)
    for i, ref in enumerate(far):
        world.add(request(i, ref=ref, tenant=f"t{i}"))
    (base,) = world.add(request(900, tenant="base", max_tokens=4, ignore_eos=True))
    (ready,) = world.add(request(901, ref=adapter("a"), tenant="a", max_tokens=4, ignore_eos=True))
    world.step()
    assert world.scheduler.num_waiting_adapter == 201
    # Told by the gate at once, else when its turn comes: 16 of 185 a step.
    for _ in range(9 if wakes else 20):
        asked = world.gate.num_asked
        world.step()
        assert world.gate.num_asked - asked <= 33
    assert {base, ready} == world.finished.keys()
    world.gate.absent.clear()
    world.drain()
    world.check_answers()
    assert len(world.finished) == 202


@BOTH
def test_a_dead_adapter_fails_its_own_requests_alone(look_ahead: bool) -> None:
    world = World(look_ahead=look_ahead)
    gone = adapter("gone")
    world.gate.absent.add(gone)
    dead = world.add(request(0, ref=gone, n=2)) + world.add(request(1, ref=gone))
    (fine,) = world.add(request(2, ref=adapter("a")))
    for _ in range(3):
        world.step()
    assert world.scheduler.num_waiting_adapter == 3
    world.gate.dead.add(gone)
    world.drain()
    world.check_answers()
    assert all(world.finished[i].finish_reason is FinishReason.ERROR for i in dead)
    assert all(str(world.finished[i].error) == "gone" for i in dead)
    assert world.finished[fine].finish_reason is not FinishReason.ERROR


@BOTH
def test_pages_and_slot_come_both_or_neither(look_ahead: bool) -> None:
    world = World(num_pages=12, max_model_len=40, look_ahead=look_ahead)
    world.add(request(0, tuple(range(1, 30)), max_tokens=10, ignore_eos=True))
    world.step()
    world.step()
    world.add(request(1, tuple(range(1, 30)), adapter("a"), max_tokens=2))
    for _ in range(4):
        world.step()
        world.scheduler.check()
        assert not world.gate.held, "a slot without pages"
    world.drain()
    world.check_answers()


def one_slot_and_no_pages() -> World:
    """The one slot holds the adapter of a sequence that waits for pages; another adapter, of a
    tenant that was served less, asks for the slot in every step."""
    world = World(num_pages=12, max_model_len=40, gate=FakeGate(num_slots=1))
    world.add(request(0, tuple(range(1, 30)), tenant="x", max_tokens=10, ignore_eos=True))
    world.step()
    world.step()
    world.add(request(1, tuple(range(1, 30)), adapter("a"), "y", max_tokens=2))
    for _ in range(4):
        world.step()
    world.add(request(2, (1, 2), adapter("b"), "z", max_tokens=2))
    world.drain()
    world.check_answers()
    return world


def test_a_slot_given_back_unused_is_kept_for_who_waits() -> None:
    """Else the adapter goes before its first use, and is loaded again: in a loop, if many ask."""
    world = one_slot_and_no_pages()
    assert list(world.finished) == [0, 1, 2]
    assert world.gate.num_loads == 2


def test_without_that_word_the_slot_goes_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    take_out(monkeypatch, Admission, "enter", ", unused=True", "")
    assert one_slot_and_no_pages().gate.num_loads == 3


@BOTH
def test_a_big_one_is_not_overtaken_for_ever(look_ahead: bool) -> None:
    world = World(num_pages=14, max_num_seqs=4, max_model_len=48, look_ahead=look_ahead)
    for i in range(2):
        world.add(request(i, (i + 1,), max_tokens=8, ignore_eos=True))
    world.step()
    (big,) = world.add(request(2, tuple(range(1, 41)), max_tokens=2))
    small = [world.add(request(3 + i, (5,), max_tokens=8, ignore_eos=True))[0] for i in range(20)]
    world.drain()
    world.check_answers()
    order = list(world.finished)
    assert all(order.index(big) < order.index(i) for i in small[1:])


@BOTH
def test_aborts_are_immediate_wherever_it_stands(look_ahead: bool) -> None:
    world = World(look_ahead=look_ahead, max_num_seqs=2)
    running, prefilling, queued, blocked = (
        world.add(r)[0]
        for r in (
            request(0, ignore_eos=True),
            request(1, tuple(range(1, 50))),
            request(2),
            request(3, ref=adapter("far"), tenant="z"),
        )
    )
    world.gate.absent.add(adapter("far"))
    world.step()
    world.step()
    for seq_id in (running, prefilling, queued, blocked):
        assert world.abort(seq_id)
        assert not world.abort(seq_id)
        world.scheduler.check()
    assert not world.abort(12345)
    world.drain(3)
    assert not world.finished


@BOTH
def test_a_row_that_is_not_finite_ends_alone_and_leaves_no_pages(look_ahead: bool) -> None:
    world = World(look_ahead=look_ahead, max_step_tokens=64)
    prompt = tuple(range(1, 14))
    (bad,) = world.add(request(0, prompt, salt="s", ignore_eos=True))
    (good,) = world.add(request(1, prompt, ignore_eos=True))
    world.step()
    world.step()
    batch, tokens = world.launched.popleft() if world.launched else (None, [])
    if batch is None:
        batch = world.scheduler.schedule()
        assert batch is not None
        tokens = world._run(batch)
    tokens[batch.seq_ids.index(bad)] = -1
    world.num_sampled += len(tokens)
    updates = {update.seq.seq_id: update for update in world.scheduler.commit(batch, tokens)}
    assert updates[bad].token is None and updates[bad].error is None
    assert updates[bad].finish_reason is FinishReason.ERROR
    world.delivered[good].append(updates[good].token or 0)
    world.scheduler.check()
    (again,) = world.add(request(2, prompt, salt="s"))
    world.drain()
    world.check_answers()
    assert world.seqs[again].num_cached_tokens == 0
    assert good in world.finished


def test_a_masked_row_waits_for_its_token_and_the_others_do_not() -> None:
    world = World(look_ahead=True)
    (masked,) = world.add(request(0, mask="json", ignore_eos=True))
    (plain,) = world.add(request(1, ignore_eos=True))
    world.drain()
    world.check_answers()
    sources: dict[int, list[int]] = {masked: [], plain: []}
    for batch in world.batches:
        for seq_id, source in zip(batch.seq_ids, batch.sources, strict=True):
            sources[seq_id].append(source)
    assert set(sources[masked]) == {-1}
    assert sources[plain].count(-1) == 1


@BOTH
def test_what_cannot_fit_is_known_beforehand(look_ahead: bool) -> None:
    world = World(num_pages=11, max_model_len=100, windows=(0,), look_ahead=look_ahead)
    assert world.scheduler.fits(41) and not world.scheduler.fits(42)
    world.add(request(0, (1, 2, 3), max_tokens=38, ignore_eos=True))
    world.add(request(1, tuple(range(1, 40)), max_tokens=2, ignore_eos=True))
    with pytest.raises(AssertionError, match="3 of 42 tokens"):
        world.add(request(2, (1, 2, 3), max_tokens=39))
    world.drain()
    world.check_answers()


def test_counts() -> None:
    world = World(max_num_seqs=2)
    world.gate.absent.add(adapter("far"))
    for i, ref in enumerate([None, None, adapter("far"), None, None]):
        world.add(request(i, ref=ref, tenant=f"t{i}", ignore_eos=True))
    scheduler = world.scheduler
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 5)
    world.step()
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_waiting_adapter) == (
        2,
        3,
        0,
    )
    for _ in range(8):
        world.step()
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_waiting_adapter) == (
        2,
        0,
        1,
    )


@pytest.mark.parametrize("eos_at", [0, 3])
@BOTH
def test_min_tokens_bans_the_end_until_then(look_ahead: bool, eos_at: int) -> None:
    world = World(look_ahead=look_ahead)
    world.add(request(0, (9, 9), max_tokens=6, min_tokens=eos_at + 1, stop_ids=(3,)))
    world.drain()
    world.check_answers()
    bans = [s.banned_ids for batch in world.batches for s in batch.samples if s is not None]
    assert bans[: eos_at + 1] == [(EOS, 3)] * (eos_at + 1)
    assert all(ban == () for ban in bans[eos_at + 1 :])
