"""Rotary positions against a rotation of complex numbers; the cache writes that follow them."""

import pytest
import torch
from torch import Tensor

from kernels.kv_write import kv_write
from kernels.rope import apply_rope

DIM, MAX_POS = 16, 64


def table() -> Tensor:
    angle = torch.arange(MAX_POS)[:, None] / 100 ** (torch.arange(0, DIM, 2) / DIM)
    return torch.cat((angle.cos(), angle.sin()), 1)  # [MAX_POS, DIM]


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """The same by complex multiplication, in fp64."""
    half = DIM // 2
    angle = positions[:, None].double() / 100 ** (torch.arange(0, DIM, 2).double() / DIM)
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    turned = pairs * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat((turned.real, turned.imag), -1).float()


@pytest.mark.parametrize("fused", [False, True])
def test_rotation_of_pairs_half_apart(fused: bool) -> None:
    num_q, num_k = 3, 2
    qkv = torch.randn(5, (num_q + 2 * num_k) * DIM)
    before = qkv.clone()
    q = qkv[:, : num_q * DIM].view(5, num_q, DIM)
    k = qkv[:, num_q * DIM : (num_q + num_k) * DIM].view(5, num_k, DIM)
    if not fused:
        q, k = q.contiguous(), k.contiguous()
    positions = torch.tensor([0, 63, 7, 7, 20])
    want = rotate(q, positions), rotate(k, positions)
    apply_rope(q, k, table(), positions)
    torch.testing.assert_close(q, want[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(k, want[1], rtol=1e-5, atol=1e-5)
    if fused:  # in place in the one buffer, the values untouched
        assert torch.equal(qkv[:, -num_k * DIM :], before[:, -num_k * DIM :])
        assert not torch.equal(qkv, before)
    else:
        assert torch.equal(qkv, before)


def test_products_depend_on_the_distance_alone() -> None:
    q, k = torch.randn(1, 1, DIM).expand(2, 1, DIM), torch.randn(1, 1, DIM).expand(2, 1, DIM)
    q, k = q.clone(), k.clone()
    apply_rope(q, k.clone(), table(), torch.tensor([9, 49]))
    apply_rope(k, k.clone(), table(), torch.tensor([4, 44]))
    scores = (q * k).sum(-1)
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-4, atol=1e-5)


def test_bf16_is_rounded_once() -> None:
    q = torch.randn(4, 2, DIM).bfloat16()
    positions = torch.tensor([3, 60, 11, 0])
    want = rotate(q.float(), positions)
    apply_rope(q, q.clone(), table(), positions)
    # Half a rounding step of bf16 (8 bits), and the fp32 error before it.
    assert ((q.float() - want).abs() <= want.abs() * 2**-8 + 1e-5).all()


@pytest.mark.parametrize("skipped", [(), (1,), (0, 1, 2, 3)])
def test_only_the_named_places_are_written(skipped: tuple[int, ...]) -> None:
    qkv = torch.randn(4, 3, 2, 8)
    k, v = qkv[:, 1], qkv[:, 2]
    k_cache = torch.full((3, 4, 2, 8), float("nan"))
    v_cache = k_cache.clone()
    write_idx = torch.tensor([11, 0, 5, 6])
    places = write_idx.tolist()
    for token in skipped:
        write_idx[token] = -1
    kv_write(k, v, k_cache, v_cache, write_idx)
    for cache, source in ((k_cache, k), (v_cache, v)):
        flat = cache.view(12, 2, 8)
        written = {place: token for token, place in enumerate(places) if token not in skipped}
        for place in range(12):
            if place in written:
                assert torch.equal(flat[place], source[written[place]])
            else:
                assert flat[place].isnan().all()
