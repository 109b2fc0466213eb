"""The decode kernels alone: every guard with the test that needs it.

Not here: equality with the reference (test_ops.py), LoRA through the layers (test_golden.py).
"""

from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import kernels.lora_decode as own
from kernels.dense_lora import dense_lora
from kernels.fused_moe_lora import moe_lora, random_tables
from kernels.lora_decode import DecodeTiles
from kernels.lora_tables import LoraTables
from kernels.worklist import build_worklist
from tests.kernels.mutant import mutant
from tests.kernels.test_fused_moe_lora import E, K, batch, dense_delta, poison, tables_of

pytestmark = pytest.mark.interp
# Several programs a row on both sides, and a last one that is not full.
SMALL = DecodeTiles(16, 16)
# Of nine tokens: programs that take up to three tiles, the last one of a row fewer.
LOOPS = DecodeTiles(16, 16, programs=60)


def run(
    module: ModuleType, tables: LoraTables, target: int, down: bool, b: dict[str, Tensor],
    tiles: DecodeTiles = SMALL,
) -> Tensor:  # fmt: skip
    y = b["y"].clone()
    module.add_pairs(
        y, b["x"], tables, target, b["ids"], b["slots"], E, down, b["weights"] if down else None,
        tiles,
    )  # fmt: skip
    return y


def deltas_hold(
    module: ModuleType, num_tokens: int, shared: bool = False, tiles: DecodeTiles = SMALL,
    device: str = "cpu",
) -> None:  # fmt: skip
    tables = tables_of(shared, device=device)
    for target in (0, 1):
        for down in (False, True):
            b = batch(num_tokens, down, device=device)
            b["ids"][-1, 0], b["ids"][1, 1] = -1, E
            got = run(module, tables, target, down, b, tiles)
            for pair in range(num_tokens * K):
                slot, expert = int(b["slots"][pair // K]), int(b["ids"].flatten()[pair])
                delta = dense_delta(tables, target, slot, expert) if expert < E else None
                if delta is None:
                    assert torch.equal(got[pair], b["y"][pair]), "bits of a row without adapter"
                    continue
                want = delta @ b["x"][pair if down else pair // K].double()
                want *= float(b["weights"].flatten()[pair]) if down else 1.0
                want += b["y"][pair].double()
                assert torch.allclose(got[pair].double(), want, rtol=1e-5, atol=1e-5), pair


@pytest.mark.parametrize("shared", [False, True])
def test_deltas_are_their_definition(shared: bool) -> None:
    for num_tokens in (2, 9):
        deltas_hold(own, num_tokens, shared)


def test_programs_of_several_tiles_do_the_same() -> None:
    assert [LOOPS.per_program(9 * K, tiles) for tiles in (3, 4)] == [2, 3]
    deltas_hold(own, 9, tiles=LOOPS)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("& (slot < num_slots)", "", id="slot_of_elsewhere"),
        pytest.param("(slot >= 0) &", "", id="base_rows"),
        pytest.param("| (other < 0)", "", id="half_a_factor"),
        pytest.param("off + expert * stride", "off + expert", id="expert_stride"),
        pytest.param("k_live = k < in_features", "k_live = k < in_features + 1",
                     id="past_the_row"),
        pytest.param("z_mask = (s < SPLITS)", "z_mask = (s < 1)", id="all_parts"),
    ],
)  # fmt: skip
def test_deltas_with_a_guard_reversed_fail(old: str, new: str, tmp_path: Path) -> None:
    bad = mutant("lora_decode", {old: new}, tmp_path)
    if old == "| (other < 0)":
        tables, b = tables_of(), batch(3, False)
        b["slots"] = torch.zeros(3, dtype=torch.int32)
        tables.b_off[0, 0] = -1
        assert torch.equal(run(own, tables, 0, False, b), b["y"])
        tables.a_off[1, 0], tables.b_off[1, 0] = -1, int(tables.b_off[1, 1])
        assert torch.equal(run(own, tables, 1, False, b), b["y"])
        assert not torch.equal(run(bad, tables, 1, False, b), b["y"])
        return
    with pytest.raises(AssertionError):
        deltas_hold(bad, 9)


@pytest.mark.parametrize("value", [float("nan"), 1e4])
def test_nobody_feels_another_slot(value: float) -> None:
    tables = tables_of()
    for down in (False, True):
        b = batch(4, down)
        b["slots"] = torch.tensor([1, -1, 1, -1]).int()
        want = run(own, tables, 0, down, b)
        assert torch.isfinite(want).all()
        assert torch.equal(run(own, poison(tables, {1}, value), 0, down, b), want)


def test_a_row_alone_has_the_bits_it_has_in_company() -> None:
    tables, b = tables_of(), batch(9, True)
    together = run(own, tables, 0, True, b)
    for token in (2, 4):
        alone = {k: b[k][token : token + 1] for k in ("ids", "slots", "weights")}
        alone |= {k: b[k][token * K : (token + 1) * K] for k in ("x", "y")}
        assert torch.equal(run(own, tables, 0, True, alone), together[token * K : (token + 1) * K])


def test_moe_lora_without_a_worklist_comes_here() -> None:
    tables, b = tables_of(), batch(5, False)
    y = b["y"].clone()
    moe_lora(y, b["x"], tables, 0, b["ids"], b["slots"], None, False, None, num_experts=E)
    torch.testing.assert_close(y, run(own, tables, 0, False, b), rtol=1e-5, atol=1e-5)
    with pytest.raises(AssertionError, match="number of experts"):
        moe_lora(y, b["x"], tables, 0, b["ids"], b["slots"], None, False, None)


def test_more_rank_than_a_tile_holds_is_refused() -> None:
    tables = random_tables([(1, 24, 16)], [72], 72, "cpu", torch.float32, 0)
    slots, x, y = torch.zeros(2, dtype=torch.int32), torch.randn(2, 24), torch.zeros(2, 16)
    assert not own.tokens_suffice(2, tables) and not own.pairs_suffice(2, tables)
    with pytest.raises(AssertionError, match="72"):
        dense_lora(y, x, tables, 0, slots, None)
    dense_lora(y, x, tables, 0, slots, build_worklist(None, slots, 1, 1, 16))
    assert y.any()


@pytest.mark.parametrize("name", ["_shrink_kernel", "_expand_kernel"])
def test_length_and_target_do_not_compile_anew(name: str) -> None:
    kernel = getattr(own, name)
    lengths = {"num_rows", "per_row", "programs_0", "programs_1", "n_tiles"} & set(kernel.arg_names)
    assert "num_rows" in lengths
    assert lengths | {"target_0", "target_1", "target_2"} <= set(own.UNSPECIALISED)


def test_no_rows_are_nothing_to_do() -> None:
    """The head's rows of a step whose chunks all end within their prompts."""
    tables = tables_of(False)
    none = torch.empty(0, dtype=torch.int32)
    for down in (False, True):
        b = batch(3, down)
        y, x, ids = b["y"][:0].clone(), b["x"][:0], b["ids"][:0]
        dense_lora(y, x, random_tables([(1, x.shape[1], y.shape[1])], [8], 8, "cpu", x.dtype, 0),
                   0, none, None, settled=True)  # fmt: skip
        moe_lora(y, x, tables, int(down), ids, none, None, down, None, False, E, settled=True)
        assert not y.numel()
