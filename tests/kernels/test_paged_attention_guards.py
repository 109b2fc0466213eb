"""Poison where a row may not look; each guard of paged attention and of its cache taken out once.

Poison is NaN, then 1e4 and -1e4: a mask by selection can swallow NaN, a weight of zero cannot, and
a large number is felt by a sum that NaN was cut out of. Not here: what attention computes
(test_paged_attention.py).
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kernels.paged_attention as attention
import kernels.paged_attention_torch as torch_side
import kernels.rope_kv as kv_side
from kernels.op import Inputs
from kernels.paged_attention import Rows, make_case, paged_attention
from tests.guards import take_out
from tests.kernels.mutant import mutant
from tests.kernels.test_paged_attention import plain

NAN = float("nan")
POISON = [NAN, 1e4, -1e4]
LARGE = [NAN, 1e4]
INTERP = pytest.param("triton", marks=[pytest.mark.interp, pytest.mark.slow])
GPU = pytest.param("gpu", marks=pytest.mark.gpu)
every = pytest.mark.parametrize("form", ["torch", INTERP, GPU])
compiled = pytest.mark.parametrize("form", [INTERP, GPU])
DEVICES = {"torch": "cpu", "triton": "cpu", "gpu": "cuda"}

DECODE: Rows = ((1, 300), (1, 70), (0, 0), (1, 3), (1, 0))
SPLIT: Rows = ((1, 300), (1, 70))  # so few that their keys are split
CHUNKS: Rows = ((1, 40), (20, 45), (3, 0), (5, 61))
WINDOWED: Rows = ((1, 150), (1, 30), (24, 60), (2, 9))


def batch(rows: Rows, window: int, poison: float, device: str = "cpu") -> Inputs:
    """Eight tokens of no row at the end: a guard that is out writes there, not past the tensor.

    window  below 0: in chunks of that many
    """
    seen = {"window": abs(window), "chunked": window < 0}
    case = make_case("guards", rows, 6, 2, 16, **seen, spare=8, poison=poison, max_len=1024)
    return case.make(device, torch.float32, 0)


def rows_hold(rows: Rows, window: int, poison: float, device: str = "cpu") -> None:
    """Everything that no row may see is poison: the batch gives what its definition gives."""
    inputs = batch(rows, window, poison, device)
    got = paged_attention(**inputs).cpu()
    want = plain({k: x.cpu() if isinstance(x, Tensor) else x for k, x in inputs.items()})
    # 2e-4: the largest poison leaves that much of its rounding in no correct sum, 1e4 far more.
    assert torch.allclose(got.double(), want, rtol=1e-4, atol=2e-4)


def others_hold(row: int, poison: float, device: str = "cpu") -> None:
    """The pages of all other rows are poison, and the places of the table past the row's own end
    name them: this row's answer keeps every bit."""
    rows: Rows = ((1, 300), (1, 70), (7, 40), (1, 33))
    inputs = batch(rows, 0, 0.0, device)
    mine = paged_attention(**inputs)
    foreign = _spoil_others(inputs, row, poison)
    assert foreign > 0
    got = paged_attention(**inputs)
    bounds = inputs["cu_q"].tolist()
    first, last = bounds[row], bounds[row + 1]
    assert torch.isfinite(mine[first:last]).all()
    assert torch.equal(got[first:last], mine[first:last])
    assert not torch.equal(got, mine), "the others did read their own pages"


