"""What a tensor of a PEFT file is called -> which `LoraTarget` it changes, or why it is refused.

All spellings that are in use are read here: with and without prefixes, nested parameter wrappers,
parameter names, one pair for each expert, Unsloth's lists, w1/w2/w3. Not here: shapes and layouts.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from adapter_store.errors import AdapterInvalid
from adapter_store.formats.bounded_files import shown
from adapter_store.formats.peft_config import PeftConfig
from adapter_store.formats.safetensors_file import TensorInfo
from adapter_store.weights import LoraTarget

_PAIR = re.compile(r"(.+)\.lora_(?:(embedding_)([AB])|([AB])(?:\.weight)?)")
_WRAPPER_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.", ""),
)
_PART_NAMES = {1: (("down_proj", "w2"),), 2: (("gate_proj", "w1"), ("up_proj", "w3"))}


@dataclass(frozen=True)
class Place:
    """What one pair of tensors changes.

    part    index into the target's expert_parts, where gate and up have pairs of their own; None =
            the target's whole output
    expert  the one expert that it changes; None = all of them
    name    full module or parameter name as PEFT's patterns see it
    """

    target: LoraTarget
    part: int | None
    expert: int | None
    name: str

    @property
    def out_features(self) -> int:
        """Output size of this pair: a part has its share of the target's."""
        parts = 1 if self.part is None else len(self.target.expert_parts)
        return self.target.out_features // parts


@dataclass(frozen=True)
class Pair:
    """lora_A and lora_B of one place, unread."""

    place: Place
    a: TensorInfo
    b: TensorInfo


@dataclass(frozen=True)
class _Experts:
    """One module of experts. params: in the order in which PEFT nests them, gate_up first (inner).

    parts  name of one expert's linear -> its target, and which part of it
    """

    params: dict[str, LoraTarget]
    parts: dict[str, tuple[LoraTarget, int | None]]


class TargetIndex:
    """The model's targets by every path that a file may use for them."""

    def __init__(self, targets: Sequence[LoraTarget]) -> None:
        self._plain: dict[str, LoraTarget] = {}
        self._experts: dict[str, _Experts] = {}
        self._vocabulary_shapes = {
            (t.in_features, t.out_features) for t in targets if t.kind == "embedding"
        }
        self._param_paths: set[str] = set()
        grouped: dict[str, dict[str, LoraTarget]] = {}
        for target in targets:
            for path in (target.name, *target.aliases):
                if target.kind == "experts":
                    module, param = _module_and_param(target, path)
                    grouped.setdefault(module, {})[param] = target
                    self._param_paths.add(f"{module}.{param}")
                else:
                    self._plain[path] = target
                    self._param_paths.add(f"{path}.weight")
        for module, params in grouped.items():
            order = sorted(params, key=lambda param: -len(params[param].expert_parts))
            parts = dict(item for param in order for item in _part_names(params[param]))
            self._experts[module] = _Experts({p: params[p] for p in order}, parts)
        self._param_names = {path.rpartition(".")[2] for path in self._param_paths}
        self._foreign_prefixes = [
            (prefix, instead)
            for prefix, instead in _WRAPPER_PREFIXES
            if not any(path.startswith(prefix) for path in self._param_paths)
        ]
        self._suffixes = {s for path in self._param_paths for s in dotted_suffixes(path)}

    def plain(self, path: str) -> LoraTarget | None:
        """The linear or embedding of this path."""
        return self._plain.get(path)

    def is_vocabulary(self, target: LoraTarget) -> bool:
        """True for the embedding and for a head of the same shape."""
        sizes = (target.out_features, target.in_features)
        return target.kind == "embedding" or sizes in self._vocabulary_shapes

    def strip(self, raw_path: str) -> str:
        """The path without PEFT's prefix, and a multimodal wrapper's if the model has none."""
        path = raw_path.removeprefix("base_model.model.")
        for prefix, instead in self._foreign_prefixes:
            if path.startswith(prefix):
                return instead + path.removeprefix(prefix)
        return path

    def check_parameters(self, names: Iterable[str]) -> Iterator[str]:
        """Warnings for entries of target_parameters that name nothing here.

        Errors:  AdapterInvalid("unsupported_parameter") for an entry whose last part is no weight
                 that can be adapted: its tensors would lie under the names of one that can.
        """
        for name in names:
            if name.rpartition(".")[2] not in self._param_names:
                what = f"target_parameters: {shown(name)} is no weight that can take a LoRA"
                raise AdapterInvalid("unsupported_parameter", what)
            if name not in self._suffixes:
                yield f"target_parameters: {shown(name)} names nothing in this model"

    def place_expert(
        self, path: str, spelled: str, nested: Collection[str], chosen: Collection[str]
    ) -> Place | None:
        """The place of an expert tensor. path: as the model spells it; spelled: as the file does.

        nested  paths of expert modules that have `.base_layer.lora_*` tensors;  chosen  the
        config's target_parameters.  None if there is no such place. Errors: AdapterInvalid.
        """
        for depth in range(3):
            module, rest = _split_tail(path, depth)
            experts = self._experts.get(module)
            if experts is None:
                continue
            spelled_module = _split_tail(spelled, depth)[0]
            if depth == 0:
                param = self._outer_param(experts, spelled_module, module in nested, chosen)
                return Place(experts.params[param], None, None, f"{spelled_module}.{param}")
            if depth == 1:
                return _whole_place(experts, spelled_module, rest[0])
            return _one_expert_place(experts, spelled, rest)
        return None

    def _outer_param(
        self, experts: _Experts, spelled: str, nested: bool, chosen: Collection[str]
    ) -> str:
        """Which parameter `...experts.lora_A` is: the outer of two, or the only one targeted."""
        if nested:
            return list(experts.params)[-1]
        targeted = [
            param
            for param in experts.params
            if any(suffix in chosen for suffix in dotted_suffixes(f"{spelled}.{param}"))
        ]
        if len(targeted) == 1:
            return targeted[0]
        said = "names both parameters" if targeted else "names neither parameter"
        what = f"{shown(spelled + '.lora_A')} is the only pair there; target_parameters {said}"
        raise AdapterInvalid("ambiguous_layout", what)


