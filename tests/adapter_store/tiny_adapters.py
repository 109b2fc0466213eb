"""Tiny targets and adapters for the tests of this folder: as weights, and as folders that PEFT
could have written."""

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from adapter_store.arena import AdapterArena
from adapter_store.packed import PackedAdapter, write_packed
from adapter_store.weights import AdapterManifest, AdapterWeights, LoraFactors, LoraTarget

TARGETS = (
    LoraTarget("model.layers.0.self_attn.q_proj", 40, 56),
    LoraTarget("model.layers.0.mlp.experts.gate_up_proj", 40, 48, "experts", 3, ("gate", "up")),
    LoraTarget("model.layers.0.mlp.experts.down_proj", 24, 40, "experts", 3, ("down",)),
    LoraTarget("model.layers.1.self_attn.q_proj", 40, 56),
)


def make_weights(
    seed: int, ranks: Sequence[int] = (4, 3, 8, 12), shared_a: bool = False
) -> AdapterWeights:
    """Random factors for the first targets, rank 0 = the target is left out."""
    random = torch.Generator().manual_seed(seed)
    factors = {}
    for target, rank in zip(TARGETS, ranks, strict=False):
        if rank:
            experts = 1 if shared_a else target.num_experts
            a = torch.randn(experts, rank, target.in_features, generator=random)
            b = torch.randn(target.num_experts, rank, target.out_features, generator=random)
            factors[target.name] = LoraFactors(a, b)
    return AdapterWeights(factors, AdapterManifest())


def write_tiny(
    path: Path, seed: int, digest: str = "", dtype: torch.dtype = torch.float32
) -> AdapterWeights:
    """Pack random weights into a file."""
    weights = make_weights(seed)
    write_packed(path, weights, TARGETS, dtype, digest)
    return weights


def write_peft_folder(folder: Path, seed: int, rank: int = 4) -> Path:
    """A PEFT folder with both q_proj, alpha = rank; its digest depends on the seed."""
    folder.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in (0, 1):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, 40, generator=random)
        tensors[f"{name}.lora_B.weight"] = torch.randn(56, rank, generator=random)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def read_slot(arena: AdapterArena, slot: int, target: int) -> LoraFactors | None:
    """What the tables say of a slot: A [E or 1, R, in] and B [E or 1, R, out], read through them
    alone."""
    a_off, b_off = int(arena.a_off[target, slot]), int(arena.b_off[target, slot])
    if a_off < 0:
        assert b_off < 0 and int(arena.lora_rank[target, slot]) == 0
        return None
    rank = int(arena.lora_rank[target, slot])
    spec = TARGETS[target]

    def read(offset: int, stride: int, size: int) -> torch.Tensor:
        experts = spec.num_experts if stride else 1
        parts = [arena.memory[offset + e * stride :][: rank * size] for e in range(experts)]
        return torch.stack(parts).view(experts, rank, size)  # [E or 1, R, in or out]

    return LoraFactors(
        read(a_off, int(arena.a_stride[target, slot]), spec.in_features),
        read(b_off, int(arena.b_stride[target, slot]), spec.out_features),
    )


def assert_slot_holds(arena: AdapterArena, slot: int, weights: AdapterWeights) -> None:
    """Every target of a slot equals the weights, its padding is zero, and what is absent has no
    delta."""
    for index, target in enumerate(TARGETS):
        got, want = read_slot(arena, slot, index), weights.factors.get(target.name)
        assert (got is None) == (want is None), target.name
        if got is None or want is None:
            continue
        rank = want.lora_rank
        for have, wanted in ((got.a, want.a), (got.b, want.b)):
            assert torch.equal(have[:, :rank], wanted.to(arena.dtype)), target.name
            assert not have[:, rank:].any(), target.name


def open_tiny(path: Path, dtype: torch.dtype = torch.float32) -> PackedAdapter:
    """Open a packed file of these targets."""
    return PackedAdapter.open(path, TARGETS, dtype)


def small_disk(folder: Path, num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on files below the folder have so much room together, when it is asked for."""
    allocate = os.posix_fallocate

    def fails(fd: int, offset: int, length: int) -> None:
        sizes = (path.stat().st_size for path in folder.rglob("*") if path.is_file())
        if sum(sizes) > num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", fails)
