"""Whose turn it is, and that nobody waits longer than the shares allow."""

from hashlib import blake2b

import pytest

from model_runner.request import Request
from model_runner.scheduling import adapter_gate, fairness
from model_runner.scheduling.fairness import TenantQueue
from model_runner.scheduling.page_pool import PageTable
from model_runner.scheduling.sequence import Sequence
from tests.model_runner.scheduling_world import FakeGate, World, adapter, request

BOTH = pytest.mark.parametrize("look_ahead", [False, True])


class Line:
    def __init__(self) -> None:
        self.queue = TenantQueue()
        self.count = 0

    def add(self, tenant: str) -> Sequence:
        seq = Sequence(self.count, Request(f"r{self.count}", (1,), tenant_id=tenant))
        account = self.queue.open_account(tenant)
        seq.bind(self.count, PageTable(blake2b(), 1), account, (), 10)
        self.count += 1
        self.queue.push(seq)
        return seq

    def serve(self, cost: float) -> str:
        seq = self.queue.head()
        assert seq is not None
        self.queue.serve(seq)
        seq.account.counter += cost
        self.queue.close_account(seq.account)
        return seq.account.tenant_id


def test_least_served_first_and_first_come_inside_a_tenant() -> None:
    line = Line()
    ids = [line.add(t).seq_id for t in "aaab"]
    order = []
    while (seq := line.queue.head()) is not None:
        line.queue.serve(seq)
        seq.account.counter += 1
        order.append(seq.seq_id)
    assert order == [ids[0], ids[3], ids[1], ids[2]]
    assert len(line.queue) == 0


def test_the_head_follows_the_counters() -> None:
    line = Line()
    a, b = line.add("a"), line.add("b")
    assert line.queue.head() is a
    a.account.counter = 5.0
    assert line.queue.head() is b
    b.account.counter = 6.0
    assert line.queue.head() is a


def test_idleness_earns_no_credit() -> None:
    line = Line()
    for _ in range(50):
        line.add("busy")
    for _ in range(20):
        assert line.serve(10) == "busy"
    late = line.add("late")
    assert late.account.counter == 200.0
    for _ in range(20):
        line.add("late")
    served = [line.serve(10) for _ in range(20)]
    assert served.count("late") == 10


def test_a_debt_is_kept_while_others_wait_and_forgotten_once_they_caught_up() -> None:
    line = Line()
    line.add("greedy")
    line.add("other")
    line.add("other")
    assert line.serve(100) == "greedy"
    assert line.add("greedy").account.counter == 100.0
    assert [line.serve(30), line.serve(30)] == ["other", "other"]
    assert line.serve(0) == "greedy"
    assert "greedy" not in line.queue._lines
    assert line.add("greedy").account.counter == 100.0  # lifted to where the last one was


