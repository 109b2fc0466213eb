"""Mutations of the files beside the weights as files: their JSON, sizes, bytes, what stands there.

Not here: what they say (tokens).
"""

import os
from functools import partial
from pathlib import Path
from typing import Any

from adapter_store.sources.source import (
    GENERATION_FILE,
    OPTIONAL_FILES,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
)
from tests.adapter_store.hostile.draft import GIB, MIB, Draft, Mutation, Random, adder
from tests.adapter_store.hostile.good_files import (
    add_files,
    set_fields,
)
from tests.adapter_store.hostile.places import special_maker

MUTATIONS: dict[str, Mutation] = {}
_mutation = adder(MUTATIONS)
_JSON_FILES = (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, GENERATION_FILE)


@_mutation()
def no_table_beside(draft: Draft, rng: Random) -> None:
    name = rng.choice(_JSON_FILES)
    add_files(draft, rng, name)
    whole = draft.beside[name]
    bodies = [
        b"", b"[]", b"null", b"true", b"1", b'"x"', b"{", whole[:-1], whole + whole, b"}", b"\0",
        b"[" + whole + b"]", b"\xef\xbb\xbf" + whole, whole.decode().encode("utf-16"), b"\xff",
        whole.replace(b"{", b"{\xff\xff", 1), whole.replace(b'"', b"'"), whole + b"\0", b"\0" * 99,
        whole[:-1] + b",}", b"/* */" + whole, b" " * MIB, whole + b" x", whole + b"\xc3",
        whole.replace(b":", b"=", 1), whole.replace(b",", b"", 1), b"{,}", b'{"a"}', b'{"a":}',
        b'{"a":1,}', b'{"a":1,,"b":2}', b"{1:2}", b'{"a":-}', b'{"a":01}', b'{"a":"\n"}', b'{"\\',
        b'{"a":NaN}', b'{"a":Infinity}', b'{"\\u12":1}', b'{"a":1' + b"0" * 5000 + b"}", b'{"a',
    ]  # fmt: skip
    draft.beside[name] = rng.choice(bodies)


@_mutation()
def key_twice_beside(draft: Draft, rng: Random) -> None:
    """Of the whole, and of the tables within that are read."""
    name = rng.choice(_JSON_FILES)
    add_files(draft, rng, name)
    whole = draft.beside[name]
    opening = b"{"
    if name == TOKENIZER_FILE:
        opening = rng.choice([b"{", b'"model": {', b'"vocab": {', b'"added_tokens": [{'])
    at = whole.index(opening) + len(opening)
    key, value = rng.choice([(b"\\u0061", b"1"), (b"a", b"{}")]), b"1"
    pair = b'"%s": %s, "a": %s, ' % (*key, value)
    if opening == b'"vocab": {':
        pair = b'"!": 3, '
    draft.beside[name] = whole[:at] + pair + whole[at:]


@_mutation(must_refuse=False)
def deep_json_beside(draft: Draft, rng: Random) -> None:
    depth = rng.choice(
        [5, 98, 99, 100, 101, 500, 900, 940, 960, 970, 975, 980, 985, 990, 1100, 20_000, 100_000]
    )
    opening, closing = rng.choice([("[", "]"), ('{"a":', "}")])
    name = rng.choice(_JSON_FILES)
    fields = {
        TOKENIZER_FILE: ["model", "added_tokens", "normalizer", "novel"],
        TOKENIZER_CONFIG_FILE: ["chat_template", "eos_token", "added_tokens_decoder", "novel",
                                "extra_special_tokens", "pad_token"],
        GENERATION_FILE: ["temperature", "top_k", "eos_token_id", "do_sample", "novel", "min_p"],
    }  # fmt: skip
    set_fields(draft, rng, name, **{rng.choice(fields[name]): "@here@"})
    deep = opening * depth + "1" + closing * depth
    if name == TOKENIZER_FILE and rng.random() < 0.5:
        deep = f'{{"{rng.choice(["vocab", "merges", "type"])}": {deep}}}'
    draft.beside[name] = draft.beside[name].replace(b'"@here@"', deep.encode())


