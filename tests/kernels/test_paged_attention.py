"""Paged attention: against plain softmax, alone and in company, and never a page of another row.

The same promises are tested of the torch form here and, marked `interp`, of the Triton kernels.
Not here: its guards taken out (test_paged_attention_guards.py).
"""

import math

import pytest
import torch
from torch import Tensor

import kernels.paged_attention_torch as torch_side
import kernels.paged_attention_triton as triton_side
from kernels.op import Inputs
from kernels.paged_attention import Rows, make_case, paged_attention

NAN = float("nan")
MIXED: Rows = ((1, 40), (7, 7), (0, 0), (12, 45), (1, 1), (3, 64))
DECODE: Rows = ((1, 5), (1, 33), (0, 0), (1, 200), (1, 16))
SHAPES = [
    pytest.param(rows, window, sinks, id=f"{name}-w{window}{'-sinks' if sinks else ''}")
    for name, rows in (("decode", DECODE), ("mixed", MIXED))
    for window, sinks in (
        (0, False),
        (0, True),
        (6, True),
        (17, False),
        (1, False),
        (-6, True),
        (-17, False),
    )
]
# Every promise is kept by both forms; which one runs is decided by TRITON_INTERPRET.
both = pytest.mark.parametrize("form", ["torch", pytest.param("triton", marks=pytest.mark.interp)])


def batch(
    rows: Rows,
    *,
    window: int = 0,
    sinks: bool = False,
    poison: float = NAN,
    max_len: int = 0,
    seed: int = 0,
) -> Inputs:
    """Five query heads over one kv head would hide a head mixed up: six over two, D = 16.

    window  below 0: in chunks of that many
    """
    case = make_case(
        "test",
        rows,
        6,
        2,
        16,
        window=abs(window),
        chunked=window < 0,
        sinks=sinks,
        spare=2,
        poison=poison,
        max_len=max_len,
    )
    return case.make("cpu", torch.float32, seed)


