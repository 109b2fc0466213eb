"""Tensors for a problem: a call a layer, each with weights, adapters and routing of its own, so
that no call finds what it reads in the L2 cache because another has read it.

Rows are the same for all layers: a product's input has just been written, in service too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from kernels.dense_lora import dense_lora_multi, dense_lora_multi_reference
from kernels.fused_moe import (
    ExpertWeights,
    moe_down,
    moe_down_reference,
    moe_gate_up,
    moe_gate_up_reference,
)
from kernels.fused_moe_lora import moe_lora, moe_lora_reference
from kernels.lora_gated_act import lora_gated_act, lora_gated_act_reference
from kernels.lora_tables import LoraTables, Worklist
from kernels.skinny_linear import linear, linear_reference
from kernels.tiling import moe_block_m, slot_block_m
from kernels.tune.problems import NUM_SLOTS, Problem
from kernels.worklist import build_worklist

MAX_BYTES = 6 << 30  # of all layers together
# y is small, so that the rounding of what was there does not hide what is added.
Y_SCALE = 0.02


@dataclass(frozen=True)
class Batch:
    """A problem's calls.

    calls      one a layer; each launches the kernels and gives what they wrote
    reference  what the first call should give;  bound  the error allowed, of the norm of what a
               call computes
    start      what the calls add to (None: they write afresh)
    """

    calls: tuple[Callable[[], Tensor], ...]
    reference: Callable[[], Tensor]
    bound: float
    start: Tensor | None = None
    written: Tensor | None = None

    def restore(self) -> None:
        """Make the tensor that calls add to what it was."""
        if self.written is not None and self.start is not None:
            self.written.copy_(self.start)

    def error(self, got: Tensor, want: Tensor) -> float:
        """Of `got`, relative to what the call computes."""
        base = self.start.float() if self.start is not None else torch.zeros_like(want).float()
        size = (want.float() - base).norm().clamp(min=1e-9)
        return float((got.float() - want.float()).norm() / size)


def make_products(p: Problem, device: torch.device, filled: bool) -> Batch:
    """The base product of experts. filled: with values; else memory alone, for the compiler."""
    dtype = _dtype(device)
    size = p.num_experts * p.outs[0] * p.in_ * (17 / 32 if p.experts == "packed" else 2)
    layers = num_layers(p, size) if filled else 1
    weights = _experts(p.in_, p.outs[0], p.num_experts, p.experts, layers, device, filled)
    g = torch.Generator(device).manual_seed(p.tokens)
    x_rows = p.tokens if p.product == "gate_up" else p.rows
    x = torch.randn(x_rows, p.in_, generator=g, device=device).to(dtype)
    factors = torch.rand(p.tokens, p.top_k, generator=g, device=device)  # [T, K]
    calls: list[Callable[[], Tensor]] = []
    references: list[Callable[[], Tensor]] = []
    for experts in weights:
        ids = _random_ids(p, g, device)
        work = build_worklist(
            ids, None, p.num_experts, 0, moe_block_m(p.tokens, p.top_k, p.num_experts)
        )
        if p.product == "gate_up":
            calls.append(partial(moe_gate_up, x, experts, ids, work))
            references.append(partial(moe_gate_up_reference, x, experts, ids, None))
        else:
            calls.append(partial(moe_down, x, experts, ids, work, factors))
            references.append(partial(moe_down_reference, x, experts, ids, None, factors))
    return Batch(tuple(calls), references[0], 1e-2)


def make_linear(p: Problem, device: torch.device, filled: bool) -> Batch:
    """A plain linear with a bias. filled: as in make_products."""
    dtype, (out,) = _dtype(device), p.outs
    layers = num_layers(p, 2 * out * p.in_) if filled else 1
    g = torch.Generator(device).manual_seed(p.tokens)
    x = torch.randn(p.tokens, p.in_, generator=g, device=device).to(dtype)
    bias = torch.randn(out, generator=g, device=device).to(dtype)
    weights = _weights(p.in_, out, layers, device, filled)
    calls = tuple(partial(linear, x, weight, bias) for weight in weights)
    return Batch(calls, partial(linear_reference, x, weights[0], bias), 1e-2)


def make_lora(p: Problem, device: torch.device, filled: bool, decode: bool) -> Batch:
    """LoRA on one product. decode: without worklists, by the kernels of lora_decode.py, as behind
    a product: what it reads but y is settled; and gate_up with its activation."""
    tables, layers = _tables(p, device, filled)
    g = torch.Generator(device).manual_seed(p.tokens)
    slots = torch.arange(p.tokens, device=device).remainder(NUM_SLOTS).int()  # [T]
    x_rows = p.rows if p.product == "down" else p.tokens
    x = torch.randn(x_rows, p.in_, generator=g, device=device).to(tables.memory.dtype)
    y = torch.randn(p.rows, sum(p.outs), generator=g, device=device).mul_(Y_SCALE).to(x.dtype)
    weights = torch.rand(p.tokens, p.top_k, generator=g, device=device) + 0.5  # [T, K]
    activated = decode and p.product == "gate_up"
    work: Worklist | None = None
    calls: list[Callable[[], Tensor]] = []
    references: list[Callable[[], Tensor]] = []
    for layer in range(layers):
        if p.of_experts:
            ids, down = _random_ids(p, g, device), p.product == "down"
            if activated:
                given = (y, x, tables, layer, ids, slots, p.num_experts, "gpt_oss", True)
                calls.append(partial(lora_gated_act, *given))
                references.append(partial(lora_gated_act_reference, *given))
                continue
            if not decode:
                block_m = moe_block_m(p.tokens, p.top_k, p.num_experts)
                work = build_worklist(ids, slots, p.num_experts, NUM_SLOTS, block_m)
            args = (y, x, tables, layer, ids, slots, work, down, weights if down else None, False,
                    p.num_experts)  # fmt: skip
            calls.append(partial(_and_give, y, partial(moe_lora, *args, settled=True)))
            references.append(partial(_of_copy, y, partial(moe_lora_reference, y, *args[1:])))
            continue
        if not decode and work is None:
            work = build_worklist(None, slots, 1, NUM_SLOTS, slot_block_m(p.tokens))
        parts = len(p.outs)
        targets = tuple(range(layer * parts, (layer + 1) * parts))
        rest = (x, tables, targets, slots, work)
        ys = y.split(p.outs, 1)
        call = partial(dense_lora_multi, ys, *rest, settled=True)
        calls.append(partial(_and_give, y, call))
        references.append(partial(_of_copy, y, partial(dense_lora_multi_reference, ys, *rest)))
    added = (None, None) if activated else (y.clone(), y)
    return Batch(tuple(calls), references[0], 3e-2, *added)


def _and_give(y: Tensor, call: Callable[[], None]) -> Tensor:
    call()
    return y


def _of_copy(y: Tensor, call: Callable[[], None]) -> Tensor:
    """What a call leaves in y, which is then put back."""
    before = y.clone()
    call()
    after = y.clone()
    y.copy_(before)
    return after


def num_layers(p: Problem, layer_bytes: float) -> int:
    """Enough to make a graph's own start small, few where a call is long anyway."""
    fit = int(MAX_BYTES / layer_bytes)
    return max(2, min(fit, 4 if p.tokens >= 128 else 12))


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _random_ids(p: Problem, g: torch.Generator, device: torch.device) -> Tensor:
    scores = torch.rand(p.tokens, p.num_experts, generator=g, device=device)
    return scores.argsort(-1)[:, : p.top_k].int().contiguous()  # [T, K]


