"""The comparisons of LoRA's paths: they compute the same, what is compared is what it says, and the
limit that follows. Times need a GPU."""

import argparse

import pytest
import torch

import tests.bench.lora_parts as parts
import tests.bench.lora_paths as bench
import tests.bench.one_launch as one_launch
from kernels.op import interpreting
from kernels.tune.compiling import NO_TARGET, compile_recorded, record_kernels
from kernels.tune.problems import SHAPES, ModelShape
from tests.kernels.conftest import h200_host  # noqa: F401

SMALL = ModelShape(64, 32, 16, 32, 4, 2, "packed")
DENSE = ModelShape(64, 32, 16, 96)
CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "small", SMALL)
    monkeypatch.setitem(SHAPES, "dense", DENSE)


@pytest.mark.interp
@pytest.mark.slow
@pytest.mark.parametrize("mix", ["distinct", "one_90", "none"])
def test_both_paths_compute_the_same(mix: str) -> None:
    for shape, part in ((SMALL, "experts"), (SMALL, "linears"), (DENSE, "linears")):
        memory = parts.Memory.make(shape, part, 8, CPU, True)
        made = parts.make_part(shape, part, memory, 9, mix)
        before = [y.clone() for y in made.written()]
        for path in parts.PATHS:
            parts.check(made, path, made.reference(0))
        assert all(map(torch.equal, made.written(), before)), "put back"


def wrong_base(part: parts.Linears, layer: int) -> tuple[torch.Tensor, ...]:
    part.products[1].y[3].add_(1)
    return part.written()


def test_a_path_that_computes_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = parts.Memory.make(SMALL, "linears", 8, CPU, True)
    experts = parts.Memory.make(SMALL, "experts", 8, CPU, True)
    made = parts.make_part(SMALL, "linears", memory, 9, "eight")
    parts.check(made, "row", made.reference(0))
    others = parts.Linears(made.products, made.xs, (made.slots + 1) % 8, made.work)
    with pytest.raises(AssertionError, match="off by"):
        parts.check(made, "row", others.reference(0))
    made = parts.make_part(SMALL, "experts", experts, 9, "eight")
    parts.check(made, "row", made.reference(0))
    for wrong in ((made.without()[0], made.reference(0)[1]), made.without()):
        with pytest.raises(AssertionError, match="off by"):
            parts.check(made, "row", wrong)
    none = parts.make_part(SMALL, "linears", memory, 9, "none")
    monkeypatch.setattr(parts.Linears, "row", wrong_base)
    with pytest.raises(AssertionError, match="base rows changed"):
        parts.check(none, "row", none.reference(0))


def test_a_row_a_shape_part_rank_size_mix_and_path(small, monkeypatch) -> None:
    monkeypatch.setattr(bench, "torch_us", lambda part: 5000.0)
    args = argparse.Namespace(
        shapes=["small", "dense"], ranks=[8], tokens=[1, 4], mixes=["eight", "none"]
    )
    rows = bench.measure(args, lambda batch: float(len(batch.calls)), CPU, float("inf"))
    assert len(rows) == 3 * 2 * (3 + 2)
    assert {(r["shape"], r["part"]) for r in rows} == {
        ("small", "experts"), ("small", "linears"), ("dense", "linears"),
    }  # fmt: skip
    assert {r["rows"] for r in rows if r["part"] == "experts"} == {2, 8}
    assert all(r["us"] == parts.LAYERS for r in rows if r["path"] in parts.PATHS)
    bench.print_tables(rows)


def test_what_fails_hides_nothing_else(small, monkeypatch, capsys) -> None:
    def check(part: parts.Part, path: str, want: tuple[torch.Tensor, ...]) -> None:
        assert part.rows != 8 or path == "four", "planted"

    monkeypatch.setattr(bench, "check", check)
    monkeypatch.setattr(bench, "torch_us", lambda part: 5000.0)
    args = argparse.Namespace(shapes=["small"], ranks=[8], tokens=[1, 4], mixes=["eight"])
    rows = bench.measure(args, lambda batch: 1.0, CPU, float("inf"))
    assert [(r["part"], r["rows"]) for r in rows] == (
        [("experts", 2)] * 3 + [("linears", 1)] * 3 + [("linears", 4)] * 3
    )
    assert "FAILED small experts r8 T=4 eight: AssertionError: planted" in capsys.readouterr().out


