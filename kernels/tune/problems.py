"""What is worth tuning: the products of three models, base and LoRA, by number of tokens.

Plain numbers. Not here: tile sizes (ops.py) and tensors (inputs.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kernels.lora_decode import MAX_PAIRS, MAX_TOKENS, most_rows
from kernels.skinny_linear import choose_form
from kernels.tiling import moe_block_m, narrow_block_m, slot_block_m

Key = tuple[int, int, int]  # rows, out, in: what a file of tiles is looked up by

DECODE_TOKENS = (1, 8, 16, 32, 64)
PREFILL_TOKENS = (128, 512, 2048)
# Each of LoRA's two paths is tuned for so many times the rows at the limit between them: 1 is what
# is served. To measure the limit anew (tests/bench/lora_paths.py) both need tiles beyond it.
REACH = 1
# Adapters side by side, each token's neighbours on others: the least that rows can share.
NUM_SLOTS = 8


@dataclass(frozen=True)
class ModelShape:
    """Widths of one model.

    q_out, kv_out  rows of the query and of the key (or value) projection
    inner          I of one expert, or of the dense MLP where num_experts is 0
    experts        how a GPU serves them: "packed" (MXFP4) or "dense" (bf16)
    """

    hidden: int
    q_out: int
    kv_out: int
    inner: int
    num_experts: int = 0
    top_k: int = 0
    experts: str = "dense"


SHAPES = {
    "gpt-oss-20b": ModelShape(2880, 4096, 512, 2880, 32, 4, "packed"),
    "qwen3-30b-a3b": ModelShape(2048, 4096, 512, 768, 128, 8),
    "qwen3-32b": ModelShape(5120, 8192, 1024, 25600),
}


@dataclass(frozen=True)
class Problem:
    """One product at one number of tokens: the base's (lora_rank 0), or LoRA on it.

    product   "gate_up" and "down" of experts; anything else is a plain linear
    outs      rows of the targets that share x
    experts   as in ModelShape
    """

    product: str
    in_: int
    outs: tuple[int, ...]
    tokens: int
    lora_rank: int = 0
    num_experts: int = 1
    top_k: int = 1
    experts: str = ""

    @property
    def of_experts(self) -> bool:
        return self.product in ("gate_up", "down")

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k

    @property
    def block_m(self) -> int:
        """Rows of one tile of this product."""
        if not self.of_experts:
            return slot_block_m(self.tokens)
        block_m = moe_block_m(self.tokens, self.top_k, self.num_experts)
        return narrow_block_m(block_m, self.tokens) if self.experts == "packed" else block_m

    def __str__(self) -> str:
        rank = f" r{self.lora_rank}" if self.lora_rank else ""
        return f"{self.product} {self.in_}->{'+'.join(map(str, self.outs))} T={self.tokens}{rank}"


def base_products(shape: ModelShape, experts: str) -> Iterator[Problem]:
    """Both expert products at every size, if the model serves its experts so."""
    if shape.experts != experts or not shape.num_experts:
        return
    for product, in_, out in expert_products(shape):
        for tokens in (*DECODE_TOKENS, *PREFILL_TOKENS):
            yield Problem(
                product, in_, (out,), tokens, 0, shape.num_experts, shape.top_k, shape.experts
            )


def linear_products(shape: ModelShape, form: str) -> Iterator[Problem]:
    """Plain linears of decode steps that this form serves. Targets that share x are one weight."""
    linears = [(product, in_, sum(outs)) for product, in_, outs in linear_widths(shape)]
    if shape.num_experts:
        linears.append(("router", shape.hidden, shape.num_experts))
    for product, in_, out in linears:
        # Two tokens are summed as one is, and need twice the registers.
        for tokens in sorted({2, *DECODE_TOKENS}):
            if choose_form(tokens, out) == form:
                yield Problem(product, in_, (out,), tokens)


def lora_products(shape: ModelShape, ranks: Sequence[int], decode: bool) -> Iterator[Problem]:
    """LoRA on every product, at the sizes that the decode kernels serve and some more, or at those
    of the four operations and some less."""
    sizes = (*DECODE_TOKENS, *PREFILL_TOKENS)
    for lora_rank in ranks:
        pairs, rows = most_rows(MAX_PAIRS, lora_rank), most_rows(MAX_TOKENS, lora_rank)
        for product, in_, out in expert_products(shape):
            for tokens in sizes:
                if in_reach(tokens * shape.top_k, pairs, decode):
                    yield Problem(
                        product, in_, (out,), tokens, lora_rank, shape.num_experts, shape.top_k
                    )
        for product, in_, outs in linear_widths(shape):
            for tokens in sizes:
                if in_reach(tokens, rows, decode):
                    yield Problem(product, in_, outs, tokens, lora_rank)


def in_reach(rows: int, limit: int, decode: bool) -> bool:
    """Whether the decode kernels, or the four operations, are tuned for so many rows."""
    return rows <= REACH * limit if decode else REACH * rows > limit


def expert_products(shape: ModelShape) -> Iterator[tuple[str, int, int]]:
    """(name, width of x, width of y) of one expert's products; none for a dense model."""
    if shape.num_experts:
        yield "gate_up", shape.hidden, 2 * shape.inner
        yield "down", shape.inner, shape.hidden


def linear_widths(shape: ModelShape) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """(name, width of x, widths of the targets that share it) of a layer's plain linears."""
    yield "qkv", shape.hidden, (shape.q_out, shape.kv_out, shape.kv_out)
    yield "o", shape.q_out, (shape.hidden,)
    if not shape.num_experts:
        yield "mlp_gate_up", shape.hidden, (shape.inner, shape.inner)
        yield "mlp_down", shape.inner, (shape.hidden,)


def product_key(p: Problem) -> Key:
    """How `moe_gate_up`, `moe_down` and `linear` look up their tiles."""
    return p.rows, p.outs[0], p.in_


def shrink_key(p: Problem) -> Key:
    """How a shrink does."""
    return p.rows, p.lora_rank, p.in_


def expand_key(p: Problem) -> Key:
    """How an expand does."""
    return p.rows, max(p.outs), p.lora_rank


def as_shape(key: Key) -> dict[str, Any]:
    """As `tiles_for` takes it."""
    return dict(zip(("rows", "out", "in"), key, strict=True))
