"""Rotary positions against a rotation of complex numbers; the norm before them and the cache writes
after."""

from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import kernels.rope_kv as own
from kernels.norm import rms_norm
from tests.kernels.mutant import mutant

both = pytest.mark.parametrize("form", ["torch", pytest.param("triton", marks=pytest.mark.interp)])

DIM, MAX_POS, EPS = 16, 64, 1e-5


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


def run(
    q: Tensor, k: Tensor, positions: Tensor, norms: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Rotate q in place; the keys as the cache has them, [T, G, DIM]."""
    cache = torch.full((len(q), 1, *k.shape[1:]), float("nan"), dtype=k.dtype)
    write_idx = torch.arange(len(q))
    own.rope_kv_write(
        q, k, k, table(), positions, cache, cache.clone(), write_idx, *(norms or ()), eps=EPS
    )
    return cache[:, 0]


@both
@pytest.mark.parametrize("norm", [False, True])
def test_rotation_of_pairs_half_apart(form: str, norm: bool) -> None:
    num_q, num_k = 9, 2
    qkv = torch.randn(5, (num_q + 2 * num_k) * DIM)
    before = qkv.clone()
    q, k, _ = qkv.view(5, -1, DIM).split((num_q, num_k, num_k), 1)
    positions = torch.tensor([0, 63, 7, 7, 20])
    norms = (1 + torch.randn(DIM), 1 + torch.randn(DIM)) if norm else None
    plain = (q, k)
    if norms is not None:
        plain = (rms_norm(q.contiguous(), norms[0], EPS), rms_norm(k.contiguous(), norms[1], EPS))
    want = rotate(plain[0], positions), rotate(plain[1], positions)
    keys = run(q, k, positions, norms)
    torch.testing.assert_close(q, want[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(keys, want[1], rtol=1e-5, atol=1e-5)
    # In place in the one buffer, keys and values untouched.
    assert torch.equal(qkv[:, num_q * DIM :], before[:, num_q * DIM :])
    assert not torch.equal(qkv, before)


def test_products_depend_on_the_distance_alone() -> None:
    q, k = (torch.randn(1, 1, DIM).expand(2, 1, DIM).clone() for _ in range(2))
    run(q, k, torch.tensor([9, 49]))
    keys = run(q.clone(), k, torch.tensor([4, 44]))
    scores = (q * keys).sum(-1)
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", [False, True])
def test_bf16_is_rounded_where_the_two_parts_round(norm: bool) -> None:
    q = torch.randn(4, 2, DIM).bfloat16()
    weights = (1 + torch.randn(DIM)).bfloat16()
    positions = torch.tensor([3, 60, 11, 0])
    want = rotate((rms_norm(q, weights, EPS) if norm else q).float(), positions)
    keys = run(q, q.clone(), positions, (weights, weights) if norm else None)
    # Half a rounding step of bf16 (8 bits), and the fp32 error before it.
    for got in (q, keys):
        assert ((got.float() - want).abs() <= want.abs() * 2**-8 + 1e-5).all()


def places_hold(module: ModuleType, skipped: tuple[int, ...]) -> None:
    qkv = torch.randn(4, 4, DIM)
    q, k, v = qkv.split((1, 2, 1), 1)[0], qkv[:, 1:3], torch.randn(4, 2, DIM)
    k_cache = torch.full((3, 4, 2, DIM), float("nan"))
    v_cache = k_cache.clone()
    positions = torch.tensor([5, 0, 63, 9])
    keys = rotate(k, positions)
    write_idx = torch.tensor([11, 0, 5, 6])
    places = write_idx.tolist()
    for token in skipped:
        write_idx[token] = -1
    module.rope_kv_write(q, k, v, table(), positions, k_cache, v_cache, write_idx)
    for cache, source in ((k_cache, keys), (v_cache, v)):
        flat = cache.view(12, 2, DIM)
        written = {place: token for token, place in enumerate(places) if token not in skipped}
        for place in range(12):
            if place in written:
                assert torch.allclose(flat[place], source[written[place]], rtol=1e-5, atol=1e-5)
            else:
                assert flat[place].isnan().all()


@both
@pytest.mark.parametrize("skipped", [(), (1,), (0, 1, 2, 3)])
def test_only_the_named_places_are_written(form: str, skipped: tuple[int, ...]) -> None:
    places_hold(own, skipped)


@pytest.mark.interp
def test_without_its_guard_a_skipped_token_is_written(tmp_path: Path) -> None:
    bad = mutant(
        "rope_kv",
        {"elif place >= 0:": "elif place >= -1:", "to = place": "to = tl.maximum(place, 0)"},
        tmp_path,
    )
    with pytest.raises(AssertionError):
        places_hold(bad, (0, 1, 2, 3))


@both
def test_a_poisoned_token_stays_alone(form: str) -> None:
    q, k = torch.randn(3, 2, DIM), torch.randn(3, 1, DIM)
    positions, weights = torch.tensor([1, 2, 3]), (torch.ones(DIM), torch.ones(DIM))
    want_q, want_k = q.clone(), run(q.clone(), k, positions, weights)
    run(want_q, k, positions, weights)
    q[1], k[1] = float("nan"), float("nan")
    keys = run(q, k, positions, weights)
    assert torch.equal(q[::2], want_q[::2]) and torch.equal(keys[::2], want_k[::2])
    assert q[1].isnan().all() and keys[1].isnan().all()
