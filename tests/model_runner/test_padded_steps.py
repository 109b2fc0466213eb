"""Steps padded to the sizes of captured graphs answer as unpadded ones do. On a CPU the graphs are
stood in for by running their step at once, over a buffer that held garbage."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import model_runner.execution.runner as runner_side
from adapter_store.ref import AdapterRef
from model_runner.config import EngineConfig
from model_runner.engine import Engine
from model_runner.execution.cuda_graphs import GraphKey, decode_sizes, fit, mixed_sizes
from model_runner.execution.inputs import (
    HostBuffer,
    PageTables,
    StepShape,
    fill_blank,
    fill_decode,
    fill_mixed,
)
from model_runner.execution.runner import ModelRunner
from model_runner.request import Request, SamplingParams
from model_runner.scheduling.batch import ScheduledBatch
from tests.guards import take_out
from tests.model_runner.demo import ADAPTER_DIRS, BASE_DIR


class EagerGraphs:
    """Every size is there; a replay runs the step on the buffer's columns."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.keys: list[GraphKey] = []

    def __contains__(self, key: GraphKey) -> bool:
        return key.size > 0

    def replay(self, key: GraphKey, buffer: HostBuffer) -> tuple[Tensor, Tensor]:
        self.keys.append(key)
        step: Any = self.runner._decode_step if key.is_decode else self.runner._mixed_step
        views = buffer.device_views(buffer.memory.clone())
        return partial(step, shape=buffer.shape)(views)


def answer(padded: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, tuple], EagerGraphs]:
    # Random weights: a trained model's answer may survive one wrong token in its cache.
    config = EngineConfig(
        str(BASE_DIR), load_format="random:5", device="cpu", max_num_seqs=6, max_step_tokens=200,
        max_model_len=512, look_ahead=True,
    )  # fmt: skip
    engine = Engine(config)
    graphs = EagerGraphs(engine.runner)
    if padded:
        take = ModelRunner._ring_buffer

        def soil(runner: ModelRunner, shape: StepShape) -> HostBuffer:
            buffer = take(runner, shape)
            buffer.memory.fill_(0x3F)  # huge integers, floats of 0.7
            return buffer

        monkeypatch.setattr(ModelRunner, "_ring_buffer", soil)
        engine.runner._graphs = graphs  # type: ignore[assignment]
    refs = [AdapterRef(name, str(folder)) for name, folder in ADAPTER_DIRS.items()]
    engine.load_adapters(refs)  # so that the batches are the same in every run
    draw = torch.Generator().manual_seed(3)
    out: dict[str, list[int]] = {}
    for number, length in enumerate((5, 70, 310, 1, 33, 150, 64)):
        ids = tuple(torch.randint(10, 600, (length,), generator=draw).tolist())
        adapter = refs[number % len(refs)] if number % 4 else None
        temperature = 0.8 if number % 2 else 0.0
        sampling = SamplingParams(
            max_tokens=9 + 3 * number,
            temperature=temperature,
            seed=number,
            ignore_eos=True,
            logprobs=1 if number == 4 else None,
        )
        engine.submit(Request(f"r{number}", ids, sampling, adapter))
    steps = 0
    while engine.has_work:
        for news in engine.step():
            assert not news.error, news.error
            out.setdefault(news.request_id, []).extend(news.new_token_ids)
        steps += 1
        assert steps < 2000
    engine.close()
    return {name: tuple(ids) for name, ids in out.items()}, graphs


def test_padded_steps_answer_as_unpadded_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = answer(False, monkeypatch)
    padded, graphs = answer(True, monkeypatch)
    assert [len(plain[f"r{n}"]) for n in range(7)] == [9 + 3 * n for n in range(7)]
    assert padded == plain
    kinds = {(key.is_decode, key.size) for key in graphs.keys}
    assert {size for is_decode, size in kinds if not is_decode} >= {128, 200}, kinds
    assert any(is_decode for is_decode, _ in kinds)


# (function, line, instead) of inputs.py, each of which makes a row of padding harmless.
GUARDS = [
    pytest.param("fill_mixed", "write[:, t:] = -1", "pass", id="keys of a padded chunk"),
    # A token and a few keys each: what garbage would claim does not fit into memory.
    pytest.param("fill_mixed", 'cu_q[n + 1 :], v["seq_lens"][n:] = t, 0',
                 'cu_q[n + 1 :], v["seq_lens"][n:] = t + 1, 8', id="rows of a padded chunk"),
    pytest.param("fill_decode", "places + offset, -1",
                 "places + offset, write[:, :1].copy()", id="keys of a padded decode"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "line", "instead"), GUARDS)
def test_padded_steps_answer_otherwise_without(
    name: str, line: str, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = answer(False, monkeypatch)
    take_out(monkeypatch, runner_side, name, line, instead)
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        padded, _ = answer(True, monkeypatch)
        assert padded == plain


@pytest.mark.parametrize("decode", [True, False])
def test_page_tables_cost_what_the_rows_hold_not_what_the_model_could(decode: bool) -> None:
    """Filling all 8192 columns of a model of 131072 positions took longer than a step."""
    counts = (1, 1) if decode else (1, 3)
    starts, pages = (20, 7), ([5, 6], [9])
    batch = ScheduledBatch(
        0, (1, 2), counts, starts, tuple((7,) * n for n in counts), (-1, -1), (-1, -1),
        (3, 2), (pages,), (None, None),
    )  # fmt: skip
    tables = PageTables(1, 8, 8192, 16)
    buffer = HostBuffer(StepShape(4, 4 if decode else 64, 4, 8192, 1), pinned=False)
    buffer.memory.fill_(0x3F)
    if decode:
        fill_decode(buffer, tables, batch)
    else:
        fill_mixed(buffer, tables, batch, [], [], 9)
    table = buffer.view["page_table0"]
    assert table[:2, :2].tolist() == [[5, 6], [9, 0]]
    assert not decode or not table[2:, :2].any(), "a dummy reads page 0"
    assert (table[:, 2:] == 0x3F3F3F3F).all()


def test_a_size_holds_its_number() -> None:
    for most in (1, 8, 32, 200, 2048, 8192):
        for sizes in (decode_sizes(most), mixed_sizes(most)):
            assert sizes[-1] == most and list(sizes) == sorted(set(sizes))
            assert all(fit(sizes, n) >= n for n in range(1, most + 1))
            assert fit(sizes, most + 1) == 0


def test_a_blank_step_reads_and_writes_nothing() -> None:
    shape = StepShape(4, 64, 4, 8, 2)
    buffer = HostBuffer(shape, pinned=False)
    buffer.memory.fill_(0x3F)
    fill_blank(buffer, False, 9)
    v = buffer.view
    assert (v["write_idx0"] == -1).all() and (v["write_idx1"] == -1).all()
    assert (v["slot_of_token"] == -1).all() and (v["sources"] == -1).all()
    assert not v["cu_q"].any() and not v["seq_lens"].any() and (v["sample_rows"] == 9).all()