def _spoil_others(inputs: Inputs, row: int, poison: float) -> int:
    table, page = inputs["page_table"], inputs["k_cache"].shape[1]
    num_own = -(-int(inputs["seq_lens"][row]) // page)
    own = set(table[row, :num_own].tolist())
    others = [p for p in range(inputs["k_cache"].shape[0]) if p not in own]
    inputs["k_cache"][others] = poison
    inputs["v_cache"][others] = poison
    rest = torch.tensor(others).repeat(table.shape[1])[: table.shape[1] - num_own]
    table[row, num_own:] = rest.to(table)
    return len(others)


@every
@pytest.mark.parametrize("poison", POISON)
def test_nothing_unseen_is_felt(form: str, poison: float) -> None:
    shapes = ((DECODE, 0), (SPLIT, 0), (CHUNKS, 0), (WINDOWED, 6), (WINDOWED, 17))
    shapes += ((WINDOWED, -6), (WINDOWED, -17))
    for rows, window in shapes:
        rows_hold(rows, window, poison, DEVICES[form])


@every
@pytest.mark.parametrize("poison", POISON)
def test_pages_of_other_rows_are_not_felt(form: str, poison: float) -> None:
    for row in (1, 2) if form == "triton" else range(4):
        others_hold(row, poison, DEVICES[form])


# (function, line, instead, rows, window, poisons that find it). A weight of zero times 1e4 is zero,
# so a place that is read but masked in the scores shows with NaN alone.
TORCH_GUARDS = [
    pytest.param("_attend_single", "place.gather(1, torch.minimum(at, last))",
                 "place.gather(1, at.clamp(max=place.shape[1] - 1))", DECODE, 0, [NAN],
                 id="keys past the end"),
    pytest.param("_attend_single", 'scores.masked_fill_(past, float("-inf"))', "scores",
                 DECODE, 0, POISON, id="scores past the end"),
    pytest.param("_attend_single", "first_key(length - 1, window, chunked)", "0",
                 WINDOWED, 6, POISON, id="window of a decode"),
    pytest.param("_attend_row", "hidden |= pos[begin:end][None, :] < at // window * window", "pass",
                 WINDOWED, -6, POISON, id="chunk of a query"),
    pytest.param("_attend_row", "hidden |= ahead <= -window", "pass", WINDOWED, 6, POISON,
                 id="window within a chunk"),
    pytest.param("_attend_row", "hidden = ahead > 0", "hidden = ahead > 9999", CHUNKS, 0, POISON,
                 id="keys of later queries"),
    pytest.param("paged_attention_reference", "num_queries == 1 and length > 0",
                 "num_queries == 1", DECODE, 0, POISON, id="padded decode"),
    pytest.param("paged_attention_reference", "num_queries > 1 and length > 0",
                 "num_queries > 1", CHUNKS, 0, POISON, id="padded chunk"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "line", "instead", "rows", "window", "poisons"), TORCH_GUARDS)
def test_the_torch_form_fails_without(
    name: str, line: str, instead: str, rows: Rows, window: int, poisons: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    owner = attention if hasattr(attention, name) else torch_side  # whoever calls it has its name
    for poison in poisons:
        rows_hold(rows, window, poison)
        with monkeypatch.context() as patch:
            take_out(patch, owner, name, line, instead)
            # A padded row without its guard divides by its zero keys: that too is a failure.
            with pytest.raises((AssertionError, RuntimeError, ArithmeticError)):
                rows_hold(rows, window, poison)


# (line, instead, rows, window, poisons that find it), of paged_attention_triton.py.
TRITON_GUARDS = [
    pytest.param("    live = pos < end\n", "    live = pos >= 0\n", DECODE, 0, [NAN],
                 id="keys past the end"),
    pytest.param("    live = pos < end\n", "    live = pos >= 0\n", CHUNKS, 0, [NAN],
                 id="keys past a chunk's end"),
    pytest.param("mask=live[:, None] & (dim < D)[None, :], other=0.0\n    )  # [N, BLOCK_D]",
                 "mask=(dim < D)[None, :], other=0.0\n    )  # [N, BLOCK_D]", DECODE, 0, [NAN],
                 id="values past the end"),
    pytest.param('    scores = tl.where(seen, scores, float("-inf"))\n', "", DECODE, 0, POISON,
                 id="scores past the end"),
    pytest.param("_first_key(seq_len - 1, WINDOW, CHUNKED)", "0",
                 WINDOWED, 6, LARGE, id="window of a decode"),
    pytest.param("            seen &= ahead > -WINDOW\n", "            pass\n", WINDOWED, 6,
                 LARGE, id="window within a chunk"),
    pytest.param("seen &= pos[None, :] >= (at // WINDOW * WINDOW)[:, None]", "pass", WINDOWED, -6,
                 LARGE, id="chunk of a query"),
    pytest.param("_first_key(seq_len - num_queries + skip, WINDOW, CHUNKED)", "0", WINDOWED, 6,
                 [NAN], id="keys before a chunk's window"),
    pytest.param("seen = (ahead <= 0) & (pos < end)[None, :]", "seen = (pos < end)[None, :]",
                 CHUNKS, 0, LARGE, id="keys of later queries"),
    pytest.param("(num_queries == 1) & (seq_len <= 0)", "(num_queries == 1) & (seq_len < 0)",
                 DECODE, 0, LARGE, id="padded decode"),
    pytest.param("| (skip >= num_queries) | (seq_len <= 0)", "| (skip >= num_queries)",
                 CHUNKS, 0, LARGE, id="padded chunk"),
    pytest.param("range(num_owned + row, num_tokens, num_rows)",
                 "range(num_tokens, num_tokens, num_rows)", DECODE, 0, POISON,
                 id="tokens of no row"),
    pytest.param("mine = (query < num_queries) & (head < per_kv)", "mine = head < per_kv",
                 CHUNKS, 0, LARGE, id="queries of the next row"),
    pytest.param("used = split < tl.cdiv(num_keys, size)", "used = split < num_splits",
                 SPLIT, 0, LARGE, id="splits that nobody wrote"),
]  # fmt: skip


def _spoiled(empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def make(*args: int, **options: torch.dtype) -> Tensor:
        fresh = empty(*args, **options)
        return fresh.fill_(NAN) if fresh.is_floating_point() else fresh

    return make


def _put_in(patch: pytest.MonkeyPatch, line: str, instead: str, folder: Path) -> None:
    changed = mutant("paged_attention_triton", {line: instead}, folder)
    patch.setattr(attention, "decode", changed.decode)
    patch.setattr(attention, "prefill", changed.prefill)


@compiled
@pytest.mark.parametrize(("line", "instead", "rows", "window", "poisons"), TRITON_GUARDS)
def test_the_kernels_fail_without(
    form: str, line: str, instead: str, rows: Rows, window: int, poisons: list[float],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # Memory that nobody wrote holds NaN here, as it may on a GPU.
    monkeypatch.setattr(torch, "empty", _spoiled(torch.empty))
    rows_hold(rows, window, NAN, DEVICES[form])
    for poison in poisons:
        with monkeypatch.context() as patch:
            _put_in(patch, line, instead, tmp_path)
            with pytest.raises(AssertionError):
                rows_hold(rows, window, poison, DEVICES[form])


@every
def test_pages_of_others_are_felt_when_the_guard_is_out(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form != "torch":
        _put_in(monkeypatch, "    live = pos < end\n", "    live = pos >= 0\n", tmp_path)
    else:
        guard = "place.gather(1, torch.minimum(at, last))"
        instead = "place.gather(1, at.clamp(max=place.shape[1] - 1))"
        take_out(monkeypatch, torch_side, "_attend_single", guard, instead)
    with pytest.raises(AssertionError):
        others_hold(1, NAN, DEVICES[form])


def padding_writes_nowhere(poison: float, device: str) -> None:
    """Tokens of index -1 bring poison: no place of the cache changes but the one that was named.

    The cache is the inside of a larger tensor, so that a write before its first place is seen.
    """
    num_heads, dim, page = 2, 8, 4
    whole = torch.zeros(2, 5, page, num_heads, dim, device=device)  # [k and v, P + 2, C, G, D]
    k_cache, v_cache = whole[0, 1:4], whole[1, 1:4]  # [P, C, G, D] twice
    k = torch.full((3, num_heads, dim), poison, device=device)  # [T, G, D]
    v = torch.full((3, num_heads, dim), poison, device=device)  # [T, G, D]
    k[1], v[1] = 1.0, 2.0
    still = torch.tensor([[1.0, 0.0]]).repeat_interleave(dim // 2, 1)  # [1, D]: cos, then sin
    positions, write_idx = torch.zeros(3, dtype=torch.int64), torch.tensor([-1, 6, -1])
    still, positions, write_idx = (x.to(device) for x in (still, positions, write_idx))
    kv_side.rope_kv_write(k.clone(), k, v, still, positions, k_cache, v_cache, write_idx)
    want: Tensor = torch.zeros_like(whole)
    want[0, 2, 2], want[1, 2, 2] = 1.0, 2.0  # place 6 of pages of 4: the second page
    assert torch.equal(whole, want)


@every
@pytest.mark.parametrize("poison", POISON)
def test_padding_writes_nowhere(form: str, poison: float) -> None:
    padding_writes_nowhere(poison, DEVICES[form])


@every
@pytest.mark.parametrize("poison", POISON)
def test_padding_writes_somewhere_without_its_guard(
    form: str, poison: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form != "torch":
        bad = mutant("rope_kv", {"    elif place >= 0:": "    elif place >= -1:"}, tmp_path)
        monkeypatch.setattr(kv_side, "rope_kv_write", bad.rope_kv_write)
        with pytest.raises(AssertionError):
            padding_writes_nowhere(poison, DEVICES[form])
        return
    line = "kept = (write_idx >= 0).nonzero().squeeze(1)"
    take_out(monkeypatch, kv_side, "rope_kv_write_reference", line, line.replace(">= 0", ">= -1"))
    with pytest.raises((AssertionError, IndexError)):  # torch itself refuses the index
        padding_writes_nowhere(poison, DEVICES[form])
