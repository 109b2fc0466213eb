"""A folder as PEFT writes it -> `AdapterWeights`, or the reason why it cannot be served.

Everything that can be judged from the config and the file's header is judged before a tensor is
read. No tensor is passed over in silence: each is bound, skipped with a reason, or refused.
Not here: what names mean (peft_names), how experts lie (peft_experts), where folders come from.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from adapter_store.errors import AdapterInvalid, StoreFull
from adapter_store.formats.bounded_files import shown
from adapter_store.formats.peft_config import PeftConfig, read_config
from adapter_store.formats.peft_experts import (
    Layout,
    build_experts,
    canonical_pair,
    decide_layout,
    fitting_layouts,
    split_gate_up,
)
from adapter_store.formats.peft_names import Pair, TargetIndex, bind_tensors, dotted_suffixes
from adapter_store.formats.pickle_file import PickleFile
from adapter_store.formats.safetensors_file import FLOAT_DTYPES, SafetensorsFile
from adapter_store.sources.source import CONFIG_FILE, PICKLE_FILES, WEIGHTS_FILE
from adapter_store.weights import (
    AdapterManifest,
    AdapterWeights,
    BoundPair,
    FileLayout,
    LoraFactors,
    LoraTarget,
    is_finite,
)

_WEIGHT_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".index.json")

MAX_WARNINGS = 32

TensorFile = SafetensorsFile | PickleFile


@dataclass(frozen=True)
class _Reading:
    """How one pair is to be read: judged by its header, not yet read."""

    layout: Layout
    lora_rank: int
    scale: float


@dataclass(frozen=True)
class _Plan:
    """What comes of a file: its pairs and how they are read, the rest of it, what is to be said."""

    readings: dict[Pair, _Reading]
    skipped: dict[str, str]
    warnings: list[str]


def matches(folder: Path) -> bool:
    """Whether the folder holds, or was meant to hold, a PEFT adapter."""
    return any(
        os.path.lexists(folder / name) for name in (CONFIG_FILE, WEIGHTS_FILE, *PICKLE_FILES)
    )


def load(
    folder: Path,
    targets: Sequence[LoraTarget],
    *,
    max_rank: int,
    max_bytes: int | None,
    allow_pickle: bool,
    base_name: str | None,
) -> AdapterWeights:
    """Load the folder's adapter; arguments and errors as `registry.load_adapter`."""
    config = read_config(folder)
    with _open(folder, allow_pickle) as file:
        plan = _plan(folder, file, config, targets, max_rank, max_bytes)
        factors = _build(file, targets, plan.readings, max_rank)
        warnings = [*_other_base(config, base_name), *_other_files(folder, file), *plan.warnings]
    if not any(bool(factor.b.any()) for factor in factors.values()):
        warnings.insert(0, "every lora_B is zero: the adapter changes nothing")
    if len(warnings) > MAX_WARNINGS:  # they go into logs and answers
        rest = f"{len(warnings) - MAX_WARNINGS} more warnings of this adapter are left out"
        warnings = [*warnings[:MAX_WARNINGS], rest]
    bound = tuple(_bound(pair, reading) for pair, reading in plan.readings.items())
    return AdapterWeights(factors, AdapterManifest(bound, plan.skipped, tuple(warnings)))


def check(
    folder: Path, targets: Sequence[LoraTarget], *, max_rank: int, max_bytes: int | None
) -> None:
    """See `registry.check_adapter`."""
    config = read_config(folder)
    with _open(folder, allow_pickle=False) as file:
        _plan(folder, file, config, targets, max_rank, max_bytes)


def _plan(
    folder: Path,
    file: TensorFile,
    config: PeftConfig,
    targets: Sequence[LoraTarget],
    max_rank: int,
    max_bytes: int | None,
) -> _Plan:
    """Everything that can be judged before a tensor is read."""
    index = TargetIndex(targets)
    warnings = [*config.warnings, *index.check_parameters(config.target_parameters)]
    if not file.infos:
        raise AdapterInvalid("empty", f"the weights in {folder.name} have no tensor")
    pairs, skipped = bind_tensors(file.infos, config, index)
    if not pairs:
        raise AdapterInvalid("empty", f"no LoRA tensor among {len(file.infos)} tensors")
    flat = [pair for pair in pairs if _is_flat(pair)]
    for pair in pairs:
        _check_dtypes(pair)
    flat_layout, said = decide_layout(flat, targets, config.peft_version) if flat else (None, [])
    warnings = [*said, *warnings, *_parameters_without_tensors(config, pairs)]
    _check_tying(config, index, pairs)
    readings = {
        pair: _judge(pair, flat_layout if _is_flat(pair) else None, config, max_rank)
        for pair in pairs
    }
    least = _least_bytes(readings)
    if max_bytes is not None and least > max_bytes:
        what = f"the adapter in {folder.name} takes {least} bytes or more"
        raise StoreFull(f"{what}, zeros of experts without a tensor included; {max_bytes} at most")
    return _Plan(readings, skipped, warnings)


