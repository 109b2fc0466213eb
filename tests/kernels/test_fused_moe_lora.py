"""Expert LoRA: against dense deltas in fp64; nobody but its owner feels an adapter."""

import dataclasses
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import kernels.fused_moe_lora as own
from kernels.fused_moe import moe_down, moe_gate_up, random_experts
from kernels.fused_moe_lora import add_lora, random_tables
from kernels.lora_tables import LoraTables
from kernels.worklist import build_worklist
from tests.kernels.mutant import mutant

both = pytest.mark.parametrize("form", ["torch", pytest.param("triton", marks=pytest.mark.interp)])
E, K, IN, OUT = 4, 2, 45, 50
RANKS = [4, 16, 0, 24, 8]  # slot 2 is empty
MISSING = ((1, 3),)  # slot 3 leaves target 1 alone


def tables_of(shared: bool = False, seed: int = 0, device: str = "cpu") -> LoraTables:
    shapes = [(E, IN, OUT), (E, IN, OUT)]
    return random_tables(shapes, RANKS, 24, device, torch.float32, seed, MISSING, shared)


def dense_delta(tables: LoraTables, target: int, slot: int, expert: int) -> Tensor | None:
    """[out, in] in fp64, read value by value from the memory as its contract says."""
    if slot < 0 or slot >= tables.num_slots or expert < 0:
        return None
    a_off, b_off = int(tables.a_off[target, slot]), int(tables.b_off[target, slot])
    rank = int(tables.lora_rank[target, slot])
    if a_off < 0 or b_off < 0 or not rank:
        return None
    a_off += expert * int(tables.a_stride[target, slot])
    b_off += expert * int(tables.b_stride[target, slot])
    a = tables.memory[a_off : a_off + rank * IN].view(rank, IN).double()
    b = tables.memory[b_off : b_off + rank * OUT].view(rank, OUT).double()
    return b.t() @ a


def batch(num_tokens: int, down: bool, seed: int = 1, device: str = "cpu") -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    made = {
        "y": torch.randn(num_tokens * K, OUT, generator=g),
        "x": torch.randn(num_tokens * (K if down else 1), IN, generator=g),
        "ids": torch.rand(num_tokens, E, generator=g).argsort(-1)[:, :K].int(),
        # Base, every slot, and a slot that no table has.
        "slots": torch.arange(num_tokens).remainder(7).sub(1).int(),
        "weights": torch.rand(num_tokens, K, generator=g),
    }
    return {name: x.to(device) for name, x in made.items()}


def run(
    module: ModuleType, tables: LoraTables, target: int, down: bool, b: dict[str, Tensor],
    deterministic: bool = False,
) -> Tensor:  # fmt: skip
    y = b["y"].clone()
    work = build_worklist(b["ids"], b["slots"], E, len(RANKS), 16)
    module.moe_lora(
        y, b["x"], tables, target, b["ids"], b["slots"], work,
        x_rows_per_pair=down, weights=b["weights"] if down else None, deterministic=deterministic,
    )  # fmt: skip
    return y


