"""One layer's LoRA by either of its paths, base products left out: tensors, calls and their check.
For lora_paths.py, which times them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.dense_lora import dense_lora_multi, dense_lora_multi_reference
from kernels.fused_moe_lora import moe_lora, moe_lora_reference
from kernels.gated_act import gated_act, gated_act_reference
from kernels.lora_gated_act import lora_gated_act
from kernels.lora_tables import LoraTables, Worklist
from kernels.tiling import moe_block_m, slot_block_m
from kernels.tune.inputs import make_tables
from kernels.tune.problems import ModelShape, expert_products, linear_widths
from kernels.worklist import build_worklist

LAYERS, SLOTS, FEW_SLOTS = 4, 64, 8
MIXES = ("eight", "distinct", "zipf64", "one_90", "none")
PATHS = ("four", "row")
# Error allowed, of the norm of what adapters add.
BOUND = 3e-2


def slots_of(mix: str, tokens: int) -> Tensor:
    """Each token's slot. [T] int32

    eight     eight adapters in turn;  distinct  as many as there are tokens, up to 64
    zipf64    Zipf's law of 1.2 over 64;  one_90  one adapter owns 90 % of the rows
    """
    at = torch.arange(tokens)
    if mix == "none":
        slots = torch.full((tokens,), -1)
    elif mix == "eight":
        slots = at % FEW_SLOTS
    elif mix == "distinct":
        slots = at % SLOTS
    elif mix == "zipf64":
        generator = torch.Generator().manual_seed(tokens)
        odds = torch.arange(1, SLOTS + 1, dtype=torch.float32) ** -1.2
        slots = torch.multinomial(odds, tokens, replacement=True, generator=generator)
    else:
        slots = torch.where(at % 10 == 9, at // 10 % (FEW_SLOTS - 1) + 1, 0)
    return slots.int()


@dataclass(frozen=True)
class Product:
    """A product of a layer with its factors, and y [rows, out] that its LoRA is added to."""

    tables: LoraTables
    in_: int
    outs: tuple[int, ...]
    y: Tensor

    def targets(self, layer: int) -> tuple[int, ...]:
        parts = len(self.outs)
        return tuple(range(layer * parts, (layer + 1) * parts))

    def ys(self) -> tuple[Tensor, ...]:
        return self.y.split(self.outs, 1)


@dataclass(frozen=True)
class Experts:
    """gate_up, activation and down of every layer. ids [T, K], one a layer.

    down's own input, h, is made beforehand: in a model the base's product lies between, and what is
    read early (`settled`) is older than that.
    """

    gate_up: Product
    down: Product
    x: Tensor
    h: Tensor
    slots: Tensor
    ids: tuple[Tensor, ...]
    weights: Tensor
    num_experts: int
    activation: str

    @property
    def rows(self) -> int:
        return self.ids[0].numel()

    def row(self, layer: int) -> tuple[Tensor, ...]:
        """As MoE layers of decode steps do it."""
        ids, experts = self.ids[layer], self.num_experts
        activated = lora_gated_act(
            self.gate_up.y, self.x, self.gate_up.tables, layer, ids, self.slots, experts,
            self.activation, settled=True,
        )  # fmt: skip
        moe_lora(
            self.down.y, self.h, self.down.tables, layer, ids, self.slots, None, True,
            self.weights, False, experts, settled=True,
        )  # fmt: skip
        return activated, self.down.y

    def four(self, layer: int) -> tuple[Tensor, ...]:
        """As those of prefills do."""
        ids, slots, tables = self.ids[layer], self.slots, self.gate_up.tables
        tokens, top_k = ids.shape
        block_m = moe_block_m(tokens, top_k, self.num_experts)
        work = build_worklist(ids, slots, self.num_experts, tables.num_slots, block_m)
        moe_lora(self.gate_up.y, self.x, tables, layer, ids, slots, work, False, None)
        activated = gated_act(self.gate_up.y, self.activation)
        moe_lora(self.down.y, self.h, self.down.tables, layer, ids, slots, work, True, self.weights)
        return activated, self.down.y

    def reference(self, layer: int) -> tuple[Tensor, ...]:
        """The same in torch, and nothing is written."""
        given = (layer, self.ids[layer], self.slots, None)
        gate_up, down = self.gate_up.y.clone(), self.down.y.clone()
        moe_lora_reference(
            gate_up, self.x, self.gate_up.tables, *given, False, None, num_experts=self.num_experts
        )
        moe_lora_reference(
            down, self.h, self.down.tables, *given, True, self.weights,
            num_experts=self.num_experts,
        )  # fmt: skip
        return gated_act_reference(gate_up, self.activation), down

    def without(self) -> tuple[Tensor, ...]:
        """What would be there without an adapter."""
        return gated_act(self.gate_up.y, self.activation), self.down.y.clone()

    def written(self) -> tuple[Tensor, ...]:
        return self.gate_up.y, self.down.y

    def floor_bytes(self) -> float:
        """A layer's: distinct factors, x and h once; what is activated and what that gives; down's
        y twice."""
        live, total = int((self.slots >= 0).sum()), 0.0
        for ids in self.ids:
            key = self.slots[:, None] * self.num_experts + ids  # [T, K]
            factors = key[self.slots >= 0].unique().numel()
            for product in (self.gate_up, self.down):
                total += factors * product.tables.max_rank * (product.in_ + sum(product.outs))
        widths = self.down.in_ + 2 * sum(self.down.outs)
        activated = self.rows * sum(self.gate_up.outs) * 3 / 2
        moved = live * self.ids[0].shape[1] * widths + activated
        return 2 * (total / len(self.ids) + moved + live * self.gate_up.in_)


@dataclass(frozen=True)
class Linears:
    """The plain linears of every layer, an x for each."""

    products: tuple[Product, ...]
    xs: tuple[Tensor, ...]
    slots: Tensor
    work: Worklist

    @property
    def rows(self) -> int:
        return len(self.slots)

    def row(self, layer: int) -> tuple[Tensor, ...]:
        """As in decode steps."""
        return self._add(layer, None)

    def four(self, layer: int) -> tuple[Tensor, ...]:
        """As in prefills."""
        return self._add(layer, self.work)

    def _add(self, layer: int, work: Worklist | None) -> tuple[Tensor, ...]:
        for product, x in zip(self.products, self.xs, strict=True):
            at = product.targets(layer)
            dense_lora_multi(product.ys(), x, product.tables, at, self.slots, work, settled=True)
        return self.written()

    def reference(self, layer: int) -> tuple[Tensor, ...]:
        """The same in torch, and nothing is written."""
        ys = self.without()
        for product, x, y in zip(self.products, self.xs, ys, strict=True):
            at, parts = product.targets(layer), y.split(product.outs, 1)
            dense_lora_multi_reference(parts, x, product.tables, at, self.slots, None)
        return ys

    def without(self) -> tuple[Tensor, ...]:
        """What would be there without an adapter."""
        return tuple(product.y.clone() for product in self.products)

    def written(self) -> tuple[Tensor, ...]:
        return tuple(product.y for product in self.products)

    def floor_bytes(self) -> float:
        """A layer's: distinct factors and x once, y twice."""
        live = self.slots[self.slots >= 0]
        factors, total = live.unique().numel(), 0.0
        for product in self.products:
            out = sum(product.outs)
            total += factors * product.tables.max_rank * (len(product.outs) * product.in_ + out)
            total += len(live) * (product.in_ + 2 * out)
        return 2 * total


