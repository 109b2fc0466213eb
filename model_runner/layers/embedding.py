"""Token embeddings, with room for a LoRA delta."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import embedding

from kernels.dense_lora import embedding_lora
from model_runner.layers.context import ForwardContext


@dataclass(frozen=True)
class Embedding:
    """weight [V, H]; target = its LoRA target, -1 = none."""

    weight: Tensor
    target: int = -1

    def __call__(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """token_ids [T] -> [T, H]"""
        y = embedding(token_ids, self.weight).to(ctx.dtype)  # [T, H]
        if ctx.lora is not None and ctx.seldom_lora and self.target >= 0:
            embedding_lora(y, token_ids, ctx.lora, self.target, ctx.slot_of_token, len(self.weight))
        return y
