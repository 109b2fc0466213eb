"""Mutations of the file of weights: its bytes, its header, shapes, offsets, dtypes and names."""

from functools import partial
from typing import Any

from tests.adapter_store.hostile.draft import (
    ITEM_BYTES,
    MIB,
    Draft,
    Mutation,
    Random,
    adder,
    is_entry,
    product,
)

MUTATIONS: dict[str, Mutation] = {}
_mutation = adder(MUTATIONS)


# ---- bytes and header


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
        if is_entry(value):
            shape = list(value["shape"])
            shape[zero if "lora_A" in name else ~zero] = 0
            draft.entries[i] = (name, value | {"shape": shape, "data_offsets": [0, 0]})
    draft.data = b""


@_mutation()
def shape_of_another_kind(draft: Draft, rng: Random) -> None:
    i = draft.factor(rng)
    shape = draft.entries[i][1]["shape"]
    wrong: list[Any] = [
        [*shape, 1], [product(shape)], [], [1] * 9 + shape, [True, *shape], [float(n) for n in
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
    last = max(i for i, (_, value) in enumerate(draft.entries) if is_entry(value))
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
