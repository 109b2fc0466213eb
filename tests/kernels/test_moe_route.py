"""Choice and worklist in one launch: against the definition, row by row.

Not here: equality with the two launches' references (test_ops.py).
"""

from pathlib import Path
from types import ModuleType

import pytest
import torch

import kernels.moe_route as own
from tests.kernels.mutant import mutant
from tests.kernels.test_moe_gate import INF, NAN
from tests.kernels.test_worklist import check_worklist

SIZES = ((1, 1, 1, 4), (1, 32, 4, 16), (7, 5, 3, 2), (40, 6, 2, 4), (61, 32, 4, 16))


# What a broken kernel writes past the end must hurt nobody else in this process.
ROOM = {
    "new_empty(num_rows, dtype=torch.int32)": (
        "new_empty(num_rows + 9999, dtype=torch.int32)[:num_rows]"
    ),
    "new_empty(num_segments, 4, dtype=torch.int32)": (
        "new_empty(num_segments + 999, 4, dtype=torch.int32)[:num_segments]"
    ),
    "new_empty(num_tokens, top_k, dtype=torch.int32)": (
        "new_empty(num_tokens + 99, top_k, dtype=torch.int32)[:num_tokens]"
    ),
    "new_empty(num_tokens, top_k, dtype=torch.float32)": (
        "new_empty(num_tokens + 99, top_k, dtype=torch.float32)[:num_tokens]"
    ),
}


def routes_hold(module: ModuleType, device: str = "cpu") -> None:
    for num_tokens, num_experts, top_k, block_m in SIZES:
        g = torch.Generator().manual_seed(num_tokens)
        logits = torch.randn(num_tokens, num_experts, generator=g)
        if num_tokens > 6:
            logits[0], logits[1, 2], logits[2, :4], logits[3], logits[4] = NAN, NAN, NAN, INF, -INF
            logits[5] = torch.tensor([0.0, -0.0, 0.0, -0.0, -1.0]).repeat(7)[:num_experts]
        weights, ids, work = module.moe_route(logits.to(device), top_k, True, block_m)
        want = own.moe_gate_reference(logits, top_k, True)
        assert torch.equal(ids.cpu(), want[1])
        torch.testing.assert_close(weights.cpu(), want[0], rtol=1e-6, atol=1e-7, equal_nan=True)
        check_worklist(work, ids, None, num_experts, 0)
        capacity = own.segment_capacity(num_tokens * top_k, num_experts, block_m)
        assert len(work.segments) == capacity and work.block_m == block_m


@pytest.mark.interp
def test_routes_are_their_definition() -> None:
    assert all(own._form(t, e) is not None for t, e, _, _ in SIZES)
    routes_hold(own)


@pytest.mark.interp
@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("within == count", "within == 1 + count", id="last_of_a_group"),
        pytest.param("in_block == BLOCK_M - 1", "in_block == BLOCK_M", id="last_of_a_block"),
        pytest.param("- blocks)[None, :]", ")[None, :]", id="segments_before"),
        pytest.param("range(total, num_segments", "range(total + 1, num_segments", id="spare"),
        pytest.param("(token < num_tokens) & ", "", id="tokens_past_the_end"),
    ],
)
def test_routes_with_a_line_changed_fail(old: str, new: str, tmp_path: Path) -> None:
    bad = mutant("moe_route", ROOM | {old: new}, tmp_path)
    with pytest.raises(AssertionError):
        routes_hold(bad)


@pytest.mark.interp
def test_a_table_too_large_for_one_program_takes_two_launches() -> None:
    assert own._form(65, 32) is None and own._form(64, 32) is not None
    logits = torch.randn(130, 32, generator=torch.Generator().manual_seed(0))
    weights, ids, work = own.moe_route(logits, 4, False, 16)
    want = own.moe_gate_reference(logits, 4, False)
    torch.testing.assert_close(weights, want[0])
    assert torch.equal(ids, want[1])
    check_worklist(work, ids, None, 32, 0)
    assert own.moe_route(logits[:0], 4, True, 16)[1].shape == (0, 4)


@pytest.mark.parametrize("top_k", [0, 6])
def test_a_top_k_that_cannot_be_is_refused(top_k: int) -> None:
    with pytest.raises(ValueError, match="top_k must be in 1..5"):
        own.moe_route(torch.zeros(1, 5), top_k, True, 16)


def test_length_does_not_compile_anew() -> None:
    assert {"num_tokens", "num_segments"} == set(own._route_kernel.do_not_specialize)
