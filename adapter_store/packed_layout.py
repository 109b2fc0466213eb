"""Where every factor of a packed adapter stands: sizes, offsets, strides.

The same in a file and in the arena's spans. Not here: bytes (packed, arena).
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch

from adapter_store.errors import AdapterInvalid, StoreFull
from adapter_store.weights import AdapterWeights, LoraFactors, LoraTarget

ALIGN_BYTES = 256
RANK_MULTIPLE = 8
FORMAT_VERSION = 3
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class PackedTarget:
    """One adapted target of a packed adapter. Offsets count elements from the start of the data.

    index      of the target in the model's tuple;  lora_rank  padded to a multiple of 8
    a_experts, b_experts  1 or E;  a_stride, b_stride  from one expert to the next, 0 where there is
                          one for all
    """

    index: int
    lora_rank: int
    a_experts: int
    b_experts: int
    a_offset: int
    b_offset: int
    a_stride: int
    b_stride: int


@dataclass(frozen=True)
class PackedLayout:
    """Where every factor stands. Factor 2·i is A and 2·i + 1 is B of the i-th adapted target.

    ends  bytes before each factor, the whole size last: factor f lies in [ends[f], ends[f + 1])
    """

    targets: tuple[PackedTarget, ...]
    ends: tuple[int, ...]
    itemsize: int

    @property
    def num_bytes(self) -> int:
        return self.ends[-1]

    @property
    def max_rank(self) -> int:
        return max((t.lora_rank for t in self.targets), default=0)


def padded_rank(lora_rank: int) -> int:
    """The rank that memory holds: the next multiple of 8."""
    return -(-lora_rank // RANK_MULTIPLE) * RANK_MULTIPLE


def largest_adapter(pool_bytes: int) -> int:
    """Bytes that one adapter may have in an adapter memory of this size: half of it, so that there
    is always room for another one beside it."""
    return pool_bytes // 2


def check_share(name: str, num_bytes: int, pool_bytes: int) -> None:
    """Errors: StoreFull if an adapter of this many bytes takes more than its share of the pool."""
    most = largest_adapter(pool_bytes)
    if num_bytes > most:
        text = f"the adapter memory has {pool_bytes} bytes, of which one may take {most}"
        raise StoreFull(f"{name} has {num_bytes} bytes; {text}")


def fingerprint(targets: Sequence[LoraTarget], dtype: torch.dtype) -> str:
    """Names targets, dtype and file format: packed files of another fingerprint do not fit."""
    text = json.dumps([FORMAT_VERSION, dtype_name(dtype), [astuple(t) for t in targets]])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def plan_layout(
    targets: Sequence[LoraTarget],
    shapes: Sequence[tuple[int, int, int, int]],
    itemsize: int,
) -> PackedLayout:
    """Lay the factors out one after the other.

    shapes  (target index, padded rank, a_experts, b_experts), in order of the index
    """
    placed: list[PackedTarget] = []
    ends = [0]

    def add(num_elements: int) -> int:
        offset = ends[-1] // itemsize
        num_bytes = num_elements * itemsize
        ends.append(ends[-1] + -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES)
        return offset

    for index, lora_rank, a_experts, b_experts in shapes:
        a_size = lora_rank * targets[index].in_features
        b_size = lora_rank * targets[index].out_features
        placed.append(
            PackedTarget(
                index=index,
                lora_rank=lora_rank,
                a_experts=a_experts,
                b_experts=b_experts,
                a_offset=add(a_experts * a_size),
                b_offset=add(b_experts * b_size),
                a_stride=a_size if a_experts > 1 else 0,
                b_stride=b_size if b_experts > 1 else 0,
            )
        )
    return PackedLayout(tuple(placed), tuple(ends), itemsize)


def layout_of(
    weights: AdapterWeights, targets: Sequence[LoraTarget], dtype: torch.dtype
) -> PackedLayout:
    """The layout that `write_packed` would give these weights."""
    shapes = []
    for index, target in enumerate(targets):
        factors = weights.factors.get(target.name)
        if factors is not None:
            _check_factors(target, factors)
            rank = padded_rank(factors.lora_rank)
            shapes.append((index, rank, len(factors.a), len(factors.b)))
    unknown = weights.factors.keys() - {t.name for t in targets}
    if unknown:
        raise AdapterInvalid("unbound_tensor", f"the model has no target {min(unknown)}")
    return plan_layout(targets, shapes, dtype.itemsize)


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16."""
    return next(name for name, known in DTYPES.items() if known == dtype)


def _check_factors(target: LoraTarget, factors: LoraFactors) -> None:
    a, b = tuple(factors.a.shape), tuple(factors.b.shape)
    for name, shape, last in (("A", a, target.in_features), ("B", b, target.out_features)):
        good = len(shape) == 3 and shape[0] in (1, target.num_experts) and shape[1] >= 1
        if not good or shape[2] != last or shape[1] != a[1]:
            want = f"[{target.num_experts} or 1, r, {last}]"
            raise AdapterInvalid("shape", f"{name} of {target.name} is {list(shape)}, not {want}")
