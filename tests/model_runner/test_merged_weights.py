"""Adapters in the arena equal the same adapters merged into the weights, in bf16 and by the paths
of a full model, whole-step graphs among them.

Not here: the same in fp32 for every family (test_golden.py).
"""

import dataclasses
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from adapter_store.ref import AdapterRef
from adapter_store.weights import AdapterWeights, merge_delta
from kernels.op import use_reference_kernels
from model_runner.engine import Engine
from model_runner.execution.cuda_graphs import StepGraphs
from model_runner.layers.linear import Linear
from model_runner.layers.mlp import MoeMlp
from model_runner.request import Request, SamplingParams
from tests.guards import take_out
from tests.model_runner.speed_world import (
    Folders,
    both,
    engine_of,
    make_folders,
    put_in_decode_kernels,
    random_factors,
    steps_of,
)
from tests.model_runner.test_isolation import score

pytestmark = pytest.mark.usefixtures("both_paths")
_RNG = random.Random(1)
PROMPTS = [tuple(_RNG.randrange(3, 1000) for _ in range(n)) for n in (50, 7, 31)]
# Of each adapter the sequences, and the logits [n, V] at the last n of their positions.
Adapted = list[tuple[list[tuple[int, ...]], Tensor]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return make_folders(tmp_path_factory.mktemp("at_speed"))


def modules_in(value: Any) -> Iterator[Any]:
    """Every dataclass below a model's parts, outermost first."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from modules_in(item)
    elif dataclasses.is_dataclass(value):
        yield value
        for field in dataclasses.fields(value):
            yield from modules_in(getattr(value, field.name))


def parts_of(engine: Engine) -> list[Any]:
    model = engine.model
    return list(modules_in([model.embedding, model.layers, model.norm, model.head]))


@torch.inference_mode()
def copy_weights(source: Engine, target: Engine) -> None:
    for a, b in zip(parts_of(source), parts_of(target), strict=True):
        for field in dataclasses.fields(a):
            x, y = getattr(a, field.name), getattr(b, field.name)
            if isinstance(x, Tensor):
                y.copy_(x)


@torch.inference_mode()
def merge(engine: Engine, adapter: AdapterWeights) -> None:
    """Add every delta to the weight that it changes, rounded once to the weight's type."""

    def add(weight: Tensor, index: int) -> None:
        target = engine.targets[index]
        if target.name in adapter.factors:
            delta = merge_delta(target, adapter.factors[target.name]).to(weight.device)
            weight.copy_(weight.float() + delta.view(weight.shape))

    for part in parts_of(engine):
        if isinstance(part, Linear):
            for index, first, end in part.slices:
                add(part.weight[first:end], index)
        elif isinstance(part, MoeMlp):
            add(part.gate_up.weight, part.gate_up_target)
            add(part.down.weight, part.down_target)


def scored(engine: Engine, refs: Sequence[AdapterRef]) -> Adapted:
    """Every adapter on every prompt, all positions. No graph: a step whose every logit is wanted
    runs eagerly."""
    return [(PROMPTS, torch.cat(score(engine, [(ids, ref) for ids in PROMPTS]))) for ref in refs]


def answered(engine: Engine, refs: Sequence[AdapterRef]) -> Adapted:
    """Each adapter on a prompt of its own and on what it draws behind it, all in the same steps,
    which are replays where there are graphs."""
    sampling = SamplingParams(temperature=1.0, seed=1, max_tokens=32, ignore_eos=True)
    asked = [
        Request(ref.adapter_id, ids, sampling, ref) for ids, ref in zip(PROMPTS, refs, strict=True)
    ]
    logits, drawn = defaultdict(list), defaultdict(list)
    for slots, rows, tokens in steps_of(engine, asked):
        for slot, row, token in zip(slots, rows, tokens, strict=True):
            logits[slot].append(row)
            drawn[slot].append(token)
    found = []
    for ids, ref in zip(PROMPTS, refs, strict=True):
        lease = engine.store.acquire(ref)
        assert lease is not None
        engine.store.release(lease)
        found.append(([(*ids, *drawn[lease.index][:-1])], torch.stack(logits[lease.index])))
    return found


def arena_equals_merged(
    folders: Folders, device: str, ask: Callable[..., Adapted] = scored, step_tokens: int = 64
) -> None:
    """|arena - truth| <= 2 |merged - truth|, by the mean and by the largest logit; the truth is the
    merged model in fp32 and in torch alone, over the same bf16 weights and factors.

    Both paths round every activation alike. The merged one rounds each weight with its delta, by
    2^-9 of it at most; the arena's rounds x A once and the sum with the base's product once, by
    2^-9 of those: of one order, and twice the one is above the other. That an adapter changes the
    logits by far more than either keeps the test from passing without it.
    """
    fields = {"max_step_tokens": step_tokens, "max_num_seqs": 4}
    with engine_of(folders, device, cuda_graphs=ask is answered, **fields) as arena:
        adapted = ask(arena, folders[1])
        found = [[score(arena, [(ids, None) for ids in jobs]) for jobs, _ in adapted]]
        for dtype in ("bfloat16", "float32"):
            found.append([])
            use_reference_kernels(dtype == "float32")
            try:
                with engine_of(folders, device, dtype=dtype, cuda_graphs=False, **fields) as merged:
                    for seed, (jobs, _) in enumerate(adapted):
                        copy_weights(arena, merged)
                        merge(merged, random_factors(merged.targets, seed))
                        found[-1].append(score(merged, [(ids, None) for ids in jobs]))
            finally:
                use_reference_kernels(False)
    for (_, got), *others in zip(adapted, *found, strict=True):
        base, plain, truth = (torch.cat(x)[-len(got) :] for x in others)
        ours, theirs = (got - truth).abs(), (plain - truth).abs()
        effect = float((base - truth).abs().mean())
        print(f"mean {ours.mean():.5f} {theirs.mean():.5f} max {ours.max():.4f} "
              f"{theirs.max():.4f} effect {effect:.3f}")  # fmt: skip
        assert effect > 10 * float(theirs.mean())
        assert ours.mean() <= 2 * theirs.mean() and ours.max() <= 2 * theirs.max()


def no_router_weights(patch: pytest.MonkeyPatch) -> None:
    """On the deltas of the experts' down projection."""
    line = "y, h, lora, target, ids, slots, lora_work, True, weights"
    take_out(patch, MoeMlp, "__call__", line, line.replace("weights", "None"))


@both
@pytest.mark.parametrize("step_tokens", [64, 8], ids=["four operations", "decode kernels"])
def test_adapters_in_the_arena_equal_merged_weights(
    device: str, step_tokens: int, folders, monkeypatch, tmp_path
) -> None:
    arena_equals_merged(folders, device, scored, step_tokens)
    if device == "cuda" and step_tokens == 8:
        put_in_decode_kernels(monkeypatch, "acc *= weight", "acc *= 1.0", tmp_path)
    else:
        no_router_weights(monkeypatch)
    with pytest.raises(AssertionError):
        arena_equals_merged(folders, device, scored, step_tokens)


@both
def test_adapters_in_graphs_equal_merged_weights(device: str, folders, monkeypatch) -> None:
    """Three adapters in every step, prompts and decodes. On a CPU the same steps run eagerly."""
    arena_equals_merged(folders, device, answered)
    if device == "cuda":
        line = "captured.memory.copy_(buffer.memory, non_blocking=True)"
        take_out(monkeypatch, StepGraphs, "replay", line, "pass")
    else:
        no_router_weights(monkeypatch)
    with pytest.raises(AssertionError):
        arena_equals_merged(folders, device, answered)