def test_mixes_are_what_they_are_called() -> None:
    assert parts.slots_of("distinct", 64).unique().numel() == 64
    assert parts.slots_of("eight", 64).bincount().tolist() == [8] * 8
    hot = parts.slots_of("one_90", 100).bincount()
    assert hot[0] == 90 and len(hot) == 8 and min(hot[1:]) >= 1
    many = parts.slots_of("zipf64", 100_000).bincount(minlength=64) / 100_000
    odds = torch.arange(1, 65, dtype=torch.float64) ** -1.2
    assert torch.allclose(many.double(), odds / odds.sum(), atol=0.01)
    assert parts.slots_of("none", 3).tolist() == [-1] * 3


def test_the_floor_is_what_must_move() -> None:
    memory = parts.Memory.make(SMALL, "linears", 8, CPU, True)
    made = parts.make_part(SMALL, "linears", memory, 3, "distinct")
    # q, k, v: three factors of 64 in, 32 + 16 + 16 out; o: 32 in, 64 out.
    factors = 3 * 8 * (3 * 64 + 64) + 3 * 8 * (32 + 64)
    assert made.floor_bytes() == 2 * (factors + 3 * (64 + 2 * 64) + 3 * (32 + 2 * 64))
    memory = parts.Memory.make(SMALL, "experts", 8, CPU, True)
    made = parts.make_part(SMALL, "experts", memory, 1, "distinct")
    # One token of two experts: gate_up 64 in, 64 out; down 32 in, 64 out.
    factors = 2 * 8 * (64 + 64 + 32 + 64)
    assert made.floor_bytes() == 2 * (factors + 64 + 2 * (64 + 32) + 2 * (32 + 2 * 64))
    made = parts.make_part(SMALL, "experts", memory, 1, "none")
    assert made.floor_bytes() == 2 * 2 * (64 + 32), "the activation alone"


def case(rows: int, mix: str, four: float, row: float, shape: str = "a") -> list[dict]:
    about = {"shape": shape, "rows": rows, "mix": mix}
    return [about | {"path": "four", "us": four}, about | {"path": "row", "us": row}]


def test_the_limit_is_the_last_size_where_row_by_row_is_the_lesser_evil() -> None:
    rows = case(64, "eight", 4, 2) + case(64, "one_90", 4, 3)
    rows += case(128, "eight", 4, 2) + case(128, "one_90", 2, 3)  # twice as fast, half as slow
    rows += case(256, "eight", 4, 3.9) + case(256, "one_90", 2, 3)
    rows += case(512, "eight", 4, 2) + case(512, "one_90", 4, 2)  # by chance: past the first loss
    limit, lines = bench.choose_limit(rows)
    assert limit == 128 and len(lines) == 4
    assert "0.50 to 1.50" in lines[1] and "most for a, one_90" in lines[1]
    assert bench.choose_limit(case(8, "none", 1, 9) + case(8, "eight", 2, 1))[0] == 8, "not judged"
    assert bench.choose_limit(case(8, "eight", 1, 2))[0] == 0


@pytest.mark.skipif(interpreting(), reason="interpreted functions do not compile")
@pytest.mark.usefixtures("h200_host")
def test_what_is_compiled_ahead_is_found_without_a_gpu(small) -> None:
    args = argparse.Namespace(shapes=["small", "dense"], ranks=[8, 64], tokens=[1, 64, 256])
    found = record_kernels(lambda: bench.launch_all(args, CPU))
    names = {kernel.function for kernel in found}
    assert {"_shrink_kernel", "_expand_kernel", "_expand_act_kernel"} <= names
    modules = {kernel.module for kernel in found if kernel.function == "_shrink_kernel"}
    assert modules == {"kernels.lora_decode", "kernels.fused_moe_lora"}


@pytest.mark.skipif(interpreting(), reason="interpreted functions do not compile")
@pytest.mark.usefixtures("h200_host")
def test_every_form_of_one_launch_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_launch, "TOKENS", (1, 32))
    monkeypatch.setattr(one_launch, "RANKS", (16,))
    found = record_kernels(lambda: one_launch.launch_all(CPU))
    mine = [kernel for kernel in found if kernel.function == "_add_kernel"]
    assert len(mine) > 20
    for kernel in mine[:2]:
        compile_recorded(kernel, NO_TARGET)