def _least_bytes(readings: Mapping[Pair, _Reading]) -> int:
    """Of all factors in two bytes an element, if gate and up turn out to share their A."""
    ranks: dict[str, tuple[LoraTarget, int, int, int]] = {}
    for pair, reading in readings.items():
        target = pair.place.target
        _, rank, num_a, num_b = ranks.get(target.name, (target, 0, 1, 1))
        sizes = [target.num_experts] * 2
        if reading.layout == "stacked":
            sizes = [pair.a.shape[0], pair.b.shape[0]]
        rank = max(rank, reading.lora_rank)
        ranks[target.name] = target, rank, max(num_a, sizes[0]), max(num_b, sizes[1])
    return sum(
        2 * rank * (num_a * target.in_features + num_b * target.out_features)
        for target, rank, num_a, num_b in ranks.values()
    )


def _open(folder: Path, allow_pickle: bool) -> TensorFile:
    if os.path.lexists(folder / WEIGHTS_FILE):
        return SafetensorsFile(folder / WEIGHTS_FILE)
    for name in PICKLE_FILES:
        if os.path.lexists(folder / name):
            if allow_pickle:
                return PickleFile(folder / name)
            raise AdapterInvalid("pickle", f"{name} is a pickle; save it as {WEIGHTS_FILE}")
    raise AdapterInvalid("file", f"{WEIGHTS_FILE} is missing")


def _other_files(folder: Path, file: TensorFile) -> Iterator[str]:
    """A warning for each file of weights beside the one that is read."""
    read = {WEIGHTS_FILE} if isinstance(file, SafetensorsFile) else set(PICKLE_FILES)
    for name in sorted(os.listdir(folder)):
        if name.endswith(_WEIGHT_ENDINGS) and name not in read:
            yield f"{shown(name)} lies beside the adapter and was not read"


def _other_base(config: PeftConfig, base_name: str | None) -> list[str]:
    written = (config.base_model or "").rstrip("/").rpartition("/")[2]
    if not base_name or not written or written == base_name.rstrip("/").rpartition("/")[2]:
        return []
    return [f"base_model_name_or_path is {shown(config.base_model)}, served is {shown(base_name)}"]


def _parameters_without_tensors(config: PeftConfig, pairs: Sequence[Pair]) -> list[str]:
    if not config.target_parameters:
        return []
    bound = {suffix for pair in pairs for suffix in dotted_suffixes(pair.place.name)}
    return [
        f"target_parameters: {shown(name)} has no tensor in the file"
        for name in config.target_parameters
        if name not in bound
    ]


def _check_tying(config: PeftConfig, index: TargetIndex, pairs: Sequence[Pair]) -> None:
    """Tied: both embedding and head must have their pair, or half of the delta is missing."""
    kinds = {p.place.target.kind for p in pairs if index.is_vocabulary(p.place.target)}
    if config.ensure_weight_tying and len(kinds) == 1:
        what = f"ensure_weight_tying, but only the {next(iter(kinds))} side has tensors"
        raise AdapterInvalid("config", what)


def _check_dtypes(pair: Pair) -> None:
    for info in (pair.a, pair.b):
        if info.dtype not in FLOAT_DTYPES:
            what = (
                f"{shown(info.name)} is {info.dtype}; a factor is one of {', '.join(FLOAT_DTYPES)}"
            )
            raise AdapterInvalid("dtype", what)


def _is_flat(pair: Pair) -> bool:
    """Two 2-D tensors for all experts at once."""
    place = pair.place
    all_experts = place.target.kind == "experts" and place.expert is None
    return all_experts and len(pair.a.shape) == len(pair.b.shape) == 2


def _judge(pair: Pair, flat: Layout | None, config: PeftConfig, max_rank: int) -> _Reading:
    """Check shapes and rank of a pair. Errors: AdapterInvalid, naming the tensor."""
    place, name = pair.place, shown(pair.a.name)
    if flat is not None:
        fitting_layouts(pair)
        layout, experts = flat, place.target.num_experts
        (rows, _), (_, columns) = pair.a.shape, pair.b.shape
        if rows % experts:
            what = f"{name} has {rows} rows, not a multiple of {experts} experts"
            raise AdapterInvalid("rank_mismatch", what)
        rank_a, rank_b = rows // experts, columns / experts
    else:
        stacked = place.target.kind == "experts" and place.expert is None
        layout = "stacked" if stacked else "plain"
        _check_sizes(pair, stacked)
        rank_a, rank_b = pair.a.shape[-2], pair.b.shape[-1]
    if rank_a != rank_b:
        what = f"{name} has rank {rank_a}, its lora_B {rank_b:g}"
        raise AdapterInvalid("rank_mismatch", what)
    if rank_a > max_rank:
        raise AdapterInvalid(
            "rank_limit", f"{name} has rank {rank_a}; at most {max_rank} is served"
        )
    expected = config.rank_of(place.name)
    if rank_a != expected:
        what = f"{name} has rank {rank_a}, the config says {expected} (r or rank_pattern)"
        raise AdapterInvalid("rank_mismatch", what)
    return _Reading(layout, rank_a, config.scale_of(place.name, rank_a))