def bind_tensors(
    infos: Mapping[str, TensorInfo], config: PeftConfig, index: TargetIndex
) -> tuple[list[Pair], dict[str, str]]:
    """Every tensor of a file as half of a pair, or as skipped with the reason.

    Errors:  AdapterInvalid for a tensor that belongs to nothing, that is no LoRA factor, whose
             other half is missing, or that names the same thing as another.
    """
    halves: dict[tuple[str, int | None, int | None], tuple[Place, dict[str, TensorInfo]]] = {}
    skipped: dict[str, str] = {}
    unbound: list[str] = []
    nested = {
        index.strip(match[1]).removesuffix(".base_layer")
        for match in map(_PAIR.fullmatch, infos)
        if match and match[1].endswith(".base_layer")
    }
    chosen = frozenset(config.target_parameters)
    for name, info in infos.items():
        match = _PAIR.fullmatch(name)
        if match is None:
            if not _skip_copy(info, index, skipped):
                unbound.append(name)
            continue
        place = _place(name, match[1], bool(match[2]), index, nested, chosen)
        if place is None:
            unbound.append(name)
            continue
        key = (place.target.name, place.part, place.expert)
        half = halves.setdefault(key, (place, {}))[1]
        letter = match[3] or match[4]
        if letter in half:
            what = f"{shown(name)} and {shown(half[letter].name)} are the same factor"
            raise AdapterInvalid("unbound_tensor", what)
        half[letter] = info
    if unbound:
        names = ", ".join(shown(name) for name in unbound[:4])
        what = f"{len(unbound)} tensors belong to nothing in this model: {names}"
        raise AdapterInvalid("unbound_tensor", what)
    return [_paired(place, half) for place, half in halves.values()], skipped


def dotted_suffixes(path: str) -> list[str]:
    """`a.b.c` -> `a.b.c`, `b.c`, `c`."""
    pieces = path.split(".")
    return [".".join(pieces[i:]) for i in range(len(pieces))]


def _paired(place: Place, half: dict[str, TensorInfo]) -> Pair:
    if len(half) == 1:
        (letter, info), other = next(iter(half.items())), "B" if "A" in half else "A"
        raise AdapterInvalid(
            "unpaired_tensor", f"{shown(info.name)} is lora_{letter} without its lora_{other}"
        )
    return Pair(place, half["A"], half["B"])


