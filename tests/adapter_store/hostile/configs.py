"""Mutations of adapter_config.json: its form, its numbers, its words and its expressions."""

import json
from typing import Any

from tests.adapter_store.hostile.draft import MIB, Draft, Mutation, Random, adder

MUTATIONS: dict[str, Mutation] = {}
_mutation = adder(MUTATIONS)


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
