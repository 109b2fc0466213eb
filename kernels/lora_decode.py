"""LoRA for decode steps: y += (x A) B for few rows, by a pair of kernels that overlap.

Each row goes by itself, cut into many small programs of few warps that read 4 to 16 KiB of a factor
in one go; rows that share a factor meet in the L2. The shrink writes partial sums, which the expand
adds up in a fixed order: nothing is zeroed before, nothing is atomic, and the result is the same
every time.

On GPUs that can, both run beside the product that makes y (overlap.py): the shrink reads x and A
while that product computes, and the expand looks up its factor and has B in registers. For that x,
slots and ids must be settled. The shrink then triggers before it waits, so two kernels may be
unfinished when the expand starts, the product and the shrink: before its own wait the expand reads
nothing but B, the tables and what is settled.
Not here: prefill, large ranks (fused_moe_lora.py, the four operations), who calls which (moe_lora,
dense_lora), and the expand that applies an activation (lora_gated_act.py).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.lora_tables import LoraTables
from kernels.op import AotSpec, require_contiguous
from kernels.overlap import can_overlap, follow
from kernels.tiling import gpu_name, power_of_two, tiles_for

MAX_TARGETS = 3
# One tile holds all rank lanes.
MAX_RANK = 64
# Lanes of the largest rank -> most rows that go by themselves.
# The more rows share a factor, and the larger it is, the more grouping them is worth its worklist
# (tests/bench/lora_paths.py). Powers of two, as the sizes that steps are padded to.
MAX_PAIRS = {16: 128, 32: 128, 64: 128}
MAX_TOKENS = {16: 64, 32: 64, 64: 64}
UNSPECIALISED = (
    "target", "target_0", "target_1", "target_2", "num_rows", "per_row", "programs_0", "programs_1",
    "n_tiles",
)  # fmt: skip


@dataclass(frozen=True)
class DecodeTiles:
    """A shrink program takes block_k values of x at a time, an expand program block_n of y.

    programs  a launch that would have more of them lets each take several tiles: so that all are
              on the GPU at once, and a batch without adapters costs little
    """

    block_k: int
    block_n: int
    shrink_warps: int = 1
    expand_warps: int = 1
    programs: int = 2112

    def per_program(self, num_rows: int, tiles_per_row: int) -> int:
        """Tiles of one program. The same for all row counts up to the next power of two."""
        tiles = power_of_two(num_rows) * tiles_per_row  # no row counts as one
        return triton.cdiv(tiles, self.programs)


def decode_tiles(num_rows: int, in_: int, out: int, max_rank: int, gpu: str) -> DecodeTiles:
    """Small programs of few warps: waiting for each other costs more than more lanes help.

    out  of the widest target;  gpu  as in `tiles_for`
    """
    lanes = power_of_two(max_rank)  # what a program holds, also for ranks between
    shrink = tiles_for("decode_shrink", {"rows": num_rows, "out": lanes, "in": in_}, gpu)
    expand = tiles_for("decode_expand", {"rows": num_rows, "out": out, "in": lanes}, gpu)
    return DecodeTiles(shrink.block_k, expand.block_n, shrink.num_warps, expand.num_warps)


def pairs_suffice(num_rows: int, tables: LoraTables) -> bool:
    """Whether (token, expert) rows need no worklist: `add_pairs` serves so many."""
    return num_rows <= most_rows(MAX_PAIRS, tables.max_rank)


def tokens_suffice(num_tokens: int, tables: LoraTables) -> bool:
    """The same for the rows of plain linears."""
    return num_tokens <= most_rows(MAX_TOKENS, tables.max_rank)


def most_rows(limits: Mapping[int, int], max_rank: int) -> int:
    """Of MAX_PAIRS or MAX_TOKENS, for tables with this largest rank; 0 = the kernels here hold no
    such rank."""
    return limits.get(max(16, power_of_two(max_rank)), 0)


def add_rows(
    ys: tuple[Tensor, ...], x: Tensor, tables: LoraTables, targets: tuple[int, ...],
    slots: Tensor, tiles: DecodeTiles | None = None, overlap: bool | None = None,
    settled: bool = False,
) -> None:  # fmt: skip
    """Add to each row its slot's delta, for up to three linears that share x.

    Shapes:  ys[i] [T, out_i], any row stride (written);  x [T, in];
             slots [T] int32, -1 = base
    tiles, overlap  for benchmarks; None = chosen here
    settled  x and slots are older than the launch in front of this one (overlap.py)
    """
    out = max(y.shape[1] for y in ys)
    lora = shrink(x, tables, targets, slots, None, 1, 0, out, tiles, overlap, settled)
    _expand(ys, lora, None)


def add_pairs(
    y: Tensor, x: Tensor, tables: LoraTables, target: int, ids: Tensor, slots: Tensor,
    num_experts: int, x_rows_per_pair: bool, weights: Tensor | None,
    tiles: DecodeTiles | None = None, overlap: bool | None = None, settled: bool = False,
) -> None:  # fmt: skip
    """Add to each (token, expert) row the delta of the token's slot for that expert.

    Shapes:  as moe_lora
    settled  as in add_rows; of ids and weights too
    Left out: slots outside 0..L - 1, experts outside 0..num_experts - 1.
    """
    x_div = 1 if x_rows_per_pair else ids.shape[1]
    lora = shrink(
        x, tables, (target,), slots, ids, x_div, num_experts, y.shape[1], tiles, overlap, settled
    )
    _expand((y,), lora, weights)


@dataclass(frozen=True)
class Shrunk:
    """What a shrink leaves to its expand.

    Shapes:  z [targets, splits, N, max_rank] fp32, to be summed over the splits
    form     constexprs that both kernels have
    """

    z: Tensor
    tables: LoraTables
    targets: tuple[int, ...]
    sources: tuple[Tensor, Tensor]
    num_experts: int
    tiles: DecodeTiles
    form: dict[str, int]

    @property
    def num_rows(self) -> int:
        return self.z.shape[2]


def shrink(
    x: Tensor, tables: LoraTables, targets: tuple[int, ...], slots: Tensor, ids: Tensor | None,
    x_div: int, num_experts: int, out: int, tiles: DecodeTiles | None, overlap: bool | None,
    settled: bool,
) -> Shrunk:  # fmt: skip
    """Launch z = x A for up to three targets. An expand must be the very next launch.

    ids None: rows of a plain linear;  x_div  rows that share a row of x;  out  as in decode_tiles
    """
    num_rows = slots.shape[0] if ids is None else ids.numel()
    num_targets, in_, max_rank = len(targets), x.shape[1], tables.max_rank
    assert 1 <= num_targets <= MAX_TARGETS, num_targets
    assert ids is None or num_experts > 0, "pairs need the number of experts"
    assert x.dtype == tables.memory.dtype, (x.dtype, tables.memory.dtype)
    assert x.stride(1) == 1, "columns must lie side by side"
    assert max_rank <= MAX_RANK and slots.is_contiguous(), (max_rank, slots.stride())
    tiles = tiles or decode_tiles(num_rows, in_, out, max_rank, gpu_name(x.device))
    overlap = can_overlap(x.device) if overlap is None else overlap
    form, own = shrink_form(
        num_rows, in_, num_targets, max_rank, 0 if ids is None else ids.shape[1], tiles, overlap
    )
    splits = form["SPLITS"]
    z = torch.empty(
        num_targets, splits, num_rows, max_rank, dtype=torch.float32, device=x.device
    )  # [targets, S, N, R]
    sources = (slots, slots if ids is None else ids.contiguous())
    if num_rows:
        _shrink_kernel[(num_rows * splits, num_targets)](
            x, z, tables.memory, tables.a_off, tables.a_stride, tables.b_off, tables.lora_rank,
            *sources, *_three(targets), tables.num_slots, num_experts, num_rows, x.stride(0), in_,
            max_rank, **form, **own, X_DIV=x_div, SETTLED=settled,
            num_warps=tiles.shrink_warps, **follow(overlap),
        )  # fmt: skip
    return Shrunk(z, tables, targets, sources, num_experts, tiles, form)


def shrink_form(
    num_rows: int, in_: int, num_targets: int, max_rank: int, top_k: int, tiles: DecodeTiles,
    overlap: bool,
) -> tuple[dict[str, int], dict[str, int]]:  # fmt: skip
    """Constexprs of a shrink and its expand, and those of the shrink alone. top_k 0: no experts."""
    num_k = triton.cdiv(in_, tiles.block_k)
    k_tiles = tiles.per_program(num_rows, num_k * num_targets)
    form = {
        "TOP_K": max(1, top_k), "BY_EXPERT": top_k > 0,
        "BLOCK_R": triton.next_power_of_2(max_rank), "SPLITS": triton.cdiv(num_k, k_tiles),
        "OVERLAP": overlap,
    }  # fmt: skip
    even = in_ % (tiles.block_k * k_tiles) == 0
    return form, {"BLOCK_K": tiles.block_k, "K_TILES": k_tiles, "EVEN_K": even}


def _expand(ys: tuple[Tensor, ...], lora: Shrunk, weights: Tensor | None) -> None:
    """Launch ys[i] += z_i B_i, times the rows' weights if they are given."""
    tables, tiles, num_rows = lora.tables, lora.tiles, lora.num_rows
    assert len(ys) == len(lora.targets), (len(ys), lora.targets)
    assert all(y.stride(1) == 1 for y in ys), "columns must lie side by side"
    require_contiguous(weights=weights)
    if not num_rows:
        return
    num_n = [triton.cdiv(y.shape[1], tiles.block_n) for y in ys]
    n_tiles = tiles.per_program(num_rows, sum(num_n))
    programs = tuple(triton.cdiv(n, n_tiles) for n in num_n)
    places = _three(ys)
    _expand_kernel[(num_rows * sum(programs),)](
        lora.z, *places, tables.memory, tables.a_off, tables.b_off, tables.b_stride,
        tables.lora_rank, weights if weights is not None else lora.z, *lora.sources,
        *_three(lora.targets), tables.num_slots, lora.num_experts, num_rows,
        *(y.stride(0) for y in places), *(y.shape[1] for y in places), sum(programs),
        *_three(programs)[:2], n_tiles, tables.max_rank, **lora.form, NUM_TARGETS=len(ys),
        WEIGHTED=weights is not None, BLOCK_N=tiles.block_n,
        BLOCK_S=triton.next_power_of_2(lora.z.shape[1]),
        num_warps=tiles.expand_warps, **follow(bool(lora.form["OVERLAP"])),
    )  # fmt: skip


