"""The grouped products: each pair against itself in fp64; no row's bits depend on another's."""

from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import kernels.fused_moe as own
from kernels.fused_moe import ExpertWeights, random_experts
from kernels.mxfp4 import dequantize_mxfp4
from kernels.mxfp4_packed import pack_mxfp4, unpack_mxfp4
from kernels.op import interpreting
from kernels.worklist import build_worklist
from tests.kernels.mutant import mutant

both = pytest.mark.parametrize("form", ["torch", pytest.param("triton", marks=pytest.mark.interp)])
KINDS = ["dense", "bias", "mxfp4", "packed"]


def pairs_of(num_tokens: int, num_experts: int, top_k: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.rand(num_tokens, num_experts, generator=g).argsort(-1)[:, :top_k].int()


def plain(x: Tensor, experts: ExpertWeights, ids: Tensor, per_pair: bool) -> Tensor:
    """Pair by pair, in fp64."""
    if experts.weight is not None:
        weight = experts.weight
    elif experts.packed is not None:
        weight = unpack_mxfp4(experts.packed, torch.float32)
    else:
        assert experts.blocks is not None and experts.scales is not None
        weight = dequantize_mxfp4(experts.blocks, experts.scales, torch.float32)
    rows = []
    for pair, expert in enumerate(ids.flatten().tolist()):
        source = x[pair if per_pair else pair // ids.shape[1]].double()
        y = weight[expert].double() @ source
        rows.append(y if experts.bias is None else y + experts.bias[expert].double())
    return torch.stack(rows)


def products_hold(module: ModuleType, kind: str, num_tokens: int, device: str = "cpu") -> None:
    ids = pairs_of(num_tokens, 5, 2).to(device)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(num_tokens, 160, generator=g).to(device)
    h = torch.randn(num_tokens * 2, 64, generator=g).to(device)
    weights = torch.rand(num_tokens, 2, generator=g).to(device)
    work = build_worklist(ids, None, 5, 0, 16)
    gate_up = random_experts(5, 72, 160, kind, device, torch.float32, 2)
    down = random_experts(5, 40, 64, kind, device, torch.float32, 3)
    y = module.moe_gate_up(x, gate_up, ids, work).double()
    assert torch.allclose(y, plain(x, gate_up, ids, False), rtol=1e-5, atol=1e-5)
    y = module.moe_down(h, down, ids, work, weights).double()
    want = plain(h, down, ids, True) * weights.double().reshape(-1, 1)
    assert torch.allclose(y, want, rtol=1e-5, atol=1e-5)


@both
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_their_definition(form: str, kind: str) -> None:
    # One token, a few, and more than 16 rows for one expert.
    for num_tokens in (1, 3, 45) if form == "triton" else (1, 3, 45, 400):
        products_hold(own, kind, num_tokens)


@pytest.mark.interp
@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(
            "tl.load(weights_ptr + row, ", "0.5 * tl.load(weights_ptr + row, ", id="weight"
        ),
        pytest.param("& 15, scale", "& 7, scale", id="sign_of_low_nibble"),
    ],
)
def test_products_with_a_line_reversed_fail(old: str, new: str, tmp_path: Path) -> None:
    bad = mutant("fused_moe", {old: new}, tmp_path)
    with pytest.raises(AssertionError):
        products_hold(bad, "mxfp4", 3)


def row_bits(
    module: ModuleType, num_tokens: int, shape: tuple[int, int, int, int], other_seed: int
) -> tuple[Tensor, Tensor]:
    """Token 1's rows of both products while all other tokens' values and experts change."""
    num_experts, top_k, hidden, inner = shape
    g = torch.Generator().manual_seed(7)
    mine, my_ids = torch.randn(hidden, generator=g), torch.arange(top_k).int()
    my_h = torch.randn(top_k, inner, generator=g)
    g = torch.Generator().manual_seed(other_seed)
    x = torch.randn(num_tokens, hidden, generator=g) * 10**other_seed
    h = torch.randn(num_tokens, top_k, inner, generator=g)
    ids = pairs_of(num_tokens, num_experts, top_k, other_seed)
    if other_seed == 2:
        ids[:] = my_ids  # everyone at the same experts
        x[:], h[:] = float("nan"), float("nan")
    x[1], h[1], ids[1] = mine, my_h, my_ids
    work = build_worklist(ids, None, num_experts, 0, 16)
    gate_up = random_experts(num_experts, 2 * inner, hidden, "dense", "cpu", torch.float32, 4)
    down = random_experts(num_experts, hidden, inner, "dense", "cpu", torch.float32, 5)
    weights = torch.full((num_tokens, top_k), 0.5)
    y = module.moe_gate_up(x, gate_up, ids, work).view(num_tokens, top_k, -1)[1]
    z = module.moe_down(h.flatten(0, 1), down, ids, work, weights).view(num_tokens, top_k, -1)[1]
    return y, z


@both
@pytest.mark.parametrize(
    "shape",
    [pytest.param((8, 2, 128, 96), id="demo"), pytest.param((16, 2, 96, 160), id="more_experts")],
)
def test_a_row_does_not_depend_on_the_others(form: str, shape: tuple[int, int, int, int]) -> None:
    """Bit by bit, also beside NaN: adapters move the other rows of a mixed batch."""
    sizes = (3,) if form == "triton" else (2, 8, 33, 64, 200)
    for num_tokens in sizes:
        want = row_bits(own, num_tokens, shape, 0)
        assert torch.isfinite(want[0]).all()
        for other_seed in (1, 2):
            got = row_bits(own, num_tokens, shape, other_seed)
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a, b), (num_tokens, other_seed)


@pytest.mark.interp
def test_a_tail_without_its_mask_reads_the_next_row(tmp_path: Path) -> None:
    changes = {"mask=live[:, None] & (k[None, :] < left)": "mask=live[:, None]"}
    bad = mutant("fused_moe", changes, tmp_path)
    shape = (4, 1, 96, 80)
    assert torch.isfinite(row_bits(own, 3, shape, 2)[0]).all()
    assert not torch.isfinite(row_bits(bad, 3, shape, 2)[0]).all()


@both
def test_no_tokens_is_no_work(form: str) -> None:
    ids = torch.zeros(0, 2, dtype=torch.int32)
    experts = random_experts(2, 8, 32, "mxfp4", "cpu", torch.float32, 0)
    work = build_worklist(ids, None, 2, 0, 16)
    assert own.moe_gate_up(torch.zeros(0, 32), experts, ids, work).shape == (0, 8)


def test_experts_have_one_kind_of_weight() -> None:
    weight = torch.zeros(2, 4, 32)
    blocks, scales = torch.zeros(2, 4, 16).byte(), torch.zeros(2, 4, 1).byte()
    for wrong in (
        {},
        {"weight": weight, "blocks": blocks, "scales": scales},
        {"blocks": blocks},
        {"weight": weight, "scales": scales},
        {"blocks": blocks, "scales": scales, "packed": pack_mxfp4(blocks, scales)},
    ):
        with pytest.raises(ValueError, match="either a weight, or MXFP4"):
            ExpertWeights(**wrong)
    experts = ExpertWeights(blocks=blocks, scales=scales)
    for kind in (experts, experts.pack()):
        assert (kind.num_experts, kind.out_features, kind.in_features) == (2, 4, 32)


@pytest.mark.skipif(interpreting(), reason="reads the compiled function's settings")
def test_length_does_not_compile_anew() -> None:
    assert "num_segments" in own._grouped_kernel.do_not_specialize
