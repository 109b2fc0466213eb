"""Pattern keys mean what they mean to PEFT, i.e. to `re`, and cannot be made to run for long.

Not here: which values the patterns give (test_formats).
"""

import re
import time
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapter_store.errors import AdapterInvalid
from adapter_store.formats import patterns
from adapter_store.formats.patterns import MAX_KEY_CHARS, PatternTable

NAMES = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.mlp.experts.10.down_proj",
    "model.layers.11.mlp.experts.gate_up_proj",
    "lm_head",
    "a.b",
    "b.a.b",
    "ab.ab.aab",
]
_TOKENS = [
    "a", "b", "ab", ".", r"\.", "*", "+", "?", "(", "(?:", ")", "|", "[ab]", "[^a]", r"[\d.]",
    r"\d", r"\w", ".*", "{2}", "{1,2}", "{,2}", "{1,}", "{", "^", "$", "_proj", "layers", "1", "-",
    r"\-",
]  # fmt: skip


def _as_peft(keys: list[str], name: str) -> int | None:
    for i, key in enumerate(keys):
        if re.match(rf"(.*\.)?({key})$", name):
            return i
    return None


@given(
    keys=st.lists(
        st.lists(st.sampled_from(_TOKENS), min_size=1, max_size=7).map("".join),
        min_size=1,
        max_size=3,
        unique=True,
    )
)
@settings(max_examples=600, deadline=None, derandomize=True, database=None)
def test_keys_match_as_python_would(keys: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for key in keys:
                re.compile(rf"(.*\.)?({key})$")
            table = PatternTable("alpha_pattern", {key: float(i) for i, key in enumerate(keys)})
        except (re.error, AdapterInvalid):
            return
        for name in NAMES:
            assert table.lookup(name) == _as_peft(keys, name), name


@pytest.mark.parametrize(
    ("key", "matches"),
    [
        ("q_proj", {0}),
        ("proj", set()),
        ("layers.1.mlp.experts.10.down_proj", {1}),
        (r"layers\.1\..*", {1}),
        ("layers.1", set()),
        ("mlp.experts.*", {1, 2}),
        (r".*\.mlp\.experts\.\d+\.(gate_proj|down_proj)", {1}),
        (r".*\.gate_up_proj", {2}),
        ("^model.layers.0.self_attn.q_proj", {0}),
        ("^layers.0.self_attn.q_proj", set()),
        (r"^model\.layers\.(0|11)\..*$", {0, 2}),
        ("q.proj", {0}),
        ("q_proj|lm_head", {0, 3}),
        (r"layers\.\d{2}\.mlp.*?_proj", {2}),
    ],
)
def test_keys_that_people_write(key: str, matches: set[int]) -> None:
    table = PatternTable("rank_pattern", {key: 1})
    assert {i for i, name in enumerate(NAMES) if table.lookup(name)} == matches


@pytest.mark.parametrize(
    "key",
    [
        r"(a)\1", "(?=a)b", "(?i)a", "(?P<x>a)", r"\ba", r"a\Z", "a**", "a*+", "(a", "a)", "[a",
        "*a", "a{9999}", "(a{200}){200}", "a{3,2}", "(^a)", "a$b", "\\", "(" * 40 + "a" + ")" * 40,
        "", "[[a]", "a" * (MAX_KEY_CHARS + 1),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused_by_its_field(key: str) -> None:
    with pytest.raises(AdapterInvalid, match="^config: rank_pattern"):
        PatternTable("rank_pattern", {key: 1})


def test_a_key_for_every_expert_is_fast() -> None:
    names = [f"model.layers.{n}.mlp.experts.{e}.up_proj" for n in range(24) for e in range(128)]
    start = time.monotonic()
    table = PatternTable("rank_pattern", {name: i for i, name in enumerate(names)})
    assert [table.lookup(name) for name in names] == list(range(len(names)))
    assert time.monotonic() - start < 10


def test_the_budget_of_steps_ends_a_hostile_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "MAX_STEPS", 200_000)
    keys = {"(" + ".*" * 50 + f")!{i}": 1.0 for i in range(10)}
    table, looked_up = patterns.PatternTable("alpha_pattern", keys), 0
    with pytest.raises(AdapterInvalid, match="alpha_pattern: its keys take too long"):
        for looked_up in range(10_000):
            table.lookup(f"model.layers.{looked_up}.mlp.experts.gate_up_proj")
    assert 50 < looked_up < 1000
