"""The slot table alone: integers in, integers out. Not here: bytes and threads."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from adapter_store.ref import AdapterRef
from adapter_store.slot_table import AdapterSlot, ByteRange, SlotState, SlotTable

REF = AdapterRef("a", "/a")


def nobody(digest: str) -> bool:
    return False


def load(table: SlotTable, digest: str, *sizes: int) -> int | None:
    """Place and finish at once."""
    placement = table.place(digest, ends(*sizes), nobody)
    if placement is None:
        return None
    table.set_ready(placement.index)
    table.check()
    return placement.index


def use(table: SlotTable, digest: str) -> AdapterSlot:
    lease = table.acquire(digest, REF)
    assert lease is not None
    return lease


def ends(*sizes: int) -> tuple[int, ...]:
    out = [0]
    for size in sizes:
        out.append(out[-1] + size)
    return tuple(out)


def test_free_runs_grow_together() -> None:
    book = ByteRange(1000)
    spans = [book.place(ends(200)) for _ in range(5)]
    assert book.runs == () and book.place(ends(1)) is None
    for i in (1, 3, 2, 0, 4):
        span = spans[i]
        assert span is not None
        book.free(span)
    assert book.runs == ((0, 1000),) and book.free_bytes == 1000


def test_smallest_run_that_fits_is_taken() -> None:
    book = ByteRange(1000)
    spans = [book.place(ends(size)) for size in (300, 100, 200, 100, 300)]
    for i in (0, 2):
        span = spans[i]
        assert span is not None
        book.free(span)
    taken = book.place(ends(150, 50))
    assert taken is not None and [s.start for s in taken] == [400]


def test_a_row_of_factors_is_cut_between_factors_over_free_runs() -> None:
    book = ByteRange(600)
    spans = [book.place(ends(100)) for _ in range(6)]
    for i in (0, 1, 3, 5):
        span = spans[i]
        assert span is not None
        book.free(span)
    taken = book.place(ends(60, 60, 60, 80, 90))
    assert taken is not None
    covered = [f for s in taken for f in range(s.first, s.first + s.count)]
    assert covered == [0, 1, 2, 3, 4]
    assert [(s.start, s.size) for s in taken] == [(0, 180), (500, 80), (300, 90)]
    assert book.place(ends(30)) is None and book.free_bytes == 50


def test_longest_unused_goes_first() -> None:
    table = SlotTable(3, 3000)
    for digest in "abc":
        load(table, digest, 100)
        table.release(use(table, digest))
    table.release(use(table, "a"))
    placement = table.place("d", ends(100), nobody)
    assert placement is not None and placement.evicted == ((1, "b"),) and placement.index == 1
    table.set_ready(1)
    table.release(use(table, "d"))
    placement = table.place("e", ends(100), nobody)
    assert placement is not None and placement.evicted == ((2, "c"),)


def test_in_use_is_never_evicted() -> None:
    table = SlotTable(2, 1000)
    load(table, "a", 500)
    load(table, "b", 500)
    leases = [use(table, "a"), use(table, "a"), use(table, "b")]
    assert table.place("c", ends(10), nobody) is None
    table.release(leases[0])
    assert table.place("c", ends(10), nobody) is None
    table.release(leases[1])
    placement = table.place("c", ends(10), nobody)
    assert placement is not None and placement.evicted == ((0, "a"),)
    assert table.state_of("b") == SlotState.READY
    table.check()


def test_nobody_is_evicted_in_vain() -> None:
    table = SlotTable(3, 1000)
    load(table, "a", 300)
    load(table, "b", 400)
    load(table, "c", 300)
    lease = use(table, "b")
    assert table.place("d", ends(700), nobody) is None
    assert set(table.resident) == {"a", "b", "c"}
    table.release(lease)
    placement = table.place("d", ends(1000), nobody)
    assert placement is not None and len(placement.evicted) == 3
    table.check()


def test_who_may_not_evict_gets_what_fits() -> None:
    table = SlotTable(2, 100)
    assert load(table, "a", 60) == 0
    use(table, "a")
    assert table.fits(ends(40)) and table.fits((0,)) and not table.fits(ends(41))
    assert table.place("b", ends(41), nobody, may_evict=False) is None
    assert table.resident == ("a",)
    placed = table.place("b", ends(40), nobody, may_evict=False)
    assert placed is not None and placed.evicted == ()
    assert not table.fits((0,)), "bytes or not, there is no slot"
    table.check()


def test_fragments_are_no_reason_to_fail() -> None:
    table = SlotTable(8, 800)
    for i in range(8):
        load(table, str(i), 100)
        table.release(use(table, str(i)))
    held = use(table, "4")
    # One factor of 250 needs three neighbours: 0, 1, 2 go and not more.
    placement = table.place("big", ends(250), nobody)
    assert placement is not None and [d for _, d in placement.evicted] == ["0", "1", "2"]
    table.set_ready(placement.index)
    # 5 and 6 leave 3 idle neighbours on the other side of the one in use.
    placement = table.place("row", ends(120, 90, 120), nobody)
    assert placement is not None
    table.check()
    table.release(held)


def test_loaded_for_a_waiter_is_held_until_its_first_use() -> None:
    table = SlotTable(1, 100)
    load(table, "a", 100)
    assert table.place("b", ends(100), "a".__eq__) is None
    table.release(use(table, "a"), unused=True)
    assert table.place("b", ends(100), "a".__eq__) is None
    table.release(use(table, "a"))
    assert table.place("b", ends(100), "a".__eq__) is not None


def test_retired_goes_first_even_if_waited_for() -> None:
    table = SlotTable(2, 100)
    load(table, "a", 10)
    load(table, "b", 10)
    table.retire("b")
    placement = table.place("c", ends(10), lambda digest: True)
    assert placement is not None and placement.evicted == ((1, "b"),)


def test_lease_given_back_twice_is_a_broken_engine() -> None:
    table = SlotTable(1, 100)
    load(table, "a", 10)
    lease, other = use(table, "a"), use(table, "a")
    table.release(lease)
    with pytest.raises(AssertionError, match="twice"):
        table.release(lease)
    table.release(other)
    load(table, "b", 10)
    again = use(table, "b")
    assert again.index == other.index and again.generation != other.generation
    with pytest.raises(AssertionError, match="twice"):
        table.release(other)


def test_failed_load_leaves_nothing() -> None:
    table = SlotTable(1, 100)
    placement = table.place("a", ends(50, 50), nobody)
    assert placement is not None and table.acquire("a", REF) is None
    assert table.place("b", ends(10), nobody) is None, "a slot that is being filled is not free"
    table.set_failed(placement.index)
    table.check()
    assert table.used_bytes == 0 and table.num_used == 0 and table.state_of("a") == SlotState.EMPTY


def test_check_sees_damage() -> None:
    table = SlotTable(2, 100)
    load(table, "a", 50)
    table.check()
    table._bytes.free(table.spans_of(0))
    with pytest.raises(AssertionError):
        table.check()


class SlotTableMachine(RuleBasedStateMachine):
    """Random lives of adapters; after every step the books balance and what is in use stays where
    it is."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(4, 4096)
        self.loading: dict[str, int] = {}
        self.leases: list[AdapterSlot] = []
        self.wanted: set[str] = set()

    @rule(
        digest=st.sampled_from("abcdefgh"),
        sizes=st.lists(st.integers(1, 6).map(lambda n: n * 256), min_size=1, max_size=8),
    )
    def place(self, digest: str, sizes: list[int]) -> None:
        if self.table.state_of(digest) != SlotState.EMPTY:
            return
        before = {lease.index: self.table.spans_of(lease.index) for lease in self.leases}
        idle = self.table.num_used - len(self.loading) - len(before)
        placement = self.table.place(digest, ends(*sizes), self.wanted.__contains__)
        if placement is None:
            blocked = before or self.loading or self.wanted or sum(sizes) > 4096
            assert blocked, f"{sum(sizes)} bytes found no room beside {idle} idle ones"
            return
        assert not {index for index, _ in placement.evicted} & before.keys()
        assert sum(span.size for span in placement.spans) == sum(sizes)
        for index, spans in before.items():
            assert self.table.spans_of(index) == spans
        self.loading[digest] = placement.index

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), works=st.booleans())
    def finish(self, data: st.DataObject, works: bool) -> None:
        digest = data.draw(st.sampled_from(sorted(self.loading)))
        index = self.loading.pop(digest)
        if works:
            self.table.set_ready(index)
        else:
            self.table.set_failed(index)

    @rule(digest=st.sampled_from("abcdefgh"))
    def acquire(self, digest: str) -> None:
        lease = self.table.acquire(digest, REF)
        assert (lease is not None) == (self.table.state_of(digest) == SlotState.READY)
        if lease is not None:
            assert lease.digest == digest
            self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), unused=st.booleans())
    def release(self, data: st.DataObject, unused: bool) -> None:
        at = data.draw(st.integers(0, len(self.leases) - 1))
        self.table.release(self.leases.pop(at), unused)

    @rule(digest=st.sampled_from("abcdefgh"), wanted=st.booleans())
    def want(self, digest: str, wanted: bool) -> None:
        (self.wanted.add if wanted else self.wanted.discard)(digest)

    @rule(digest=st.sampled_from("abcdefgh"))
    def retire(self, digest: str) -> None:
        self.table.retire(digest)

    @invariant()
    def books_balance(self) -> None:
        self.table.check()
        for lease in self.leases:
            assert self.table.state_of(lease.digest) == SlotState.READY


TestSlotTableMachine = SlotTableMachine.TestCase
TestSlotTableMachine.settings = settings(
    max_examples=60,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
