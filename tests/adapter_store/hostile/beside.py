"""Mutations of what lies beside the weights: tokenizer, template, defaults of sampling.

`write_base` makes a base model's folder, the demo's with few tokens; `add_files` puts good files of
it into an adapter, and a mutation spoils one of them.
Not here: what templates do when they are rendered (templates).
"""

import json
import os
import shutil
from collections.abc import Callable
from functools import cache, partial
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
from tests.adapter_store.hostile.places import special_maker
from tests.adapter_store.hostile.templates import make_template
from tests.model_runner.demo import BASE_DIR

MUTATIONS: dict[str, Mutation] = {}
_mutation = adder(MUTATIONS)
NUM_TOKENS = 64
_JSON_FILES = (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, GENERATION_FILE)
_ANY: dict[str, Any] = {"a": [1], "b": {"c": "d"}}


def good_files() -> dict[str, Any]:
    """As an adapter of this base may bring them: name -> text, or what JSON says."""
    return {
        TOKENIZER_FILE: _base_tokenizer(),
        TOKENIZER_CONFIG_FILE: {
            "eos_token": "<|im_end|>",
            "pad_token": {"content": "<|endoftext|>", "lstrip": False},
            "additional_special_tokens": ["<|im_start|>"],
            "added_tokens_decoder": {"1": {"content": "<|im_start|>", "special": True}},
            "chat_template": "{{ messages[0].content }}{{ eos_token }}",
            "model_max_length": 10**30,
        },
        TEMPLATE_FILE: "own: {% for m in messages %}{{ m.content }}{% endfor %}{{ pad_token }}",
        GENERATION_FILE: {"temperature": 0.6, "top_k": 20, "eos_token_id": [2, 0], "max_length": 9},
    }


def add_files(draft: Draft, rng: Random, *names: str) -> None:
    """These files, and maybe others; those that are there stay."""
    for name, said in good_files().items():
        if name in names or rng.random() < 0.3:
            if name == TOKENIZER_FILE:  # other bytes than the base's, or nothing is read
                said = said | {"version": rng.choice(["1.0", "2.0"])}
            draft.beside.setdefault(name, file_bytes(said))


def file_bytes(said: Any) -> bytes:
    """A file's content."""
    text = said if isinstance(said, str) else json.dumps(said)
    return text.encode("utf-8", "surrogatepass")


def write_base(folder: Path) -> Path:
    """The base model that adapters are held against."""
    folder.mkdir()
    for name in (TOKENIZER_CONFIG_FILE, TEMPLATE_FILE, GENERATION_FILE):
        shutil.copy(BASE_DIR / name, folder)
    (folder / TOKENIZER_FILE).write_bytes(file_bytes(_base_tokenizer()))
    return folder


def _base_tokenizer() -> dict[str, Any]:
    made: dict[str, Any] = json.loads(_demo_text())
    vocab, merges = made["model"]["vocab"], made["model"]["merges"]
    few = {token: token_id for token, token_id in vocab.items() if token_id < NUM_TOKENS}
    made["model"] |= {"vocab": few, "merges": merges[:3]}
    return made


@cache
def _demo_text() -> str:
    return (BASE_DIR / TOKENIZER_FILE).read_text(encoding="utf-8")


def _say(draft: Draft, rng: Random, name: str, change: Callable[[Any], object]) -> None:
    """A good JSON file with a change."""
    add_files(draft, rng, name)
    said = json.loads(draft.beside[name])
    change(said)
    draft.beside[name] = file_bytes(said)


def _set(draft: Draft, rng: Random, name: str, **fields: Any) -> None:
    _say(draft, rng, name, lambda said: said.update(fields))


# ---- tokenizers


