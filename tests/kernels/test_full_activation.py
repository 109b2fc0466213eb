"""LoRA beside a quantised base reads what no quantisation touched (the thirteenth of the mistakes
in test_mistakes.py).

Not here: the quantised products (test_mxfp4_packed.py), each LoRA kernel alone.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import model_runner.layers.mlp
from kernels.fused_moe import ExpertWeights, random_experts
from kernels.fused_moe_lora import random_tables
from kernels.gated_act import gated_act_reference
from kernels.lora_tables import LoraTables
from kernels.moe_gate import moe_gate_reference
from kernels.mxfp4_packed import unpack_mxfp4
from model_runner.layers.linear import Linear
from model_runner.layers.mlp import MoeMlp
from tests.guards import take_out

devices = pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.interp), pytest.param("cuda", marks=pytest.mark.gpu)],
)
PATHS = {  # whether few pairs take the decode kernels: the line that gives x to the LoRA there
    True: "y, x, lora, target, ids, slots, experts",
    False: "y, x, lora, target, ids, slots, lora_work",
}


def lora_reads_the_full_activation(device: str) -> None:
    """A MoE layer over MXFP4 experts against fp64: within 1 % of its length.

    In bf16 about eight values on the way are rounded, each by 2^-9 of itself at most and 2^-9 /
    sqrt(3) on average: 0.9 % if all added up one way. Eighths of the activation instead, as an
    eight-bit integer would hold it, make over 3 % where the adapter's part is the larger one.
    """
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tokens, experts, top_k = 3, 4, 2
    hidden = inner = 128 if device == "cuda" else 64  # the interpreter is slow
    g = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden, generator=g).to(device, dtype)
    gate = torch.randn(experts, hidden, generator=g).to(device, dtype)
    gate_up = random_experts(experts, 2 * inner, hidden, "packed", device, dtype, 1)
    down = random_experts(experts, hidden, inner, "packed", device, dtype, 2)
    shapes = [(experts, hidden, 2 * inner), (experts, inner, hidden)]
    tables = random_tables(shapes, [8, 16], 16, device, dtype, 3)
    tables.memory.mul_(2)  # so the adapters' part is four times as long
    slots = torch.tensor([1, -1, 0], dtype=torch.int32, device=device)
    mlp = MoeMlp(Linear(gate), gate_up, down, experts, top_k, True, "silu", 0, 1)
    ctx: Any = SimpleNamespace(
        lora=tables, slot_of_token=slots, slot_work=None, experts_hit=None, deterministic=False,
        seldom_lora=True,
    )  # fmt: skip
    got = mlp(x, ctx).double().cpu().view(tokens, top_k, hidden).sum(1)  # [T, H]
    weights, ids = moe_gate_reference(torch.nn.functional.linear(x, gate), top_k, True)
    for token in range(tokens):
        want = torch.zeros(hidden, dtype=torch.float64)
        for weight, expert in zip(weights[token].tolist(), ids[token].tolist(), strict=True):
            slot = int(slots[token])
            up = _effective(gate_up, tables, 0, slot, expert) @ x[token].double().cpu()
            up += _bias(gate_up, expert)
            h = gated_act_reference(up[None].float(), "silu")[0].double()
            out = _effective(down, tables, 1, slot, expert) @ h + _bias(down, expert)
            want += weight * out
        error = float((got[token] - want).norm() / want.norm())
        assert error < (0.01 if dtype == torch.bfloat16 else 1e-5), (token, error)


def _effective(
    experts: ExpertWeights, tables: LoraTables, target: int, slot: int, expert: int
) -> Tensor:
    """The expert's weight with its adapter merged in, [out, in] fp64."""
    assert experts.packed is not None
    weight = unpack_mxfp4(experts.packed, torch.float32)[expert].double().cpu()
    if slot < 0:
        return weight
    out, in_ = weight.shape
    rank = int(tables.lora_rank[target, slot])
    factors = []
    for off, stride, width in (
        (tables.a_off, tables.a_stride, in_),
        (tables.b_off, tables.b_stride, out),
    ):
        start = int(off[target, slot]) + expert * int(stride[target, slot])
        factors.append(tables.memory[start : start + rank * width].view(rank, width).double().cpu())
    return weight + factors[1].t() @ factors[0]


def _bias(experts: ExpertWeights, expert: int) -> Tensor:
    assert experts.bias is not None
    return experts.bias[expert].double().cpu()


@devices
@pytest.mark.parametrize("few", PATHS, ids=["decode_kernels", "four_operations"])
def test_lora_reads_what_no_quantisation_touched(
    few: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_runner.layers.mlp, "pairs_suffice", lambda rows, tables: few)
    lora_reads_the_full_activation(device)
    quantised = PATHS[few].replace("x,", "(x * 8).round() / 8,")
    take_out(monkeypatch, MoeMlp, "__call__", PATHS[few], quantised)
    with pytest.raises(AssertionError):
        lora_reads_the_full_activation(device)
