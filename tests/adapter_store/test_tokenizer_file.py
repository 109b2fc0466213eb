"""A tokenizer.json that is walked in small windows gives what Python's own JSON gives.

Not here: what is refused of one (test_extras), files that were made to hurt (test_hostile_folders).
"""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapter_store.errors import AdapterInvalid
from adapter_store.formats import tokenizer_file
from adapter_store.formats.tokenizer_file import read_tokens

WINDOW_CHARS = 200
TEXTS = st.text(max_size=8)
IDS = st.integers(0, 2**40)
MERGES = st.one_of(TEXTS, st.lists(TEXTS, min_size=2, max_size=2))
FILES = st.fixed_dictionaries({
    "added_tokens": st.lists(st.fixed_dictionaries({"id": IDS, "content": TEXTS}), max_size=9),
    "model": st.fixed_dictionaries({
        "type": st.just("BPE"),
        "vocab": st.one_of(
            st.dictionaries(TEXTS, IDS, max_size=60),
            st.lists(st.tuples(TEXTS, st.floats(-9, 0)), max_size=20),
        ),
        "merges": st.lists(MERGES, max_size=60),
    }),
    "normalizer": st.none() | st.lists(st.integers(), max_size=9),
})  # fmt: skip
FORMS = st.fixed_dictionaries({
    "ensure_ascii": st.booleans(),
    "indent": st.sampled_from([None, 0, 3]),
    "separators": st.sampled_from([None, (",", ":"), (" ,\n", "\t: ")]),
})  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def small_windows() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_file, "_WINDOW_CHARS", WINDOW_CHARS)
        yield


@given(said=FILES, form=FORMS, turned=st.booleans())
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_any_file_in_any_form(said: dict[str, Any], form: dict[str, Any], turned: bool) -> None:
    order = sorted(said, reverse=turned)
    text = json.dumps({key: said[key] for key in order}, **form)
    vocab = said["model"]["vocab"]
    if isinstance(vocab, list):
        table = [(False, token_id, token) for token_id, (token, _) in enumerate(vocab)]
    else:
        table = [(False, token_id, token) for token, token_id in vocab.items()]
    added = [(True, token["id"], token["content"]) for token in said["added_tokens"]]
    want = table + added if turned else added + table
    assert list(read_tokens(text.encode("utf-8", "surrogatepass"))) == want
    for at in range(0, len(text), max(1, len(text) // 20)):  # and no part of it is one
        with pytest.raises((AdapterInvalid, KeyError)):
            list(read_tokens(text[:at].encode("utf-8", "ignore")))
