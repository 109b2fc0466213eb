"""Latent attention: the same as full attention over keys and values made from the latent."""

import pytest
import torch

from kernels.mla_attention import (
    OPS,
    make_latent_case,
    mla_attention,
    mla_attention_reference,
)
from kernels.mla_attention_triton import (
    LatentTile,
    decode,
    decode_tile,
    prefill,
    prefill_tile,
)
from kernels.op import Case, Inputs
from tests.kernels.test_ops import copy_of, largest


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


# The tiles that ship, at the widths that are published. Rows (queries, keys) are short: of tokens
# in several tiles, of keys in several blocks and, of decode, in several splits.
SHIPPED = [(heads, wide) for heads in (16, 128) for wide in (False, True)]
ROWS = {
    "decode": ((1, 5), (0, 0), (1, 300), (1, 64)),
    "prefill": ((1, 40), (7, 7), (0, 0), (6, 150)),
}


def shipped_inputs(kind: str, heads: int, device: str, dtype: torch.dtype) -> Inputs:
    """A mixed batch, or one of single queries, with random pages and a NaN wherever none is."""
    max_len = 4096 if kind == "decode" else 0
    case = make_latent_case(kind, ROWS[kind], heads, 512, 64, max_len=max_len)
    return case.make(device, dtype, 7)


def assert_fp32_equals_reference(got: torch.Tensor, inputs: Inputs) -> None:
    """In fp32: as any sum of a few hundred products in another order."""
    want = mla_attention_reference(**inputs)
    assert got.shape == want.shape and largest(want) > 0.1
    assert largest(got - want) <= 2e-5 * largest(want)


@pytest.mark.interp
@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize(("heads", "wide"), SHIPPED)
def test_the_tiles_that_ship(heads: int, wide: bool, kind: str) -> None:
    """In fp32 whatever they are for, which is what the interpreter can."""
    inputs = shipped_inputs(kind, heads, "cpu", torch.float32)
    given = {k: v for k, v in inputs.items() if k not in ("max_q", "max_len")}
    if kind == "decode":
        got = decode(**given, max_len=inputs["max_len"], tile=decode_tile(heads, wide))
    else:
        got = prefill(**given, tile=prefill_tile(heads, wide))
    assert_fp32_equals_reference(got, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize(("heads", "wide"), SHIPPED)
def test_the_tiles_that_ship_on_a_gpu(heads: int, wide: bool, kind: str) -> None:
    """In bf16 no further from the truth than twice torch in bf16, or half a step of rounding."""
    dtype = torch.float32 if wide else torch.bfloat16
    inputs = shipped_inputs(kind, heads, "cuda", dtype)
    got = mla_attention(**inputs)
    if wide:
        assert_fp32_equals_reference(got, inputs)
        return
    truth = mla_attention_reference(**copy_of(inputs, torch.float32))
    plain = largest(mla_attention_reference(**inputs).float() - truth)
    half_step = 0.5 * torch.finfo(dtype).eps * largest(truth)
    assert got.dtype == dtype and largest(truth) > 0.1
    assert largest(got.float() - truth) <= max(2 * plain, half_step)
