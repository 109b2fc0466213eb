"""Adapter folders that were made to hurt: each number gives one, the same on every machine.

`make_case(number)` takes a small valid adapter and changes it by one to three of MUTATIONS, which
have names; `Case.write` puts it into a folder. Not here: what a loader may do with it
(hostile_run).
"""

import json
import os
import random
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.adapter_store import hostile_archives

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MIB, GIB = 1 << 20, 1 << 30
LAYER = "base_model.model.model.layers.0."
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}

Random = random.Random
Maker = Callable[[Path], object]


@dataclass
class Draft:
    """An adapter folder in the making.

    entries  the header's keys and values, in order and perhaps twice;  data  behind it
    config   the config's fields
    literals text -> what stands in its place in the JSON (what json.dumps would not write)
    raw_config, raw_header, header_length  instead of what follows from the above
    edit     a last change to the bytes of the weights
    makers   file name -> what is put there instead of, or beside, the two files
    meanwhile  done to the folder when its weights have just been opened by a reader
    """

    config: dict[str, Any]
    entries: list[tuple[str, Any]]
    data: bytes
    literals: dict[str, str] = field(default_factory=dict)
    raw_config: bytes | None = None
    raw_header: bytes | None = None
    header_length: int | None = None
    edit: Callable[[bytes], bytes] = bytes
    makers: dict[str, Maker | None] = field(default_factory=dict)
    meanwhile: Maker | None = None

    def literal(self, text: str) -> str:
        """A value that becomes this text in the JSON."""
        mark = f"@literal {len(self.literals)}@"
        self.literals[mark] = text
        return mark

    def factor(self, rng: Random) -> int:
        """Index of a tensor among the entries."""
        tensors = [i for i, (_, value) in enumerate(self.entries) if _is_entry(value)]
        return rng.choice(tensors) if tensors else self.add(rng)

    def add(self, rng: Random) -> int:
        """One more empty tensor."""
        entry = {"dtype": "F32", "shape": [0], "data_offsets": [len(self.data)] * 2}
        self.entries.append((f"x{rng.random()}", entry))
        return len(self.entries) - 1

    def change(self, rng: Random, **values: Any) -> None:
        """Other values in one tensor's entry."""
        i = self.factor(rng)
        self.entries[i] = (self.entries[i][0], self.entries[i][1] | values)

    def config_bytes(self) -> bytes:
        if self.raw_config is not None:
            return self.raw_config
        return self._fill(json.dumps(self.config))

    def weights_bytes(self) -> bytes:
        header = self.raw_header
        if header is None:
            pairs = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in self.entries)
            header = self._fill("{" + ", ".join(pairs) + "}")
        length = len(header) if self.header_length is None else self.header_length
        return self.edit(length.to_bytes(8, "little") + header + self.data)

    def _fill(self, text: str) -> bytes:
        for mark, literal in self.literals.items():
            text = text.replace(json.dumps(mark), literal)
        return text.encode("utf-8", "surrogatepass")


@dataclass(frozen=True)
class Case:
    """One hostile folder.

    mutations    their names;  must_refuse  a load of it would be a fault, else it may be harmless
    """

    number: int
    mutations: tuple[str, ...]
    must_refuse: bool
    draft: Draft

    def write(self, folder: Path) -> None:
        """Make the folder's files."""
        folder.mkdir()
        for name, content in (
            (CONFIG, self.draft.config_bytes),
            (WEIGHTS, self.draft.weights_bytes),
        ):
            if name not in self.draft.makers:
                (folder / name).write_bytes(content())
        for name, make in self.draft.makers.items():
            if make is not None:
                make(folder / name)


@dataclass(frozen=True)
class Mutation:
    """must_refuse: alone, it leaves no adapter; share: how often it is taken, 1 = as the others."""

    apply: Callable[[Draft, Random], object]
    must_refuse: bool
    share: float


MUTATIONS: dict[str, Mutation] = {}


def _mutation(must_refuse: bool = True, share: float = 1.0) -> Callable[..., Any]:
    def add(apply: Callable[[Draft, Random], object]) -> Callable[[Draft, Random], object]:
        MUTATIONS[apply.__name__.strip("_")] = Mutation(apply, must_refuse, share)
        return apply

    return add


