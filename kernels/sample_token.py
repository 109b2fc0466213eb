"""One token for each row of logits: the best one, or one drawn at a temperature. In two launches,
whatever the vocabulary.

Not here: top-k, top-p, bans and masks, which want a sorted or changed row (execution/sampler.py),
and where the random numbers
come from: they are an argument.
"""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.op import AotSpec, Case, Inputs, Op, require_contiguous, use_triton

NOT_FINITE = -1  # the token of a row that holds NaN, +inf, or nothing but -inf
BLOCK_V = 4096
# Blocks of one row that the second launch takes in at once: vocabularies up to 1 M tokens.
MAX_BLOCKS = 256


def sample_token(logits: Tensor, temperature: Tensor, uniform: Tensor) -> Tensor:
    """Greedy where temperature is 0; else the token at which the cumulative probability passes
    `uniform`.

    Shapes:  logits [Z, V] fp32 or bf16, rows contiguous;  temperature, uniform [Z] fp32, uniform in
             (0, 1);
             returns [Z] int64, NOT_FINITE where a row cannot be sampled.
    A row's token depends on that row alone. Of equal logits the lowest id is the best.
    Cost:    reads logits once, and one block of each drawn row again.
    """
    if not use_triton(logits):
        return sample_token_reference(logits, temperature, uniform)
    num_rows, vocab = logits.shape
    num_blocks = triton.cdiv(vocab, BLOCK_V)
    assert num_blocks <= MAX_BLOCKS, f"{vocab} tokens are more than {MAX_BLOCKS * BLOCK_V}"
    assert logits.stride(1) == 1, "the logits of a row must lie side by side"
    require_contiguous(temperature=temperature, uniform=uniform)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)  # [Z]
    if not num_rows:
        return tokens
    stats = torch.empty(num_rows, 2, num_blocks, device=logits.device)  # [Z, 2, blocks]
    best = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=logits.device)  # [Z, blocks]
    stride = logits.stride(0)
    _block_kernel[(num_blocks, num_rows)](
        logits, temperature, stats, best, vocab, stride, num_blocks, BLOCK_V=BLOCK_V
    )
    _choose_kernel[(num_rows,)](
        logits, temperature, uniform, stats, best, tokens, vocab, stride, num_blocks,
        BLOCK_V=BLOCK_V, BLOCK_B=triton.next_power_of_2(num_blocks), num_warps=8,
    )  # fmt: skip
    return tokens


def sample_token_reference(logits: Tensor, temperature: Tensor, uniform: Tensor) -> Tensor:
    """The same in torch."""
    logits = logits.float()  # [Z, V]
    best, tokens = logits.max(-1)  # [Z] twice; NaN wins a max
    drawn = (temperature > 0).nonzero().squeeze(-1)  # [n]
    if len(drawn):
        scaled = (logits[drawn] - best[drawn, None]) / temperature[drawn, None]  # [n, V]
        cumulative = scaled.exp_().cumsum_(-1)  # [n, V]
        threshold = uniform[drawn, None] * cumulative[:, -1:]  # [n, 1]
        found = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)  # [n]
        tokens[drawn] = found.clamp(max=logits.shape[-1] - 1)
    return torch.where(torch.isfinite(best), tokens, NOT_FINITE)


