"""The rule of kernels/overlap.py: read from the machine code that the H200 gets, and by the bits of
a chain of kernels that overlap.

Every kernel that can be a follower has a constexpr OVERLAP; its specifications turn it on.
"""

import dataclasses
import re

import pytest
import torch
from torch import Tensor

from kernels.dense_lora import dense_lora, dense_lora_multi
from kernels.fused_moe import ExpertWeights, moe_down, moe_gate_up, random_experts
from kernels.fused_moe_lora import moe_lora, random_tables
from kernels.lora_gated_act import lora_gated_act
from kernels.lora_tables import LoraTables
from kernels.moe_route import moe_route
from kernels.norm import add_rms_norm, rms_norm
from kernels.op import AotSpec, interpreting
from kernels.overlap import can_overlap, follow, without_overlap
from kernels.registry import OPS
from kernels.rope_kv import rope_kv_write
from tests.kernels.aot import disassemble

WAIT, TRIGGER = "ACQBULK", "PREEXIT"
# Behind these there may be LoRA.
PRODUCTS = ("linear", "moe_gate_up", "moe_down")
# One compilation of each kernel will do.
SPECS = {
    spec.fn: pytest.param(spec, name in PRODUCTS, id=f"{name}-{spec.name}")
    for name, op in OPS.items()
    for spec in ([] if interpreting() else op.aot())
    if spec.constexprs.get("OVERLAP")
}


def opcodes(spec: AotSpec) -> list[str]:
    """Of every instruction, in the order of their addresses, modifiers and predicates left out."""
    lines = re.findall(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)", disassemble(spec))
    assert len(lines) > 20, spec.name
    return lines


@pytest.mark.parametrize(("spec", "is_product"), SPECS.values())
def test_a_follower_waits_before_it_writes_or_ends(spec: AotSpec, is_product: bool) -> None:
    codes = opcodes(spec)
    before = codes[: codes.index(WAIT)]
    assert not {"STG", "RED", "ATOMG", "ATOM", "EXIT"} & set(before), before
    assert TRIGGER in codes, "whoever comes next would wait for the end"
    if is_product:
        assert TRIGGER not in before, "LoRA behind it reads early what the product reads"


def test_launch_options_follow_the_device() -> None:
    assert not can_overlap(torch.device("cpu"))
    assert follow(True) == {"launch_pdl": True} and follow(False) == {}


@dataclasses.dataclass(frozen=True)
class Layer:
    """The weights of one small layer, all of its kernels behind one another."""

    norms: Tensor
    qkv: Tensor
    out: Tensor
    gate: Tensor
    gate_up: ExpertWeights
    down: ExpertWeights
    caches: tuple[Tensor, Tensor]


T, H, Q, G, D, E, K, INNER, SLOTS = 6, 512, 8, 2, 64, 8, 2, 256, 3


def make_layer(seed: int) -> Layer:
    g = torch.Generator("cuda").manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=g, device="cuda") * shape[-1] ** -0.5
        return x.bfloat16()

    experts = [
        random_experts(E, out, in_, "packed", "cuda", torch.bfloat16, seed)
        for out, in_ in ((2 * INNER, H), (H, INNER))
    ]
    cache = torch.zeros(T, 16, G, D, device="cuda", dtype=torch.bfloat16)
    weights = (draw((Q + 2 * G) * D, H), draw(H, Q * D), draw(E, H))
    return Layer(1 + draw(2, H), *weights, *experts, (cache, cache.clone()))


def forward(
    x: Tensor, layers: list[Layer], tables: LoraTables, slots: Tensor, table: Tensor
) -> Tensor:
    """A decode step without its attention: each kernel feeds the next. x [T, H] -> [T, H]"""
    residual, positions = x.clone(), torch.arange(T, device="cuda")
    x = rms_norm(residual, layers[0].norms[0], 1e-5)
    for w in layers:
        qkv = torch.nn.functional.linear(x, w.qkv)  # [T, (Q + 2 G) D]
        ys = qkv.split((Q * D, G * D, G * D), 1)
        dense_lora_multi(ys, x, tables, (0, 1, 2), slots, None, settled=True)
        q, k, v = qkv.view(T, -1, D).split((Q, G, G), 1)
        places = positions * 16
        rope_kv_write(q, k, v, table, positions, *w.caches, places, settled=True)
        x = (q + w.caches[0][:, 0, :1] * w.caches[1][:, 0, :1]).reshape(T, Q * D)
        y = torch.nn.functional.linear(x, w.out)  # [T, H]
        dense_lora(y, x, tables, 3, slots, None, settled=True)
        x = add_rms_norm(y, residual, w.norms[0], 1e-5)
        weights, ids, work = moe_route(torch.nn.functional.linear(x, w.gate), K, True, 16)
        y = moe_gate_up(x, w.gate_up, ids, work)
        h = lora_gated_act(y, x, tables, 4, ids, slots, E, "gpt_oss", settled=True)
        y = moe_down(h, w.down, ids, work, weights)
        moe_lora(y, h, tables, 5, ids, slots, None, True, weights, num_experts=E, settled=True)
        x = add_rms_norm(y, residual, w.norms[1], 1e-5)
    return x


@pytest.mark.gpu
def test_a_chain_that_overlaps_has_the_bits_of_one_that_does_not() -> None:
    """Replays of one graph with ever new inputs: whoever reads too early meets the one before."""
    layers = [make_layer(seed) for seed in range(6)]
    shapes = [
        (1, H, Q * D),
        (1, H, G * D),
        (1, H, G * D),
        (1, Q * D, H),
        (E, H, 2 * INNER),
        (E, INNER, H),
    ]
    tables = random_tables(shapes, [16] * SLOTS, 16, "cuda", torch.bfloat16, 0)
    slots = torch.tensor([0, -1, 2, 1, -1, 0], dtype=torch.int32, device="cuda")
    angle = torch.arange(T, device="cuda")[:, None] / 100 ** (torch.arange(D // 2).cuda() / D)
    table = torch.cat((angle.cos(), angle.sin()), 1).contiguous()
    g = torch.Generator("cuda").manual_seed(9)
    inputs = [torch.randn(T, H, generator=g, device="cuda").bfloat16() for _ in range(8)]
    with without_overlap():
        want = [forward(x, layers, tables, slots, table) for x in inputs]
    assert can_overlap(torch.device("cuda:0"))
    x = inputs[0].clone()
    forward(x, layers, tables, slots, table)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = forward(x, layers, tables, slots, table)
    for turn in range(400):
        x.copy_(inputs[turn % 8])
        graph.replay()
        assert torch.equal(got, want[turn % 8]), turn
