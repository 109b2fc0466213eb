"""Correct at speed, on a GPU: graphs equal eager steps, adapters in the arena equal adapters merged
into the weights, base rows feel no adapter, one input gives one output. Each check once more with
its guard taken out, and then it fails.

Shapes are small; the paths are those of a full model: whole-step graphs, look-ahead, bf16. What a
CPU can do runs there too. Not here: poison (test_poison_at_speed.py), leases (test_leases.py), the
demo's answers (test_isolation.py).
"""

import dataclasses
import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels.dense_lora
import kernels.fused_moe_lora
import kernels.paged_attention
from adapter_store.ref import AdapterRef
from adapter_store.weights import (
    AdapterManifest,
    AdapterWeights,
    LoraFactors,
    LoraTarget,
    merge_delta,
)
from kernels.op import use_reference_kernels
from model_runner.config import EngineConfig
from model_runner.engine import Engine
from model_runner.execution.cuda_graphs import DecodeGraphs
from model_runner.execution.runner import PendingStep
from model_runner.layers.linear import Linear
from model_runner.layers.mlp import MoeMlp
from model_runner.request import Request, SamplingParams
from model_runner.scheduling.batch import ScheduledBatch
from tests.guards import take_out
from tests.kernels.mutant import mutant
from tests.model_runner.test_isolation import score

NAN = float("nan")
both = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
gpu = pytest.mark.gpu
# Every expert is chosen, so that no rounding turns a choice over: outputs are continuous.
SHAPE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16",
    "eos_token_id": 2, "head_dim": 64, "hidden_act": "silu", "hidden_size": 256,
    "intermediate_size": 256, "max_position_embeddings": 4096, "moe_intermediate_size": 192,
    "norm_topk_prob": True, "num_attention_heads": 4, "num_experts": 4, "num_experts_per_tok": 4,
    "num_hidden_layers": 3, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": False, "vocab_size": 1024,
}  # fmt: skip
RANKS = (8, 16, 24)
Folders = tuple[Path, list[AdapterRef]]  # the model's, and who the adapters are


