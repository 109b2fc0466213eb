"""The scheduler over random lives, and the cases that random lives meet too seldom."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from model_runner.request import FinishReason
from tests.model_runner.scheduling_world import EOS, FakeGate, World, adapter, answer, request

BOTH = pytest.mark.parametrize("look_ahead", [False, True])
REFS = [None, adapter("a"), adapter("b"), adapter("c"), adapter("gone")]


class Lives(RuleBasedStateMachine):
    """Arrivals, aborts, steps in any order; every page, row and lease adds up after each, every answer is right."""

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
        max_tokens=st.integers(1, 30),
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
        min_tokens: int,
        stop: tuple[int, ...],
        n: int,
        ignore_eos: bool,
    ) -> None:
        prompt = (*base, *tail)
        if not self.world.scheduler.fits(min(48, len(prompt) + max_tokens)):
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