@lru_cache(maxsize=1)
def _weights(
    in_: int, out: int, layers: int, device: torch.device, filled: bool
) -> tuple[Tensor, ...]:
    made = tuple(torch.empty(out, in_, dtype=_dtype(device), device=device) for _ in range(layers))
    for layer, weight in enumerate(made if filled else ()):
        weight.normal_(0, in_**-0.5, generator=torch.Generator(device).manual_seed(layer))
    return made


@lru_cache(maxsize=1)
def _experts(
    in_: int, out: int, num_experts: int, kind: str, layers: int, device: torch.device, filled: bool
) -> tuple[ExpertWeights, ...]:
    made = []
    for layer in range(layers):
        g = torch.Generator(device).manual_seed(layer)
        if kind == "dense":
            weight = torch.empty(num_experts, out, in_, dtype=_dtype(device), device=device)
            if filled:
                weight.normal_(0, in_**-0.5, generator=g)
            made.append(ExpertWeights(weight=weight))
            continue
        kept = num_experts if filled else 1  # packing takes time, and one expert has all strides
        blocks = torch.empty(kept, out, in_ // 2, dtype=torch.uint8, device=device)
        blocks.random_(0, 256, generator=g)
        scales = torch.empty(kept, out, in_ // 32, dtype=torch.uint8, device=device)
        scales.random_(119, 121, generator=g)
        bias = torch.randn(kept, out, generator=g, device=device).to(_dtype(device))
        experts = ExpertWeights(blocks=blocks, scales=scales, bias=bias)
        made.append(experts.pack() if kind == "packed" else experts)
    return tuple(made)


def _tables(p: Problem, device: torch.device, filled: bool) -> tuple[LoraTables, int]:
    """Every layer's tables in one memory: target = layer · parts + part."""
    width = sum(p.in_ + out for out in p.outs)
    layers = num_layers(p, NUM_SLOTS * p.num_experts * p.lora_rank * width * 2) if filled else 1
    return _kept_tables(
        p.in_, p.outs, p.num_experts, p.lora_rank, layers, NUM_SLOTS, device, filled
    ), layers


def make_tables(
    in_: int, outs: tuple[int, ...], experts: int, lora_rank: int, layers: int, num_slots: int,
    device: torch.device, filled: bool,
) -> LoraTables:  # fmt: skip
    """Tables of `layers` layers in one memory, every slot filled.

    Shapes:  of `experts` experts each A [r, in] and B [r, out]; the tables [layers · parts, slots]:
             layer i's part j is target i · parts + j
    outs     a part each;  filled: with random values, else memory alone, for the compiler
    """
    a_off = torch.empty(layers * len(outs), num_slots, dtype=torch.int64)  # [N, L]
    b_off, b_stride, used = torch.empty_like(a_off), torch.zeros_like(a_off), 0
    for target in range(len(a_off)):
        out = outs[target % len(outs)]
        for slot in range(num_slots):
            for table, factor_width in ((a_off, in_), (b_off, out)):
                table[target, slot] = used
                used += (experts * lora_rank * factor_width + 127) // 128 * 128
        b_stride[target] = lora_rank * out if experts > 1 else 0
    a_stride = torch.full_like(a_off, lora_rank * in_ if experts > 1 else 0)
    memory = torch.empty(used, dtype=_dtype(device), device=device)
    if filled:
        g = torch.Generator(device).manual_seed(lora_rank)
        for piece in memory.split(1 << 28):
            piece.normal_(0, in_**-0.5, generator=g)
    ranks = torch.full(a_off.shape, lora_rank, dtype=torch.int32, device=device)
    a_off, b_off, a_stride, b_stride = (t.to(device) for t in (a_off, b_off, a_stride, b_stride))
    return LoraTables(memory, a_off, b_off, a_stride, b_stride, ranks, lora_rank)


_kept_tables = lru_cache(maxsize=1)(make_tables)