def random_factors(targets: Sequence[LoraTarget], seed: int) -> AdapterWeights:
    """An adapter of attention and experts, exact in bf16, each delta longer than the base's
    product."""
    g, factors = torch.Generator().manual_seed(seed), {}
    for target in targets:
        if target.name.endswith(("_proj", "down_proj")):
            rank = RANKS[seed % len(RANKS)]
            a = torch.randn(target.num_experts, rank, target.in_features, generator=g)
            b = torch.randn(target.num_experts, rank, target.out_features, generator=g)
            a, b = a / target.in_features**0.5, b * 0.5 / rank**0.5
            factors[target.name] = LoraFactors(a.bfloat16().float(), b.bfloat16().float())
    return AdapterWeights(factors, AdapterManifest())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A model that is a config alone, and three adapters that are a seed alone."""
    root = tmp_path_factory.mktemp("at_speed")
    model = root / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SHAPE))
    refs = []
    for seed in range(3):
        folder = root / f"adapter-{seed}"
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps({"seed": seed}))
        (folder / "adapter_model.safetensors").write_bytes(b"from the seed")
        refs.append(AdapterRef(f"adapter-{seed}", str(folder)))
    return model, refs


def from_seed(folder: Path, targets: Sequence[LoraTarget], **limits: int) -> AdapterWeights:
    return random_factors(targets, json.loads((folder / "adapter_config.json").read_text())["seed"])


@contextmanager
def engine_of(folders: Folders, device: str, **fields: Any) -> Iterator[Engine]:
    model, refs = folders
    defaults = {
        "load_format": "random:3", "device": device, "max_model_len": 128, "kv_bytes": 16 << 20,
        "lora_bytes": 32 << 20, "max_loras": 3, "max_num_seqs": 16, "max_step_tokens": 64,
        "prefix_cache": False, "seed": 1, "dtype": "bfloat16",
    }  # fmt: skip
    engine = Engine(EngineConfig(str(model), **(defaults | fields)))
    try:
        engine.store._loader._load_adapter = from_seed
        engine.load_adapters(refs)
        yield engine
    finally:
        engine.close()


def requests_of(refs: Sequence[AdapterRef | None], name: str, count: int = 12) -> list[Request]:
    """Every fourth of the base; half of them draw at temperature 1."""
    rng = random.Random(5)
    return [
        Request(
            f"{name}-{i}",
            tuple(rng.randrange(3, 1000) for _ in range(rng.randrange(2, 30))),
            SamplingParams(temperature=float(i % 2), seed=i, max_tokens=16, ignore_eos=True),
            refs[i % 4],
        )
        for i in range(count)
    ]


Step = tuple[tuple[int, ...], Tensor, list[int]]  # slots of the rows with logits, logits, tokens


def steps_of(engine: Engine, requests: Sequence[Request], slots_off: bool = False) -> list[Step]:
    """Run requests that all begin in one step; what each step gave.

    slots_off  the same batches with every slot -1, and no adapter in the tables
    """
    engine.load_adapters(r.adapter for r in requests if r.adapter is not None)
    for request in requests:
        engine.submit(request)
    while engine._arriving:
        engine.store.poll()
        engine._admit_arrived()
    found: list[Step] = []
    runner, launch = engine.runner, engine.runner.launch
    results: list[Tensor] = []

    def keep(run: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        def kept(*args: Any) -> tuple[Tensor, Tensor]:
            logits, tokens = run(*args)
            results.append(logits.clone())
            return logits, tokens

        return kept

    def recorded(batch: ScheduledBatch, scored: Any = None) -> PendingStep:
        changed = batch
        if slots_off:
            changed = dataclasses.replace(batch, slots=(-1,) * len(batch.slots))
        pending = launch(changed, scored)
        rows = [s for s, row in enumerate(batch.samples) if row is not None]
        drawn = [batch.slots[s] for s in rows]
        if rows:
            logits = results[-1][: len(rows)] if len(results[-1]) == len(rows) else results[-1]
            if len(logits) != len(rows):  # a padded decode: the rows themselves
                logits = logits[rows]
            found.append((tuple(drawn), logits.float().cpu(), pending.wait()[0]))
        return dataclasses.replace(pending, batch=batch)

    offsets = engine.arena.a_off.clone()
    if slots_off:
        engine.arena.a_off.fill_(-1)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_replay", "_run_decode", "_run_mixed"):
            patch.setattr(runner, name, keep(getattr(runner, name)))
        patch.setattr(runner, "launch", recorded)
        while engine.has_work:
            engine.step()
    engine.arena.a_off.copy_(offsets)
    engine.check()
    assert len(found) > 10
    return found


def same(a: Sequence[Step], b: Sequence[Step]) -> bool:
    """Bit by bit, logits and tokens."""
    pairs = list(zip(a, b, strict=True))
    return all(torch.equal(x[1], y[1]) and x[2] == y[2] for x, y in pairs)


# Graphs


def replays_equal_eager_steps(engine: Engine, requests: Sequence[Request]) -> None:
    """Every replay beside the same step run eagerly, on the same columns and the same padding: the
    same kernels on the same numbers, so no bit may differ."""
    runner = engine.runner
    replay, wrong, count = runner._replay, [], 0

    def twice(batch: ScheduledBatch, size: int) -> tuple[Tensor, Tensor]:
        nonlocal count
        before = runner._previous.clone()
        got = tuple(x.clone() for x in replay(batch, size))
        after = runner._previous.clone()
        runner._previous.copy_(before)
        shape = runner._decode_shape(size)
        want = runner._decode_step(runner._upload(runner._ring[shape][-1]), shape)
        runner._previous.copy_(after)
        rows = len(batch.seq_ids)
        equal = all(torch.equal(x[:rows], y[:rows]) for x, y in zip(got, want, strict=True))
        count += 1
        if not equal:
            wrong.append((batch.step, size, float((got[0] - want[0])[:rows].abs().max())))
        return got[0], got[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "_replay", twice)
        engine.generate(requests)
    assert count > 5 and not wrong, wrong


@gpu
def test_graphs_equal_eager_steps(folders, monkeypatch) -> None:
    with engine_of(folders, "cuda") as engine:
        refs = [None, *folders[1]]
        replays_equal_eager_steps(engine, requests_of(refs, "a"))
        line = "captured.memory.copy_(buffer.memory, non_blocking=True)"
        take_out(monkeypatch, DecodeGraphs, "replay", line, "pass")
        with pytest.raises(AssertionError):
            replays_equal_eager_steps(engine, requests_of(refs, "b"))


# The base beside adapters


def base_rows_feel_no_adapter(engine: Engine, refs: Sequence[AdapterRef], name: str) -> None:
    """Bit by bit the same batches without any adapter; the other rows do change."""
    requests = requests_of([None, *refs], name)
    mixed = steps_of(engine, requests)
    bare = steps_of(
        engine, [dataclasses.replace(r, request_id=f"{r.request_id}-off") for r in requests], True
    )
    changed = 0
    for (slots, logits, tokens), (again, plain, plain_tokens) in zip(mixed, bare, strict=True):
        assert slots == again
        for row, slot in enumerate(slots):
            if slot < 0:
                assert torch.equal(logits[row], plain[row]), (slots, row)
                assert tokens[row] == plain_tokens[row]
            else:
                changed += not torch.equal(logits[row], plain[row])
    assert changed > 50


@both
def test_base_rows_feel_no_adapter(device: str, folders, tmp_path, monkeypatch) -> None:
    fields = {} if device == "cuda" else {"look_ahead": True}
    with engine_of(folders, device, **fields) as engine:
        base_rows_feel_no_adapter(engine, folders[1], "a")
        if device == "cpu":
            line, instead = "if 0 <= s < num_slots", "if s < num_slots"
            take_out(monkeypatch, kernels.moe_gate, "slot_groups", line, instead)
        else:
            engine.runner._graphs = None  # they were captured with the guard
            put_in_decode_kernels(monkeypatch, "(slot >= 0) &", "", tmp_path)
        with pytest.raises(AssertionError):
            base_rows_feel_no_adapter(engine, folders[1], "b")


def put_in_decode_kernels(patch: pytest.MonkeyPatch, line: str, instead: str, folder: Path) -> None:
    bad = mutant("lora_decode", {line: instead}, folder)
    patch.setattr(kernels.fused_moe_lora, "add_pairs", bad.add_pairs)
    patch.setattr(kernels.dense_lora, "add_rows", bad.add_rows)


# Merged weights


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
        line = "y, h, lora, self.down_target, ids, slots, lora_work, True, weights"
        take_out(monkeypatch, MoeMlp, "__call__", line, line.replace("weights", "None"))
        with pytest.raises(AssertionError):
            arena_equals_merged(folders, device, step_tokens)


# One input, one output


@both
def test_deterministic_runs_agree_bit_for_bit(device: str, folders) -> None:
    """In one engine twice, and in another engine. (That split-K without it differs is shown where
    it can be forced: tests/kernels/test_fused_moe_lora.py.)"""
    refs = [None, *folders[1]]
    runs = []
    for name in ("a", "b"):
        with engine_of(folders, device, deterministic=True) as engine:
            runs += [steps_of(engine, requests_of(refs, f"{name}{i}")) for i in range(2)]
    assert all(same(runs[0], run) for run in runs[1:])
    with engine_of(folders, device, deterministic=True) as engine:
        others = steps_of(engine, requests_of([*refs[1:], None], "c"))
    assert not same(runs[0], others)  # other adapters: the comparison sees something
