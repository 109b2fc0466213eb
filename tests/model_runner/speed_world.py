"""A small model with random weights and three random adapters, whose steps go the way that those of
a full model do; what the tests of correctness at speed share.

No tests here.
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
import kernels.lora_decode
from adapter_store.ref import AdapterRef
from adapter_store.weights import AdapterManifest, AdapterWeights, LoraFactors, LoraTarget
from model_runner.config import EngineConfig
from model_runner.engine import Engine
from model_runner.execution.runner import PendingStep
from model_runner.request import Request, SamplingParams
from model_runner.scheduling.batch import ScheduledBatch
from tests.kernels.mutant import mutant

both = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
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
            a, b = a / target.in_features**0.5, b * 4 / rank**0.5
            factors[target.name] = LoraFactors(a.bfloat16().float(), b.bfloat16().float())
    return AdapterWeights(factors, AdapterManifest())


def make_folders(root: Path) -> Folders:
    """A model that is a config alone, and three adapters that are a seed alone."""
    model = root / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SHAPE))
    return model, seeded_adapters(root)


def seeded_adapters(root: Path) -> list[AdapterRef]:
    """Three adapters that are a seed alone: a format of the test's own makes their weights."""
    refs = []
    for seed in range(3):
        folder = root / f"adapter-{seed}"
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps({"seed": seed}))
        (folder / "adapter_model.safetensors").write_bytes(b"from the seed")
        refs.append(AdapterRef(f"adapter-{seed}", str(folder)))
    return refs


def from_seed(folder: Path, targets: Sequence[LoraTarget], **limits: int) -> AdapterWeights:
    return random_factors(targets, json.loads((folder / "adapter_config.json").read_text())["seed"])


def take_both_paths(patch: pytest.MonkeyPatch, most_tokens: int = 32) -> None:
    """On a GPU steps of more tokens take LoRA's four operations and others the decode kernels,
    wherever the limits between them lie. A token has four experts."""
    lanes = kernels.lora_decode.MAX_TOKENS
    for name, most in (("MAX_TOKENS", most_tokens), ("MAX_PAIRS", 4 * most_tokens)):
        patch.setattr(kernels.lora_decode, name, dict.fromkeys(lanes, most))


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
        engine.store.loader._load_adapter = from_seed
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
    while engine._arrivals:
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
            # Of a decode the rows themselves, else those that draw; then padding.
            decode = all(count == 1 for count in batch.num_tokens)
            logits = results[-1][rows] if decode else results[-1][: len(rows)]
            found.append((tuple(drawn), logits.float().cpu(), pending.wait()[0]))
        return dataclasses.replace(pending, batch=batch)

    offsets = engine.arena.a_off.clone()
    if slots_off:
        engine.arena.a_off.fill_(-1)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_replay_decode", "_run_decode", "_run_mixed"):
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


def put_in_decode_kernels(patch: pytest.MonkeyPatch, line: str, instead: str, folder: Path) -> None:
    bad = mutant("lora_decode", {line: instead}, folder)
    patch.setattr(kernels.fused_moe_lora, "add_pairs", bad.add_pairs)
    patch.setattr(kernels.dense_lora, "add_rows", bad.add_rows)
