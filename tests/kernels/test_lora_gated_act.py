"""The activation that adds expert LoRA first: whose delta, whose bits.

Not here: equality with the reference (test_ops.py), the shrink (test_lora_decode.py).
"""

from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import kernels.lora_gated_act as own
from kernels.gated_act import gated_act
from kernels.lora_decode import DecodeTiles
from kernels.lora_tables import LoraTables
from tests.kernels.mutant import mutant
from tests.kernels.test_fused_moe_lora import E, K, batch, dense_delta, poison, tables_of
from tests.kernels.test_gated_act import plain

pytestmark = pytest.mark.interp
SMALL = DecodeTiles(16, 16)
# Of nine tokens: programs that take two tiles.
LOOPS = DecodeTiles(16, 16, programs=50)


def run(
    module: ModuleType, tables: LoraTables, target: int, b: dict[str, Tensor],
    tiles: DecodeTiles = SMALL, kind: str = "gpt_oss",
) -> Tensor:  # fmt: skip
    return module.lora_gated_act(
        b["y"], b["x"], tables, target, b["ids"], b["slots"], E, kind, tiles=tiles
    )


def rows_hold(
    module: ModuleType, tiles: DecodeTiles = SMALL, kind: str = "gpt_oss", device: str = "cpu"
) -> None:
    """Every row is the activation of gate_up with its owner's delta; base rows to the bit."""
    tables, num_tokens = tables_of(device=device), 9
    for target in (0, 1):
        b = batch(num_tokens, False, device=device)
        b["ids"][-1, 0], b["ids"][1, 1] = -1, E
        before = b["y"].clone()
        got = run(module, tables, target, b, tiles, kind)
        assert torch.equal(b["y"], before), "gate_up is left alone"
        base = gated_act(b["y"], kind)
        if device != "cpu":  # there another kernel may join other products and sums
            bare = b | {"slots": torch.full_like(b["slots"], -1)}
            base = run(own, tables, target, bare, tiles, kind)
        for pair in range(num_tokens * K):
            slot, expert = int(b["slots"][pair // K]), int(b["ids"].flatten()[pair])
            delta = dense_delta(tables, target, slot, expert) if expert < E else None
            if delta is None:
                assert torch.equal(got[pair], base[pair]), "bits of a row without adapter"
                continue
            total = b["y"][pair].double() + delta @ b["x"][pair // K].double()
            want = plain(total[None], kind)[0]
            assert torch.allclose(got[pair].double(), want, rtol=1e-5, atol=1e-5), pair


@pytest.mark.parametrize("tiles", [SMALL, LOOPS])
@pytest.mark.parametrize("kind", ["gpt_oss", "silu"])
def test_rows_are_their_definition(tiles: DecodeTiles, kind: str) -> None:
    assert (tiles is LOOPS) == (tiles.per_program(9 * K, 2) > 1)
    rows_hold(own, tiles, kind)


# What a broken kernel writes past the end must hurt nobody else in this process.
ROOM = {
    "gate_up.new_empty(num_rows, inner)": "gate_up.new_empty(num_rows + 9, inner)[:num_rows]",
}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("(r < rank) & adapted", "(r < max_rank) & adapted", id="rank_lanes"),
        pytest.param("+ inner + ahead", "+ ahead", id="up_of_the_next_tile"),
        pytest.param("* (2 * inner)", "* inner", id="row_of_both_halves"),
        pytest.param("mask=n < end)", "mask=n < end - 1)", id="last_column"),
        pytest.param("        if adapted:", "        if row > 9:", id="rows_with_an_adapter"),
    ],
)
def test_rows_with_a_guard_reversed_fail(old: str, new: str, tmp_path: Path) -> None:
    bad = mutant("lora_gated_act", ROOM | {old: new}, tmp_path)
    with pytest.raises(AssertionError):
        rows_hold(bad, LOOPS)


@pytest.mark.parametrize("value", [float("nan"), 1e4])
def test_nobody_feels_another_slot(value: float) -> None:
    tables, b = tables_of(), batch(4, False)
    b["slots"] = torch.tensor([1, -1, 1, -1]).int()
    want = run(own, tables, 0, b)
    assert torch.isfinite(want).all()
    assert torch.equal(run(own, poison(tables, {1}, value), 0, b), want)


def test_base_rows_have_the_bits_of_a_batch_without_adapters() -> None:
    tables, b = tables_of(), batch(9, False)
    mixed = run(own, tables, 0, b).view(9, K, -1)
    base = b["slots"] < 0
    b["slots"] = torch.full_like(b["slots"], -1)
    alone = run(own, tables, 0, b).view(9, K, -1)
    assert base.any() and torch.equal(mixed[base], alone[base])
    assert not torch.equal(mixed, alone)


def test_another_kind_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="not 'gelu'"):
        run(own, tables_of(), 0, batch(2, False), kind="gelu")