def make_case(number: int, only: str | None = None) -> Case:
    """The case of this number. Every mutation has its turn as the first, the dear ones less often.

    only  this mutation and no other
    """
    rng = Random(f"hostile {number}")
    names = list(MUTATIONS)
    first = only or names[number % len(names)]
    if only is None and rng.random() > MUTATIONS[first].share:
        first = rng.choice([name for name in names if MUTATIONS[name].share == 1.0])
    chosen = [first]
    while only is None and len(chosen) < 3 and rng.random() < 0.3:
        chosen.append(rng.choice([name for name in names if MUTATIONS[name].share == 1.0]))
    draft = valid_draft(rng)
    MUTATIONS[first].apply(draft, rng)
    for name in chosen[1:]:
        # What one mutation spoiled, the next may not find any more.
        with suppress(IndexError, KeyError, TypeError, ValueError):
            MUTATIONS[name].apply(draft, rng)
    must_refuse = len(chosen) == 1 and MUTATIONS[first].must_refuse
    return Case(number, tuple(chosen), must_refuse, draft)


# ---- what is valid


def valid_draft(rng: Random, form: str | None = None) -> Draft:
    """A small adapter of tiny_adapters.TARGETS in one of the forms that must load."""
    form = form or rng.choice(list(_FORMS))
    rank, dtype = rng.randint(1, 4), rng.choice(list(ITEM_BYTES))
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rng.choice([rank, 2 * rank, 1.5]),
        "target_modules": ["q_proj"],
        "bias": "none",
        "use_rslora": rng.random() < 0.2,
        "modules_to_save": None,
        "base_model_name_or_path": "base",
        "peft_version": "0.21.2",
    }
    entries: list[tuple[str, Any]] = [("__metadata__", {"format": "pt"})]
    data = b""
    for name, shape in _FORMS[form](rank):
        count = _product(shape)
        begin = len(data)
        data += _values(rng, count, dtype)
        entries.append((name, {"dtype": dtype, "shape": shape, "data_offsets": [begin, len(data)]}))
    return Draft(config, entries, data)


def _linears(rank: int) -> list[tuple[str, list[int]]]:
    return [
        (f"base_model.model.model.layers.{i}.self_attn.q_proj.lora_{letter}.weight", shape)
        for i in (0, 1)
        for letter, shape in (("A", [rank, 40]), ("B", [56, rank]))
    ]


def _flat(rank: int) -> list[tuple[str, list[int]]]:
    return [
        (f"{LAYER}mlp.experts.base_layer.lora_A.weight", [3 * rank, 40]),
        (f"{LAYER}mlp.experts.base_layer.lora_B.weight", [48, 3 * rank]),
        (f"{LAYER}mlp.experts.lora_A.weight", [3 * rank, 24]),
        (f"{LAYER}mlp.experts.lora_B.weight", [40, 3 * rank]),
    ]


def _stacked(rank: int) -> list[tuple[str, list[int]]]:
    return [
        (f"{LAYER}mlp.experts.gate_up_proj.lora_A.weight", [3, rank, 40]),
        (f"{LAYER}mlp.experts.gate_up_proj.lora_B.weight", [3, 48, rank]),
    ]


def _per_expert(rank: int) -> list[tuple[str, list[int]]]:
    return [
        (f"{LAYER}mlp.experts.{expert}.{name}.lora_{letter}.weight", shape)
        for expert in (0, 2)
        for name, out, size in (("gate_proj", 24, 40), ("down_proj", 40, 24))
        for letter, shape in (("A", [rank, size]), ("B", [out, rank]))
    ]


_FORMS = {"linear": _linears, "flat": _flat, "3-D": _stacked, "per expert": _per_expert}


def _values(rng: Random, count: int, dtype: str) -> bytes:
    """Finite numbers: the exponents' upper bits are those of numbers below 2."""
    high = {"F32": 0x3F, "BF16": 0x3F, "F16": 0x3B}[dtype]
    raw = bytearray(rng.randbytes(count * ITEM_BYTES[dtype]))
    raw[ITEM_BYTES[dtype] - 1 :: ITEM_BYTES[dtype]] = bytes([high]) * count
    return bytes(raw)