Part = Experts | Linears


@dataclass(frozen=True)
class Memory:
    """The factors of one part of a layer at one rank: (in, outs, tables) a product."""

    products: tuple[tuple[int, tuple[int, ...], LoraTables], ...]

    @classmethod
    def make(
        cls, shape: ModelShape, part: str, lora_rank: int, device: torch.device, filled: bool
    ) -> "Memory":
        """filled: with values; else one layer of memory, for the compiler."""
        widths = [(in_, outs) for _, in_, outs in linear_widths(shape)]
        if part == "experts":
            widths = [(in_, (out,)) for _, in_, out in expert_products(shape)]
        experts = shape.num_experts if part == "experts" else 1
        layers, slots = (LAYERS, SLOTS) if filled else (1, SLOTS)
        return cls(
            tuple(
                (i, o, make_tables(i, o, experts, lora_rank, layers, slots, device, filled))
                for i, o in widths
            )
        )


def parts_of(shape: ModelShape) -> tuple[str, ...]:
    return ("experts", "linears") if shape.num_experts else ("linears",)


def make_part(shape: ModelShape, part: str, memory: Memory, tokens: int, mix: str) -> Part:
    """One batch: the same rows for every layer; expert ids differ from layer to layer."""
    tables = memory.products[0][2]
    device, dtype = tables.memory.device, tables.memory.dtype
    layers = tables.a_off.shape[0] // len(memory.products[0][1])
    generator = torch.Generator(device).manual_seed(tokens)
    rows = tokens * (shape.top_k if part == "experts" else 1)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, device=device, generator=generator)

    # Small: the rounding of y must not hide the delta.
    products = tuple(
        Product(tables, in_, outs, random(rows, sum(outs)).mul(0.02).to(dtype))
        for in_, outs, tables in memory.products
    )
    slots = slots_of(mix, tokens).to(device)
    if part == "linears":
        xs = tuple(random(tokens, product.in_).to(dtype) for product in products)
        work = build_worklist(None, slots, 1, tables.num_slots, slot_block_m(tokens))
        return Linears(products, xs, slots, work)
    ids = tuple(
        random(tokens, shape.num_experts).argsort(-1)[:, : shape.top_k].int().contiguous()
        for _ in range(layers)
    )
    gate_up, down = products
    x, h = random(tokens, gate_up.in_).to(dtype), random(rows, down.in_).to(dtype)
    weights = random(tokens, shape.top_k).sigmoid()
    activation = "gpt_oss" if shape.experts == "packed" else "silu"
    return Experts(gate_up, down, x, h, slots, ids, weights, shape.num_experts, activation)


def check(part: Part, path: str, want: tuple[Tensor, ...]) -> None:
    """want  what the reference makes of layer 0

    Errors: AssertionError unless the path's values are those, and rows without an adapter keep
    their bits."""
    old = [y.clone() for y in part.written()]
    before = part.without()
    found = [y.clone() for y in getattr(part, path)(0)]
    restore(part, old)
    base = (part.slots < 0).repeat_interleave(part.rows // len(part.slots))
    for got, wanted, was in zip(found, want, before, strict=True):
        delta = (wanted.float() - was.float()).norm().clamp(min=1e-6)
        error = float((got.float() - wanted.float()).norm() / delta)
        assert error < BOUND or bool(base.all()), f"{path}: off by {error:.1e} of the delta"
        assert torch.equal(got[base], was[base]), f"{path}: base rows changed"


def restore(part: Part, old: Sequence[Tensor]) -> None:
    for y, was in zip(part.written(), old, strict=True):
        y.copy_(was)
