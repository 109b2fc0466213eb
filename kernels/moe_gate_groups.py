"""Chooses each token's experts as DeepSeek and Llama 4 do: sigmoid scores, a correction of the
order, groups of experts of which only the best count.

Not here: the softmax over all experts (moe_gate.py), and grouping rows by expert.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.op import AotSpec, Case, Inputs, Op, require_contiguous, use_triton


@dataclass(frozen=True)
class GateRule:
    """How scores become a choice.

    sigmoid      each logit's sigmoid is its score, else the softmax over all
    num_groups   the experts lie in so many equal groups;  top_groups  of which the best are open
    group_best   a group is worth the sum of this many of its best scores, 1 or 2
    renormalize  the chosen scores are scaled to a sum of 1;  scaling  then times this
    """

    sigmoid: bool
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    renormalize: bool = False
    scaling: float = 1.0


def moe_gate_groups(
    logits: Tensor, bias: Tensor | None, top_k: int, rule: GateRule
) -> tuple[Tensor, Tensor]:
    """The best top_k experts of each token's open groups, and their scores.

    Shapes:  logits [T, E];  bias [E] fp32 or None: added to the scores for the order alone
             ->  weights [T, K] fp32, ids [T, K] int32, best first
    Where the order is that of the logits (sigmoid, no bias, all groups open), they decide: sigmoids
    of large logits are equal in fp32. Ties go to the lower id, of groups too. A NaN logit counts as
    minus infinity in the order.
    Errors:  ValueError unless the open groups hold top_k experts and groups are equal.
    Cost:    reads the logits once.
    Source:  DeepSeek-V2, arXiv 2405.04434 (2.1.2); DeepSeek-V3, arXiv 2412.19437 (2.1.2).
    """
    num_tokens, num_experts = logits.shape
    size, rest = divmod(num_experts, rule.num_groups)
    if rest or not 1 <= rule.top_groups <= rule.num_groups:
        raise ValueError(
            f"{num_experts} experts in {rule.num_groups} groups, {rule.top_groups} open"
        )
    if not 1 <= top_k <= size * rule.top_groups or rule.group_best not in range(1, size + 1):
        raise ValueError(f"top_k {top_k}, group_best {rule.group_best} of groups of {size}")
    if not use_triton(logits):
        return moe_gate_groups_reference(logits, bias, top_k, rule)
    assert rule.group_best <= 2, "the kernel adds up to two scores of a group"
    assert logits.stride(1) == 1, "the logits of a token must lie side by side"
    require_contiguous(bias=bias)
    weights = logits.new_empty(num_tokens, top_k, dtype=torch.float32)  # [T, K]
    ids = logits.new_empty(num_tokens, top_k, dtype=torch.int32)  # [T, K]
    if num_tokens:
        block_g, block_p = triton.next_power_of_2(rule.num_groups), triton.next_power_of_2(size)
        _gate_groups_kernel[(num_tokens,)](
            logits, logits if bias is None else bias, weights, ids, logits.stride(0),
            rule.scaling, G=rule.num_groups, P=size, TOP_K=top_k, TOP_GROUPS=rule.top_groups,
            TWO=rule.group_best == 2, SIGMOID=rule.sigmoid, BIAS=bias is not None,
            RENORMALIZE=rule.renormalize, BLOCK_G=block_g, BLOCK_P=block_p,
            num_warps=1 if block_g * block_p <= 128 else 4,
        )  # fmt: skip
    return weights, ids


def moe_gate_groups_reference(
    logits: Tensor, bias: Tensor | None, top_k: int, rule: GateRule
) -> tuple[Tensor, Tensor]:
    """The same in torch."""
    x = logits.float()
    scores = x.sigmoid() if rule.sigmoid else x.softmax(-1)  # [T, E]
    order = scores if bias is None else scores + bias
    if _follows_logits(bias, rule):
        order = x
    order = torch.nan_to_num(order, nan=float("-inf"))
    if rule.num_groups > rule.top_groups:
        grouped = order.view(len(x), rule.num_groups, -1)  # [T, G, P]
        worth = grouped.topk(rule.group_best, -1).values.sum(-1)  # [T, G]
        best = worth.sort(dim=-1, descending=True, stable=True).indices[:, : rule.top_groups]
        closed = torch.ones_like(worth, dtype=torch.bool).scatter_(1, best, False)  # [T, G]
        order = grouped.masked_fill(closed[:, :, None], float("-inf")).view_as(order)
    ids = order.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]  # [T, K]
    weights = scores.gather(1, ids)  # [T, K]
    if rule.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * rule.scaling, ids.to(torch.int32, memory_format=torch.contiguous_format)


def _follows_logits(bias: Tensor | None, rule: GateRule) -> bool:
    return rule.sigmoid and bias is None and rule.num_groups <= rule.top_groups


@triton.jit
def _sortable(x):
    """fp32 as int64 that sorts alike, its low 32 bits free."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    bits ^= (bits >> 31) & 0x7FFFFFFF
    return bits.to(tl.int64) << 32