@_mutation()
def other_vocabulary(draft: Draft, rng: Random) -> None:
    """One token more, less, elsewhere, of no kind that a token or an id has."""

    def change(said: dict[str, Any]) -> None:
        vocab, added = said["model"]["vocab"], said["added_tokens"]
        one, other = rng.sample(list(vocab), 2)
        kind = rng.randrange(10)
        if kind == 0:
            vocab[one], vocab[other] = vocab[other], vocab[one]
        elif kind == 1:
            number = vocab.pop(one)
            added[:] = [token for token in added if token["id"] != number]
        elif kind == 2:
            vocab["\ud800" if rng.random() < 0.3 else "novel"] = rng.choice(
                [NUM_TOKENS, 3, 2**40, 70]
            )
        elif kind == 3:
            odd: list[Any] = [-1, 2.0, "2", None, True, [], {}, 1e300, 10**4000, [2], 10**50]
            vocab[one] = rng.choice(odd)
        elif kind == 4:
            added.append(
                {"id": rng.choice([NUM_TOKENS, 0, -1, "0", None, 1.0]), "content": "<novel>"}
            )
        elif kind == 5:
            del rng.choice(added)[rng.choice(["id", "content"])]
        elif kind == 6:
            added[0] = rng.choice([None, [], 1, "x", {"id": {}, "content": []}])
        elif kind == 7:
            said["model"]["vocab"] = [[token, 0.0] for token in vocab][::-1]
        elif kind == 8:
            odd = [1, "x", True, [1, 2], [[]], [None], [{"0": 0}], [[[]]], {}, [], None, [[None]]]
            said["model"]["vocab"], said["added_tokens"] = rng.choice(odd), []
        else:
            said[rng.choice(["model", "added_tokens"])] = rng.choice([1, "x", True, [[]], [1]])
            said["vocab"] = vocab

    _say(draft, rng, TOKENIZER_FILE, change)


@_mutation()
def other_special_tokens(draft: Draft, rng: Random) -> None:
    """Roles for tokens that the base has not, and values that are no tokens."""
    odd: list[Any] = [
        "[PAD]", "\ud800", "x" * 5000, 5, True, [], {}, {"content": 5}, ["<|im_end|>"], 0, 0.5,
        {"content": {"content": "<|im_end|>"}}, "\0", "\x1b[31m",
    ]  # fmt: skip
    value = rng.choice(odd)
    kind = rng.randrange(4)
    if kind == 0:
        role = rng.choice(["bos", "eos", "unk", "sep", "pad", "cls", "mask"])
        _set(draft, rng, TOKENIZER_CONFIG_FILE, **{f"{role}_token": value})
    elif kind == 1:
        where = rng.choice(["additional_special_tokens", "extra_special_tokens"])
        many = rng.choice([[value], {"x": value}, [*["<|im_end|>"] * 999, value]])
        _set(draft, rng, TOKENIZER_CONFIG_FILE, **{where: many})
    elif kind == 2:
        ids = [
            f"{NUM_TOKENS}",
            "-1",
            "x",
            "",
            "1.0",
            " 1",
            "0x1",
            "\u0661",
            "1_0",
            "9" * 5000,
            "01",
            "true",
        ]
        token = {"content": "<|im_end|>"}
        _set(draft, rng, TOKENIZER_CONFIG_FILE, added_tokens_decoder={rng.choice(ids): token})
    else:
        values: list[Any] = [[], 1, "x", {"1": "x"}, {"1": {}}, {"1": None}, {"1": {"content": 1}}]
        _set(draft, rng, TOKENIZER_CONFIG_FILE, added_tokens_decoder=rng.choice(values))


# ---- forms of JSON


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
    _set(draft, rng, name, **{rng.choice(fields[name]): "@here@"})
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


