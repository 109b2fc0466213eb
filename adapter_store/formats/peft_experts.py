"""Expert factors of PEFT files -> the canonical `[E or 1, r, in]` and `[E or 1, r, out]`.

Flat tensors (expert axis folded into the rank axis) in the two layouts that PEFT has written, true
3-D tensors, and one pair for each expert; gate and up together or apart. Not here: names, files.

Flat: A is [r*E, x], row e*r + k; B is [y, r*E], column k*E + e. "natural": x is the true input, y
the true output. "swapped": the other way round, and A and B change roles. Sizes tell them apart,
except where input and output are equal; there the rest of the adapter tells, and at last the
versions.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from adapter_store.errors import AdapterInvalid
from adapter_store.formats.bounded_files import shown
from adapter_store.formats.peft_config import parse_release
from adapter_store.formats.peft_names import Pair
from adapter_store.weights import LoraFactors, LoraTarget

FlatLayout = Literal["natural", "swapped"]
Layout = Literal["natural", "swapped", "stacked", "plain"]
Storage = Literal["out_in", "in_out", "in_out_interleaved"]
Read = Callable[[Pair], tuple[Tensor, Tensor]]

# How experts are stored in transformers 5: qwen3_moe and its like, llama4, gpt-oss.
_STORAGES: tuple[Storage, ...] = ("out_in", "in_out", "in_out_interleaved")
# (first PEFT release, transformers, layout by storage); None: transformers 4 has no 3-D experts.
# Source: PEFT of each era, run on tiny models.
_ERAS: tuple[tuple[tuple[int, int, int], int, tuple[FlatLayout | None, ...]], ...] = (
    ((0, 19, 1), 5, ("natural", "swapped", "natural")),
    ((0, 19, 1), 4, (None, "swapped", "swapped")),
    ((0, 19, 0), 5, ("swapped", "natural", "swapped")),
    ((0, 19, 0), 4, (None, "natural", "natural")),
    ((0, 0, 0), 5, ("swapped", "natural", "natural")),
    ((0, 0, 0), 4, (None, "natural", "natural")),
)
_NEWEST_SEEN = (0, 21, 2)


def fitting_layouts(pair: Pair) -> set[FlatLayout]:
    """Layouts that the sizes of a flat pair allow; AdapterInvalid("shape") if none does."""
    place = pair.place
    inner, outer = place.target.in_features, place.out_features
    x, y = pair.a.shape[1], pair.b.shape[0]
    fits: set[FlatLayout] = set()
    if (x, y) == (inner, outer):
        fits.add("natural")
    if (x, y) == (outer, inner):
        fits.add("swapped")
    if not fits:
        raise AdapterInvalid(
            "shape",
            f"{shown(pair.a.name)} {list(pair.a.shape)} and lora_B {list(pair.b.shape)} fit no "
            f"layout of {place.target.name}: {inner} in, {outer} out, "
            f"{place.target.num_experts} experts",
        )
    return fits


def decide_layout(
    flat: Sequence[Pair],
    targets: Sequence[LoraTarget],
    peft_version: str | None,
) -> tuple[FlatLayout, list[str]]:
    """One layout for all flat pairs of an adapter, and warnings.

    Errors:  AdapterInvalid("shape") for a pair that fits none, ("ambiguous_layout") if pairs
             contradict each other or nothing tells.
    """
    votes: dict[FlatLayout, Pair] = {}
    for pair in flat:
        fits = fitting_layouts(pair)
        if len(fits) == 1:
            votes.setdefault(next(iter(fits)), pair)
    if len(votes) == 2:
        names = " and ".join(shown(pair.a.name) for pair in votes.values())
        raise AdapterInvalid("ambiguous_layout", f"{names} are in different layouts")
    if votes:
        return next(iter(votes)), []
    return _layout_by_version(flat[0], targets, peft_version)


def _layout_by_version(
    pair: Pair, targets: Sequence[LoraTarget], peft_version: str | None
) -> tuple[FlatLayout, list[str]]:
    name, storage = shown(pair.a.name), _storage(pair.place.target, targets)
    release = parse_release(peft_version) if peft_version else None
    if release is None:
        said = "no peft_version tells which is which"
        if peft_version:
            said = f"peft_version {shown(peft_version)} does not tell which is which"
        raise AdapterInvalid(
            "ambiguous_layout", f"{name}: input and output sizes are equal, and {said}"
        )
    assumed = pair.place.target.assume_transformers
    layout = _written_as(release, assumed or 5, storage)
    if layout is None:
        raise AdapterInvalid(
            "ambiguous_layout",
            f"{name}: transformers {assumed} writes no such tensor for this model",
        )
    warning = f"{name}: input and output sizes are equal; read as {layout}, as PEFT {peft_version}"
    if assumed:
        warning += f" with transformers {assumed} (assume_transformers) writes it"
    else:
        warning += " with transformers 5 writes it: the file does not record that version"
        if _written_as(release, 4, storage) not in (None, layout):
            warning += ", and under transformers 4 it would be the other layout"
    if release > _NEWEST_SEEN:
        warning += "; this release of PEFT is newer than those checked"
    return layout, [warning]


def _written_as(
    release: tuple[int, int, int], transformers: int, storage: Storage
) -> FlatLayout | None:
    for first, version, layouts in _ERAS:
        if release >= first and transformers == version:
            return layouts[_STORAGES.index(storage)]
    return None


def _storage(target: LoraTarget, targets: Sequence[LoraTarget]) -> Storage:
    """How the module of this target stores its experts; gpt-oss shows in its gate_up alone."""
    if not target.weight_is_in_out:
        return "out_in"
    module = target.name.rpartition(".")[0]
    interleaved = any(t.interleaved for t in targets if t.name.rpartition(".")[0] == module)
    return "in_out_interleaved" if interleaved else "in_out"


def canonical_pair(a: Tensor, b: Tensor, layout: Layout, num_experts: int) -> tuple[Tensor, Tensor]:
    """One pair of tensors as `a [E or 1, r, in]`, `b [E or 1, r, out]` (views)."""
    if layout == "plain":
        return a[None], b.T[None]  # [1, r, in], [1, r, out]
    if layout == "stacked":
        return a, b.transpose(1, 2)  # [E or 1, r, in], [E or 1, r, out]
    r = a.shape[0] // num_experts
    by_expert = a.view(num_experts, r, a.shape[1])  # [E, r, x]
    by_column = b.view(b.shape[0], r, num_experts).permute(2, 1, 0)  # [E, r, y]
    return (by_expert, by_column) if layout == "natural" else (by_column, by_expert)


def split_gate_up(b: Tensor) -> Tensor:
    """Outputs g0,u0,g1,u1 -> all of gate, then all of up: [.., out] -> [.., out]."""
    return torch.cat([b[..., 0::2], b[..., 1::2]], dim=-1)  # [E or 1, r, out]


def build_experts(target: LoraTarget, pairs: Sequence[Pair], read: Read) -> LoraFactors:
    """The factors of one experts target from all its pairs.

    read  gives a pair as `canonical_pair` does, scale folded into b, checked.
    Experts without a pair get zeros. Ranks that differ are padded with zeros to the largest.
    Cost:  gate and up with an A of their own become one factor of rank r_gate + r_up, half of
           whose B is zero: twice the memory and work of one common A. Equal As are joined.
    Errors:  AdapterInvalid("unbound_tensor") if the file spells the target in two ways.
    """
    if len({(p.place.part is None, p.place.expert is None) for p in pairs}) > 1:
        names = " and ".join(shown(p.a.name) for p in (pairs[0], pairs[-1]))
        raise AdapterInvalid("unbound_tensor", f"{target.name} is spelled in two ways: {names}")
    by_part: dict[int | None, list[Pair]] = {}
    for pair in pairs:
        by_part.setdefault(pair.place.part, []).append(pair)
    built = {part: _gather(target, some, read) for part, some in by_part.items()}
    if None in built:
        a, b = built[None]
        return LoraFactors(a.contiguous(), b.contiguous())
    gate_up = [built.get(part) for part in range(len(target.expert_parts))]
    return _join_parts(gate_up, target.out_features // len(target.expert_parts))


def _gather(target: LoraTarget, pairs: Sequence[Pair], read: Read) -> tuple[Tensor, Tensor]:
    """All pairs of one part -> `a [E or 1, r, in]`, `b [E or 1, r, out of the part]`."""
    if pairs[0].place.expert is None:
        (pair,) = pairs
        return read(pair)
    parts = {pair.place.expert or 0: read(pair) for pair in pairs}
    r = max(a.shape[1] for a, _ in parts.values())
    a_dtype, b_dtype = (
        _common([a for a, _ in parts.values()]),
        _common([b for _, b in parts.values()]),
    )
    in_features, out_features = target.in_features, pairs[0].place.out_features
    whole_a = torch.zeros(target.num_experts, r, in_features, dtype=a_dtype)  # [E, r, in]
    whole_b = torch.zeros(target.num_experts, r, out_features, dtype=b_dtype)  # [E, r, out]
    for expert, (a, b) in parts.items():
        whole_a[expert, : a.shape[1]] = a[0]
        whole_b[expert, : b.shape[1]] = b[0]
    return whole_a, whole_b


def _join_parts(parts: Sequence[tuple[Tensor, Tensor] | None], part_out: int) -> LoraFactors:
    """Gate and up, each with its own pair or none -> one factor; B is zero outside its own part."""
    there = [part for part in parts if part is not None]
    a_dtype, b_dtype = _common([a for a, _ in there]), _common([b for _, b in there])
    num_a, num_b = max(len(a) for a, _ in there), max(len(b) for _, b in there)
    one_a = all(torch.equal(a, there[0][0]) for a, _ in there)
    needed = [a for a, _ in (there[:1] if one_a else there)]
    whole_a = torch.cat(
        [a.to(a_dtype).expand(num_a, -1, -1) for a in needed], dim=1
    )  # [E|1, r, in]
    whole_b = torch.zeros(num_b, whole_a.shape[1], part_out * len(parts), dtype=b_dtype)
    row = 0
    for i, part in enumerate(parts):
        if part is not None:
            r = part[1].shape[1]
            whole_b[:, row : row + r, i * part_out : (i + 1) * part_out] = part[1]  # [E|1, r, out]
            row += 0 if one_a else r
    return LoraFactors(whole_a, whole_b)


def _common(tensors: Sequence[Tensor]) -> torch.dtype:
    """A dtype that holds all of these exactly."""
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype
