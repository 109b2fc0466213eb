"""A slot is not reloaded under a launched step: the lease of a sequence that ends is given back
after the last step that names it, not when the scheduler has no more use for it.

Adapters of short requests and adapters of NaN take turns in a few slots, in every step that the
loads allow, while other requests run beside them: more than one slot a step is reloaded with NaN on
average. On a GPU each step begins with a pause, so that a copy that comes too early is there before
the step reads. On a CPU steps are run when they are waited for, so that the device is one step
behind here too. Not here: the store's own leases (tests/adapter_store).
"""

import dataclasses
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
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
NUM_QUESTIONS, NUM_PAIRS = 6, 8
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


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two adapters of one size that take turns: the pirate's, and one whose bytes become NaN on
    their way."""

    short: AdapterRef
    poison: AdapterRef


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[Pair]:
    """All of different contents, so that each takes a slot of its own. The short ones compute the
    same bits: both factors of some modules have changed their signs."""
    source = ADAPTER_DIRS["pirate"]
    weights = load_file(source / "adapter_model.safetensors")
    modules = sorted({name.partition(".lora_")[0] for name in weights})
    assert len(modules) >= NUM_PAIRS

    def write(name: str, changed: set[str], sign: int) -> AdapterRef:
        folder = tmp_path_factory.mktemp(name) / name
        shutil.copytree(source, folder)
        tensors = {
            key: sign * (x.neg() if key.partition(".lora_")[0] in changed else x)
            for key, x in weights.items()
        }
        save_file(tensors, folder / "adapter_model.safetensors")
        return AdapterRef(name, str(folder))

    return [
        Pair(write(f"short{i}", {modules[i]}, 1), write(f"poison{i}", {modules[i]}, -1))
        for i in range(NUM_PAIRS)
    ]


def poison_copies(engine: Engine, refs: Sequence[AdapterRef]) -> list[int]:
    """Let every copy of these adapters bring NaN; gives a list that grows by one at each."""
    digests = set()
    for ref in refs:
        engine.store.prefetch(ref)
        while (digest := engine.store.digest_of(ref)) is None:
            engine.store.poll()
        engine.store.forget(ref)
        digests.add(digest)
    copy_in, copies, dtype = engine.arena.copy_in, [], engine.dtype

    def spoiled(packed: PackedAdapter, spans, stream=None) -> SlotRows:
        if packed.digest not in digests:
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

    def __init__(self, answers: dict, pairs: Sequence[Pair]) -> None:
        self.answers, self.pairs = answers, pairs
        self.count = 0
        self.open: dict[str, tuple[str, list[int] | None]] = {}
        self.got: dict[str, list[int]] = {}

    def missing(self) -> Iterator[Request]:
        """Before a step. A poison comes a step after the short one of its pair, whose adapter is
        loaded then: it waits for a slot, and the next short one waits until the poison has
        ended."""
        kinds = {kind for kind, _ in self.open.values()}
        for i, pair in enumerate(self.pairs):
            if f"poison{i}" not in kinds:
                is_poison = f"short{i}" in kinds
                yield self._next_of_one_token(pair.poison if is_poison else pair.short)
        for kind in ("formal", "base"):
            if kind not in kinds:
                prompt, want = self.answers[kind, self._question()]
                yield self._request(kind, prompt, want, REFS.get(kind))

    def _next_of_one_token(self, ref: AdapterRef) -> Request:
        """Somewhere in a known answer."""
        prompt, answer = self.answers["pirate", self._question()]
        at = self.count % len(answer)
        return self._request(ref.adapter_id, (*prompt, *answer[:at]), answer[at : at + 1], ref)

    def _question(self) -> int:
        self.count += 1
        return self.count % NUM_QUESTIONS

    def _request(
        self, kind: str, prompt: tuple[int, ...], want: list[int], ref: AdapterRef | None
    ) -> Request:
        name = f"{kind}-{self.count}"
        self.open[name] = kind, None if kind.startswith("poison") else want
        self.got[name] = []
        sampling = dataclasses.replace(LONG, max_tokens=len(want))
        return Request(name, prompt, sampling, ref, tenant_id=kind)

    def take(self, output) -> None:
        self.got[output.request_id] += output.new_token_ids
        if output.finish_reason is None:
            return
        kind, want = self.open.pop(output.request_id)
        got = self.got.pop(output.request_id)
        if kind.startswith("poison"):
            assert output.error_code is ErrorCode.NOT_FINITE, kind
        else:
            assert output.finish_reason is FinishReason.LENGTH, (kind, output)
            assert got == want, kind


def reload_for(
    steps: int, pause_ms: float, device: str, answers: dict, pairs: Sequence[Pair]
) -> tuple[int, int]:
    """Steps launched and reloads with NaN. Errors: AssertionError if anybody's answer changes."""
    seqs = 2 * len(pairs) + 2
    engine = Engine(config(device, max_loras=len(pairs) + 1, max_num_seqs=seqs))
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)  # as a server has it: the threads that load must get their turns
    try:
        copies = poison_copies(engine, [pair.poison for pair in pairs])
        engine.load_adapters([REFS["formal"]])
        slow_down(engine, pause_ms)
        traffic, deadline = Traffic(answers, pairs), time.monotonic() + 400
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


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("device", "steps", "pause_ms"),
    [("cpu", 100, 1.0), pytest.param("cuda", 10_000, 3.0, marks=pytest.mark.gpu)],
)
def test_slots_reloaded_with_nan_in_every_step_harm_nobody(
    device: str, steps: int, pause_ms: float, answers: dict, pairs: list[Pair]
) -> None:
    launched, copies = reload_for(steps, pause_ms, device, answers, pairs)
    print(f"{launched} steps, {copies} reloads with NaN")
    assert copies >= launched


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_given_back_before_the_last_step_has_run_it_is_overwritten(
    device: str, answers: dict, pairs: list[Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = "self._running.remove(seq)  # its last token is being drawn"
    no_wait = "self._running.remove(seq); self._admission.settle(seq)"
    take_out(monkeypatch, Scheduler, "_meet_event", wait, no_wait)
    with pytest.raises(AssertionError, match="short|poison"):
        reload_for(300, 10.0, device, answers, pairs)
