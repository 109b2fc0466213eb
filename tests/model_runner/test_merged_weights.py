"""Adapters in the arena equal the same adapters merged into the weights, in bf16 and by the paths
of a full model.

Not here: the same in fp32 for every family (test_golden.py).
"""

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from adapter_store.weights import AdapterWeights, merge_delta
from kernels.op import use_reference_kernels
from model_runner.engine import Engine
from model_runner.layers.linear import Linear
from model_runner.layers.mlp import MoeMlp
from tests.guards import take_out
from tests.model_runner.speed_world import Folders, both, engine_of, make_folders, random_factors
from tests.model_runner.test_isolation import score


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


def arena_equals_merged(folders: Folders, device: str, step_tokens: int) -> None:
    """|arena - truth| <= 2 |merged - truth|, by the mean and by the largest logit; the truth is the
    merged model in fp32 and in torch alone, over the same bf16 weights and factors.

    Both paths round every activation alike. The merged one rounds each weight with its delta, by
    2^-9 of it at most; the arena's rounds x A once and the sum with the base's product once, by
    2^-9 of those: of one order, and twice the one is above the other. That an adapter changes the
    logits by far more than either keeps the test from passing without it.
    """
    rng = random.Random(1)
    jobs = [tuple(rng.randrange(3, 1000) for _ in range(n)) for n in (50, 7, 31)]
    fields = {"max_step_tokens": step_tokens, "max_num_seqs": 4, "cuda_graphs": False}
    with engine_of(folders, device, **fields) as arena:
        adapted = [score(arena, [(ids, ref) for ids in jobs]) for ref in folders[1]]
        bare = score(arena, [(ids, None) for ids in jobs])
        found = []
        for dtype in ("bfloat16", "float32"):
            use_reference_kernels(dtype == "float32")
            try:
                with engine_of(folders, device, dtype=dtype, **fields) as merged:
                    for seed in range(len(folders[1])):
                        copy_weights(arena, merged)
                        merge(merged, random_factors(merged.targets, seed))
                        found.append(score(merged, [(ids, None) for ids in jobs]))
            finally:
                use_reference_kernels(False)
    half = len(found) // 2
    for got, plain, truth in zip(adapted, found[:half], found[half:], strict=True):
        got, plain, truth, base = (torch.cat(x) for x in (got, plain, truth, bare))
        ours, theirs = (got - truth).abs(), (plain - truth).abs()
        effect = float((base - truth).abs().mean())
        print(f"mean {ours.mean():.5f} {theirs.mean():.5f} max {ours.max():.4f} "
              f"{theirs.max():.4f} effect {effect:.3f}")  # fmt: skip
        assert effect > 10 * float(theirs.mean())
        assert ours.mean() <= 2 * theirs.mean() and ours.max() <= 2 * theirs.max()


@both
@pytest.mark.parametrize("step_tokens", [64, 8], ids=["four operations", "decode kernels"])
def test_adapters_in_the_arena_equal_merged_weights(
    device: str, step_tokens: int, folders, monkeypatch
) -> None:
    arena_equals_merged(folders, device, step_tokens)
    if step_tokens == 64:
        line = "y, h, lora, target, ids, slots, lora_work, True, weights"
        take_out(monkeypatch, MoeMlp, "__call__", line, line.replace("weights", "None"))
        with pytest.raises(AssertionError):
            arena_equals_merged(folders, device, step_tokens)
