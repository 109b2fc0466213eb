"""The worklists: against the definition, written out row by row."""

import random
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from torch import Tensor

import kernels.worklist as own
from kernels.lora_tables import Worklist

# Every promise is kept by both forms; which one runs is decided by TRITON_INTERPRET.
both = pytest.mark.parametrize("form", ["torch", pytest.param("triton", marks=pytest.mark.interp)])


def check_worklist(
    work: Worklist, ids: Tensor | None, slots: Tensor | None, num_experts: int, num_slots: int
) -> None:
    """The definition: every row that belongs to somebody lies in one segment of its own group."""
    ids, slots = (None if x is None else x.cpu() for x in (ids, slots))
    top_k = 1 if ids is None else ids.shape[1]
    num_rows = ids.numel() if ids is not None else len(slots if slots is not None else ())
    groups: dict[tuple[int, int], list[int]] = {}
    left_out = []
    for row in range(num_rows):
        expert = 0 if ids is None else int(ids.flatten()[row])
        slot = -1 if slots is None else int(slots[row // top_k])
        if 0 <= expert < num_experts and (slots is None or 0 <= slot < num_slots):
            groups.setdefault((slot, expert), []).append(row)
        else:
            left_out.append(row)
    rows, segments = work.rows.tolist(), work.segments.tolist()
    assert work.rows.dtype == work.segments.dtype == torch.int32
    assert sorted(rows) == list(range(num_rows)), "each row once"
    used = [tuple(s) for s in segments if s[3]]
    assert segments[len(used) :] == [[-1, -1, 0, 0]] * (len(segments) - len(used))
    keys = [(slot, expert) for slot, expert, _, _ in used]
    assert keys == sorted(keys)
    found: dict[tuple[int, int], list[int]] = {}
    for slot, expert, first, count in used:
        assert 0 < count <= work.block_m
        found.setdefault((slot, expert), []).extend(rows[first : first + count])
    assert found == groups, "rows of a group in their order"
    covered = sum(len(own_rows) for own_rows in groups.values())
    assert rows[covered:] == left_out
    for (a, b, first, count), (c, d, after, _) in pairwise(used):
        assert after == first + count and ((a, b) != (c, d) or count == work.block_m)


def worklists_hold(module: ModuleType, sizes: tuple[int, ...], device: str = "cpu") -> None:
    for num_tokens in sizes:
        g = torch.Generator().manual_seed(num_tokens)
        # Ids from -1 (another rank's) to E (a shared expert's); slots from -1 (base) to L (none).
        ids = torch.randint(-1, 6, (num_tokens, 2), generator=g).int().to(device)
        slots = torch.randint(-1, 4, (num_tokens,), generator=g).int().to(device)
        for args in ((ids, None, 5, 0), (None, slots, 1, 3), (ids, slots, 5, 3)):
            check_worklist(module.build_worklist(*args, 4), *args)


@both
def test_worklist_is_its_definition(form: str) -> None:
    # 64 tokens are the last that one program sorts; 150 are too many for lists on a CPU.
    worklists_hold(own, (0, 1, 64, 65) if form == "triton" else (0, 1, 5, 64, 150))


def test_the_form_for_many_groups_sends_nothing_to_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU falls back on it, also while a graph is captured, where such a copy is an error."""
    ids = torch.arange(12).remainder(5).int().view(6, 2)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "tensor", lambda *values, **options: pytest.fail("a host value"))
        work = own.build_worklist_reference(ids, None, 5, 0, 4)
    check_worklist(work, ids, None, 5, 0)


@pytest.mark.gpu
def test_a_worklist_of_many_groups_can_be_captured() -> None:
    ids = torch.arange(400, device="cuda").remainder(128).int().view(100, 4)
    slots = torch.arange(100, device="cuda").remainder(65).sub(1).int()
    own.build_worklist(ids, slots, 128, 64, 16)  # what is allocated once is there then
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work = own.build_worklist(ids, slots, 128, 64, 16)
    graph.replay()
    check_worklist(work, ids, slots, 128, 64)


@both
def test_every_slot_and_the_base_in_one_batch(form: str) -> None:
    slots = torch.arange(-1, 8).repeat(3).int()
    ids = torch.arange(27).remainder(4).int()[:, None]
    check_worklist(own.build_worklist(ids, slots, 4, 8, 16), ids, slots, 4, 8)


@both
def test_nothing_is_kept_from_the_batch_before(form: str) -> None:
    """Base after adapters, then a slot reloaded: the list follows the tensors, which are reused."""
    slots = torch.tensor([0, 1, 2, -1]).int()
    ids = torch.tensor([[0, 1]] * 4).int()
    for values in ([0, 1, 2, -1], [-1, -1, -1, -1], [2, 2, -1, 0]):
        slots.copy_(torch.tensor(values))
        work = own.build_worklist(ids, slots, 2, 3, 16)
        check_worklist(work, ids, slots, 2, 3)
        assert work.groups is not None
        assert [slot for slot, _ in work.groups] == sorted({v for v in values if v >= 0})


def test_groups_name_the_rows_of_each_slot() -> None:
    slots = torch.tensor([2, -1, 0, 2, 7]).int()
    ids = torch.zeros(5, 2, dtype=torch.int32)
    groups = own.build_worklist(ids, slots, 1, 3, 16).groups
    assert groups is not None
    assert [(s, r.tolist()) for s, r in groups] == [(0, [4, 5]), (2, [0, 1, 6, 7])]
    assert own.build_worklist(ids, None, 1, 0, 16).groups == ()


def test_long_lists_of_groups_agree_with_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = torch.randint(-1, 5, (40,), generator=torch.Generator().manual_seed(2)).int()
    short = own.slot_groups(slots, 4, 3)
    monkeypatch.setattr(own, "LIST_ROWS", 0)
    long = own.slot_groups(slots, 4, 3)
    assert [(s, r.tolist()) for s, r in short] == [(s, r.tolist()) for s, r in long]


def worst_case(num_rows: int, num_groups: int, block_m: int, rng: random.Random) -> int:
    """Segments of a partition that tries hard: one row in most groups, the rest anywhere."""
    counts = [0] * num_groups
    for row in range(num_rows):
        place = row % num_groups if row < num_groups else rng.randrange(num_groups)
        counts[place] += 1
    return sum(-(-n // block_m) for n in counts)


def test_a_worklist_cannot_overflow() -> None:
    rng = random.Random(0)
    tight = 0
    for _ in range(500):
        num_rows, num_groups = rng.randrange(0, 60), rng.randrange(1, 40)
        block_m = rng.choice([1, 2, 4, 16])
        capacity = own.segment_capacity(num_rows, num_groups, block_m)
        need = max(worst_case(num_rows, num_groups, block_m, rng) for _ in range(3))
        assert need <= capacity
        tight += need == capacity
    assert tight > 100, "the bound is met, not merely kept"
    assert own.segment_capacity(4, 32, 16) == 4  # one token of GPT-OSS


def test_a_worklist_needs_something() -> None:
    with pytest.raises(ValueError, match="ids, slot_of_token or both"):
        own.build_worklist(None, None, 1, 1, 16)


@pytest.mark.parametrize("name", ["_sort_kernel", "_count_kernel", "_scatter_kernel"])
def test_length_does_not_compile_anew(name: str) -> None:
    kernel = getattr(own, name)
    lengths = {"num_rows", "num_segments"} & set(kernel.arg_names)
    assert lengths and lengths <= set(kernel.do_not_specialize)


Build = Callable[..., Worklist]


@pytest.mark.parametrize("build", [own._worklist_of_lists, own.build_worklist_reference])
def test_both_cpu_forms_are_the_definition(build: Build) -> None:
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(-1, 6, (33, 3), generator=g).int()
    slots = torch.randint(-1, 4, (33,), generator=g).int()
    for args in ((ids, None, 5, 0), (None, slots, 1, 3), (ids, slots, 5, 3)):
        check_worklist(build(*args, 4), *args)
