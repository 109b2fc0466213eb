"""Groups rows by expert, adapter slot or both: the worklist that grouped products walk.

Not here: the choice of experts (moe_gate.py), what a worklist is (lora_tables.py), the products.
Nothing here waits for the device, so all of it can be captured in a graph.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.lora_tables import Worklist
from kernels.op import AotSpec, Case, Inputs, Op, use_triton

# Rows that one program sorts in registers; more are counted and scattered by one program a group.
SORT_ROWS = 128
SCATTER_BLOCK = 1024
# CPU: up to this many rows Python lists are faster than a dozen torch calls.
LIST_ROWS = 256
# Groups whose counts one program of the scatter holds in registers; torch serves beyond.
SCATTER_GROUPS = 4096


def segment_capacity(num_rows: int, num_groups: int, block_m: int) -> int:
    """Segments that `num_rows` rows in `num_groups` groups fill at worst.

    Each group that is not empty leaves at most block_m - 1 places of its last segment free, and
    there are no more such groups than rows.
    """
    return max(1, (num_rows + min(num_groups, num_rows) * (block_m - 1)) // block_m)


def build_worklist(
    ids: Tensor | None,
    slot_of_token: Tensor | None,
    num_experts: int,
    num_slots: int,
    block_m: int,
) -> Worklist:
    """Group rows by expert (slot_of_token None), by slot (ids None) or by both.

    Shapes:  ids [T, K] int32;  slot_of_token [T] int32, -1 = base model
    Rows are pairs t·K + k where ids is given, tokens otherwise. Left out: slots outside
    0..num_slots - 1
    and experts outside 0..num_experts - 1 (another rank's). Within a group rows keep their order.
    Pass num_experts = 1 without ids; num_slots is not read without slots.
    Cost:  one launch up to 128 rows, three above. On a CPU `groups` is filled too.
    """
    some = ids if ids is not None else slot_of_token
    if some is None:
        raise ValueError("a worklist needs ids, slot_of_token or both")
    num_rows = some.numel()
    num_groups = _num_groups(slot_of_token, num_experts, num_slots)
    if not use_triton(some) and num_rows <= LIST_ROWS:
        return _worklist_of_lists(ids, slot_of_token, num_experts, num_slots, block_m)
    if not use_triton(some) or (num_rows > SORT_ROWS and num_groups > SCATTER_GROUPS):
        return build_worklist_reference(ids, slot_of_token, num_experts, num_slots, block_m)
    num_segments = segment_capacity(num_rows, num_groups, block_m)
    rows = some.new_empty(num_rows, dtype=torch.int32)  # [N]
    segments = some.new_empty(num_segments, 4, dtype=torch.int32)  # [W, 4]
    # Without ids or slots the kernels are compiled not to read that pointer.
    sources = (
        some if ids is None else ids.contiguous(),
        some if slot_of_token is None else slot_of_token.contiguous(),
    )
    form = {
        "TOP_K": 1 if ids is None else ids.shape[1],
        "BY_EXPERT": ids is not None,
        "BY_SLOT": slot_of_token is not None,
    }
    sizes = (num_experts, max(1, num_slots))
    if num_rows <= SORT_ROWS:
        _sort_kernel[(1,)](
            *sources, rows, segments, num_rows, num_segments, *sizes, **form,
            WIDE=(num_groups + 1) * SORT_ROWS >= 2**31, BLOCK_M=block_m, BLOCK_N=SORT_ROWS,
            num_warps=1,
        )  # fmt: skip
    else:
        counts = rows.new_zeros(num_groups + 1)  # [G + 1]
        _count_kernel[(triton.cdiv(num_rows, SCATTER_BLOCK),)](
            *sources, counts, num_rows, *sizes, **form, BLOCK_N=SCATTER_BLOCK
        )
        _scatter_kernel[(num_groups + 1,)](
            *sources, counts, rows, segments, num_rows, num_segments, *sizes, **form,
            BLOCK_M=block_m, BLOCK_N=SCATTER_BLOCK, BLOCK_G=triton.next_power_of_2(num_groups),
        )  # fmt: skip
    return Worklist(rows, segments, block_m, _groups(ids, slot_of_token, num_experts, num_slots))


def build_worklist_reference(
    ids: Tensor | None,
    slot_of_token: Tensor | None,
    num_experts: int,
    num_slots: int,
    block_m: int,
) -> Worklist:
    """The same in torch ops of fixed shapes."""
    some = ids if ids is not None else slot_of_token
    assert some is not None
    num_rows, device = some.numel(), some.device
    num_groups = _num_groups(slot_of_token, num_experts, num_slots)
    key = torch.zeros(num_rows, dtype=torch.int64, device=device)  # [N]
    live = torch.ones(num_rows, dtype=torch.bool, device=device)  # [N]
    if ids is not None:
        expert = ids.flatten().long()  # [N]
        key += expert
        live &= (expert >= 0) & (expert < num_experts)
    if slot_of_token is not None:
        slot = slot_of_token.long()  # [T]
        if ids is not None:
            slot = slot.repeat_interleave(ids.shape[1], output_size=num_rows)  # [N]
        key += slot * num_experts
        live &= (slot >= 0) & (slot < num_slots)
    key = torch.where(live, key, num_groups)
    rows = torch.sort(key, stable=True).indices  # [N]
    count = key.new_zeros(num_groups + 1).scatter_add_(0, key, torch.ones_like(key))  # [G + 1]
    first = count.cumsum(0) - count  # [G + 1]
    blocks = (count[:-1] + block_m - 1) // block_m  # [G]
    end = blocks.cumsum(0)  # [G]
    segment = torch.arange(segment_capacity(num_rows, num_groups, block_m), device=device)  # [W]
    group = torch.searchsorted(end, segment, right=True)  # [W]
    used = group < num_groups
    group = group.clamp(max=num_groups - 1)
    within = (segment - (end - blocks)[group]) * block_m  # [W]
    left = (count[group] - within).clamp(max=block_m)  # [W]
    columns = (
        (group // num_experts if slot_of_token is not None else torch.full_like(group, -1), -1),
        (group % num_experts, -1),
        (first[group] + within, 0),
        (left, 0),
    )
    segments = torch.stack([torch.where(used, *column) for column in columns], 1)  # [W, 4]
    groups = _groups(ids, slot_of_token, num_experts, num_slots)
    return Worklist(rows.int(), segments.int(), block_m, groups)


def _worklist_of_lists(
    ids: Tensor | None, slot_of_token: Tensor | None, num_experts: int, num_slots: int, block_m: int
) -> Worklist:
    experts = None if ids is None else ids.flatten().tolist()
    slots = None if slot_of_token is None else slot_of_token.tolist()
    if slots is not None and ids is not None:
        slots = [slot for slot in slots for _ in range(ids.shape[1])]
    num_rows = len(experts if experts is not None else slots or ())
    keyed, left_out = [], []
    for row in range(num_rows):
        expert = 0 if experts is None else experts[row]
        slot = 0 if slots is None else slots[row]
        if 0 <= expert < num_experts and (slots is None or 0 <= slot < num_slots):
            keyed.append((slot * num_experts + expert, row))
        else:
            left_out.append(row)
    keyed.sort()
    segments: list[tuple[int, int, int, int]] = []
    first = 0
    for i, (key, _) in enumerate(keyed):
        last = i + 1 == len(keyed) or keyed[i + 1][0] != key
        if last or i + 1 - first == block_m:
            slot = -1 if slots is None else key // num_experts
            segments.append((slot, key % num_experts, first, i + 1 - first))
            first = i + 1
    capacity = segment_capacity(
        num_rows, _num_groups(slot_of_token, num_experts, num_slots), block_m
    )
    segments += [(-1, -1, 0, 0)] * (capacity - len(segments))
    rows = torch.tensor([row for _, row in keyed] + left_out, dtype=torch.int32)  # [N]
    table = torch.tensor(segments, dtype=torch.int32)  # [W, 4]
    return Worklist(rows, table, block_m, _groups(ids, slot_of_token, num_experts, num_slots))


def slot_groups(
    slot_of_token: Tensor, num_slots: int, top_k: int
) -> tuple[tuple[int, Tensor], ...]:
    """CPU: (slot, its rows int64) for every slot in use, ascending; row t·K + k of each token t."""
    listed = slot_of_token.tolist()
    slots = sorted({s for s in listed if 0 <= s < num_slots})
    if len(listed) * top_k > LIST_ROWS:
        return tuple((slot, _rows_of_slot(slot_of_token, slot, top_k)) for slot in slots)
    rows: dict[int, list[int]] = {slot: [] for slot in slots}
    for token, slot in enumerate(listed):
        if slot in rows:
            rows[slot] += range(token * top_k, (token + 1) * top_k)
    return tuple((slot, torch.tensor(own)) for slot, own in rows.items())


def _rows_of_slot(slot_of_token: Tensor, slot: int, top_k: int) -> Tensor:
    tokens = (slot_of_token == slot).nonzero()  # [tokens of the slot, 1]
    return (tokens * top_k + torch.arange(top_k)).flatten()  # [tokens · K]


def _num_groups(slot_of_token: Tensor | None, num_experts: int, num_slots: int) -> int:
    return max(1, num_experts * (1 if slot_of_token is None else num_slots))


def _groups(
    ids: Tensor | None, slot_of_token: Tensor | None, num_experts: int, num_slots: int
) -> tuple[tuple[int, Tensor], ...] | None:
    if slot_of_token is None:
        return ()
    if slot_of_token.is_cuda:
        return None
    if ids is None:
        return slot_groups(slot_of_token, num_slots, 1)
    groups = slot_groups(slot_of_token, num_slots, ids.shape[1])
    is_here = ((ids >= 0) & (ids < num_experts)).flatten()  # [N]
    if not groups or is_here.all():
        return groups
    return tuple((slot, rows[is_here[rows]]) for slot, rows in groups)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _group_of_row(
    ids_ptr, slots_ptr, row, num_rows, num_experts, num_slots,
    TOP_K: tl.constexpr, BY_EXPERT: tl.constexpr, BY_SLOT: tl.constexpr,
):  # fmt: skip
    """Each row's group, G (all groups) for a row that is left out or past the end; and G."""
    live = row < num_rows
    expert = tl.zeros_like(row)
    slot = tl.zeros_like(row)
    if BY_EXPERT:
        # other = -1: a lane past the end belongs to no expert and no slot (0 would be somebody).
        expert = tl.load(ids_ptr + row, mask=live, other=-1)
    else:
        num_experts = 1
    if BY_SLOT:
        slot = tl.load(slots_ptr + row // TOP_K, mask=live, other=-1)
    else:
        num_slots = 1
    num_groups = num_experts * num_slots
    ok = (expert >= 0) & (expert < num_experts) & (slot >= 0) & (slot < num_slots)
    return tl.where(ok, slot * num_experts + expert, num_groups), num_groups


@triton.jit(do_not_specialize=["num_rows", "num_segments"])
def _sort_kernel(
    ids_ptr, slots_ptr, rows_ptr, segments_ptr, num_rows, num_segments, num_experts, num_slots,
    TOP_K: tl.constexpr, BY_EXPERT: tl.constexpr, BY_SLOT: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK_N)
    live = lane < num_rows
    key, num_groups = _group_of_row(
        ids_ptr, slots_ptr, lane, num_rows, num_experts, num_slots, TOP_K, BY_EXPERT, BY_SLOT
    )
    if WIDE:
        key = key.to(tl.int64)
    packed = tl.sort(key * BLOCK_N + lane)
    key = (packed // BLOCK_N).to(tl.int32)
    row = (packed % BLOCK_N).to(tl.int32)
    used = key < num_groups
    before = tl.gather(key, tl.maximum(lane - 1, 0), 0)
    after = tl.gather(key, tl.minimum(lane + 1, BLOCK_N - 1), 0)
    opens = (lane == 0) | (key != before)
    closes = (lane == BLOCK_N - 1) | (key != after)
    first = tl.associative_scan(tl.where(opens, lane, 0), 0, _larger)
    within = (lane - first) % BLOCK_M
    begins = (used & (within == 0)).to(tl.int32)
    segment = tl.cumsum(begins, 0) - 1
    tl.store(rows_ptr + lane, row, mask=live)
    # The last row of a segment knows all of it.
    last = used & (closes | (within == BLOCK_M - 1))
    at = segments_ptr + segment * 4
    if BY_SLOT:
        tl.store(at, key // num_experts, mask=last)
    else:
        tl.store(at, tl.full([BLOCK_N], -1, tl.int32), mask=last)
    tl.store(at + 1, key % num_experts, mask=last)
    tl.store(at + 2, lane - within, mask=last)
    tl.store(at + 3, within + 1, mask=last)
    total = tl.sum(begins, 0)
    for start in range(0, num_segments, BLOCK_N):
        spare = start + lane
        mask = (spare >= total) & (spare < num_segments)
        for column in tl.static_range(4):
            value = -1 if column < 2 else 0
            tl.store(segments_ptr + spare * 4 + column, value, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _count_kernel(
    ids_ptr, slots_ptr, counts_ptr, num_rows, num_experts, num_slots,
    TOP_K: tl.constexpr, BY_EXPERT: tl.constexpr, BY_SLOT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    key, _ = _group_of_row(
        ids_ptr, slots_ptr, row, num_rows, num_experts, num_slots, TOP_K, BY_EXPERT, BY_SLOT
    )
    tl.atomic_add(counts_ptr + key, 1, mask=row < num_rows, sem="relaxed")


@triton.jit(do_not_specialize=["num_rows", "num_segments"])
def _scatter_kernel(
    ids_ptr, slots_ptr, counts_ptr, rows_ptr, segments_ptr,
    num_rows, num_segments, num_experts, num_slots,
    TOP_K: tl.constexpr, BY_EXPERT: tl.constexpr, BY_SLOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    # One program a group; the last one has the rows that are left out and the unused segments.
    group = tl.program_id(0)
    lane = tl.arange(0, BLOCK_N)
    key, num_groups = _group_of_row(
        ids_ptr, slots_ptr, lane, 0, num_experts, num_slots, TOP_K, BY_EXPERT, BY_SLOT
    )
    every = tl.arange(0, BLOCK_G)
    counts = tl.load(counts_ptr + every, mask=every < num_groups, other=0)
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(every < group, counts, 0), 0)
    segment = tl.sum(tl.where(every < group, blocks, 0), 0)
    count = tl.load(counts_ptr + group)
    if count == 0 and group < num_groups:
        return
    num_own = num_segments - segment
    slot, expert = -1, -1
    if group < num_groups:
        num_own = (count + BLOCK_M - 1) // BLOCK_M
        expert = group
        if BY_SLOT:
            slot, expert = group, 0
            if BY_EXPERT:
                slot, expert = group // num_experts, group % num_experts
    for start in range(0, num_own, BLOCK_N):
        own = start + lane
        at = segments_ptr + (segment + own) * 4
        left = tl.minimum(count - own * BLOCK_M, BLOCK_M)
        unused = group == num_groups
        tl.store(at, tl.zeros_like(own) + slot, mask=own < num_own)
        tl.store(at + 1, tl.zeros_like(own) + expert, mask=own < num_own)
        tl.store(at + 2, tl.where(unused, 0, first + own * BLOCK_M), mask=own < num_own)
        tl.store(at + 3, tl.where(unused, 0, left), mask=own < num_own)
    for start in range(0, num_rows, BLOCK_N):
        row = start + lane
        key, num_groups = _group_of_row(
            ids_ptr, slots_ptr, row, num_rows, num_experts, num_slots, TOP_K, BY_EXPERT, BY_SLOT
        )
        mine = ((key == group) & (row < num_rows)).to(tl.int32)
        tl.store(rows_ptr + first + tl.cumsum(mine, 0) - 1, row, mask=mine == 1)
        first += tl.sum(mine, 0)


def _cases() -> Iterator[Case]:
    def case(
        name: str, tokens: int, top_k: int, experts: int, slots: int, block_m: int, kind: str
    ) -> Case:
        def make(device: str, dtype: torch.dtype, seed: int) -> Inputs:
            g = torch.Generator().manual_seed(seed)
            ids = torch.rand(tokens, experts, generator=g).argsort(-1)[:, :top_k].int()  # [T, K]
            slot_of_token = torch.randint(-1, max(1, slots), (tokens,), generator=g).int()  # [T]
            return {
                "ids": None if kind == "slot" else ids.to(device),
                "slot_of_token": None if kind == "expert" else slot_of_token.to(device),
                "num_experts": 1 if kind == "slot" else experts,
                "num_slots": slots,
                "block_m": block_m,
            }

        return Case(f"{kind}_{name}", make, tokens <= 32)

    for kind in ("expert", "slot", "both"):
        yield case("odd", 13, 3, 7, 3, 16, kind)
        yield case("one", 1, 1, 1, 1, 16, kind)
        yield case("decode", 32, 4, 32, 8, 16, kind)
        yield case("crowded", 300, 2, 5, 2, 16, kind)
        yield case("prefill", 401, 4, 32, 8, 64, kind)
    yield case("many_experts", 16, 8, 512, 8, 16, "both")


def _aot() -> Iterator[AotSpec]:
    pointers = ("ids_ptr", "slots_ptr", "counts_ptr", "rows_ptr", "segments_ptr")
    numbers = ("num_rows", "num_segments", "num_experts", "num_slots")
    signature = {**dict.fromkeys(pointers, "*i32"), **dict.fromkeys(numbers, "i32")}
    for by_slot in (False, True):
        form = {"TOP_K": 4, "BY_EXPERT": True, "BY_SLOT": by_slot}
        launches = [
            ("sort", _sort_kernel, {"WIDE": False, "BLOCK_M": 16, "BLOCK_N": SORT_ROWS}, 1),
            ("count", _count_kernel, {"BLOCK_N": SCATTER_BLOCK}, 4),
            ("scatter", _scatter_kernel,
             {"BLOCK_M": 128, "BLOCK_N": SCATTER_BLOCK, "BLOCK_G": 256 if by_slot else 32}, 4),
        ]  # fmt: skip
        if by_slot:
            most = {"BLOCK_M": 16, "BLOCK_N": SCATTER_BLOCK, "BLOCK_G": SCATTER_GROUPS}
            launches.append(("scatter_512_experts", _scatter_kernel, most, 4))
        for name, fn, constants, warps in launches:
            wanted = {n: t for n, t in signature.items() if n in fn.arg_names}
            name = f"worklist_{name}_{'slot_expert' if by_slot else 'expert'}"
            yield AotSpec(name, fn, wanted, form | constants, num_warps=warps)


OPS = (
    Op(
        name="build_worklist",
        run=build_worklist,
        reference=build_worklist_reference,
        cases=_cases,
        outputs=lambda inputs, result: [result.rows, result.segments],
        aot=_aot,
        bytes=lambda i: 4 * sum(t.numel() for t in (i["ids"], i["slot_of_token"]) if t is not None),
    ),
)
