"""Chooses each token's experts: the best of a softmax over all.

Not here: a choice by groups of experts (moe_gate_groups.py), grouping rows by expert
(worklist.py), both in one launch (moe_route.py). Nothing here waits for the device, so all of it
can be captured in a graph.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.op import AotSpec, Case, Inputs, Op, use_triton


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
    assert logits.stride(1) == 1, "the logits of a token must lie side by side"
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


def _cases() -> Iterator[Case]:
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


def _aot() -> Iterator[AotSpec]:
    signature = {
        "logits_ptr": "*bf16", "weights_ptr": "*fp32", "ids_ptr": "*i32",
        "row_stride": "i32:16", "num_experts": "i32:16",
    }  # fmt: skip
    for name, experts, top_k in (("gpt_oss", 32, 4), ("qwen3", 128, 8), ("many", 512, 8)):
        constants = {"TOP_K": top_k, "RENORMALIZE": True, "BLOCK_E": experts}
        warps = 1 if experts <= 128 else 4
        yield AotSpec(f"moe_gate_{name}", _gate_kernel, signature, constants, num_warps=warps)


OPS = (
    Op(
        name="moe_gate",
        run=moe_gate,
        reference=moe_gate_reference,
        cases=_cases,
        outputs=lambda inputs, result: list(result),
        aot=_aot,
        bytes=lambda i: i["logits"].nbytes,
    ),
)