@triton.jit
def _gate_groups_kernel(
    logits_ptr, bias_ptr, weights_ptr, ids_ptr, row_stride, scaling,
    G: tl.constexpr, P: tl.constexpr, TOP_K: tl.constexpr, TOP_GROUPS: tl.constexpr,
    TWO: tl.constexpr, SIGMOID: tl.constexpr, BIAS: tl.constexpr, RENORMALIZE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    low: tl.constexpr = float("-inf")
    taken: tl.constexpr = -(2**63)
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_G)[:, None]
    within = tl.arange(0, BLOCK_P)[None, :]
    live = (group < G) & (within < P)
    expert = group * P + within  # [BLOCK_G, BLOCK_P]
    x = tl.load(logits_ptr + token * row_stride + expert, mask=live, other=0.0).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-x))
    else:
        top = tl.max(tl.max(tl.where(live & (x == x), x, low), 1), 0)
        scores = tl.where(live, tl.exp(x - top), 0.0)
        scores = scores / tl.sum(tl.sum(scores, 1), 0)
    order = scores
    if SIGMOID and not BIAS and G <= TOP_GROUPS:
        order = x
    if BIAS:
        order += tl.load(bias_ptr + expert, mask=live, other=0.0).to(tl.float32)
    order = tl.where(live & (order == order), order, low)
    if G > TOP_GROUPS:
        lane = tl.arange(0, BLOCK_G)
        worth = tl.max(order, 1)  # [BLOCK_G]
        if TWO:
            at = tl.argmax(order, 1)  # [BLOCK_G]
            worth += tl.max(tl.where(within == at[:, None], low, order), 1)
        key = tl.where(lane < G, _sortable(worth) | (65535 - lane), taken)
        open_ = tl.zeros([BLOCK_G], tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            chosen = 65535 - (tl.max(key, 0) & 65535).to(tl.int32)
            open_ = tl.where(lane == chosen, 1, open_)
            key = tl.where(lane == chosen, taken, key)
        order = tl.where(open_[:, None] == 1, order, low)
    key = tl.where(live, _sortable(order) | (65535 - expert), taken)
    place = tl.full([BLOCK_G, BLOCK_P], -1, tl.int32)
    for k in tl.static_range(TOP_K):
        chosen = 65535 - (tl.max(tl.max(key, 1), 0) & 65535).to(tl.int32)
        mine = (expert == chosen) & live
        place = tl.where(mine, k, place)
        key = tl.where(mine, taken, key)
    weights = tl.where(place >= 0, scores, 0.0)
    if RENORMALIZE:
        weights = weights / (tl.sum(tl.sum(weights, 1), 0) + 1e-20)
    at = token * TOP_K + place
    tl.store(weights_ptr + at, weights * scaling, mask=place >= 0)
    tl.store(ids_ptr + at, expert.to(tl.int32), mask=place >= 0)


V2 = GateRule(False, 8, 3, 1, False, 16.0)
V3 = GateRule(True, 8, 4, 2, True, 2.5)
LLAMA4 = GateRule(True)


def _cases() -> Iterator[Case]:
    def case(
        name: str,
        tokens: int,
        experts: int,
        top_k: int,
        rule: GateRule,
        bias: bool,
        small: bool,
        least: float | None = None,
    ) -> Case:
        def make(device: str, dtype: torch.dtype, seed: int) -> Inputs:
            g = torch.Generator().manual_seed(seed)
            # Distinct values: a tie in one dtype and none in another would change the order.
            x = torch.rand(tokens, experts, generator=g).argsort(-1).float() / 16  # [T, E]
            x = x - x.mean() if least is None else least + 16 * x
            shift = torch.randn(experts, generator=g) / 8  # [E]
            return {
                "logits": x.to(device, dtype),
                "bias": shift.to(device) if bias else None,
                "top_k": top_k,
                "rule": rule,
            }

        return Case(name, make, small)

    yield case("odd", 5, 6, 2, GateRule(True, 3, 2, 2, True, 2.5), True, True)
    yield case("softmax_odd", 4, 12, 3, GateRule(False, 4, 2, 1, False, 2.0), False, True)
    yield case("one_group", 3, 5, 3, LLAMA4, False, True)
    yield case("saturated", 3, 6, 2, LLAMA4, False, True, least=17.0)
    yield case("all_open", 3, 6, 6, GateRule(True, 2, 2, 1, True), True, True)
    yield case("one", 1, 1, 1, LLAMA4, False, True)
    yield case("v2", 9, 160, 6, V2, False, True)
    yield case("v3", 7, 256, 8, V3, True, True)
    yield case("v3_many", 512, 256, 8, V3, True, False)
    yield case("llama4", 64, 128, 1, LLAMA4, False, False)


def _aot() -> Iterator[AotSpec]:
    signature = {
        "logits_ptr": "*bf16", "bias_ptr": "*fp32", "weights_ptr": "*fp32", "ids_ptr": "*i32",
        "row_stride": "i32:16", "scaling": "fp32",
    }  # fmt: skip
    for name, rule, experts, top_k in (
        ("v2", V2, 160, 6),
        ("v3", V3, 256, 8),
        ("l4", LLAMA4, 16, 1),
    ):
        size = experts // rule.num_groups
        blocks = triton.next_power_of_2(rule.num_groups), triton.next_power_of_2(size)
        constants = {
            "G": rule.num_groups, "P": size, "TOP_K": top_k, "TOP_GROUPS": rule.top_groups,
            "TWO": rule.group_best == 2, "SIGMOID": rule.sigmoid, "BIAS": name == "v3",
            "RENORMALIZE": rule.renormalize, "BLOCK_G": blocks[0], "BLOCK_P": blocks[1],
        }  # fmt: skip
        warps = 1 if blocks[0] * blocks[1] <= 128 else 4
        yield AotSpec(
            f"moe_gate_{name}", _gate_groups_kernel, signature, constants, num_warps=warps
        )


OPS = (
    Op(
        name="moe_gate_groups",
        run=moe_gate_groups,
        reference=moe_gate_groups_reference,
        cases=_cases,
        outputs=lambda inputs, result: list(result),
        aot=_aot,
        bytes=lambda i: i["logits"].nbytes,
    ),
)