def _bound(pair: Pair, reading: _Reading) -> BoundPair:
    place = pair.place
    layout: FileLayout = "plain"
    if reading.layout == "natural" or reading.layout == "swapped":
        layout = reading.layout
    elif reading.layout == "stacked":
        shared = place.target.num_experts > 1 and 1 in (pair.a.shape[0], pair.b.shape[0])
        layout = "shared outer" if shared else "3-D"
    elif place.expert is not None:
        layout = "per expert"
    names = pair.a.name, pair.b.name, place.target.name
    return BoundPair(*names, layout, reading.lora_rank, reading.scale)


def _check_sizes(pair: Pair, stacked: bool) -> None:
    """Sizes of a plain pair (r, in), (out, r), or of a 3-D one with an expert axis of E or 1."""
    place, a, b = pair.place, pair.a.shape, pair.b.shape
    axes = {1, place.target.num_experts}
    fits = len(a) == len(b) == (3 if stacked else 2)
    fits = fits and a[-1] == place.target.in_features and b[-2] == place.out_features
    if not fits or (stacked and not {a[0], b[0]} <= axes):
        experts = f", {place.target.num_experts} experts" if place.target.kind == "experts" else ""
        raise AdapterInvalid(
            "shape",
            f"{shown(pair.a.name)} {list(a)} and lora_B {list(b)} do not fit {place.target.name}: "
            f"{place.target.in_features} in, {place.out_features} out{experts}",
        )


def _build(
    file: TensorFile, targets: Sequence[LoraTarget], readings: dict[Pair, _Reading], max_rank: int
) -> dict[str, LoraFactors]:
    """Read everything, target by target in the model's order."""
    by_target: dict[str, list[Pair]] = {}
    for pair in readings:
        by_target.setdefault(pair.place.target.name, []).append(pair)

    def read(pair: Pair) -> tuple[Tensor, Tensor]:
        return _read_pair(file, pair, readings[pair])

    factors: dict[str, LoraFactors] = {}
    for target in targets:
        pairs = by_target.get(target.name)
        if pairs is None:
            continue
        if target.kind == "experts":
            factor = build_experts(target, pairs, read)
        else:
            a, b = read(pairs[0])
            factor = LoraFactors(a.contiguous(), b.contiguous())
        if factor.lora_rank > max_rank:
            what = f"{target.name}: gate and up together have rank {factor.lora_rank}"
            raise AdapterInvalid("rank_limit", f"{what}; at most {max_rank} is served")
        factors[target.name] = factor
    return factors


def _read_pair(file: TensorFile, pair: Pair, reading: _Reading) -> tuple[Tensor, Tensor]:
    """`a [E or 1, r, in]`, `b [E or 1, r, out]` with the scale in b and gate before up."""
    place = pair.place
    # Scaled as it lies in the file: passes over a permuted view take many times as long.
    scaled = pair.a if reading.layout == "swapped" else pair.b  # what becomes b
    raw = {t.name: _read_finite(file, t.name) for t in (pair.a, pair.b)}
    if reading.scale != 1.0:
        raw[scaled.name] = _fold(raw[scaled.name], reading.scale)
        if not is_finite(raw[scaled.name]):
            raise AdapterInvalid(
                "not_finite", f"{shown(scaled.name)} overflows when scaled by alpha / r"
            )
    a, b = canonical_pair(
        raw[pair.a.name], raw[pair.b.name], reading.layout, place.target.num_experts
    )
    if place.target.interleaved and place.part is None:
        b = split_gate_up(b)  # [E or 1, r, out]
    return a, b


def _read_finite(file: TensorFile, name: str) -> Tensor:
    tensor = file.read(name)
    if tensor.dtype is torch.float64:
        tensor = tensor.float()
    if not is_finite(tensor):
        raise AdapterInvalid("not_finite", f"{shown(name)} holds NaN or infinity")
    return tensor


def _fold(b: Tensor, scale: float) -> Tensor:
    """b * scale: in b's own dtype where that is exact (a power of two), else in fp32."""
    scaled = b.float() * scale
    if b.dtype is torch.float32:
        return scaled
    narrow = scaled.to(b.dtype)
    return narrow if torch.equal(narrow.float(), scaled) else scaled
