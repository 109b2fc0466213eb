"""Latent attention: the same as full attention over keys and values made from the latent."""

import pytest
import torch

from kernels.mla_attention import OPS, mla_attention, mla_attention_reference
from kernels.mla_attention_triton import LatentTile, decode, prefill
from kernels.op import Case


def case_named(name: str) -> Case:
    return next(case for case in OPS[0].cases() if case.name == name)


def test_equals_attention_over_the_expanded_keys() -> None:
    """fp64, with the absorbed products written out: key = (W_k c, k_rope), value = W_v c."""
    num_latent, dim_nope, dim_v = 32, 12, 10
    inputs = case_named("mixed").make("cpu", torch.float32, 0)
    num_tokens, num_q, dim_rope = inputs["q_rope"].shape
    up_k = torch.randn(num_q, dim_nope, num_latent).double()
    up_v = torch.randn(num_q, dim_v, num_latent).double()
    q_nope = torch.randn(num_tokens, num_q, dim_nope).double()
    absorbed = torch.einsum("tqn,qnr->tqr", q_nope, up_k)
    inputs["q_latent"] = absorbed.float()
    got = torch.einsum("tqr,qvr->tqv", mla_attention(**inputs).double(), up_v)

    page = inputs["cache"].shape[1]
    flat = inputs["cache"].view(-1, num_latent + dim_rope).double()
    bounds, lens = inputs["cu_q"].tolist(), inputs["seq_lens"].tolist()
    seen = 0
    for row, length in enumerate(lens):
        for token in range(bounds[row], bounds[row + 1]):
            visible = length - (bounds[row + 1] - 1 - token)
            pos = torch.arange(visible)
            cached = flat[inputs["page_table"][row, pos // page].long() * page + pos % page]
            latent, rope = cached[:, :num_latent], cached[:, num_latent:]
            scores = torch.einsum("qn,qnr,lr->ql", q_nope[token], up_k, latent)
            scores += torch.einsum("qd,ld->ql", inputs["q_rope"][token].double(), rope)
            weights = torch.softmax(scores * inputs["scale"], -1)
            want = torch.einsum("ql,qvr,lr->qv", weights, up_v, latent)
            error = (got[token] - want).abs().max() / want.abs().max()
            assert error < 1e-4
            seen += 1
    assert seen == bounds[-1] > 0


def test_tokens_of_no_row_are_zero() -> None:
    inputs = case_named("decode").make("cpu", torch.float32, 0)
    got = mla_attention(**inputs)
    assert got.shape == inputs["q_latent"].shape
    assert torch.equal(got[-1], torch.zeros_like(got[-1])) and not got[:-1].eq(0).any()


TILES = [(1, 16), (2, 16), (4, 16), (1, 32), (8, 4)]


@pytest.mark.interp
@pytest.mark.parametrize(("tokens", "heads"), TILES)
@pytest.mark.parametrize("name", ["mixed", "wide", "decode"])
def test_any_tile_of_tokens_by_heads_gives_the_same(name: str, tokens: int, heads: int) -> None:
    inputs = case_named(name).make("cpu", torch.float32, 3)
    want = mla_attention_reference(**inputs)
    given = {k: v for k, v in inputs.items() if k not in ("max_q", "max_len")}
    got = prefill(**given, tile=LatentTile(tokens, heads, 16, 4, 1))
    assert (got - want).abs().max() <= 2e-5 * want.abs().max()


@pytest.mark.interp
@pytest.mark.parametrize("programs", [1, 8, 64])
def test_any_number_of_splits_gives_the_same(programs: int) -> None:
    inputs = case_named("decode_split").make("cpu", torch.float32, 3)
    want = mla_attention_reference(**inputs)
    given = {k: v for k, v in inputs.items() if k != "max_q"}
    got = decode(**given, tile=LatentTile(1, 16, 16, 4, 1, programs))
    assert (got - want).abs().max() <= 2e-5 * want.abs().max()
