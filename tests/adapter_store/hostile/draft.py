"""A small valid adapter that others change: `Draft`, and what a mutation of it is.

Not here: the mutations (weights, configs, places), who chooses among them (folders).
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MIB, GIB = 1 << 20, 1 << 30
LAYER = "base_model.model.model.layers.0."
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}

Random = random.Random
Maker = Callable[[Path], object]
Apply = Callable[["Draft", Random], object]


@dataclass
class Draft:
    """An adapter folder in the making.

    entries  the header's keys and values, in order and perhaps twice;  data  behind it
    config   the config's fields
    literals text -> what stands in its place in the JSON (what json.dumps would not write)
    raw_config, raw_header, header_length  instead of what follows from the above
    edit     a last change to the bytes of the weights
    beside   file name -> content: what else an adapter may bring
    makers   file name -> what is put there instead of, or beside, all of these
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
    beside: dict[str, bytes] = field(default_factory=dict)
    makers: dict[str, Maker | None] = field(default_factory=dict)
    meanwhile: Maker | None = None

    def literal(self, text: str) -> str:
        """A value that becomes this text in the JSON."""
        mark = f"@literal {len(self.literals)}@"
        self.literals[mark] = text
        return mark

    def factor(self, rng: Random) -> int:
        """Index of a tensor among the entries."""
        tensors = [i for i, (_, value) in enumerate(self.entries) if is_entry(value)]
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
class Mutation:
    """must_refuse: alone, it leaves no adapter; share: how often it is taken, 1 = as the others."""

    apply: Apply
    must_refuse: bool
    share: float


def adder(table: dict[str, Mutation]) -> Callable[..., Callable[[Apply], Apply]]:
    """A decorator that puts functions into a table by their names."""

    def mutation(must_refuse: bool = True, share: float = 1.0) -> Callable[[Apply], Apply]:
        def add(apply: Apply) -> Apply:
            table[apply.__name__] = Mutation(apply, must_refuse, share)
            return apply

        return add

    return mutation


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
        count = product(shape)
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


def product(shape: list[int]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


def is_entry(value: Any) -> bool:
    return isinstance(value, dict) and "data_offsets" in value
