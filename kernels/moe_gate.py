"""Chooses each token's experts, and groups rows by expert, adapter slot or both.

Not here: the products. Nothing here waits for the device, so all of it can be captured in a graph.
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


def moe_gate(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Softmax over all experts, the best top_k of them, optionally scaled to a sum of 1.

    Shapes:  logits [T, E]  ->  weights [T, K] fp32, ids [T, K] int32, best first
    Ties go to the lower id. A NaN logit counts as minus infinity in the order; without renormalize
    it makes the row's weights NaN, with it only a row of nothing but NaN.
    Errors:  ValueError unless 1 <= top_k <= E.      Cost:  reads the logits once.
    """
    num_tokens, num_experts = logits.shape
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k must be in 1..{num_experts} (the experts), not {top_k}")
    if not use_triton(logits):
        return moe_gate_reference(logits, top_k, renormalize)
    weights = logits.new_empty(num_tokens, top_k, dtype=torch.float32)  # [T, K]
    ids = logits.new_empty(num_tokens, top_k, dtype=torch.int32)  # [T, K]
    if num_tokens:
        block = triton.next_power_of_2(num_experts)
        _gate_kernel[(num_tokens,)](
            logits, weights, ids, logits.stride(0), num_experts, top_k, renormalize, block,
            num_warps=1 if block <= 128 else 4,
        )  # fmt: skip
    return weights, ids


def moe_gate_reference(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The same in torch."""
    x = logits.float()
    low = float("-inf")
    order = torch.nan_to_num(x, nan=low, posinf=-low, neginf=low)  # [T, E]
    best, ids = torch.sort(order, dim=-1, descending=True, stable=True)  # [T, E] twice
    ids = ids[:, :top_k]  # [T, K]
    # The softmax over all, scaled to a sum of 1 over the chosen, is the softmax over the chosen.
    weights = best[:, :top_k].softmax(-1) if renormalize else x.softmax(-1).gather(1, ids)
    return weights, ids.to(torch.int32, memory_format=torch.contiguous_format)


@triton.jit
def choose_experts(
    logits, live, TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, BLOCK_E: tl.constexpr
):
    """(which of a row's top_k each expert became, -1 = none; weights), [rows, BLOCK_E] as logits.

    live  which lanes are experts of a row that exists; the others hold any logits
    """
    lane = tl.arange(0, BLOCK_E)[None, :]
    x = tl.where(live, logits, float("-inf")).to(tl.float32)
    order = tl.where(x == x, x, float("-inf"))
    # As integers that sort like the numbers, the lower lane first: one reduction finds both. The
    # low half of a bf16 is free for the lane. Negative zero equals zero.
    bits = tl.where(order == 0.0, 0.0, order).to(tl.int32, bitcast=True)
    bits ^= (bits >> 31) & 0x7FFFFFFF
    taken: tl.constexpr = -(2**31) if logits.dtype == tl.bfloat16 else -(2**63)
    if logits.dtype == tl.bfloat16:
        key = (bits & -65536) | (65535 - lane)
    else:
        key = (bits.to(tl.int64) << 32) | (65535 - lane)
    key = tl.where(live, key, taken)
    place = tl.full(logits.shape, -1, tl.int32)
    for k in tl.static_range(TOP_K):
        chosen = 65535 - (tl.max(key, 1, keep_dims=True) & 65535).to(tl.int32)
        place = tl.where((lane == chosen) & live, k, place)
        key = tl.where(lane == chosen, taken, key)
    # Scaled to a sum of 1 over the chosen, a softmax over all is one over the chosen.
    kept = tl.where(place >= 0, order, float("-inf")) if RENORMALIZE else x
    best = tl.max(tl.where(kept == kept, kept, float("-inf")), 1, keep_dims=True)
    p = tl.exp(kept - best)
    return place, p / tl.sum(p, 1, keep_dims=True)


@triton.jit
def _gate_kernel(
    logits_ptr, weights_ptr, ids_ptr, row_stride, num_experts,
    TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK_E)[None, :]
    live = lane < num_experts
    logits = tl.load(logits_ptr + token * row_stride + lane, mask=live, other=0.0)
    place, weights = choose_experts(logits, live, TOP_K, RENORMALIZE, BLOCK_E)
    tl.store(weights_ptr + token * TOP_K + place, weights, mask=place >= 0)
    tl.store(ids_ptr + token * TOP_K + place, lane, mask=place >= 0)


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
    return Worklist(rows, segments, block_m, _groups(ids, slot_of_token, num_slots))


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
    groups = _groups(ids, slot_of_token, num_slots)
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
    return Worklist(rows, table, block_m, _groups(ids, slot_of_token, num_slots))


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
    ids: Tensor | None, slot_of_token: Tensor | None, num_slots: int
) -> tuple[tuple[int, Tensor], ...] | None:
    if slot_of_token is None:
        return ()
    if slot_of_token.is_cuda:
        return None
    return slot_groups(slot_of_token, num_slots, 1 if ids is None else ids.shape[1])


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


def _gate_cases() -> Iterator[Case]:
    def case(
        name: str, tokens: int, experts: int, top_k: int, renormalize: bool, small: bool
    ) -> Case:
        def make(device: str, dtype: torch.dtype, seed: int) -> Inputs:
            g = torch.Generator().manual_seed(seed)
            # Distinct values: a tie in one dtype and none in another would change the order.
            x = torch.rand(tokens, experts, generator=g).argsort(-1).float() / 16  # [T, E]
            return {"logits": x.to(device, dtype), "top_k": top_k, "renormalize": renormalize}

        return Case(name, make, small)

    yield case("odd", 5, 7, 3, True, True)
    yield case("all_of_them", 3, 5, 5, False, True)
    yield case("one", 1, 1, 1, True, True)
    yield case("gpt_oss", 32, 32, 4, True, True)
    yield case("qwen3", 9, 128, 8, True, True)
    yield case("many_experts", 512, 512, 8, False, False)


def _work_cases() -> Iterator[Case]:
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


def _gate_aot() -> Iterator[AotSpec]:
    signature = {
        "logits_ptr": "*bf16", "weights_ptr": "*fp32", "ids_ptr": "*i32",
        "row_stride": "i32:16", "num_experts": "i32:16",
    }  # fmt: skip
    for name, experts, top_k in (("gpt_oss", 32, 4), ("qwen3", 128, 8), ("many", 512, 8)):
        constants = {"TOP_K": top_k, "RENORMALIZE": True, "BLOCK_E": experts}
        warps = 1 if experts <= 128 else 4
        yield AotSpec(f"moe_gate_{name}", _gate_kernel, signature, constants, num_warps=warps)


def _work_aot() -> Iterator[AotSpec]:
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
        name="moe_gate",
        run=moe_gate,
        reference=moe_gate_reference,
        cases=_gate_cases,
        outputs=lambda inputs, result: list(result),
        aot=_gate_aot,
        bytes=lambda i: i["logits"].nbytes,
    ),
    Op(
        name="build_worklist",
        run=build_worklist,
        reference=build_worklist_reference,
        cases=_work_cases,
        outputs=lambda inputs, result: [result.rows, result.segments],
        aot=_work_aot,
        bytes=lambda i: 4 * sum(t.numel() for t in (i["ids"], i["slot_of_token"]) if t is not None),
    ),
)