def _place(
    name: str,
    raw_path: str,
    is_embedding: bool,
    index: TargetIndex,
    nested: Collection[str],
    chosen: Collection[str],
) -> Place | None:
    """Where the pair at this path belongs; None if nowhere. Errors: AdapterInvalid."""
    spelled = raw_path.removeprefix("base_model.model.")
    path = index.strip(raw_path)
    target = index.plain(path)
    if target is None:
        return None if is_embedding else index.place_expert(path, spelled, nested, chosen)
    if is_embedding != (target.kind == "embedding"):
        if target.kind == "embedding":
            what = f"{shown(name)}: an embedding takes lora_embedding_A and lora_embedding_B"
            raise AdapterInvalid("unsupported_parameter", what)
        return None
    weight = f"{spelled}.weight"  # a router adapted as a parameter is called by its weight
    as_parameter = any(suffix in chosen for suffix in dotted_suffixes(weight))
    return Place(target, None, None, weight if as_parameter else spelled)


def _module_and_param(target: LoraTarget, path: str) -> tuple[str, str]:
    """Experts module and parameter name; an alias may name the module alone."""
    param = target.name.rpartition(".")[2]
    module, _, last = path.rpartition(".")
    return (module, param) if last == param else (path, param)


def _part_names(target: LoraTarget) -> Iterator[tuple[str, tuple[LoraTarget, int | None]]]:
    """Names of one expert's linears -> the part of the target; the only part is the whole."""
    known = _PART_NAMES.get(len(target.expert_parts), ())
    for i, own in enumerate(target.expert_parts):
        part = None if len(target.expert_parts) == 1 else i
        for name in {own, *(known[i] if known else ())}:
            yield name, (target, part)


def _split_tail(path: str, depth: int) -> tuple[str, list[str]]:
    """(path without its last `depth` pieces, those pieces)."""
    if depth == 0:
        return path, []
    module, *rest = path.rsplit(".", depth)
    return module, rest


def _whole_place(experts: _Experts, spelled_module: str, last: str) -> Place | None:
    """`...experts.X`: X is base_layer (the inner of two nested), a parameter or a linear's name."""
    if last == "base_layer":
        param = next(iter(experts.params))
        return Place(experts.params[param], None, None, f"{spelled_module}.{param}")
    if last in experts.params:
        return Place(experts.params[last], None, None, f"{spelled_module}.{last}")
    if last in experts.parts:
        target, part = experts.parts[last]
        return Place(target, part, None, f"{spelled_module}.{last}")
    return None


def _one_expert_place(experts: _Experts, spelled: str, rest: list[str]) -> Place | None:
    """`...experts.3.up_proj`, or Unsloth's `...experts.gate_up_projs.3`."""
    first, second = rest
    if first.isdecimal() and second in experts.parts:
        number, (target, part) = first, experts.parts[second]
    elif second.isdecimal() and first.removesuffix("s") in experts.params and first[-1] == "s":
        number, target, part = second, experts.params[first.removesuffix("s")], None
    else:
        return None
    expert = int(number) if len(number) < 8 else target.num_experts
    if str(expert) != number or expert >= target.num_experts:
        return None
    return Place(target, part, expert, spelled)


def _skip_copy(info: TensorInfo, index: TargetIndex, skipped: dict[str, str]) -> bool:
    """A tensor that is no LoRA factor: skip a copy of the vocabulary's weights, refuse the rest.

    False if it is simply unknown. Errors: AdapterInvalid with the reason.
    """
    name = info.name
    for mark, reason in (
        ("lora_magnitude_vector", "dora"),
        ("trainable_tokens", "trainable_tokens"),
        (".modules_to_save.", "modules_to_save"),
    ):
        if mark in name:
            raise AdapterInvalid(reason, f"{shown(name)} is in the file")
    if name.endswith(".bias"):
        raise AdapterInvalid("bias", f"{shown(name)} is in the file")
    path = index.strip(name.removesuffix(".weight"))
    target = index.plain(path.removesuffix(".base_layer"))
    if not name.endswith(".weight") or target is None:
        return False
    if not path.endswith(".base_layer") or not index.is_vocabulary(target):
        what = f"{shown(name)} replaces a weight of the base model"
        raise AdapterInvalid("modules_to_save", what)
    rows, width = target.out_features, target.in_features
    if target.kind == "embedding":
        rows, width = width, rows
    if info.shape != (rows, width):
        what = f"{shown(name)} is {list(info.shape)}; the model's is {[rows, width]}"
        raise AdapterInvalid("shape", what)
    skipped[name] = "a copy of the base model's own weights, which are used instead"
    return True
