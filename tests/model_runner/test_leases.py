"""A slot is not reloaded under a launched step: the lease of a sequence that ends is given back
after the last step that names it, not when the scheduler has no more use for it.

One adapter of short requests and one of NaN take turns in one slot, in every step that the loads
allow, while other requests run beside them. On a GPU each step begins with a pause, so that a copy
that comes too early is there before the step reads. On a CPU steps are run when they are waited
for, so that the device is one step behind here too. Not here: the store's own leases
(tests/adapter_store).
"""

import dataclasses
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapter_store.arena import SlotRows
from adapter_store.packed import PackedAdapter
from adapter_store.ref import AdapterRef
from model_runner.config import EngineConfig
from model_runner.engine import Engine
from model_runner.execution.runner import PendingStep
from model_runner.request import ErrorCode, FinishReason, Request, SamplingParams
from model_runner.scheduling.batch import ScheduledBatch
from model_runner.scheduling.scheduler import Scheduler
from model_runner.tokenizer import Tokenizer
from tests.guards import take_out
from tests.model_runner.demo import ADAPTER_DIRS, BASE_DIR, QUESTIONS, chat

REFS = {name: AdapterRef(name, str(folder)) for name, folder in ADAPTER_DIRS.items()}
LONG = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
NUM_QUESTIONS = 6
CYCLES_PER_MS = 1_900_000  # of `torch.cuda._sleep`, near the clock of an H200


def config(device: str, **fields) -> EngineConfig:
    defaults = {
        "device": device,
        "max_model_len": 256,
        "kv_bytes": 16 << 20,
        "lora_bytes": 16 << 20,
        "max_num_seqs": 8,
        "prefix_cache": False,
        "look_ahead": True,
    }
    return EngineConfig(str(BASE_DIR), **(defaults | fields))


@pytest.fixture(scope="module")
def answers() -> dict[tuple[str, int], tuple[tuple[int, ...], list[int]]]:
    """(tenant or base, question) -> prompt and greedy answer, from the CPU in fp32: each token
    leads by the `smallest_margin` of questions.json at least, so bf16 and company change none."""
    tokenizer = Tokenizer(BASE_DIR)
    engine = Engine(config("cpu", look_ahead=False))
    found = {}
    try:
        for name in ("pirate", "formal", "base"):
            for i, question in enumerate(QUESTIONS[:NUM_QUESTIONS]):
                prompt = tuple(tokenizer.encode_chat(chat(question)))
                sampling = dataclasses.replace(LONG, ignore_eos=False)
                done = engine.generate([Request("r", prompt, sampling, REFS.get(name))])[0]
                found[name, i] = prompt, done.token_ids
    finally:
        engine.close()
    return found


@pytest.fixture
def poison_ref(tmp_path: Path) -> AdapterRef:
    """As large as the pirate's, of another content: its bytes become NaN on their way."""
    folder = tmp_path / "poison"
    shutil.copytree(ADAPTER_DIRS["pirate"], folder)
    path = folder / "adapter_model.safetensors"
    save_file({name: x.neg() for name, x in load_file(path).items()}, path)
    return AdapterRef("poison", str(folder))