def _three(some: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same filled up to MAX_TARGETS with its first."""
    return some + some[:1] * (MAX_TARGETS - len(some))


@triton.jit
def _pick(index, first, second, third):
    return tl.where(index == 0, first, tl.where(index == 1, second, third))


@triton.jit
def find_source(
    row, slots_ptr, ids_ptr, num_slots, num_experts, TOP_K: tl.constexpr, BY_EXPERT: tl.constexpr
):
    """(slot, expert, whether there may be a delta) of a row."""
    slot = tl.load(slots_ptr + row // TOP_K)
    expert = tl.zeros_like(slot)
    live = (slot >= 0) & (slot < num_slots)
    if BY_EXPERT:
        expert = tl.load(ids_ptr + row)
        live = live & (expert >= 0) & (expert < num_experts)
    return slot, expert.to(tl.int64), live


@triton.jit
def find_factor(off_ptr, stride_ptr, other_ptr, rank_ptr, expert, live, max_rank):
    """(where the expert's factor starts, its rank); start < 0: nothing to add.

    One branch hangs on all of it, so that the four loads travel together.
    """
    # Factors start on 16 bytes and a rank is a multiple of 8. Unless the compiler is told so, and
    # keeps it through the select, it reads them two bytes at a time.
    off, stride = tl.multiple_of(tl.load(off_ptr), 8), tl.multiple_of(tl.load(stride_ptr), 8)
    other = tl.load(other_ptr)
    # Lanes past the adapter's own rank lie in the next expert's rows, or in another adapter.
    rank = tl.minimum(tl.load(rank_ptr), max_rank)
    none = ~live | (off < 0) | (other < 0) | (rank <= 0)
    return tl.where(none, -8, off + expert * stride), rank


@triton.jit(do_not_specialize=UNSPECIALISED)
def _shrink_kernel(
    x_ptr, z_ptr, memory_ptr, a_off_ptr, a_stride_ptr, b_off_ptr, rank_ptr,
    slots_ptr, ids_ptr, target_0, target_1, target_2, num_slots, num_experts, num_rows,
    x_stride, in_features, max_rank,
    X_DIV: tl.constexpr, TOP_K: tl.constexpr, BY_EXPERT: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr, K_TILES: tl.constexpr, SPLITS: tl.constexpr, EVEN_K: tl.constexpr,
    OVERLAP: tl.constexpr, SETTLED: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        if not SETTLED:
            gdc_wait()
        # The expand may come as soon as all of this grid is under way.
        gdc_launch_dependents()
    part = tl.program_id(1)
    row = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    slot, expert, live = find_source(
        row, slots_ptr, ids_ptr, num_slots, num_experts, TOP_K, BY_EXPERT
    )
    at = _pick(part, target_0, target_1, target_2) * num_slots + tl.maximum(slot, 0)
    start, rank = find_factor(
        a_off_ptr + at, a_stride_ptr + at, b_off_ptr + at, rank_ptr + at, expert, live, max_rank
    )
    if start < 0:
        if OVERLAP:
            gdc_wait()
        return
    r = tl.arange(0, BLOCK_R)
    r_live = r < rank
    r_kept = r < max_rank  # the others get zeros: so wide stores and loads of z are possible
    a_ptr = memory_ptr + start
    z_row = (part * SPLITS + split).to(tl.int64) * num_rows
    row = row.to(tl.int64)
    z = tl.zeros([BLOCK_R], tl.float32)
    for tile in range(K_TILES):
        k = (split * K_TILES + tile) * BLOCK_K + tl.arange(0, BLOCK_K)
        k_live = k < in_features
        a_ptrs = a_ptr + r.to(tl.int64)[:, None] * in_features + k[None, :]
        x_ptrs = x_ptr + row // X_DIV * x_stride + k
        if EVEN_K:
            a = tl.load(a_ptrs, mask=r_live[:, None], other=0.0)
            x = tl.load(x_ptrs)
        else:
            a = tl.load(a_ptrs, mask=r_live[:, None] & k_live[None, :], other=0.0)
            x = tl.load(x_ptrs, mask=k_live, other=0.0)
        z += tl.sum(a.to(tl.float32) * x.to(tl.float32)[None, :], 1)
    if OVERLAP:
        # As an operand z is finished by then; a plain wait gets scheduled before the sums.
        z = tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.b32 $0, $1;", "=r,r", [z], tl.float32, is_pure=False, pack=1
        )
    tl.store(z_ptr + (z_row + row) * max_rank + r, z, mask=r_kept)


@triton.jit
def load_shrunk(
    z_ptr, row, part, num_rows, max_rank, live,
    BLOCK_R: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """A row's z [BLOCK_R], summed over the splits; zeros unless live."""
    r = tl.arange(0, BLOCK_R)
    s = tl.arange(0, BLOCK_S)
    z_row = row + part * SPLITS * num_rows
    r_kept = (r < max_rank) & live
    z_ptrs = z_ptr + (z_row + s.to(tl.int64) * num_rows)[:, None] * max_rank + r[None, :]
    z_mask = (s < SPLITS)[:, None] & r_kept[None, :]
    # Past the L1, which may be older than what the shrink wrote while this program ran.
    return tl.sum(tl.load(z_ptrs, mask=z_mask, other=0.0, cache_modifier=".cg"), 0)


@triton.jit(do_not_specialize=UNSPECIALISED)
def _expand_kernel(
    z_ptr, y_0_ptr, y_1_ptr, y_2_ptr, memory_ptr, a_off_ptr, b_off_ptr, b_stride_ptr, rank_ptr,
    weights_ptr, slots_ptr, ids_ptr, target_0, target_1, target_2, num_slots, num_experts,
    num_rows, y_0_stride, y_1_stride, y_2_stride, out_0, out_1, out_2,
    per_row, programs_0, programs_1, n_tiles, max_rank,
    NUM_TARGETS: tl.constexpr, WEIGHTED: tl.constexpr, TOP_K: tl.constexpr,
    BY_EXPERT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
    row = tl.program_id(0) // per_row
    place = tl.program_id(0) % per_row
    slot, expert, live = find_source(
        row, slots_ptr, ids_ptr, num_slots, num_experts, TOP_K, BY_EXPERT
    )
    y_ptr, y_stride, out_features, target = y_0_ptr, y_0_stride, out_0, target_0
    part = 0
    if NUM_TARGETS > 1:
        part = tl.where(place < programs_0, 0, tl.where(place < programs_0 + programs_1, 1, 2))
        y_stride = _pick(part, y_0_stride, y_1_stride, y_2_stride)
        out_features = _pick(part, out_0, out_1, out_2)
        target = _pick(part, target_0, target_1, target_2)
        place -= _pick(part, 0, programs_0, programs_0 + programs_1)
        if part == 1:
            y_ptr = y_1_ptr
        elif part == 2:
            y_ptr = y_2_ptr
    at = target * num_slots + tl.maximum(slot, 0)
    start, rank = find_factor(
        b_off_ptr + at, b_stride_ptr + at, a_off_ptr + at, rank_ptr + at, expert, live, max_rank
    )
    if start < 0:
        if OVERLAP:
            gdc_wait()
        return
    first = place * n_tiles * BLOCK_N
    end = tl.minimum(first + n_tiles * BLOCK_N, out_features)
    lane = tl.arange(0, BLOCK_N)
    r = tl.arange(0, BLOCK_R)
    r_live = r < rank
    b_rows = memory_ptr + start + r.to(tl.int64)[:, None] * out_features
    n = first + lane
    b = tl.load(b_rows + n[None, :], mask=r_live[:, None] & (n < end)[None, :], other=0.0)
    row = row.to(tl.int64)
    weight = 1.0
    if WEIGHTED:
        weight = tl.load(weights_ptr + row)
    if OVERLAP:
        gdc_wait()
    y_row = y_ptr + row * y_stride
    y = tl.load(y_row + n, mask=n < end, other=0.0, cache_modifier=".cg")
    z = load_shrunk(z_ptr, row, part, num_rows, max_rank, True, BLOCK_R, SPLITS, BLOCK_S)
    for first_n in range(first, end, BLOCK_N):
        n = first_n + lane
        # The next tile travels while this one is added.
        ahead = n + BLOCK_N
        mask = r_live[:, None] & (ahead < end)[None, :]
        b_ahead = tl.load(b_rows + ahead[None, :], mask=mask, other=0.0)
        y_ahead = tl.load(y_row + ahead, mask=ahead < end, other=0.0, cache_modifier=".cg")
        acc = tl.sum(z[:, None] * b.to(tl.float32), 0)
        if WEIGHTED:
            acc *= weight
        acc += y.to(tl.float32)
        tl.store(y_row + n, acc.to(y_ptr.dtype.element_ty), mask=n < end)
        b, y = b_ahead, y_ahead


def aot_specs(
    name: str, num_rows: int, in_: int, outs: tuple[int, ...], max_rank: int, top_k: int,
    x_div: int, weighted: bool, tiles: DecodeTiles | None = None,
) -> Iterator[AotSpec]:  # fmt: skip
    """The two compilations that one call uses on an H200. top_k 0: a plain linear."""
    tiles = tiles or decode_tiles(num_rows, in_, max(outs), max_rank, "NVIDIA H200")
    form, own = shrink_form(num_rows, in_, len(outs), max_rank, top_k, tiles, True)
    own |= {"X_DIV": x_div, "SETTLED": True}
    expand = {"NUM_TARGETS": len(outs), "WEIGHTED": weighted, "BLOCK_N": tiles.block_n}
    expand["BLOCK_S"] = triton.next_power_of_2(form["SPLITS"])
    yield lora_spec(f"{name}_shrink", _shrink_kernel, form | own, tiles.shrink_warps)
    yield lora_spec(f"{name}_expand", _expand_kernel, form | expand, tiles.expand_warps)


def lora_spec(
    name: str, fn: triton.JITFunction, constants: dict[str, Any], num_warps: int
) -> AotSpec:
    """One compilation of a kernel here, its types told by the names of its arguments."""
    loose = dict.fromkeys(("num_slots", "num_experts", *UNSPECIALISED), "i32")
    numbers = ("rank_ptr", "slots_ptr", "ids_ptr")
    wide = dict.fromkeys(("a_off_ptr", "b_off_ptr", "a_stride_ptr", "b_stride_ptr"), "*i64")
    types = loose | dict.fromkeys(numbers, "*i32") | wide
    types |= dict.fromkeys(("z_ptr", "weights_ptr"), "*fp32")
    signature = {
        n: types.get(n, "*bf16" if n.endswith("_ptr") else "i32:16")
        for n in fn.arg_names
        if n not in constants
    }
    return AotSpec(name, fn, signature, constants, num_warps=num_warps, num_stages=1)