@triton.jit
def _block_kernel(
    logits_ptr, temperature_ptr, stats_ptr, best_ptr, vocab, stride, num_blocks,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The largest logit of one block, where it stands, and the block's mass relative to it."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lane = block * BLOCK_V + tl.arange(0, BLOCK_V)
    x = tl.load(logits_ptr + row * stride + lane, mask=lane < vocab, other=float("-inf")).to(
        tl.float32
    )
    top, place = tl.max(x, 0, return_indices=True)
    # tl.max may pass over NaN: a sum cannot.
    broken = tl.sum((x != x).to(tl.int32), 0) > 0
    temperature = tl.load(temperature_ptr + row)
    scale = 1.0 / tl.maximum(temperature, 1e-6)
    mass = tl.sum(tl.where(x > float("-inf"), tl.exp((x - top) * scale), 0.0), 0)
    at = stats_ptr + row * 2 * num_blocks + block
    tl.store(at, tl.where(broken, float("nan"), top))
    tl.store(at + num_blocks, mass)
    tl.store(best_ptr + row * num_blocks + block, block * BLOCK_V + place)


@triton.jit
def _choose_kernel(
    logits_ptr, temperature_ptr, uniform_ptr, stats_ptr, best_ptr, tokens_ptr, vocab, stride,
    num_blocks, BLOCK_V: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """The best block's best token, or the block that the threshold falls into and the place in
    it."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK_B)
    there = lane < num_blocks
    at = stats_ptr + row * 2 * num_blocks + lane
    tops = tl.load(at, mask=there, other=float("-inf"))
    masses = tl.load(at + num_blocks, mask=there, other=0.0)
    broken = tl.sum((tops != tops).to(tl.int32), 0) > 0
    top, winner = tl.max(tops, 0, return_indices=True)
    temperature = tl.load(temperature_ptr + row)
    if broken | (top == float("inf")) | (top == float("-inf")):
        tl.store(tokens_ptr + row, -1)
        return
    if temperature <= 0:
        tl.store(tokens_ptr + row, tl.load(best_ptr + row * num_blocks + winner).to(tl.int64))
        return
    scale = 1.0 / tl.maximum(temperature, 1e-6)
    weights = tl.where(tops > float("-inf"), masses * tl.exp((tops - top) * scale), 0.0)
    reached = tl.cumsum(weights, 0)
    threshold = tl.load(uniform_ptr + row) * tl.sum(weights, 0)
    # The last block with any mass takes what rounding leaves over.
    last = tl.max(tl.where(weights > 0, lane, 0), 0)
    block = tl.minimum(tl.sum((there & (reached <= threshold)).to(tl.int32), 0), last)
    before = tl.sum(tl.where(lane < block, weights, 0.0), 0)
    place = block * BLOCK_V + tl.arange(0, BLOCK_V)
    x = tl.load(logits_ptr + row * stride + place, mask=place < vocab, other=float("-inf")).to(
        tl.float32
    )
    inside = tl.where(x > float("-inf"), tl.exp((x - top) * scale), 0.0)
    passed = tl.sum(((before + tl.cumsum(inside, 0)) <= threshold).to(tl.int32), 0)
    last_inside = tl.max(tl.where(inside > 0, tl.arange(0, BLOCK_V), 0), 0)
    tl.store(tokens_ptr + row, (block * BLOCK_V + tl.minimum(passed, last_inside)).to(tl.int64))


def _case(name: str, rows: int, vocab: int, small: bool) -> Case:
    def make(device: str, dtype: torch.dtype, seed: int) -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        logits = 2 * torch.randn(rows, vocab, generator=generator)
        temperature = torch.tensor([0.0, 1.0, 0.7, 0.0, 2.0] * (rows // 5 + 1))[:rows]
        uniform = torch.rand(rows, generator=generator).clamp(1e-3, 1 - 1e-3)
        return {
            "logits": logits.to(dtype).to(device),
            "temperature": temperature.to(device),
            "uniform": uniform.to(device),
        }

    return Case(name, make, small)


def _aot() -> Iterable[AotSpec]:
    types = {"logits_ptr": "*bf16", "temperature_ptr": "*fp32", "uniform_ptr": "*fp32"}
    types |= {"stats_ptr": "*fp32", "best_ptr": "*i32", "tokens_ptr": "*i64"}
    types |= {"vocab": "i32", "stride": "i32:16", "num_blocks": "i32"}
    first = {k: v for k, v in types.items() if k not in ("uniform_ptr", "tokens_ptr")}
    yield AotSpec("blocks", _block_kernel, first, {"BLOCK_V": BLOCK_V})
    constants = {"BLOCK_V": BLOCK_V, "BLOCK_B": 64}
    yield AotSpec("choose", _choose_kernel, types, constants, num_warps=8)


OPS = (
    Op(
        name="sample_token",
        run=sample_token,
        reference=sample_token_reference,
        cases=lambda: (
            _case("odd", 7, 5003, True),
            _case("one_block", 5, 640, True),
            _case("gpt_oss", 32, 201088, False),
        ),
        outputs=lambda inputs, result: [result],
        aot=_aot,
        bytes=lambda inputs: inputs["logits"].numel() * inputs["logits"].element_size(),
    ),
)