def poison_copies(engine: Engine, ref: AdapterRef) -> list[int]:
    """Let every copy of this adapter bring NaN; gives a list that grows by one at each."""
    engine.store.prefetch(ref)
    while (digest := engine.store.digest_of(ref)) is None:
        engine.store.poll()
    engine.store.forget(ref)
    copy_in, copies, dtype = engine.arena.copy_in, [], engine.dtype

    def spoiled(packed: PackedAdapter, spans, stream=None) -> SlotRows:
        if packed.digest != digest:
            return copy_in(packed, spans, stream)
        copies.append(len(copies))
        nan = torch.full((packed.data.numel() // dtype.itemsize,), torch.nan, dtype=dtype)
        return copy_in(SimpleNamespace(layout=packed.layout, data=nan.view(torch.uint8)), spans)

    engine.arena.copy_in = spoiled  # type: ignore[method-assign]
    return copies


def slow_down(engine: Engine, pause_ms: float) -> None:
    """The device begins each step so much later than it was told to."""
    launch = engine.runner.launch

    def launch_slowly(batch: ScheduledBatch, scored=None) -> PendingStep:
        if engine.device.type == "cuda":
            torch.cuda._sleep(int(pause_ms * CYCLES_PER_MS))
            return launch(batch, scored)
        # The scheduler's own page lists change before the step runs.
        pages = tuple(tuple(list(row) for row in group) for group in batch.pages)
        later = dataclasses.replace(batch, pages=pages)

        def wait():
            time.sleep(pause_ms / 1000)
            return launch(later, scored).wait()

        return SimpleNamespace(batch=batch, wait=wait)  # type: ignore[return-value]

    engine.runner.launch = launch_slowly  # type: ignore[method-assign]


class Traffic:
    """A request of each kind at a time, the next as soon as one has ended; answers checked."""

    def __init__(self, answers: dict, poison_ref: AdapterRef) -> None:
        self.answers, self.poison_ref = answers, poison_ref
        self.count = 0
        self.open: dict[str, tuple[str, list[int] | None]] = {}
        self.got: dict[str, list[int]] = {}

    def missing(self) -> Iterator[Request]:
        """Before a step. The poison comes a step after the short one, whose adapter is loaded then:
        it waits for the slot, and the next short one waits until the poison has ended."""
        kinds = {kind for kind, _ in self.open.values()}
        if "poison" not in kinds:
            yield self._next("poison" if "short" in kinds else "short")
        for kind in ("formal", "base"):
            if kind not in kinds:
                yield self._next(kind)

    def _next(self, kind: str) -> Request:
        self.count += 1
        name = f"{kind}-{self.count}"
        question = self.count % NUM_QUESTIONS
        prompt, answer = self.answers["pirate" if kind in ("short", "poison") else kind, question]
        sampling, want, ref = LONG, answer, REFS.get(kind)
        if kind in ("short", "poison"):
            # One token, somewhere in a known answer.
            at = self.count % len(answer)
            prompt, want = (*prompt, *answer[:at]), answer[at : at + 1]
            sampling = dataclasses.replace(LONG, max_tokens=1)
            ref = REFS["pirate"] if kind == "short" else self.poison_ref
        sampling = dataclasses.replace(sampling, max_tokens=len(want))
        self.open[name] = kind, None if kind == "poison" else want
        self.got[name] = []
        return Request(name, prompt, sampling, ref, tenant_id=kind)

    def take(self, output) -> None:
        self.got[output.request_id] += output.new_token_ids
        if output.finish_reason is None:
            return
        kind, want = self.open.pop(output.request_id)
        got = self.got.pop(output.request_id)
        if kind == "poison":
            assert output.error_code is ErrorCode.NOT_FINITE, kind
        else:
            assert output.finish_reason is FinishReason.LENGTH, (kind, output)
            assert got == want, kind


def reload_for(
    steps: int, pause_ms: float, device: str, answers: dict, poison_ref: AdapterRef
) -> tuple[int, int]:
    """Steps launched and reloads with NaN. Errors: AssertionError if anybody's answer changes."""
    engine = Engine(config(device, max_loras=2))
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)  # as a server has it: the threads that load must get their turns
    try:
        copies = poison_copies(engine, poison_ref)
        engine.load_adapters([REFS["formal"]])
        slow_down(engine, pause_ms)
        traffic, deadline = Traffic(answers, poison_ref), time.monotonic() + 100
        while engine.stats().num_steps < steps:
            assert time.monotonic() < deadline, f"only {engine.stats().num_steps} steps"
            for request in traffic.missing():
                engine.submit(request)
            outputs = engine.step()
            for output in outputs:
                traffic.take(output)
        engine.check()
        return engine.stats().num_steps, len(copies)
    finally:
        sys.setswitchinterval(before)
        engine.close()


@pytest.mark.parametrize(
    ("device", "steps", "pause_ms"),
    [("cpu", 100, 1.0), pytest.param("cuda", 10_000, 1.0, marks=pytest.mark.gpu)],
)
def test_a_slot_reloaded_with_nan_in_every_turn_harms_nobody(
    device: str, steps: int, pause_ms: float, answers: dict, poison_ref: AdapterRef
) -> None:
    launched, copies = reload_for(steps, pause_ms, device, answers, poison_ref)
    print(f"{launched} steps, {copies} reloads with NaN")
    assert copies >= launched // 20


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_given_back_before_the_last_step_has_run_it_is_overwritten(
    device: str, answers: dict, poison_ref: AdapterRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = "self._running.remove(seq)  # its last token is being drawn"
    no_wait = "self._running.remove(seq); self._admission.settle(seq)"
    take_out(monkeypatch, Scheduler, "_meet_event", wait, no_wait)
    with pytest.raises(AssertionError, match="short|poison"):
        reload_for(300, 10.0, device, answers, poison_ref)