@_mutation(must_refuse=False, share=0.2)
def large_tokenizer(draft: Draft, rng: Random) -> None:
    """Just below and above what is read, and what unfolds."""
    most = OPTIONAL_FILES[TOKENIZER_FILE]
    text = json.dumps(_base_tokenizer())
    num = rng.choice([100_000, 800_000, 1_290_000, 2_600_000])
    face = rng.choice(
        ["", "\xe9", "\u0101", "\U0001f600"]
    )  # one decides what a text's letters take
    vocab, merges, end = '"vocab": {', '"merges": [', "}}"
    many: dict[str, Callable[[], str]] = {
        vocab: lambda: "".join(f'"{face}{i:x}":{i},' for i in range(min(num, 1_500_000))),
        merges: lambda: rng.choice([f'["{face}a","b"],', f'"a {face}",', "[[]],", "{},"]) * num,
        '"added_tokens": [': lambda: '{"id":3,"content":"!"},' * (num // 2),
        '"model": {': lambda: "".join(f'"{i}":{{}},' for i in range(num)),
        "{": lambda: f'"{face}x":"' + rng.choice(["x", "\\n", "\\ud83d"]) * (num * 5) + '",',
        "[": lambda: '"' + "x" * num + face + '",',
    }
    where = rng.choice([*many, end, " "])
    if where == end:
        text += rng.choice([" ", "\n"]) * (most - len(text) - rng.choice([-1, 0, 1]))
    elif where == " ":
        text = text.replace(": ", ":" + " " * rng.choice([5000, 40_000]))
    else:
        text = text.replace(where, where + many[where](), 1)
    raw = text.encode()
    draft.beside[TOKENIZER_FILE] = raw if len(raw) < most + MIB else raw[: most + 1]


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
    _set(draft, rng, name, **{rng.choice(fields): rng.choice(values)})


# ---- templates and defaults


@_mutation()
def templates_that_are_none(draft: Draft, rng: Random) -> None:
    """No text, or none of which one is the default, or one that is too long."""
    good = {"name": "default", "template": "x"}
    values: list[Any] = [
        5, True, {}, [], 0, False, ["x"], [good, good], [{"name": ["default"], "template": "x"}],
        [{"name": {}, "template": "x"}], [{"name": "rag", "template": "x"}], "x\ud800", "\udfff",
        [good | {"template": 5}], [good | {"template": None}], {"default": "x"}, "x" * 262_145,
        [{"template": "x"}], [good | {"template": "\ud800"}], ["default"], [["default", "x"]],
        "\U0001f600" * 65_537,
    ]  # fmt: skip
    _set(draft, rng, TOKENIZER_CONFIG_FILE, chat_template=rng.choice(values))
    draft.beside.pop(TEMPLATE_FILE, None)


@_mutation(must_refuse=False)
def templates_that_hurt(draft: Draft, rng: Random) -> None:
    """They are loaded, as they are programs; what they may do is judged when they are rendered."""
    template = make_template(rng)
    if rng.random() < 0.7:
        add_files(draft, rng)
        draft.beside[TEMPLATE_FILE] = file_bytes(template)
    else:
        named = [{"name": "rag", "template": "x"}, {"name": "default", "template": template}]
        said = rng.choice([template, named])
        _set(draft, rng, TOKENIZER_CONFIG_FILE, chat_template=said)
        draft.beside.pop(TEMPLATE_FILE, None)


@_mutation()
def sampling_that_is_none(draft: Draft, rng: Random) -> None:
    """Out of range, of no kind that it may have, and ends that are no tokens."""
    key = rng.choice(
        ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "eos_token_id"]
    )
    texts = [
        "-1e9", "1e999", "-1e999", "1e5", '"1"', "[]", "{}", "true", "false", "[1e400]", '["0"]',
        "1" + "0" * 4000, "-1" + "0" * 400, '"\\ud800"', '"\\u001b[31m"', "[[[[0]]]]", "NaN",
    ]  # fmt: skip
    if key == "eos_token_id":
        texts = [text for text in texts if text != "[]"]
        ends = ["-1", "2.0", "[2, null]", "[true]", f"[{'2,' * 64}2]", '{"2": 2}']
        texts += [*ends, f"{NUM_TOKENS}", f"[2, {NUM_TOKENS}]"]
    if key in ("top_p", "repetition_penalty"):
        texts += ["0", "0.0", "-0.0", "1e-400"]
    if key == "top_k":
        texts += ["2147483648", "1.0", "-2", "1e2"]
    _set(draft, rng, GENERATION_FILE, **{key: "@here@"})
    raw = draft.beside[GENERATION_FILE].replace(b'"@here@"', rng.choice(texts).encode())
    draft.beside[GENERATION_FILE] = raw


@_mutation(must_refuse=False)
def odd_but_fair_sampling(draft: Draft, rng: Random) -> None:
    texts = {
        "temperature": ["5e-324", "1e-400", "-0.0", "0", "100", "null"],
        "top_p": ["5e-324", "1", "1.0", "null", "0." + "9" * 400],
        "top_k": ["-1", "0", "2147483647", "null"],
        "min_p": ["1", "-0", "1e-400"],
        "repetition_penalty": ["0.01", "100", "1e-2"],
        "do_sample": ["false", "0", '"no"', "[]"],
        "eos_token_id": ["[]", "null", "0", f"[{'2,' * 63}2]", "[0,1,2,3]"],
    }
    chosen = rng.sample(sorted(texts), rng.randint(1, len(texts)))
    _set(draft, rng, GENERATION_FILE, **{key: f"@{key}@" for key in chosen})
    for key in chosen:
        old, new = f'"@{key}@"'.encode(), rng.choice(texts[key]).encode()
        draft.beside[GENERATION_FILE] = draft.beside[GENERATION_FILE].replace(old, new)


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
