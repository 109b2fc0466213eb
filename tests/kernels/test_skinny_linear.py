"""The linears of decode alone: every guard with the test that needs it, and what comes before the
wait.

Not here: equality with the reference at the shapes of models (test_ops.py).
"""

import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import kernels.skinny_linear as own
from kernels.op import AotSpec, interpreting
from kernels.tiling import Tiles
from tests.kernels.aot import disassemble
from tests.kernels.mutant import mutant

# Several programs, chunks and parts; a last one of each that is not full.
DOT = Tiles(block_n=16, block_k=32, split_k=3)
SUM = Tiles(block_n=4, block_k=32)
SHAPES = ((1, 75, 37), (3, 200, 33), (33, 72, 50))


@pytest.fixture(autouse=True)
def nan_in_new_memory() -> Iterator[None]:
    """Memory used again holds the last product's results: right ones that nobody has written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def batch(rows: int, in_: int, out: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and bias with NaN around all of them: rows, columns and results of others."""
    draw = torch.Generator().manual_seed(rows * in_ + out)

    def within(*shape: int) -> Tensor:
        whole = torch.full([n + 40 for n in shape], float("nan"), device=device)
        part = whole[tuple(slice(0, n) for n in shape)]
        return part.copy_(torch.randn(shape, generator=draw))

    weight = torch.full((out + 40, in_), float("nan"), device=device)[:out]
    weight.copy_(torch.randn(out, in_, generator=draw))
    return within(rows, in_), weight, within(out)


def products_hold(module: ModuleType, device: str = "cpu") -> None:
    for rows, in_, out in SHAPES:
        x, weight, bias = batch(rows, in_, out, device)
        for form, tiles in (("linear_dot", DOT), ("linear_sum", SUM)):
            for b in (bias, None):
                want = torch.nn.functional.linear(
                    x.cpu().double(), weight.cpu().double(), None if b is None else b.cpu().double()
                )
                got = module.product(x, weight, b, form, tiles)
                torch.testing.assert_close(got.cpu().double(), want, rtol=1e-4, atol=1e-4)
    # All counters are as before: the next product starts from them.
    assert not module._counters(x.device).any()


@pytest.mark.interp
def test_products_are_their_definition() -> None:
    products_hold(own)


@pytest.mark.interp
@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("x_live = k_live[:, None] & t_live[None, :]", "x_live = t_live[None, :]",
                     id="dot_columns_of_x"),
        pytest.param("mask=k_live[None, :], other=0.0)", "mask=k_live[None, :] | True)",
                     id="dot_columns_of_weights"),
        pytest.param("end = tl.minimum(chunk + per_split, num_chunks)",
                     "end = chunk + per_split - 1", id="all_chunks"),
        pytest.param("for part in tl.static_range(SPLIT_K)", "for part in tl.static_range(1)",
                     id="all_parts"),
        pytest.param("!= SPLIT_K - 1", "!= SPLIT_K - 2", id="the_last_adds"),
        pytest.param("tl.store(counters_ptr + pid_n, 0)", "pass", id="counters_left_at_zero"),
        pytest.param("mask=k < in_features - then", "mask=k < in_features", id="sum_columns"),
        pytest.param("(k < in_features - first)", "(k < in_features)", id="sum_columns_of_x"),
        pytest.param("tl.program_id(1) * BLOCK_T", "0", id="later_rows"),
        pytest.param("acc += bias", "acc += 2 * bias", id="bias_once"),
    ],
)  # fmt: skip
def test_products_with_a_guard_reversed_fail(old: str, new: str, tmp_path: Path) -> None:
    bad = mutant("skinny_linear", {old: new}, tmp_path)
    with pytest.raises(AssertionError):
        products_hold(bad)


@pytest.mark.interp
@pytest.mark.parametrize(("form", "tiles"), [("linear_dot", DOT), ("linear_sum", SUM)])
def test_a_row_has_the_same_bits_whatever_its_neighbours(form: str, tiles: Tiles) -> None:
    x, weight, bias = batch(7, 200, 37)
    want = own.product(x, weight, bias, form, tiles)
    others = x.clone()
    others[1::2] = torch.randn(3, 200, generator=torch.Generator().manual_seed(0)) * 100
    got = own.product(others, weight, bias, form, tiles)
    assert torch.equal(got[::2], want[::2]) and not torch.equal(got, want)


@pytest.mark.interp
def test_what_the_kernels_do_not_serve_goes_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> Tensor:
        raise RuntimeError("the kernels")

    monkeypatch.setattr(own, "product", refuse)
    x, weight = torch.randn(own.MAX_ROWS, 8), torch.randn(24, 8)
    with pytest.raises(RuntimeError, match="the kernels"):
        own.linear(x, weight)
    columns = torch.randn(8, 24).t()
    for a, w in (
        (torch.randn(own.MAX_ROWS + 1, 8), weight), (x[:0], weight), (x, columns),
        (torch.randn(8, 4).t(), weight), (x[:1], torch.zeros(own.MAX_OUT + 1, 8)),
    ):  # fmt: skip
        assert torch.equal(own.linear(a, w), torch.nn.functional.linear(a, w))


def test_a_form_follows_from_the_padded_rows() -> None:
    assert [own.choose_form(t, 5120) for t in (1, 2, 3, 64)] == ["linear_sum"] * 2 + [
        "linear_dot"
    ] * 2
    assert {own.choose_form(t, 32) for t in range(1, 65)} == {"linear_sum"}
    for rows in range(1, 65):
        padded = 1 << (rows - 1).bit_length()
        assert own.choose_form(rows, 128) == own.choose_form(padded, 128)


SPECS = [] if interpreting() else [s for s in own._aot() if s.name.startswith(("1x", "16x", "64x"))]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_only_weights_come_before_the_wait(spec: AotSpec) -> None:
    code = [line for line in disassemble(spec).splitlines() if "/*" in line]
    waits = [i for i, line in enumerate(code) if "ACQBULK" in line]
    assert len(waits) == 1
    early, late = code[: waits[0]], code[waits[0] :]
    assert not any(re.search(r"\b(STG|ATOMG|RED|EXIT)\b", line) for line in early)
    if spec.fn is own._linear_sum_kernel:
        wide = sum("LDG.E.128" in line for line in early)
        block = spec.constexprs["BLOCK_N"] * spec.constexprs["BLOCK_K"]
        assert wide == block // (32 * spec.num_warps * 8), "all of the first weights, 16 bytes each"
    else:
        assert not any("LDGSTS" in line for line in early) and any("LDGSTS" in s for s in late)