def _product(shape: list[int]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


def _is_entry(value: Any) -> bool:
    return isinstance(value, dict) and "data_offsets" in value


# ---- the file of weights as bytes


@_mutation()
def truncated(draft: Draft, rng: Random) -> None:
    share = rng.choice([0.0, rng.random(), rng.random(), 0.999])
    draft.edit = lambda raw: raw[: int(share * len(raw))]


@_mutation()
def bytes_behind_the_data(draft: Draft, rng: Random) -> None:
    more = rng.choice([1, 8, 4096])
    draft.edit = lambda raw: raw + bytes(more)


@_mutation(must_refuse=False)
def flipped_bytes(draft: Draft, rng: Random) -> None:
    draft.edit = partial(_flip, seed=rng.random(), header_only=rng.random() < 0.7)


def _flip(raw: bytes, seed: float, header_only: bool) -> bytes:
    rng, changed = Random(seed), bytearray(raw)
    end = min(len(raw), 8 + int.from_bytes(raw[:8], "little")) if header_only else len(raw)
    for _ in range(rng.randint(1, 4) if end else 0):
        changed[rng.randrange(end)] = rng.randrange(256)
    return bytes(changed)


@_mutation()
def header_length(draft: Draft, rng: Random) -> None:
    wrong = [0, 1, 7, 1 << 20, 1 << 31, 1 << 32, 1 << 48, 1 << 62, 1 << 63, (1 << 64) - 1]
    draft.header_length = rng.choice(wrong)


@_mutation(must_refuse=False, share=0.3)
def huge_header(draft: Draft, rng: Random) -> None:
    """Blanks, which a header may have."""
    num_bytes = rng.choice([2, 20, 47, 50, 70]) * MIB
    header = draft.weights_bytes()[8 : -len(draft.data)]
    draft.raw_header = header + b" " * num_bytes


@_mutation(share=0.4)
def header_that_unfolds(draft: Draft, rng: Random) -> None:
    """Short texts that become many objects, or texts of four bytes a letter."""
    num = rng.choice([1, 8, 32, 47]) * MIB
    kind = rng.randrange(7)
    if kind == 0:
        body = b'{"__metadata__": {' + b",".join(b'"%x":""' % i for i in range(num // 10)) + b"}}"
    elif kind == 1:
        body = b'{"x": [' + b".1,".join([b"0"] * (num // 4)) + b"]}"
    elif kind == 2:
        body = b'{"x": [' + b",".join([b"1"] * (num // 2)) + b"]}"
    elif kind == 3:
        body = b"{" + b",".join(b'"%x":{}' % i for i in range(num // 10)) + b"}"
    elif kind == 4:
        body = b'{"' + "\U0001f600".encode() * (num // 4) + b'": 1}'
    elif kind == 5:
        body = b'{"__metadata__": {"a": "' + "\U0001f600".encode() * (num // 4) + b'"}}'
    else:
        entry = b'{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
        body = b"{" + b",".join(b'"%x":%s' % (i, entry) for i in range(num // 60)) + b"}"
    draft.raw_header, draft.data = body, b""


@_mutation()
def header_is_no_table(draft: Draft, rng: Random) -> None:
    bodies = [b"", b"[]", b"null", b"1", b'"x"', b"{", b"{}{}", b"\0" * 64, b"\xff\xfe{}", b"{,}"]
    draft.raw_header = rng.choice([*bodies, b"\xef\xbb\xbf{}", b'{"a"', b'{"a":}', b'{"a":1,}'])


@_mutation()
def metadata(draft: Draft, rng: Random) -> None:
    wrong: list[Any] = [1, [], "x", None, {"a": 1}, {"a": {}}, {"a": None}, {"a": ["x"]}]
    draft.entries[0] = ("__metadata__", rng.choice(wrong[:3] + wrong[4:]))


@_mutation()
def key_twice_in_header(draft: Draft, rng: Random) -> None:
    i = draft.factor(rng)
    draft.entries.append((draft.entries[i][0], draft.entries[rng.randrange(i + 1)][1]))


@_mutation()
def entry_is_no_table(draft: Draft, rng: Random) -> None:
    i = draft.factor(rng)
    whole = draft.entries[i][1]
    part = dict(list(whole.items())[: rng.randrange(3)]) if isinstance(whole, dict) else {}
    wrong: list[Any] = [None, 1, "x", [], {}, part, {**part, "x": 1}, [whole]]
    draft.entries[i] = (draft.entries[i][0], rng.choice(wrong))


# ---- shapes, offsets, dtypes


@_mutation()
def overlapping_offsets(draft: Draft, rng: Random) -> None:
    draft.change(rng, data_offsets=draft.entries[draft.factor(rng)][1]["data_offsets"])
    begin, end = draft.entries[-1][1]["data_offsets"]
    draft.entries[-1] = (
        draft.entries[-1][0],
        draft.entries[-1][1] | {"data_offsets": [begin - 4, end - 4]},
    )


@_mutation()
def offsets(draft: Draft, rng: Random) -> None:
    """Backwards, past the end, negative, huge, no numbers, too many."""
    i = draft.factor(rng)
    begin, end = draft.entries[i][1]["data_offsets"]
    more = rng.choice([4, 1 << 20, 1 << 32, 1 << 47, 1 << 63, 1 << 64, 1 << 100, 10**4000])
    wrong: list[Any] = [
        [end, begin], [begin + more, end + more], [begin, end + more], [-more, end], [begin - end,
        0], [begin], [begin, end, end], [], None, "0", [str(begin), str(end)], [float(begin),
        float(end)], [begin, True], {"0": begin}, [[begin], [end]], [-begin - 4, -end - 4],
    ]  # fmt: skip
    draft.entries[i] = (
        draft.entries[i][0],
        draft.entries[i][1] | {"data_offsets": rng.choice(wrong)},
    )


@_mutation()
def negative_shape(draft: Draft, rng: Random) -> None:
    i = draft.factor(rng)
    shape = draft.entries[i][1]["shape"]
    flipped = [-n for n in shape] if rng.random() < 0.5 else [-shape[0], *shape[1:]]
    draft.entries[i] = (draft.entries[i][0], draft.entries[i][1] | {"shape": flipped})


@_mutation()
def shape_that_overflows(draft: Draft, rng: Random) -> None:
    """The product is right modulo 2^64, or too large for 64 bits, 48 bits or any memory."""
    i = draft.factor(rng)
    shape = draft.entries[i][1]["shape"]
    huge = rng.choice([1 << 31, 1 << 32, 1 << 47, 1 << 62, 1 << 63, 1 << 64, 1 << 200])
    wrong = [
        [huge, *shape], [1 << 32, 1 << 32, *shape], [n + (1 << 64) for n in shape], [huge],
        [huge] * 8, [(1 << 64) - n for n in shape], [shape[0], huge],
    ]  # fmt: skip
    draft.entries[i] = (draft.entries[i][0], draft.entries[i][1] | {"shape": rng.choice(wrong)})


@_mutation()
def zero_sizes(draft: Draft, rng: Random) -> None:
    """Factors without an element: rank zero, or no inputs."""
    zero = rng.choice([0, -1])
    for i, (name, value) in enumerate(draft.entries):
        if _is_entry(value):
            shape = list(value["shape"])
            shape[zero if "lora_A" in name else ~zero] = 0
            draft.entries[i] = (name, value | {"shape": shape, "data_offsets": [0, 0]})
    draft.data = b""


@_mutation()
def shape_of_another_kind(draft: Draft, rng: Random) -> None:
    i = draft.factor(rng)
    shape = draft.entries[i][1]["shape"]
    wrong: list[Any] = [
        [*shape, 1], [_product(shape)], [], [1] * 9 + shape, [True, *shape], [float(n) for n in
        shape], [str(n) for n in shape], None, "40", {}, [shape], [*shape[:-1], None],
    ]  # fmt: skip
    draft.entries[i] = (draft.entries[i][0], draft.entries[i][1] | {"shape": rng.choice(wrong)})


@_mutation()
def dtype(draft: Draft, rng: Random) -> None:
    """Of another size, of the same size and no factor, unknown, no text."""
    i = draft.factor(rng)
    same = {"F32": ["I32", "U32"], "BF16": ["I16", "U16"], "F16": ["I16", "U16"]}
    now = draft.entries[i][1]["dtype"]
    wrong = ["F64", "I64", "U8", "F8_E4M3", "F4", "C64", "BOOL", "F128", "f32", "", 32, None, [now]]
    wrong += same.get(now, [])
    draft.entries[i] = (draft.entries[i][0], draft.entries[i][1] | {"dtype": rng.choice(wrong)})


@_mutation()
def values_that_are_no_numbers(draft: Draft, rng: Random) -> None:
    i = draft.factor(rng)
    begin, end = draft.entries[i][1]["data_offsets"]
    size = ITEM_BYTES[draft.entries[i][1]["dtype"]]
    at = begin + size * rng.randrange((end - begin) // size)
    nan = {2: b"\xff\xff", 4: b"\xff\xff\xff\xff"}[size]
    infinite = {"F32": b"\0\0\x80\x7f", "BF16": b"\x80\xff", "F16": b"\0\x7c"}
    value = rng.choice([nan, infinite[draft.entries[i][1]["dtype"]]])
    draft.data = draft.data[:at] + value + draft.data[at + size :]


# ---- names of tensors


@_mutation()
def odd_names(draft: Draft, rng: Random) -> None:
    """Half characters, controls, paths out of the folder, other spellings of the same letters."""
    i = draft.factor(rng)
    name = draft.entries[i][0]
    odd = [
        "", "\ud800", f"{name}\udfff", f"{name}\0", f"\n{name}", f"{name}\u202e", f"{name}\u0301",
        name.replace("l", "\uff4c"), name.upper(), f"../../{name}", "/etc/passwd", "..", "a" * 600,
        f"{name} ", f" {name}", name.replace(".", "/"), name.replace(".", ".."), "\U0001f600" * 600,
        "." * 500, name + ".weight", name.replace("lora_A", "lora_C").replace("lora_B", "lora_C"),
        name.replace(".0.", ".00."), name.replace(".0.", ".-1.").replace(".1.", ".99999999999."),
        name.replace(".0.", ".\u0660.").replace(".1.", ".\u0661."), "%s%n{0}{name}", "__class__",
    ]  # fmt: skip
    odd = [other for other in odd if other != name]
    draft.entries[i] = (rng.choice(odd), draft.entries[i][1])


@_mutation()
def two_spellings_of_one_factor(draft: Draft, rng: Random) -> None:
    i = draft.factor(rng)
    name, value = draft.entries[i]
    spellings = [
        name.removeprefix("base_model.model."), name.removesuffix(".weight"),
        name.replace("base_model.model.", "base_model.model.model.language_model.").replace(
        "language_model.model.", "language_model."),
        "language_model." + name.removeprefix("base_model.model."),
    ]  # fmt: skip
    begin, end = value["data_offsets"]
    at = len(draft.data)
    draft.data += draft.data[begin:end]
    draft.entries.append((rng.choice(spellings), value | {"data_offsets": [at, at + end - begin]}))


@_mutation()
def half_a_pair(draft: Draft, rng: Random) -> None:
    last = max(i for i, (_, value) in enumerate(draft.entries) if _is_entry(value))
    _, value = draft.entries.pop(last)
    begin, end = value["data_offsets"]
    draft.data = draft.data[:begin] + draft.data[end:]


@_mutation()
def tensors_of_other_methods(draft: Draft, rng: Random) -> None:
    i = draft.factor(rng)
    module = draft.entries[i][0].partition(".lora_")[0]
    names = [
        f"{module}.lora_magnitude_vector", f"{module}.bias", f"{module}.weight", "trainable_tokens",
        f"{module}.modules_to_save.weight", f"{module}.lora_B.bias", f"{module}.base_layer.weight",
        f"{module}.trainable_tokens_delta", "base_model.model.lm_head.weight", "prompt_embeddings",
    ]  # fmt: skip
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [len(draft.data), len(draft.data) + 16]}
    draft.entries.append((rng.choice(names), entry))
    draft.data += bytes(16)


# ---- the config


@_mutation()
def config_is_no_table(draft: Draft, rng: Random) -> None:
    whole = draft.config_bytes()
    bodies = [
        b"", b"[]", b"null", b"true", b"1", b'"LORA"', b"{}", b"{", whole[:-1], whole + whole,
        b"[" + whole + b"]", b"\xef\xbb\xbf" + whole, whole.decode().encode("utf-16"), b"\xff",
        whole.replace(b"{", b"{\xff\xff", 1), whole.replace(b'"', b"'"), whole + b"\0", b"\0" * 99,
        whole.replace(b"}", b",}"), b"/* */" + whole, b" " * (9 * MIB) + whole,
    ]  # fmt: skip
    draft.raw_config = rng.choice(bodies)


@_mutation()
def key_twice_in_config(draft: Draft, rng: Random) -> None:
    key = rng.choice(list(draft.config))
    again = json.dumps({key: draft.config[key]})[1:-1]
    draft.raw_config = draft.config_bytes().replace(b"{", f"{{{again}, ".encode(), 1)


@_mutation()
def rank_or_alpha(draft: Draft, rng: Random) -> None:
    """Not a number, too large for one, of another kind."""
    texts = [
        "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "null", '"4"', "[4]", "{}", "true",
        "1" + "0" * 4000, "1" + "0" * 5000, "-1" + "0" * 400, "1e40",
    ]  # fmt: skip
    name = rng.choice(["r", "lora_alpha"])
    if name == "r":
        texts += ["0", "-1", "4.0", "2147483648", "99", "1e2"]
    draft.config[name] = draft.literal(rng.choice(texts))


@_mutation()
def no_number_in_json(draft: Draft, rng: Random) -> None:
    text = draft.literal(rng.choice(["NaN", "Infinity", "-Infinity", "0x10", "01", "+1", "1_000"]))
    if rng.random() < 0.5:
        draft.config["lora_dropout"] = text
    else:
        draft.change(rng, shape=[text, 4])


@_mutation(must_refuse=False)
def deep_json(draft: Draft, rng: Random) -> None:
    depth = rng.choice([10, 100, 500, 900, 980, 1100, 20_000, 100_000])
    opening, closing = rng.choice([("[", "]"), ('{"a":', "}")])
    text = draft.literal(opening * depth + "1" + closing * depth)
    if rng.random() < 0.7:
        fields = [*draft.config, "novel", "init_lora_weights", "rank_pattern", "target_parameters"]
        draft.config[rng.choice(fields)] = text
    else:
        draft.entries.append((rng.choice(["x", "__metadata__"]), text))


@_mutation()
def methods_that_are_not_served(draft: Draft, rng: Random) -> None:
    choices: list[tuple[str, Any]] = [
        ("peft_type", "IA3"), ("peft_type", None), ("peft_type", ["LORA"]), ("use_dora", True),
        ("use_dora", "yes"), ("bias", "all"), ("bias", ["none"]), ("bias", {}), ("lora_bias", True),
        ("modules_to_save", ["lm_head"]), ("alora_invocation_tokens", [1, 2]),
        ("layer_replication", [[0, 2]]), ("trainable_token_indices", [5]),
        ("init_lora_weights", "pissa"), ("init_lora_weights", {"a": 1}), ("use_novel", 1),
        ("novel_config", {"a": 1}), ("use_rslora", "yes"), ("use_rslora", [True]),
        ("ensure_weight_tying", 3), ("peft_version", 21), ("rank_pattern", []),
        ("alpha_pattern", "x"), ("rank_pattern", {"q_proj": 0}), ("alpha_pattern", {"q_proj":
        None}), ("target_parameters", "x"), ("target_parameters", ["../x"]), ("base_model_name_"
        "or_path", ["x"]), ("target_parameters", [None]), ("rank_pattern", {".*": 5}),
    ]  # fmt: skip
    name, value = rng.choice(choices)
    draft.config[name] = value


@_mutation(must_refuse=False)
def words_that_lead_elsewhere(draft: Draft, rng: Random) -> None:
    """Fields that other loaders follow to files, classes and hosts."""
    paths = [
        "../../../etc/passwd",
        "/dev/zero",
        "file:///etc/passwd",
        "https://x.invalid/",
        "~root",
    ]
    path = rng.choice([*paths, "\ud800", "\0", "a\nb", "\U0001f600" * 1000, "\u202e", "{0}%s%n"])
    draft.config |= {
        "base_model_name_or_path": path,
        "auto_mapping": {"base_model_class": "os", "parent_library": path},
        "revision": path,
        "peft_version": path,
        "task_type": path,
        "megatron_core": path,
    }


_SLOW_EXPRESSIONS = (
    "(a+)+$", "(a|a)*b", "(.*)*x", "(.|.|.)+!", ".*" * 60 + "!", "(([a-z_.])+.)+[A-Z]([a-z])+$",
    "(?=(a+))a*b", r"(a*)\1b", "(?P<x>a+)+(?P=x)", "((((((((((.*)*)*)*)*)*)*)*)*)*)*$", "[", "(",
    "*", "a{1,9999}", "(a{0,200}){0,200}", "(?i)q_proj", "\\", "a{99999999999}",
    "(" * 200 + ")" * 200, "[^]", "[a-z", "(?#", "(|||)*", ".{250}", "(.{1,16}){1,16}",
    "\\N{DIGIT ONE}", "q\ud800", "\n$", "^" * 50, "$" * 50, "|" * 200, "(.*.*.*)*" * 20, "",
    "x" * 300, "(?<!a)", "[[:alpha:]]", "[a&&b]",
)  # fmt: skip


@_mutation(must_refuse=False)
def slow_expressions(draft: Draft, rng: Random) -> None:
    """Regular expressions that Python's own engine would work on for years."""
    name = rng.choice(["target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"])
    chosen = [rng.choice(_SLOW_EXPRESSIONS) for _ in range(rng.randint(1, 3))]
    if name.endswith("_pattern"):
        draft.config[name] = {key: draft.config["r"] for key in chosen}
    else:
        draft.config[name] = rng.choice(chosen)


@_mutation(must_refuse=False, share=0.3)
def large_config(draft: Draft, rng: Random) -> None:
    """Just below and above what is read: many keys, many expressions, many unknown fields."""
    num = rng.choice([1000, 20_000, 60_000, 99_000, 110_000, 390_000])
    kind = rng.randrange(6)
    if kind == 0:
        draft.config["rank_pattern"] = {f"a{i}": 1 for i in range(num)}
    elif kind == 1:
        draft.config["alpha_pattern"] = {f"(.*.*{i}.*)*x": 1 for i in range(min(num, 128))}
    elif kind == 2:
        draft.config |= {f"n{i}": 1 for i in range(num)}
    elif kind == 3:
        draft.config["target_parameters"] = [f"{i}.experts.gate_up_proj" for i in range(num // 4)]
    elif kind == 4:
        draft.config["target_modules"] = draft.literal("[" + ".1,".join(["0"] * num) + "]")
    else:
        draft.config["novel"] = draft.literal('"' + "\U0001f600" * (6 * num) + '"')


# ---- the folder


def _special(make: Maker, *names: str) -> Callable[[Draft, Random], None]:
    def apply(draft: Draft, rng: Random) -> None:
        draft.makers[rng.choice(names or (CONFIG, WEIGHTS))] = make

    return apply


@_mutation()
def links(draft: Draft, rng: Random) -> None:
    """To a good file outside, to nothing, to itself, to devices: none of them is followed."""
    name = rng.choice([CONFIG, WEIGHTS])
    where = [f"../outside/{name}", "nowhere", name, "/dev/zero", "/dev/stdin", "/etc/passwd", ".."]
    draft.makers[name] = partial(_link, to=rng.choice([*where, f"../outside/../outside/{name}"]))


def _link(at: Path, to: str) -> None:
    at.symlink_to(to)


@_mutation()
def pipes_sockets_devices_folders(draft: Draft, rng: Random) -> None:
    makers = [
        os.mkfifo,
        _socket,
        os.mkdir,
        _full_folder,
        partial(_device, minor=rng.choice([3, 5])),
    ]
    _special(rng.choice(makers))(draft, rng)


def _socket(at: Path) -> None:
    """A socket's path is short, so it is made from inside the folder."""
    with socket.socket(socket.AF_UNIX) as made:
        here = os.open(at.parent, os.O_RDONLY)
        try:
            made.bind(f"/proc/self/fd/{here}/{at.name}")
        finally:
            os.close(here)


def _device(at: Path, minor: int) -> None:
    """/dev/null or /dev/zero; who may not make them makes a pipe."""
    try:
        os.mknod(at, 0o20666, os.makedev(1, minor))
    except PermissionError:
        os.mkfifo(at)


def _full_folder(at: Path) -> None:
    at.mkdir()
    (at / at.name).write_bytes(b"{}")


@_mutation(must_refuse=False)
def odd_neighbours(draft: Draft, rng: Random) -> None:
    """Beside a good adapter: whatever it is, it is left alone."""
    makers: dict[str, Maker] = {
        "adapter_model.bin": hostile_archives.write_pickle,
        "adapter_model.pt": os.mkfifo,
        "adapter_model.pth": partial(_link, to="/dev/zero"),
        "adapter_model.safetensors.index.json": lambda at: at.write_text(
            '{"weight_map": {"a": "../outside/adapter_model.safetensors"}}'
        ),
        "model.ckpt": hostile_archives.write_zip_bomb,
        "a\nb\x1b[31m.bin": _socket,
        os.fsdecode(b"\xff\xfe.safetensors"): os.mkdir,
        "x" * 250 + ".pt": lambda at: at.write_bytes(b""),
        "configuration.py": lambda at: at.write_text("raise SystemExit"),
    }
    draft.makers |= {name: makers[name] for name in rng.sample(sorted(makers), rng.randint(1, 5))}


@_mutation(must_refuse=False, share=0.1)
def many_neighbours(draft: Draft, rng: Random) -> None:
    for i in range(rng.choice([100, 2000])):
        draft.makers[f"{i}.bin"] = Path.touch


@_mutation()
def missing_files(draft: Draft, rng: Random) -> None:
    for name in rng.choice([[CONFIG], [WEIGHTS], [CONFIG, WEIGHTS]]):
        draft.makers[name] = None


@_mutation()
def pickles(draft: Draft, rng: Random) -> None:
    """Code, an archive that unfolds, a pickle with a good name: nothing of them is run or read."""
    write = rng.choice([
        hostile_archives.write_pickle, hostile_archives.write_zip_bomb,
        hostile_archives.write_torch_archive, hostile_archives.write_gzip_bomb,
    ])  # fmt: skip
    if rng.random() < 0.5:
        draft.makers[WEIGHTS] = write
    else:
        draft.makers[WEIGHTS] = None
        names = ["adapter_model.bin", "adapter_model.pt", "adapter_model.pth"]
        draft.makers[rng.choice(names)] = write


@_mutation()
def sparse_files(draft: Draft, rng: Random) -> None:
    """Files that take no disk: of any size, with a header that is right for it or none."""
    size = rng.choice([300 * MIB, 2 * GIB, 8 * GIB, 1 << 40])
    kind = rng.randrange(4)
    if kind == 0:
        draft.makers[CONFIG] = partial(_sparse, size=size, head=draft.config_bytes())
        return
    entry = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    if kind == 1:
        head, size = draft.weights_bytes(), size + 8
    elif kind == 2:
        raw = json.dumps({draft.entries[1][0]: entry}).encode()
        head, size = len(raw).to_bytes(8, "little") + raw, 8 + len(raw) + size
    else:
        head = rng.choice([47 * MIB, size - 8]).to_bytes(8, "little") + b"{"
    draft.makers[WEIGHTS] = partial(_sparse, size=size, head=head)


def _sparse(at: Path, size: int, head: bytes) -> None:
    at.write_bytes(head)
    os.truncate(at, size)


@_mutation(must_refuse=False)
def changed_while_read(draft: Draft, rng: Random) -> None:
    """Cut, made longer, replaced by a link, a pipe or another file, or gone."""

    def change(folder: Path) -> None:
        weights = folder / WEIGHTS
        if kind == "cut":
            os.truncate(weights, weights.stat().st_size // 2)
        elif kind == "longer":
            with weights.open("ab") as file:
                file.truncate(weights.stat().st_size + GIB)
        elif kind == "other bytes":
            with weights.open("r+b") as file:
                file.write(b"\xff" * 16)
        else:
            weights.unlink()
            if kind == "link":
                _link(weights, f"../outside/{WEIGHTS}")
            elif kind == "pipe":
                os.mkfifo(weights)
            elif kind == "config":
                (folder / CONFIG).unlink()

    kind = rng.choice(["cut", "longer", "other bytes", "link", "pipe", "gone", "config"])
    draft.meanwhile = change


@_mutation(must_refuse=False, share=0.1)
def rank_of_one_expert(draft: Draft, rng: Random) -> None:
    """One expert's pair of the largest rank: the others' share is zeros that the file lacks."""
    rank, size = 256, 256 * 40 * 2
    name = f"{LAYER}mlp.experts.1.up_proj.lora_"
    draft.config["r"] = rank
    draft.entries = [
        (f"{name}A.weight", {"dtype": "F16", "shape": [rank, 40], "data_offsets": [0, size]}),
        (
            f"{name}B.weight",
            {"dtype": "F16", "shape": [24, rank], "data_offsets": [size, size + 512 * 24]},
        ),
    ]
    draft.data = bytes(size + 512 * 24)


def words_of(case: Case) -> set[str]:
    """What a refusal of this case may name: files, fields, tensors."""
    names = {CONFIG, WEIGHTS, "adapter_model.", *case.draft.config}
    names |= {key for key, _ in case.draft.entries if key}
    return {ascii(name)[1:60].rstrip("'\"") for name in names} | set(_FIELDS)


_FIELDS = tuple(
    re.findall(
        r"\w+",
        "use_dora bias lora_bias modules_to_save alora_invocation_tokens layer_replication "
        "trainable_token_indices init_lora_weights rank_pattern alpha_pattern target_parameters",
    )
)
