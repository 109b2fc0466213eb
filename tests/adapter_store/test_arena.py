"""The arena on a CPU (and on a GPU where there is one): spans and tables. Not here: who gets which
span (slot_table)."""

from pathlib import Path

import pytest
import torch

from adapter_store.arena import AdapterArena, SlotRows
from adapter_store.packed import PackedAdapter
from adapter_store.ref import AdapterRef
from adapter_store.slot_table import SlotTable, Span
from tests.adapter_store.tiny_adapters import (
    TARGETS,
    assert_slot_holds,
    open_tiny,
    read_slot,
    write_tiny,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def make_arena(device: str, num_slots: int = 4, num_bytes: int = 1 << 18) -> AdapterArena:
    return AdapterArena(TARGETS, num_slots, num_bytes, torch.float32, device, max_rank=12)


def put(arena: AdapterArena, table: SlotTable, digest: str, packed: PackedAdapter) -> int:
    placement = table.place(digest, packed.layout.ends, lambda d: False)
    assert placement is not None
    for index, _ in placement.evicted:
        arena.clear(index)
    arena.show(placement.index, arena.copy_in(packed, placement.spans))
    table.set_ready(placement.index)
    assert arena.publish()
    return placement.index


def test_tables_are_as_the_kernels_expect_them() -> None:
    arena = make_arena("cpu", num_bytes=(1 << 18) + 100)
    shape = (len(TARGETS), 4)
    for table in (arena.a_off, arena.b_off, arena.a_stride, arena.b_stride):
        assert table.shape == shape and table.dtype == torch.int64 and table.is_contiguous()
    assert arena.lora_rank.shape == shape and arena.lora_rank.dtype == torch.int32
    assert arena.lora_rank.is_contiguous()
    assert arena.memory.shape == (1 << 16,) and arena.num_bytes == 1 << 18
    assert arena.max_rank == 16
    assert bool((arena.a_off == -1).all()) and bool((arena.b_off == -1).all())
    assert not arena.lora_rank.any()


def test_arena_without_slots_is_empty() -> None:
    arena = AdapterArena(TARGETS, 0, 0, torch.bfloat16)
    assert arena.a_off.shape == (len(TARGETS), 0) and arena.memory.numel() == 0
    assert arena.publish()


def test_slots_that_change_a_watched_target_are_known() -> None:
    arena = AdapterArena(TARGETS, 2, 1 << 18, torch.float32, max_rank=12, watched=(1,))
    none = torch.full((len(TARGETS),), -1)
    ranks = torch.zeros(len(TARGETS), dtype=torch.int32)
    ranks[0] = 8
    arena.show(0, SlotRows(none, none, none, none, ranks))
    assert not arena.watched_slots
    ranks[1] = 8
    arena.show(1, SlotRows(none, none, none, none, ranks))
    assert arena.watched_slots == {1}
    arena.clear(1)
    assert not arena.watched_slots


@pytest.mark.parametrize("device", DEVICES)
def test_adapters_side_by_side_read_back_as_they_were(tmp_path: Path, device: str) -> None:
    arena = make_arena(device)
    table = SlotTable(arena.num_slots, arena.num_bytes)
    stored = {}
    for seed in range(3):
        weights = write_tiny(tmp_path / str(seed), seed)
        with open_tiny(tmp_path / str(seed)) as packed:
            stored[put(arena, table, str(seed), packed)] = weights
    for slot, weights in stored.items():
        assert_slot_holds(_on_cpu(arena), slot, weights)
    assert read_slot(_on_cpu(arena), 3, 0) is None


def test_nothing_shows_before_it_is_published(tmp_path: Path) -> None:
    arena = make_arena("cpu")
    weights = write_tiny(tmp_path / "a", 1)
    with open_tiny(tmp_path / "a") as packed:
        span = Span(0, len(packed.layout.ends) - 1, 512, packed.layout.num_bytes)
        rows = arena.copy_in(packed, (span,))
    assert read_slot(arena, 2, 0) is None
    arena.show(2, rows)
    assert read_slot(arena, 2, 0) is None
    addresses = [t.data_ptr() for t in (arena.memory, arena.a_off, arena.lora_rank)]
    assert arena.publish()
    assert_slot_holds(arena, 2, weights)
    arena.clear(2)
    assert_slot_holds(arena, 2, weights)
    assert arena.publish()
    assert all(read_slot(arena, 2, t) is None for t in range(len(TARGETS)))
    assert addresses == [t.data_ptr() for t in (arena.memory, arena.a_off, arena.lora_rank)]


@pytest.mark.parametrize("poison", [float("nan"), 1e4, -1e4])
def test_bytes_that_nobody_owns_are_read_by_nobody(tmp_path: Path, poison: float) -> None:
    arena = make_arena("cpu")
    arena.memory.fill_(poison)
    weights = {s: write_tiny(tmp_path / s, ord(s)) for s in "abcd"}
    size = open_tiny(tmp_path / "a").layout.num_bytes
    table = SlotTable(arena.num_slots, size * 3 + 1024)
    slots = {}
    for name in "abc":
        with open_tiny(tmp_path / name) as packed:
            slots[name] = put(arena, table, name, packed)
    held = table.acquire("b", AdapterRef("b", "/b"))
    assert held is not None
    with open_tiny(tmp_path / "d") as packed:
        slots["d"] = put(arena, table, "d", packed)
    for name in ("b", "d"):
        assert_slot_holds(arena, slots[name], weights[name])
    owned = torch.zeros(arena.num_bytes // 4, dtype=torch.bool)
    for name in ("b", "d"):
        for span in table.spans_of(slots[name]):
            owned[span.start // 4 : (span.start + span.size) // 4] = True
    arena.memory[~owned] = poison
    for name in ("b", "d"):
        assert_slot_holds(arena, slots[name], weights[name])
    # The guard against a blind test: poison inside a span is seen.
    arena.memory[owned] = poison
    with pytest.raises(AssertionError):
        assert_slot_holds(arena, slots["b"], weights["b"])


def test_an_adapter_in_several_spans_reads_as_one(tmp_path: Path) -> None:
    arena = make_arena("cpu")
    weights = write_tiny(tmp_path / "a", 1)
    with open_tiny(tmp_path / "a") as packed:
        ends = packed.layout.ends
        cut = 3
        spans = (
            Span(0, cut, 1 << 17, ends[cut]),
            Span(cut, len(ends) - 1 - cut, 256, ends[-1] - ends[cut]),
        )
        arena.show(0, arena.copy_in(packed, spans))
    arena.publish()
    assert_slot_holds(arena, 0, weights)


@pytest.mark.gpu
def test_table_updates_are_ordered_with_the_steps(tmp_path: Path) -> None:
    """A long step that reads the tables, launched before an update, must see them as they were."""
    arena = make_arena("cuda")
    with open_tiny_file(tmp_path, 1) as packed:
        span = Span(0, len(packed.layout.ends) - 1, 0, packed.layout.num_bytes)
        rows = arena.copy_in(packed, (span,))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        before = arena.a_off.clone()
        arena.show(1, rows)
        assert arena.publish(stream)
        after = arena.a_off.clone()
    stream.synchronize()
    assert int(before[0, 1]) == -1 and int(after[0, 1]) == 0


@pytest.mark.gpu
def test_publish_never_waits(tmp_path: Path) -> None:
    arena = make_arena("cuda")
    with open_tiny_file(tmp_path, 1) as packed:
        span = Span(0, len(packed.layout.ends) - 1, 0, packed.layout.num_bytes)
        rows = arena.copy_in(packed, (span,))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(400_000_000)
    sent = []
    for slot in range(4):
        arena.show(slot, rows)
        sent.append(arena.publish(stream))
    assert sent == [True, True, False, False]
    stream.synchronize()
    assert arena.publish(stream)
    stream.synchronize()
    assert arena.a_off[0].tolist() == [0, 0, 0, 0]


def open_tiny_file(tmp_path: Path, seed: int) -> PackedAdapter:
    write_tiny(tmp_path / "packed", seed)
    return open_tiny(tmp_path / "packed")


def _on_cpu(arena: AdapterArena) -> AdapterArena:
    """The same tables and bytes where tests can read them."""
    if arena.device.type == "cpu":
        return arena
    torch.cuda.synchronize()
    copy = make_arena("cpu", arena.num_slots, arena.num_bytes)
    for name in ("memory", "a_off", "b_off", "a_stride", "b_stride", "lora_rank"):
        getattr(copy, name).copy_(getattr(arena, name))
    return copy
