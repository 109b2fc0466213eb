"""Mutations of what the files beside the weights say: tokens, templates, defaults of sampling.

Not here: their form as files (beside), what templates do when they are rendered (templates).
"""

from collections.abc import Callable
from typing import Any

from adapter_store.sources.source import (
    GENERATION_FILE,
    OPTIONAL_FILES,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
)
from tests.adapter_store.hostile.draft import Draft, Mutation, Random, adder
from tests.adapter_store.hostile.good_files import (
    NUM_TOKENS,
    add_files,
    base_tokenizer,
    file_bytes,
    say,
    set_fields,
)
from tests.adapter_store.hostile.templates import make_template

MUTATIONS: dict[str, Mutation] = {}
_mutation = adder(MUTATIONS)
_NAMED_TOKENS = tuple(
    f"{kind}_special_tokens" for kind in ("additional", "extra", "model_specific")
)


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

    say(draft, rng, TOKENIZER_FILE, change)


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
        set_fields(draft, rng, TOKENIZER_CONFIG_FILE, **{f"{role}_token": value})
    elif kind == 1:
        where = rng.choice(_NAMED_TOKENS)
        many = rng.choice([[value], {"x": value}, [*["<|im_end|>"] * 999, value]])
        set_fields(draft, rng, TOKENIZER_CONFIG_FILE, **{where: many})
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
        set_fields(draft, rng, TOKENIZER_CONFIG_FILE, added_tokens_decoder={rng.choice(ids): token})
    else:
        values: list[Any] = [[], 1, "x", {"1": "x"}, {"1": {}}, {"1": None}, {"1": {"content": 1}}]
        set_fields(draft, rng, TOKENIZER_CONFIG_FILE, added_tokens_decoder=rng.choice(values))


@_mutation(must_refuse=False, share=0.2)
def large_tokenizer(draft: Draft, rng: Random) -> None:
    """Just below and above what is read, and what unfolds."""
    most = OPTIONAL_FILES[TOKENIZER_FILE]
    raw = file_bytes(base_tokenizer())
    num = rng.choice([100_000, 800_000, 1_290_000, 2_600_000])
    # One of these decides how many bytes Python takes for each letter of a text.
    face = rng.choice(["", "\xe9", "\u0101", "\U0001f600"]).encode()
    merge = rng.choice([b'["%sa","b"],' % face, b'"a %s",' % face, b"[[]],", b"{},"])
    letter = rng.choice([b"x", b"\\n", b"\\ud83d"])
    many: dict[bytes, Callable[[], bytes]] = {
        b'"vocab": {': lambda: b"".join(
            b'"%s%x":%d,' % (face, i, i) for i in range(min(num, 1_500_000))
        ),
        b'"merges": [': lambda: merge * num,
        b'"added_tokens": [': lambda: b'{"id":3,"content":"!"},' * (num // 2),
        b'"model": {': lambda: b"".join(b'"%d":{},' % i for i in range(min(num, 1_500_000))),
        b"{": lambda: b'"%sx":"%s",' % (face, letter * (num * 5)),
        b"[": lambda: b'"%s%s",' % (b"x" * num, face),
    }
    where = rng.choice([*many, b"}}", b" "])
    if where in many:
        raw = raw.replace(where, where + many[where](), 1)
    elif where == b" ":
        raw = raw.replace(b": ", b":" + b" " * rng.choice([5000, 40_000]))
    else:
        raw += rng.choice([b" ", b"\n"]) * (most - len(raw) - rng.choice([-1, 0, 1]))
    draft.beside[TOKENIZER_FILE] = raw[: most + 1]


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
    set_fields(draft, rng, TOKENIZER_CONFIG_FILE, chat_template=rng.choice(values))
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
        set_fields(draft, rng, TOKENIZER_CONFIG_FILE, chat_template=said)
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
    set_fields(draft, rng, GENERATION_FILE, **{key: "@here@"})
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
    set_fields(draft, rng, GENERATION_FILE, **{key: f"@{key}@" for key in chosen})
    for key in chosen:
        old, new = f'"@{key}@"'.encode(), rng.choice(texts[key]).encode()
        draft.beside[GENERATION_FILE] = draft.beside[GENERATION_FILE].replace(old, new)
