"""The RMS norm before each half of a layer, alone or fused with the residual addition."""

from dataclasses import dataclass

from torch import Tensor

from kernels.norm import add_rms_norm, rms_norm


@dataclass(frozen=True)
class RmsNorm:
    """weight [H]."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]"""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """The norm of residual + x; residual [T, H] becomes that sum. x [T, H], or [T K, H] to be
        summed over each token's K rows. -> [T, H]"""
        return add_rms_norm(x, residual, self.weight, self.eps)
