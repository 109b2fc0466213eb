"""The table of rotary angles. The rotation itself is kernels.rope_kv.

Source: transformers' `ROPE_INIT_FUNCTIONS` for the meaning of each field; YaRN is arXiv 2309.00071;
        llama3 is Meta's Llama 3.1 reference.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def rope_table(
    theta: float,
    kind: str,
    fields: Mapping[str, Any],
    head_dim: int,
    num_positions: int,
    device: torch.device,
) -> Tensor:
    """cos and sin of every position, attention scaling folded in.

    Shapes: [num_positions, D] float32: cos of the D/2 angles, then sin.
    """
    inv_freq = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)  # [D / 2]
    scaling = 1.0
    if kind == "linear":
        inv_freq = inv_freq / float(fields["factor"])
    elif kind == "llama3":
        inv_freq = _llama3(inv_freq, fields)
    elif kind == "yarn":
        inv_freq, scaling = _yarn(inv_freq, theta, head_dim, fields)
    angles = (
        torch.arange(num_positions, dtype=torch.float32)[:, None] * inv_freq
    )  # [positions, D / 2]
    return (torch.cat([angles.cos(), angles.sin()], -1) * scaling).to(device)  # [positions, D]


def _llama3(inv_freq: Tensor, fields: Mapping[str, Any]) -> Tensor:
    factor, old_len = float(fields["factor"]), float(fields["original_max_position_embeddings"])
    low, high = float(fields["low_freq_factor"]), float(fields["high_freq_factor"])
    wavelen = 2 * math.pi / inv_freq
    smooth = ((old_len / wavelen - low) / (high - low)).clamp(0, 1)
    return inv_freq / factor * (1 - smooth) + inv_freq * smooth  # [D / 2]


def _yarn(
    inv_freq: Tensor, theta: float, head_dim: int, fields: Mapping[str, Any]
) -> tuple[Tensor, float]:
    factor, old_len = float(fields["factor"]), float(fields["original_max_position_embeddings"])
    beta_fast, beta_slow = float(fields.get("beta_fast") or 32), float(fields.get("beta_slow") or 1)
    scaling = fields.get("attention_factor")
    if scaling is None:
        mscale, all_dim = fields.get("mscale"), fields.get("mscale_all_dim")
        if mscale and all_dim:
            scaling = _mscale(factor, float(mscale)) / _mscale(factor, float(all_dim))
        else:
            scaling = _mscale(factor, 1.0)

    def dim_of(rotations: float) -> float:
        return head_dim * math.log(old_len / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of(beta_fast), dim_of(beta_slow)
    if fields.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return inv_freq / factor * ramp + inv_freq * (1 - ramp), float(scaling)  # [D / 2]


def yarn_mscale(fields: Mapping[str, Any]) -> float:
    """What DeepSeek multiplies the softmax's scale by, once for queries and once for keys."""
    factor, all_dim = fields.get("factor"), fields.get("mscale_all_dim")
    return _mscale(float(factor), float(all_dim)) if factor and all_dim else 1.0


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