def deltas_hold(
    module: ModuleType, num_tokens: int, shared: bool = False, deterministic: bool = False,
    device: str = "cpu",
) -> None:  # fmt: skip
    tables = tables_of(shared, device=device)
    for target in (0, 1):
        for down in (False, True):
            b = batch(num_tokens, down, device=device)
            got = run(module, tables, target, down, b, deterministic)
            for pair in range(num_tokens * K):
                slot, expert = int(b["slots"][pair // K]), int(b["ids"].flatten()[pair])
                delta = dense_delta(tables, target, slot, expert)
                if delta is None:
                    assert torch.equal(got[pair], b["y"][pair]), "bits of a row without adapter"
                    continue
                want = delta @ b["x"][pair if down else pair // K].double()
                want *= float(b["weights"].flatten()[pair]) if down else 1.0
                want += b["y"][pair].double()
                assert torch.allclose(got[pair].double(), want, rtol=1e-5, atol=1e-5), pair


@both
@pytest.mark.parametrize("shared", [False, True])
def test_deltas_are_their_definition(form: str, shared: bool) -> None:
    for num_tokens in (1, 9) if form == "triton" else (1, 9, 200, 900):
        deltas_hold(own, num_tokens, shared)


@pytest.mark.interp
def test_the_fixed_order_gives_the_same() -> None:
    deltas_hold(own, 9, deterministic=True)


@pytest.mark.interp
@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("* num_slots + slot", "* num_slots + slot * 0", id="another_slot"),
        pytest.param("expert * tl.multiple_of(tl.load(a_stride_ptr + at), 8)", "expert",
                     id="expert_stride"),
    ],
)  # fmt: skip
def test_deltas_with_a_guard_reversed_fail(old: str, new: str, tmp_path: Path) -> None:
    bad = mutant("fused_moe_lora", {old: new}, tmp_path)
    with pytest.raises(AssertionError):
        deltas_hold(bad, 9)


def poison(tables: LoraTables, keep: set[int], value: float) -> LoraTables:
    """The same tables with every number that is not a factor of a slot in `keep` replaced."""
    memory = torch.full_like(tables.memory, value)
    for target in range(tables.a_off.shape[0]):
        for slot in keep:
            rank = int(tables.lora_rank[target, slot])
            for off, width in ((tables.a_off, IN), (tables.b_off, OUT)):
                start = int(off[target, slot])
                if start >= 0:
                    end = start + E * rank * width
                    memory[start:end] = tables.memory[start:end]
    return dataclasses.replace(tables, memory=memory)


@both
@pytest.mark.parametrize("value", [float("nan"), 1e4, -1e4])
def test_nobody_feels_another_slot(form: str, value: float) -> None:
    tables = tables_of()
    for slot in (1,) if form == "triton" else (0, 1, 3):
        for down in (False, True):
            b = batch(4, down)
            b["slots"] = torch.tensor([slot, -1, slot, -1]).int()
            want = run(own, tables, 0, down, b)
            assert torch.isfinite(want).all()
            assert torch.equal(run(own, poison(tables, {slot}, value), 0, down, b), want)


@pytest.mark.interp
def test_poison_is_felt_when_the_guard_is_out(tmp_path: Path) -> None:
    bad = mutant("fused_moe_lora", {"r_live = r < rank": "r_live = r < max_rank"}, tmp_path)
    tables = poison(tables_of(), {0}, float("nan"))
    b = batch(2, False)
    b["slots"] = torch.zeros(2, dtype=torch.int32)
    assert torch.isfinite(run(own, tables, 0, False, b)).all()
    assert not torch.isfinite(run(bad, tables, 0, False, b)).all()


@both
def test_a_poisoned_token_stays_alone(form: str) -> None:
    tables, b = tables_of(), batch(9, False)
    want = run(own, tables, 0, False, b)
    b["x"][2] = float("nan")
    got = run(own, tables, 0, False, b)
    mine = torch.arange(9 * K) // K == 2
    assert torch.isnan(got[mine]).any()
    assert torch.equal(got[~mine], want[~mine])


@both
def test_company_changes_nothing(form: str) -> None:
    """A token alone, beside others, and in another order: within rounding; base rows to the bit."""
    tables, b = tables_of(), batch(13, False)
    together = run(own, tables, 0, False, b)
    order = torch.arange(12, -1, -1)
    pairs = (order[:, None] * K + torch.arange(K)).flatten()
    turned = {"y": b["y"][pairs]} | {k: b[k][order] for k in ("x", "ids", "slots", "weights")}
    torch.testing.assert_close(
        run(own, tables, 0, False, turned)[pairs.argsort()], together, rtol=1e-5, atol=1e-5
    )
    for token in (1,) if form == "triton" else (1, 4):
        alone = {k: b[k][token : token + 1] for k in ("x", "ids", "slots", "weights")}
        alone["y"] = b["y"][token * K : (token + 1) * K]
        got = run(own, tables, 0, False, alone)
        torch.testing.assert_close(got, together[token * K : (token + 1) * K], rtol=1e-5, atol=1e-5)


@both
@pytest.mark.parametrize("expert", [-1, E])
def test_an_expert_of_elsewhere_takes_nobody_elses_rows(form: str, expert: int) -> None:
    """-1: expert parallelism. E: a shared expert's id, which the worklist leaves out."""
    tables, b = tables_of(), batch(5, True)
    b["slots"] = torch.ones(5, dtype=torch.int32)
    want = run(own, tables, 0, True, b)
    b["ids"][2, 1] = expert
    got = run(own, tables, 0, True, b)
    row = 2 * K + 1
    assert torch.equal(got[row], b["y"][row])
    others = torch.arange(5 * K) != row
    torch.testing.assert_close(got[others], want[others], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num_tokens", [5, 200])
def test_the_reference_leaves_out_the_same_experts_without_a_worklist(num_tokens: int) -> None:
    tables, b = tables_of(), batch(num_tokens, True)
    b["ids"][2] = torch.tensor([E, E + 1])
    want = run(own, tables, 0, True, b)
    got = b["y"].clone()
    own.moe_lora_reference(
        got, b["x"], tables, 0, b["ids"], b["slots"], None, True, b["weights"], num_experts=E
    )
    assert torch.equal(got[2 * K : 3 * K], b["y"][2 * K : 3 * K])
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@both
def test_router_weight_once_over_base_and_delta(form: str) -> None:
    """Both halves of a MoE layer's down product: w · (W h + B A h)."""
    tables, b = tables_of(), batch(6, True)
    experts = random_experts(E, OUT, IN, "bias", "cpu", torch.float32, 3)
    assert experts.weight is not None and experts.bias is not None
    work = build_worklist(b["ids"], None, E, 0, 16)
    b["y"] = moe_down(b["x"], experts, b["ids"], work, b["weights"])
    got = run(own, tables, 0, True, b).double()
    for pair in range(6 * K):
        expert = int(b["ids"].flatten()[pair])
        weight = experts.weight[expert].double()
        delta = dense_delta(tables, 0, int(b["slots"][pair // K]), expert)
        weight = weight if delta is None else weight + delta
        want = weight @ b["x"][pair].double() + experts.bias[expert].double()
        want *= float(b["weights"].flatten()[pair])
        torch.testing.assert_close(got[pair], want, rtol=1e-5, atol=1e-5)


@both
def test_base_rows_are_those_of_a_batch_without_adapters(form: str) -> None:
    tables, b = tables_of(), batch(8, False)
    experts = random_experts(E, OUT, IN, "dense", "cpu", torch.float32, 3)
    work = build_worklist(b["ids"], None, E, 0, 16)
    b["y"] = moe_gate_up(b["x"], experts, b["ids"], work)
    mixed = run(own, tables, 0, False, b)
    base = b | {"slots": torch.full((8,), -1, dtype=torch.int32)}
    bare = run(own, tables, 0, False, base)
    assert torch.equal(bare, b["y"])
    rows = (b["slots"] < 0).repeat_interleave(K)
    assert rows.any() and torch.equal(mixed[rows], bare[rows])
    assert not torch.equal(mixed, bare)


@both
def test_a_reloaded_slot_is_read_anew(form: str) -> None:
    """The tables are written in place between steps: nothing of them may be remembered."""
    tables, b = tables_of(), batch(5, False)
    b["slots"] = torch.zeros(5, dtype=torch.int32)
    first = run(own, tables, 0, False, b)
    for name in ("a_off", "b_off", "a_stride", "b_stride", "lora_rank"):
        getattr(tables, name)[:, 0] = getattr(tables, name)[:, 1]
    second = run(own, tables, 0, False, b)
    b["slots"][:] = 1
    assert not torch.equal(first, second)
    assert torch.equal(second, run(own, tables, 0, False, b))
    tables.a_off[:, 1] = -1
    assert torch.equal(run(own, tables, 0, False, b), b["y"])


@both
def test_no_rows_is_no_work(form: str) -> None:
    b = batch(0, False)
    assert run(own, tables_of(), 0, False, b).shape == (0, OUT)


@pytest.mark.interp
def test_a_rank_above_the_tables_limit_writes_nowhere_else() -> None:
    """Such an adapter is refused at load; were it there, it would be cut."""
    tables, b = tables_of(), batch(5, False)
    b["slots"] = torch.full((5,), 1, dtype=torch.int32)
    cut = dataclasses.replace(tables, max_rank=8)
    eight = tables.lora_rank.clamp(max=8)
    assert torch.equal(
        run(own, cut, 0, False, b),
        run(own, dataclasses.replace(cut, lora_rank=eight), 0, False, b),
    )


def test_another_dtype_than_the_adapters_is_an_error() -> None:
    tables, x = tables_of(), torch.zeros(1, IN, dtype=torch.bfloat16)
    ids = torch.zeros(1, 1, dtype=torch.int32)
    work = build_worklist(ids, ids[0], E, len(RANKS), 16)
    with pytest.raises(AssertionError, match="float32"):
        add_lora((torch.zeros(1, OUT),), x, tables, (0,), work, 1, None, False)


@pytest.mark.parametrize("name", ["_shrink_kernel", "_expand_kernel"])
def test_length_and_target_do_not_compile_anew(name: str) -> None:
    kernel = getattr(own, name)
    free = {"target_0", "target_1", "target_2", "num_segments", "num_rows"} & set(kernel.arg_names)
    assert {"target_0", "num_rows"} <= free <= set(kernel.do_not_specialize)


def sums_repeat(module: ModuleType, deterministic: bool) -> bool:
    """Whether 200 calls give the same bits, in fp32, with 16 parts of a sum of 4096 in flight."""
    tables = random_tables([(E, 4096, 96)], [32, 16], 32, "cuda", torch.float32, 0)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(64, 4096, generator=g).cuda()
    ids = torch.rand(64, E, generator=g).argsort(-1)[:, :K].int().cuda()
    slots = torch.arange(64).remainder(2).int().cuda()
    work = build_worklist(ids, slots, E, 2, 16)
    first = None
    for _ in range(200):
        y = torch.zeros(64 * K, 96, device="cuda")
        module.moe_lora(y, x, tables, 0, ids, slots, work, False, None, deterministic)
        first = y if first is None else first
        if not torch.equal(y, first):
            return False
    return True


@pytest.mark.gpu
def test_the_fixed_order_repeats_every_bit(tmp_path: Path) -> None:
    assert sums_repeat(own, True)
    line = "atomic = split_k > 1 and not deterministic"
    assert not sums_repeat(mutant("fused_moe_lora", {line: "atomic = split_k > 1"}, tmp_path), True)