@_mutation(must_refuse=False)
def edited_beside(draft: Draft, rng: Random) -> None:
    """Bytes of any of the files: cut, turned, put in, taken out, repeated."""
    name = rng.choice(list(OPTIONAL_FILES))
    add_files(draft, rng, name)
    raw = bytearray(draft.beside[name])
    for _ in range(rng.randint(1, 4)):
        at = int(rng.random() ** 2 * len(raw))
        kind = rng.randrange(5)
        if kind == 0:
            del raw[at:]
        elif kind == 1 and at < len(raw):
            raw[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            raw[at:at] = rng.choice([b'"', b"\\", b"{", b"]", b",", b"\xff", b"0", b"\0", b"%}"])
        elif kind == 3:
            del raw[at : at + rng.randint(1, 9)]
        else:
            raw[at:at] = raw[at : at + rng.randint(1, 99)]
    draft.beside[name] = bytes(raw)


@_mutation(must_refuse=False, share=0.3)
def large_beside(draft: Draft, rng: Random) -> None:
    name = rng.choice([TOKENIZER_CONFIG_FILE, TEMPLATE_FILE, GENERATION_FILE])
    most = OPTIONAL_FILES[name]
    add_files(draft, rng, name)
    if name == TEMPLATE_FILE:
        part = rng.choice(
            ["x", "{{a}}", "{#", "\U0001f600", "{% if a %}", "\n", "{{'", "-%}", "\0"]
        )
        draft.beside[name] = (part * most).encode()[: most + rng.choice([-1, 0, 1])]
        return
    num = most // 16
    values: list[Any] = [
        "x" * (most - 400), "\U0001f600" * (most // 12 - 400), [[]] * num, [{}] * (num // 8),
        {f"{i}": i for i in range(num // 2)}, ["<|im_end|>"] * (num // 2), list(range(num)),
    ]  # fmt: skip
    fields = ["chat_template", "eos_token", "additional_special_tokens", "novel"]
    if name == GENERATION_FILE:
        fields = ["temperature", "eos_token_id", "novel"]
    set_fields(draft, rng, name, **{rng.choice(fields): rng.choice(values)})


# ---- places


@_mutation()
def no_files_beside(draft: Draft, rng: Random) -> None:
    """Links, pipes, sockets, devices and folders of their names, and sparse files of any size."""
    name = rng.choice(list(OPTIONAL_FILES))
    add_files(draft, rng, name)
    head = draft.beside.pop(name)
    draft.makers[name] = special_maker(rng, name)
    if rng.random() < 0.2:
        size = rng.choice([OPTIONAL_FILES[name] + 1, 300 * MIB, 8 * GIB, 1 << 40])
        draft.makers[name] = partial(_sparse, size=size, head=head)


def _sparse(at: Path, size: int, head: bytes) -> None:
    at.write_bytes(head)
    os.truncate(at, size)


@_mutation(must_refuse=False)
def neighbours_that_nobody_reads(draft: Draft, rng: Random) -> None:
    """Tokenizers in other forms, templates in others: whatever stands there is left alone."""
    names = [
        "added_tokens.json", "special_tokens_map.json", "vocab.json", "merges.txt", "config.json",
        "tokenizer.model", "chat_template.json", "additional_chat_templates", "README.md", ".git",
        "tokenization.py", "preprocessor_config.json", "TOKENIZER.JSON", "tokenizer.json.bak",
    ]  # fmt: skip
    add_files(draft, rng)
    for name in rng.sample(names, rng.randint(1, 5)):
        draft.makers[name] = special_maker(rng, name)


@_mutation(must_refuse=False)
def changed_beside_while_read(draft: Draft, rng: Random) -> None:
    """Between the listing and the copying: one of the files cut, longer, replaced, gone or new."""
    name = rng.choice(list(OPTIONAL_FILES))
    kind = rng.choice(["cut", "longer", "other", "special", "gone", "new"])
    put = special_maker(rng, name)
    add_files(draft, rng, name)
    if kind == "new":
        new = draft.beside.pop(name)

    def change(folder: Path) -> None:
        at = folder / name
        if name in draft.makers:
            return
        if kind == "new":
            at.write_bytes(new)
        elif kind in ("cut", "longer"):
            os.truncate(at, at.stat().st_size // 2 if kind == "cut" else GIB)
        elif kind == "other":
            at.write_bytes(b"\xff" * at.stat().st_size)
        else:
            at.unlink()
            if kind == "special":
                put(at)

    draft.meanwhile = change
