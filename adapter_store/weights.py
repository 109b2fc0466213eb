"""What a model can take from an adapter (`LoraTarget`), what an adapter brings (`AdapterWeights`).

One canonical layout for every file format. Not here: how files spell it (formats), how the device
holds it (packed, arena).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["linear", "embedding", "experts"]
FileLayout = Literal["plain", "natural", "swapped", "3-D", "shared outer", "per expert"]


@dataclass(frozen=True)
class LoraTarget:
    """One weight of the model that an adapter may change.

    Its index in the model's tuple of targets is its row in the arena's tables.

    name           full module or parameter path as transformers 5 spells it: `model.embed_tokens`,
                   `model.layers.0.self_attn.q_proj`, `model.layers.0.mlp.experts.gate_up_proj`
    in_features    true input size (for an embedding: the vocabulary)
    out_features   true output size; 2·I for a fused gate_up
    kind           linear | embedding | experts
    num_experts    E for experts, else 1
    expert_parts   experts only: how one expert's linears are called in per-expert files, in
                   canonical order: ("gate_proj", "up_proj") or ("down_proj",), ("w1", "w3") or
                   ("w2",)
    interleaved    experts only: the checkpoint orders a fused output g0,u0,g1,u1 (gpt-oss);
                   canonical is gate then up
    weight_is_in_out  experts only: the 3-D parameter is (E, in, out) (gpt-oss, llama4), else
                   (E, out, in)
    aliases        other full paths for the same weight; for experts the module's path is enough
                   (transformers 4 spelling: `...block_sparse_moe.experts`)
    assume_transformers  experts only: 4 or 5, the release beside which adapters were written, for
                   files whose sizes do not tell their layout; 0 = not known: 5, with a warning
    """

    name: str
    in_features: int
    out_features: int
    kind: Kind = "linear"
    num_experts: int = 1
    expert_parts: tuple[str, ...] = ()
    interleaved: bool = False
    weight_is_in_out: bool = False
    aliases: tuple[str, ...] = ()
    assume_transformers: int = 0


@dataclass(frozen=True)
class LoraFactors:
    """The delta of one target: dW_e = b[e]^T a[e], with alpha/r already in `b`.

    a  [E or 1, r, in]; b  [E or 1, r, out]; an expert axis of 1 on an experts target is shared by
    all experts. Both rank-major, contiguous, in host memory, each fp32 or the file's dtype.
    gate_up's out is gate then up.
    For an embedding `a` is [1, r, V] and `b` [1, r, H].
    """

    a: Tensor
    b: Tensor

    @property
    def lora_rank(self) -> int:
        return int(self.a.shape[1])


@dataclass(frozen=True)
class BoundPair:
    """How one lora_A and its lora_B in a file were read.

    target     name of the `LoraTarget` that they change
    layout     plain: a linear's or an embedding's. Of experts: natural, swapped (two 2-D tensors
               for all of them, see formats/peft_experts.py), 3-D (with an axis of experts), shared
               outer (3-D, where one factor is every expert's), per expert
    lora_rank  the file's own, not padded;  scale  alpha / r or alpha / sqrt(r)
    """

    a: str
    b: str
    target: str
    layout: FileLayout
    lora_rank: int
    scale: float


@dataclass(frozen=True)
class AdapterManifest:
    """What a load did: nothing in the file is passed over in silence.

    pairs     tensors that became factors
    skipped   tensor name -> why it may be left out
    warnings  for the operator
    """

    pairs: tuple[BoundPair, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def bound(self) -> tuple[str, ...]:
        """Names of the tensors that became factors."""
        return tuple(name for pair in self.pairs for name in (pair.a, pair.b))


@dataclass(frozen=True)
class AdapterWeights:
    """One adapter in the canonical layout: target name -> factors. An absent one has no delta."""

    factors: Mapping[str, LoraFactors]
    manifest: AdapterManifest

    @property
    def max_rank(self) -> int:
        return max((f.lora_rank for f in self.factors.values()), default=0)


def merge_delta(target: LoraTarget, factors: LoraFactors) -> Tensor:
    """The dense delta of a target, fp32: [E, out, in], [1, out, in] if plain.

    For tests that compare with merged weights.
    """
    a, b = factors.a.float(), factors.b.float()
    num = max(len(a), len(b))
    delta = torch.einsum("ero,eri->eoi", b.expand(num, -1, -1), a.expand(num, -1, -1))
    return delta.expand(target.num_experts, -1, -1)  # [E, out, in]


def assuming(targets: Sequence[LoraTarget], transformers: int) -> tuple[LoraTarget, ...]:
    """The same targets, for adapters written beside this release of transformers (0, 4 or 5)."""
    return tuple(
        replace(t, assume_transformers=transformers) if t.kind == "experts" else t for t in targets
    )


def find_target(targets: Sequence[LoraTarget], name: str) -> int:
    """Index of the target with this name or alias. KeyError if there is none."""
    for i, t in enumerate(targets):
        if name == t.name or name in t.aliases:
            return i
    raise KeyError(name)


def is_finite(tensor: Tensor) -> bool:
    """No NaN, no infinity. One pass without a copy: some 18 times as fast as torch.isfinite on a
    CPU."""
    if not tensor.numel():
        return True
    low, high = torch.aminmax(tensor)  # NaN wins in both
    return bool(torch.isfinite(low) & torch.isfinite(high))