def plain(inputs: Inputs) -> Tensor:
    """The definition, token by token and head by head, in fp64."""
    q, k_cache, v_cache = inputs["q"], inputs["k_cache"], inputs["v_cache"]
    page, num_kv, dim = k_cache.shape[1:]
    per_kv = q.shape[1] // num_kv
    out = torch.zeros(q.shape, dtype=torch.float64)
    bounds = inputs["cu_q"].tolist()
    for row, length in enumerate(inputs["seq_lens"].tolist()):
        for token in range(bounds[row], bounds[row + 1]):
            last = length - bounds[row + 1] + token
            if last < 0:
                continue  # a padding row
            window = inputs["window"]
            first = max(0, last - window + 1) if window else 0
            if inputs["chunked"]:
                first = last - last % window
            places = [
                (int(inputs["page_table"][row, pos // page]), pos % page)
                for pos in range(first, last + 1)
            ]
            for head in range(q.shape[1]):
                keys = torch.stack([k_cache[p, c, head // per_kv] for p, c in places]).double()
                values = torch.stack([v_cache[p, c, head // per_kv] for p, c in places]).double()
                weights = (keys @ q[token, head].double() * inputs["scale"]).exp()
                total = weights.sum()
                if inputs["sinks"] is not None:
                    total = total + math.exp(float(inputs["sinks"][head]))
                out[token, head] = weights @ values / total
    return out


def owned(inputs: Inputs) -> int:
    return int(inputs["cu_q"][-1])


@both
@pytest.mark.parametrize(("rows", "window", "sinks"), SHAPES)
def test_equals_the_definition(form: str, rows: Rows, window: int, sinks: bool) -> None:
    inputs = batch(rows, window=window, sinks=sinks)
    got, want = paged_attention(**inputs), plain(inputs)
    assert got.shape == inputs["q"].shape and got.is_contiguous()
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=2e-6)
    spare = got[owned(inputs) :]
    assert spare.shape[0] == 2 and torch.equal(spare, torch.zeros_like(spare))


@both
@pytest.mark.parametrize("window", [0, 1, 16, 17, -16, -17])
def test_lengths_at_every_edge(form: str, window: int) -> None:
    """One key more or less than a page, a block, a split: as decode rows and as two queries."""
    edges = (1, 15, 16, 17, 63, 64, 65, 128, 129, 257)
    for rows in ([(1, n) for n in edges], [(min(2, n), n) for n in edges]):
        inputs = batch(rows, window=window, max_len=1024)
        want = torch_side.paged_attention_reference(**inputs)
        torch.testing.assert_close(paged_attention(**inputs), want, rtol=1e-4, atol=2e-6)
        assert torch.isfinite(want).all()


@both
@pytest.mark.parametrize(("rows", "window", "sinks"), [SHAPES[3], SHAPES[5], SHAPES[7]])
def test_what_a_row_may_not_see_changes_nothing(
    form: str, rows: Rows, window: int, sinks: bool
) -> None:
    clean = paged_attention(**batch(rows, window=window, sinks=sinks, poison=0.0))
    for poison in (NAN, 1e4) if form == "triton" else (NAN, 1e4, -1e4, float("inf")):
        dirty = paged_attention(**batch(rows, window=window, sinks=sinks, poison=poison))
        assert torch.equal(dirty, clean), poison


@both
def test_a_padding_row_may_have_a_query_but_no_keys(form: str) -> None:
    """As a captured graph pads: one query for each row, lengths of zero, any page numbers."""
    inputs = batch(((1, 30), (1, 20), (1, 0), (1, 0)), max_len=512)
    want = plain(inputs)
    got = paged_attention(**inputs)
    torch.testing.assert_close(got[:2].double(), want[:2], rtol=1e-4, atol=2e-6)
    assert torch.equal(got[2:], torch.zeros_like(got[2:]))


@both
@pytest.mark.parametrize("rows", [((1, 40),), ((1, 40), (1, 9))])
def test_max_q_is_a_bound(form: str, rows: Rows) -> None:
    inputs = batch(rows)
    want = paged_attention(**inputs)
    assert torch.equal(paged_attention(**{**inputs, "max_q": 4}), want)


@both
def test_company_changes_no_bit_of_a_longer_row(form: str) -> None:
    rows = ((20, 45), (9, 9))
    together = paged_attention(**batch(rows))
    inputs = batch(rows)
    inputs["page_table"][1] = 0  # a page of NaN
    inputs["seq_lens"][1] = 16
    beside_nan = paged_attention(**inputs)
    assert torch.equal(together[:20], beside_nan[:20])
    assert beside_nan[20:29].isnan().any()  # the neighbour did read it


def test_company_changes_a_decode_row_by_rounding_alone() -> None:
    """Rows are padded to the longest: another order of summation, nothing more."""
    inputs = batch(DECODE)
    together = paged_attention(**inputs)
    for row in (0, 1, 3, 4):
        token = int(inputs["cu_q"][row])
        alone = paged_attention(
            **{
                **inputs,
                "q": inputs["q"][token : token + 1],
                "page_table": inputs["page_table"][row : row + 1],
                "seq_lens": inputs["seq_lens"][row : row + 1],
                "cu_q": torch.tensor([0, 1], dtype=torch.int32),
            }
        )
        torch.testing.assert_close(together[token], alone[0], rtol=1e-6, atol=1e-6)


@pytest.mark.interp
def test_the_kernel_gives_decode_rows_the_same_bits_in_any_company() -> None:
    """Splits follow a row's own length: neighbours of another length or kind change no bit."""
    inputs = batch(((1, 200), (1, 70), (1, 5)), max_len=1024)
    want = paged_attention(**inputs)[0]
    inputs["seq_lens"][1:] = torch.tensor([64, 0])
    assert torch.equal(paged_attention(**inputs)[0], want)
    inputs["max_q"] = 5  # now a mixed batch: the other rows are one prefill chunk
    inputs["cu_q"] = torch.tensor([0, 1, 3, 3], dtype=torch.int32)
    assert torch.equal(paged_attention(**inputs)[0], want)


@pytest.mark.parametrize(
    "form", ["torch", pytest.param("triton", marks=[pytest.mark.interp, pytest.mark.slow])]
)
def test_chunks_and_single_tokens_give_what_one_prefill_gives(form: str) -> None:
    whole = batch(((23, 23),), window=11, sinks=True)
    want = paged_attention(**whole)[:23]
    for size in (1, 7):
        for first in range(0, 23, size):
            last = min(23, first + size)
            part = {
                **whole,
                "q": whole["q"][first:last],
                "seq_lens": torch.tensor([last], dtype=torch.int32),
                "cu_q": torch.tensor([0, last - first], dtype=torch.int32),
                "max_q": last - first,
            }
            torch.testing.assert_close(
                paged_attention(**part), want[first:last], rtol=1e-5, atol=1e-6
            )


def test_the_reference_bounds_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long chunk is cut into parts of queries, and the parts give the same."""
    for window in (0, 9):
        inputs = batch(((50, 75), (1, 3)), window=window, sinks=True)
        monkeypatch.setattr(torch_side, "_REFERENCE_SCORES", 1 << 24)
        want = paged_attention(**inputs)
        monkeypatch.setattr(torch_side, "_REFERENCE_SCORES", 6 * 75 * 7)
        torch.testing.assert_close(paged_attention(**inputs), want, rtol=1e-6, atol=1e-6)


def test_splits_are_bounded_and_fill_the_chip() -> None:
    choose = triton_side.choose_num_splits
    for num_rows in (1, 3, 8, 64, 512):
        for num_kv in (1, 4, 8):
            for span in (1, 128, 129, 4096, 131072):
                splits = choose(num_rows, num_kv, span, 132)
                assert 1 <= splits <= triton_side.MAX_SPLITS
                assert splits & (splits - 1) == 0
                assert splits == 1 or span > splits * triton_side.DECODE_N
    assert choose(1, 8, 131072, 132) * 8 >= 132 * 2
    assert choose(64, 8, 2048, 132) == 1  # full without splits
    assert choose(64, 8, 131072, 132) == 8  # but a long row may be among them
    assert choose(1, 8, 128, 132) == 1  # a window: no second launch


@pytest.mark.gpu
def test_a_captured_decode_follows_lengths_and_pages() -> None:
    """Captured once with the longest length; replayed over other rows, it equals the eager call."""
    first = make_case("a", ((1, 990), (1, 3), (1, 64), (1, 0)), 8, 2, 64, max_len=4096)
    second = make_case("b", ((1, 17), (1, 880), (1, 0), (1, 129)), 8, 2, 64, max_len=4096)
    held = first.make("cuda", torch.bfloat16, 0)
    other = second.make("cuda", torch.bfloat16, 1)
    paged_attention(**held)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(**held)
    for inputs in (held, other):
        want = paged_attention(**{**inputs, "max_len": 4096})
        pages = inputs["page_table"].clone()
        assert inputs["k_cache"].shape[0] <= held["k_cache"].shape[0]
        for name in ("q", "seq_lens", "cu_q"):
            held[name].copy_(inputs[name])
        held["page_table"].zero_()[:, : pages.shape[1]].copy_(pages)
        for name in ("k_cache", "v_cache"):
            held[name][: inputs[name].shape[0]].copy_(inputs[name])
        graph.replay()
        assert torch.equal(out, want)


@pytest.mark.gpu
def test_one_compilation_serves_every_length() -> None:
    def compiled() -> int:
        functions = (
            triton_side.decode_kernel,
            triton_side.combine_kernel,
            triton_side.prefill_kernel,
        )
        return sum(len(caches[0]) for f in functions for caches in f.device_caches.values())

    def run(rows: Rows) -> None:
        paged_attention(**make_case("x", rows, 8, 2, 64).make("cuda", torch.bfloat16, 0))

    run(((1, 40),) * 2)
    run(((1, 4000),) * 2)
    run(((3, 40), (1, 500)))
    before = compiled()
    assert before > 0
    for num_rows, length in ((1, 1), (3, 33), (16, 1000), (7, 2048)):
        run(((1, length),) * num_rows)
        run(((1, length), *((5, length + 5),) * num_rows))
    assert compiled() == before
