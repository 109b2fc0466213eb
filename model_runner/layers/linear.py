"""A linear layer with room for LoRA deltas on slices of its output (q, k and v are one product with
three deltas)."""

from dataclasses import dataclass

from torch import Tensor

from kernels.dense_lora import dense_lora, dense_lora_multi
from kernels.lora_tables import Worklist
from kernels.skinny_linear import linear
from model_runner.layers.context import ForwardContext


@dataclass(frozen=True)
class Linear:
    """y = x W^T + b, plus each token's LoRA.

    Shapes:  weight [out, in];  bias [out] or None; widened at each use if x is of a wider dtype
    seldom   hardly any adapter changes it: steps whose adapters do not, skip its LoRA
             (ForwardContext.seldom_lora)
    slices   one (target, first row, end row) for each LoRA target that lies in this weight; target
             -1 cannot be adapted
    """

    weight: Tensor
    bias: Tensor | None = None
    slices: tuple[tuple[int, int, int], ...] = ()
    seldom: bool = False

    def __call__(self, x: Tensor, ctx: ForwardContext) -> Tensor:
        """x [T, in] -> [T, out]"""
        return self.apply(x, ctx, ctx.slot_of_token, ctx.slot_work)

    def apply(self, x: Tensor, ctx: ForwardContext, slots: Tensor, work: Worklist | None) -> Tensor:
        """The same for rows other than the step's tokens: `slots` [rows] and `work` belong to the
        rows of x."""
        weight, bias = self.weight, self.bias
        if weight.dtype != x.dtype:
            weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        y = linear(x, weight, bias)  # [T, out]
        if ctx.lora is not None and self.slices and (ctx.seldom_lora or not self.seldom):
            if len(self.slices) == 1:
                target, first, end = self.slices[0]
                dense_lora(
                    y[:, first:end],
                    x,
                    ctx.lora,
                    target,
                    slots,
                    work,
                    ctx.deterministic,
                    settled=True,
                )
            else:
                parts = tuple(y[:, first:end] for _, first, end in self.slices)
                targets = tuple(s[0] for s in self.slices)
                dense_lora_multi(
                    parts, x, ctx.lora, targets, slots, work, ctx.deterministic, settled=True
                )
        return y
