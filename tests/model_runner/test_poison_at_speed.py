"""Poison on a GPU, with look-ahead and whole-step graphs: the demo's answers stay what they are
while all that nobody owns is spoiled before each step; then each guard is taken out once.

Not here: the same on a CPU, guard by guard (test_poison.py), the kernels' own (tests/kernels), the
guard of base rows (test_at_speed.py compares their bits: a whole answer need not turn).
"""

from pathlib import Path
from typing import Any

import pytest

import kernels.paged_attention
import model_runner.execution.runner as runner_side
from adapter_store.ref import AdapterRef
from model_runner.config import EngineConfig
from model_runner.engine import Engine
from model_runner.execution.inputs import PageTables
from model_runner.request import Request, SamplingParams
from model_runner.tokenizer import Tokenizer
from tests.guards import take_out
from tests.kernels.mutant import mutant
from tests.model_runner.demo import ADAPTER_DIRS, ANSWERS, BASE_DIR, QUESTIONS, chat
from tests.model_runner.test_poison import an_adapters_step_leaves_no_slots_behind, spoil

pytestmark = pytest.mark.usefixtures("both_paths")
NAN = float("nan")
DEMO_REFS = {name: AdapterRef(name, str(folder)) for name, folder in ADAPTER_DIRS.items()}


def answers_hold(poison: float, device: str = "cuda", **fields: Any) -> None:
    """Two slots for three tenants and few pages; what nobody owns is spoiled before each step."""
    tokenizer = Tokenizer(BASE_DIR)
    defaults = {
        "device": device, "max_model_len": 128, "page_tokens": 4, "kv_bytes": 40 << 12,
        "lora_bytes": 8 << 20, "max_loras": 2, "prefix_cache": False, "max_step_tokens": 64,
        "max_num_seqs": 16,
    }  # fmt: skip
    engine = Engine(EngineConfig(str(BASE_DIR), **(defaults | fields)))
    step = engine.step

    def spoiled_step() -> list:
        spoil(engine, poison)
        return step()

    engine.step = spoiled_step  # type: ignore[method-assign]
    wanted = {
        f"{name}-{i}": ANSWERS[name][i].strip() for name in ("base", *DEMO_REFS) for i in range(6)
    }
    sampling = SamplingParams(temperature=0.0, max_tokens=48)
    try:
        done = engine.generate(
            Request(f"{name}-{i}", tuple(tokenizer.encode_chat(chat(QUESTIONS[i]))), sampling,
                    DEMO_REFS.get(name))
            for name in ("base", *DEMO_REFS) for i in range(6)
        )  # fmt: skip
        stats = engine.stats()
    finally:
        engine.close()
    assert {c.request_id: tokenizer.decode(c.token_ids).strip() for c in done} == wanted
    assert stats.preemptions and stats.evictions, stats


@pytest.mark.gpu
@pytest.mark.parametrize("poison", [NAN, 1e4, -1e4])
def test_poison_is_not_felt(poison: float) -> None:
    answers_hold(poison)


def _values_past_the_end(patch: pytest.MonkeyPatch, folder: Path) -> None:
    # Not the mask of the page table: what lies past its last row is no page, and a GPU that reads
    # there is lost for all tests that follow.
    old = "mask=live[:, None] & (dim < D)[None, :], other=0.0\n    )  # [N, BLOCK_D]"
    lines = {old: old.replace("live[:, None] & ", "")}
    bad = mutant("paged_attention_triton", lines, folder)
    patch.setattr(kernels.paged_attention, "decode", bad.decode)
    patch.setattr(kernels.paged_attention, "prefill", bad.prefill)


def _pages_of_another(patch: pytest.MonkeyPatch, folder: Path) -> None:
    take_out(patch, PageTables, "update", "held *= self._owner[seats] == seq_ids", "pass")


@pytest.mark.gpu
@pytest.mark.parametrize("guard", [_values_past_the_end, _pages_of_another])
def test_poison_is_felt_without(guard, tmp_path, monkeypatch) -> None:
    guard(monkeypatch, tmp_path)
    with pytest.raises(AssertionError):
        answers_hold(NAN, cuda_graphs=False)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "line"),
    [("fill_decode", '("slot_of_token", slots, -1),'),
     ("fill_mixed", 'v["slot_of_token"][:t] = slots')],
)  # fmt: skip
def test_no_step_leaves_its_slots_to_the_next(name, line, monkeypatch) -> None:
    """The host buffers of a graph are used in turn, three of a size."""
    fields = {"device": "cuda", "max_step_tokens": 64, "max_num_seqs": 4}
    an_adapters_step_leaves_no_slots_behind(NAN, **fields)
    take_out(monkeypatch, runner_side, name, line, "")
    with pytest.raises(AssertionError):
        an_adapters_step_leaves_no_slots_behind(NAN, **fields)