def test_debts_of_tenants_that_never_come_back_do_not_pile_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each came when nobody waited, so nobody ever caught up with it. The largest debts stay."""
    monkeypatch.setattr(fairness, "_MAX_DEBTS", 10)
    line = Line()
    for number in range(100):
        line.add(f"t{number}")
        line.serve(number % 50 + 1)
        line.add("often")
        line.serve(0)
    debts = {tenant: known.account.counter for tenant, known in line.queue._lines.items()}
    assert len(debts) <= 10 and min(debts.values()) >= 45
    assert len(line.queue._debts) <= 10


def test_those_who_left_are_skipped_and_leave_nothing_behind() -> None:
    line = Line()
    seqs = [line.add("a") for _ in range(1000)]
    for seq in seqs[:-1]:
        line.queue.discard(seq)
        line.queue.discard(seq)
    assert len(line.queue) == 1
    assert len(line.queue._lines["a"].order) < 200
    assert line.queue.head() is seqs[-1]


def test_one_that_comes_back_stands_where_it_arrived() -> None:
    line = Line()
    first, second = line.add("a"), line.add("a")
    line.queue.serve(first)
    assert line.queue.head() is second
    line.queue.push(first)
    line.queue.push(first)
    assert line.queue.head() is first
    assert len(line.queue) == 2


@BOTH
def test_a_flood_delays_another_tenant_by_no_more_than_a_seat(look_ahead: bool) -> None:
    world = World(num_pages=200, max_num_seqs=4, look_ahead=look_ahead)
    for i in range(100):
        world.add(request(i, tenant="flood", max_tokens=10, ignore_eos=True))
    for _ in range(20):
        world.step()
    (late,) = world.add(request(999, tenant="late", max_tokens=2, ignore_eos=True))
    for _ in range(16):  # one of four seats is free after 10 tokens at most
        world.step()
    assert late in world.finished
    world.drain()
    world.check_answers()


@BOTH
@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0)])
def test_backlogged_tenants_share_by_weight(look_ahead: bool, weights: tuple[float, ...]) -> None:
    world = World(num_pages=300, max_num_seqs=4, max_step_tokens=32, look_ahead=look_ahead)
    lengths = {"a": (3, 12), "b": (12, 3)}  # (prompt, output)
    for i in range(150):
        for (tenant, (prompt, output)), weight in zip(lengths.items(), weights, strict=True):
            ids = tuple((i * 17 + k) % 20 + 1 for k in range(prompt))
            sampling = {"max_tokens": output, "ignore_eos": True}
            world.add(
                request(2 * i + (tenant == "b"), ids, None, tenant, f"{i}", weight, **sampling)
            )
    for _ in range(200):
        world.step()
    service = {"a": 0.0, "b": 0.0}
    for seq in world.seqs.values():
        service[seq.request.tenant_id] += seq.num_charged + 2 * seq.num_output
    ratio = service["a"] / service["b"]
    want = weights[0] / weights[1]
    assert 0.85 * want < ratio < 1.15 * want, service


@BOTH
def test_a_long_prompt_does_not_hold_up_another_tenants_short_one(look_ahead: bool) -> None:
    world = World(num_pages=600, max_model_len=2000, look_ahead=look_ahead)
    world.add(request(0, tuple(i % 20 + 1 for i in range(1600)), None, "long", max_tokens=1))
    for _ in range(5):
        world.step()
    (short,) = world.add(request(1, (4, 5, 6), None, "short", max_tokens=1))
    for _ in range(3):
        world.step()
    assert short in world.finished
    world.drain()
    world.check_answers()


@BOTH
def test_endless_work_of_one_adapter_makes_room_for_another(
    look_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_gate, "_SLOT_QUANTUM", 100.0)
    for makes_room in (True, False):
        world = World(look_ahead=look_ahead, gate=FakeGate(1), makes_room=makes_room)
        a, b = adapter("a"), adapter("b")
        count = 0
        waiting: list[int] = []
        for step in range(300):
            while world.scheduler.num_waiting < 4:
                count += 1
                world.add(request(count, ref=a, tenant="busy", max_tokens=9, ignore_eos=True))
            if step == 20:
                waiting = world.add(request(10000, ref=b, tenant="other"))
            world.step()
            world.scheduler.check()
        assert (waiting[0] in world.finished) == makes_room
        assert sum(world.seqs[i].request.adapter == a for i in world.finished) > 10
        world.drain()
        world.check_answers()


def test_one_whose_bytes_are_still_far_makes_nobody_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_gate, "_SLOT_QUANTUM", 10.0)
    world = World(gate=FakeGate(1))
    a, far = adapter("a"), adapter("far")
    world.gate.absent.add(far)
    (waiting,) = world.add(request(0, ref=far, tenant="far"))
    for i in range(1, 40):
        world.add(request(i, ref=a, tenant="busy", max_tokens=5, ignore_eos=True))
    for _ in range(70):
        world.step()
    assert len(world.finished) == 39
    world.gate.absent.clear()
    world.drain()
    assert waiting in world.finished
    world.check_answers()


@BOTH
def test_what_a_preemption_computes_again_is_not_charged_again(look_ahead: bool) -> None:
    world = World(12, max_model_len=40, prefix_cache=False, look_ahead=look_ahead)
    for i in range(8):
        world.add(request(i, (i + 1, 2, 3), weight=2.0, max_tokens=30, ignore_eos=True))
    account = world.seqs[0].account
    world.drain()
    assert world.scheduler.num_preemptions > 0
    assert account.counter == 8 * (3 + 2 * 30) / 2.0
