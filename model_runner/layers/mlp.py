"""The feed-forward half of a layer: dense, or a mixture of experts with each token's expert
LoRA."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.fused_moe import ExpertWeights, moe_down, moe_gate_up
from kernels.fused_moe_lora import moe_lora
from kernels.gated_act import gated_act
from kernels.lora_decode import pairs_suffice
from kernels.lora_gated_act import lora_gated_act
from kernels.lora_tables import Worklist
from kernels.moe_gate import moe_gate
from kernels.moe_gate_groups import GateRule, moe_gate_groups
from kernels.moe_route import moe_route
from kernels.op import use_triton
from kernels.tiling import moe_block_m
from kernels.worklist import build_worklist
from model_runner.layers.context import ForwardContext
from model_runner.layers.linear import Linear


@dataclass(frozen=True)
class DenseMlp:
    """gate_up [2I, H], down [H, I]."""

    gate_up: Linear
    down: Linear
    activation: str

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """x [T, H] -> [T, H]"""
        return self.down(gated_act(self.gate_up(x, ctx), self.activation), ctx)


@dataclass(frozen=True)
class MoeMlp:
    """gate [E, H] chooses top_k experts a token; gate_up [E, 2I, H], down [E, H, I].

    The base products never see an adapter: their worklist is by expert alone, with adapters or
    without.
    rule         how experts are chosen, None = by a softmax over all;  correction [E] fp32: moves
                 the order alone
    scale_input  a token's weight goes on its input instead of its output (one expert a token)
    """

    gate: Linear
    gate_up: ExpertWeights
    down: ExpertWeights
    num_experts: int
    top_k: int
    renormalize: bool
    activation: str
    gate_up_target: int
    down_target: int
    rule: GateRule | None = None
    correction: Tensor | None = None
    scale_input: bool = False

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """x [T, H] -> [T K, H]: what each expert adds, weighted; the norm that follows sums it."""
        logits = self.gate(x, ctx)  # [T, E]
        lora, slots = ctx.lora, ctx.slot_of_token
        weights, ids, work = self._route(logits)
        lora_work = None
        if lora is not None and work is not None and not pairs_suffice(ids.numel(), lora):
            lora_work = build_worklist(ids, slots, self.num_experts, lora.num_slots, work.block_m)
        if self.scale_input:
            x, weights = x * weights.to(x.dtype), torch.ones_like(weights)
        if ctx.experts_hit is not None:
            ctx.experts_hit.append(ids)
        y = moe_gate_up(x, self.gate_up, ids, work)  # [T K, 2I]
        fixed, experts = ctx.deterministic, self.num_experts
        # Behind its product, what a LoRA reads is settled.
        if lora is not None and lora_work is None:
            target = self.gate_up_target
            h = lora_gated_act(
                y, x, lora, target, ids, slots, experts, self.activation, settled=True
            )  # [T K, I]
        else:
            if lora is not None:
                target = self.gate_up_target
                moe_lora(y, x, lora, target, ids, slots, lora_work, False, None, fixed, experts)
            h = gated_act(y, self.activation)  # [T K, I]
        y = moe_down(h, self.down, ids, work, weights)  # [T K, H]
        if lora is not None:
            target = self.down_target
            moe_lora(
                y, h, lora, target, ids, slots, lora_work, True, weights, fixed, experts,
                settled=True,
            )  # fmt: skip
        return y

    def _route(self, logits: Tensor) -> tuple[Tensor, Tensor, Worklist | None]:
        """Weights and ids [T, K] of the chosen experts, and on a GPU the pairs by expert."""
        compiled = use_triton(logits)
        block_m = moe_block_m(len(logits), self.top_k, self.num_experts) if compiled else 0
        if self.rule is not None:
            weights, ids = moe_gate_groups(logits, self.correction, self.top_k, self.rule)
        elif compiled:
            return moe_route(logits, self.top_k, self.renormalize, block_m)
        else:
            weights, ids = moe_gate(logits, self.top_k, self.renormalize)
        if not compiled:
            return weights, ids, None
        return weights, ids, build_worklist(ids, None, self.num_experts, 0, block_m)
