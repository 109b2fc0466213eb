"""The tokenizer's edges: templates, refusals, exact incremental text, no torch, no network."""

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders

from model_runner.tokenizer import IncrementalDetokenizer, Tokenizer
from tests.model_runner.demo import ANSWERS, BASE_DIR, PADDING_IDS, QUESTIONS, chat
from tests.model_runner.vocabularies import save, sentencepiece

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer(BASE_DIR)


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return sentencepiece(tmp_path_factory.mktemp("fallback"))


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The demo's vocabulary with added tokens: special or not, within the byte alphabet or not."""
    fast = tokenizers.Tokenizer.from_file(str(BASE_DIR / "tokenizer.json"))
    fast.add_tokens(
        [
            AddedToken("<tool>"),
            AddedToken("two words"),
            AddedToken("\u00e9\u00e9"),
            AddedToken("\U0001f5fc"),
        ]
    )
    fast.add_special_tokens([AddedToken("<\uff5cend\uff5c>", special=True)])
    return save(fast, tmp_path_factory.mktemp("extended"), eos_token="<|im_end|>")


@pytest.mark.parametrize(
    "text", ["", "It is Tokyo.", "T\u014dky\u014d \u6771\u4eac \U0001f5fc\u200d\n\t\0", " <b> "]
)
def test_text_goes_there_and_back(demo: Tokenizer, text: str) -> None:
    ids = demo.encode(text)
    assert demo.decode(ids) == text
    assert b"".join(demo.token_bytes(i) for i in ids) == text.encode()
    assert all(0 <= i < demo.vocab_size for i in ids)


def test_what_the_demo_declares(demo: Tokenizer) -> None:
    assert (demo.vocab_size, PADDING_IDS) == (640, range(640, 3584))
    assert demo.has_chat_template
    names = {demo.token_bytes(i) for i in demo.eos_ids}
    assert names == {b"<|im_end|>", b"<|endoftext|>"}
    assert len(QUESTIONS) == 20 and all(len(a) == 20 for a in ANSWERS.values())


def test_padding_ids_give_nothing(demo: Tokenizer) -> None:
    ids = demo.encode("T\u014dky\u014d")
    first, middle, last = PADDING_IDS[0], PADDING_IDS[1000], PADDING_IDS[-1]
    among = [first, *ids[:2], middle, *ids[2:], last]  # cuts the first character in two
    assert demo.decode(among) == "T\u014dky\u014d" and demo.decode(PADDING_IDS) == ""
    assert "".join(pieces(demo, among, [1] * len(among))) == "T\u014dky\u014d"
    assert {demo.token_bytes(i) for i in PADDING_IDS} == {b""}


def test_begin_of_text_is_added_to_plain_text_alone(tmp_path: Path) -> None:
    fast = tokenizers.Tokenizer.from_file(str(BASE_DIR / "tokenizer.json"))
    start = fast.token_to_id("<|im_start|>")
    fast.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)]
    )
    shutil.copy(BASE_DIR / "chat_template.jinja", tmp_path)
    begins = save(fast, tmp_path)
    assert begins.encode("It")[0] == start
    assert begins.encode("It", add_special_tokens=False) == begins.encode("It")[1:]
    assert begins.encode_chat(chat("It")).count(start) == 2  # the template's own: user, assistant


def test_chat_is_the_template_filled(demo: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *chat("What colour is grass?")]
    ids = demo.encode_chat(messages)
    text = b"".join(demo.token_bytes(i) for i in ids).decode()
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat colour is grass?<|im_end|>\n<|im_start|>assistant\n"
    )
    shorter = demo.encode_chat(messages, add_generation_prompt=False)
    assert ids[: len(shorter)] == shorter and len(shorter) < len(ids)


def test_content_may_be_text_parts(demo: Tokenizer) -> None:
    parts = [{"type": "text", "text": "What colour "}, {"type": "text", "text": "is grass?"}]
    assert demo.encode_chat([{"role": "user", "content": parts}]) == demo.encode_chat(
        chat("What colour is grass?")
    )


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "messages must not be empty"),
        (["hello"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\].role"),
        ([{"role": "user"}], r"messages\[0\].content"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\].content\[0\]"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\].content\[0\]"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\].content\[0\]"),
        ([{"role": "pilot", "content": "x"}], "unknown role: pilot"),
        ([*chat("x"), {"role": "system", "content": "x"}], "a system message must come first"),
        (chat("\ud800"), "tokenized|refused"),
    ],
)
def test_bad_messages_are_refused_by_name(demo: Tokenizer, messages: list, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        demo.encode_chat(messages)


def test_what_cannot_be_done_is_said(fallback: Tokenizer, demo: Tokenizer, tmp_path: Path) -> None:
    assert not fallback.has_chat_template
    with pytest.raises(ValueError, match="no chat template"):
        fallback.encode_chat(chat("x"))
    with pytest.raises(ValueError, match="cannot be tokenized"):
        demo.encode("a\ud800b")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Tokenizer(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no"):
        Tokenizer(tmp_path)


def test_end_ids_come_from_all_three_files(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BASE_DIR / name, tmp_path)
    own = Tokenizer(tmp_path).eos_ids
    assert len(own) == 1
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 5}}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 5]}))
    assert Tokenizer(tmp_path).eos_ids == tuple(sorted({*own, 5, 9}))


@pytest.fixture(scope="module")
def metaspace(fallback: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """As newer SentencePiece conversions have it: one decoder that knows the first token."""
    fast = tokenizers.Tokenizer.from_str(fallback._fast.to_str())
    fast.decoder = decoders.Metaspace()
    return save(fast, tmp_path_factory.mktemp("metaspace"), eos_token="</s>")


def pieces(
    tokenizer: Tokenizer, ids: list[int], chunks: list[int], before: Sequence[int] = ()
) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, before)
    given_text, at = [], 0
    for size in [*chunks, len(ids)]:
        given_text.append(detokenizer.push(ids[at : at + size]))
        at += size
    return [*given_text, detokenizer.flush()]


SAME_EACH_TIME = settings(deadline=None, derandomize=True)
CHUNKS = st.lists(st.integers(0, 4), max_size=60)


@SAME_EACH_TIME
@given(data=st.data(), chunks=CHUNKS)
@pytest.mark.parametrize("kind", ["demo", "extended", "fallback", "metaspace"])
def test_pieces_join_to_the_whole(
    request: pytest.FixtureRequest, kind: str, data: st.DataObject, chunks: list[int]
) -> None:
    """Any ids at all: special ones, broken bytes, ids outside the vocabulary."""
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    assert "".join(pieces(tokenizer, ids, chunks)) == tokenizer.decode(ids)


@SAME_EACH_TIME
@given(data=st.data(), chunks=CHUNKS)
@pytest.mark.parametrize("kind", ["demo", "extended", "fallback", "metaspace"])
def test_an_answer_goes_on_with_the_text_before(
    request: pytest.FixtureRequest, kind: str, data: st.DataObject, chunks: list[int]
) -> None:
    """Any ids at all, unless those before end within a character."""
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    some = st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=20)
    before, ids = data.draw(some), data.draw(some)
    with_text = [i for i in before if tokenizer.text_end((i,))]
    assume(tokenizer._byte_level or not {*with_text[-1:]} & tokenizer._fallback_ids)
    assume(not tokenizer._byte_level or not tokenizer.decode(before).endswith("\ufffd"))
    added = tokenizer.decode([*before, *ids])[len(tokenizer.decode(before)) :]
    assert "".join(pieces(tokenizer, ids, chunks, before)) == added


WORDS_AND_BYTES = st.lists(
    st.sampled_from(["\u2581", "\u2581It", "\u2581is", ".", "\u6771", "\u00e9"])
)


@SAME_EACH_TIME
@given(first=WORDS_AND_BYTES, second=WORDS_AND_BYTES, chunks=CHUNKS)
def test_words_and_lone_bytes_go_on_after_each_other(
    fallback: Tokenizer, first: list[str], second: list[str], chunks: list[int]
) -> None:
    before, ids = (fallback.encode("".join(words)) for words in (first, second))
    added = fallback.decode([*before, *ids])[len(fallback.decode(before)) :]
    assert "".join(pieces(fallback, ids, chunks, before)) == added
    spelled = b"".join(
        fallback.token_bytes(i, begins=not fallback.text_end([*before, *ids[:at]]))
        for at, i in enumerate(ids)
    )
    assert spelled.decode() == added


def test_a_character_cut_by_the_border_is_joined_by_neither(fallback: Tokenizer) -> None:
    by_bytes = {fallback.token_bytes(i): i for i in range(fallback.vocab_size)}
    cut, rest = ([by_bytes[bytes((b,))] for b in part] for part in (b"\xe4", b"\xba\xac"))
    assert pieces(fallback, [*rest, by_bytes[b"."]], [3], cut) == ["\ufffd\ufffd.", "", ""]
    assert pieces(fallback, [by_bytes[b" It"]], [1], cut) == [" It", "", ""]


@SAME_EACH_TIME
@given(text=st.text(max_size=30), chunks=CHUNKS)
@pytest.mark.parametrize("kind", ["demo", "extended", "fallback", "metaspace"])
def test_pieces_of_real_text_hold_no_replacement(
    request: pytest.FixtureRequest, kind: str, text: str, chunks: list[int]
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    text = text.replace("\ufffd", "")
    ids = tokenizer.encode(text)
    given_text = pieces(tokenizer, ids, chunks)
    assert "".join(given_text) == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in given_text)
    if kind == "demo":
        assert tokenizer.decode(ids) == text


def test_text_comes_with_its_token(demo: Tokenizer, fallback: Tokenizer) -> None:
    for tokenizer, text in (
        (demo, "Arr, matey! Tokyo it be!"),
        (fallback, "\u2581It\u2581isTokyo."),
    ):
        detokenizer = IncrementalDetokenizer(tokenizer)
        ids = tokenizer.encode(text)
        assert len(ids) > 3
        assert all(detokenizer.push([i]) for i in ids)
        assert detokenizer.flush() == ""


def test_a_word_after_a_special_token_keeps_its_space(fallback: Tokenizer) -> None:
    end, (word,) = fallback.eos_ids[0], fallback.encode("\u2581It")
    assert pieces(fallback, [end, word, end, word], [1, 1, 1, 1]) == ["", "It", "", " It", "", ""]
    (none,) = fallback.encode("~")
    assert pieces(fallback, [word, none, word], [1, 1, 1]) == ["It", "", " It", "", ""]


@pytest.mark.parametrize("kind", ["demo", "fallback"])
def test_cost_stays_constant(request: pytest.FixtureRequest, kind: str) -> None:
    """Long runs of the worst ids: broken bytes, tokens without text, words."""
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    by_bytes = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    runs = (
        by_bytes[b"\xff"],
        by_bytes[b"\xe4"],
        tokenizer.eos_ids[0],
        tokenizer.vocab_size + 9,
        by_bytes[b"."],
    )
    start = time.process_time()
    for token_id in runs:
        detokenizer = IncrementalDetokenizer(tokenizer)
        text = "".join(detokenizer.push((token_id,)) for _ in range(20_000)) + detokenizer.flush()
        assert text == tokenizer.decode([token_id] * 20_000)
    # Under 1 s; decoding all that is held at every token would be 200 million tokens a run.
    assert time.process_time() - start < 20


def test_threads_may_share_one(demo: Tokenizer) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for question in QUESTIONS * 10:
                ids = demo.encode_chat(chat(question))
                assert question in demo.decode(ids)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not failures and not any(thread.is_alive() for thread in threads)


WITHOUT = """
import socket, sys
sys.modules["torch"] = None

def refuse(*_):
    raise AssertionError("the network was asked")

socket.socket.connect = socket.getaddrinfo = refuse
from model_runner.text import TextEngine
from model_runner.tokenizer import Tokenizer
tokenizer = Tokenizer(sys.argv[1])
print(tokenizer.encode_chat([{"role": "user", "content": "What colour is grass?"}]))
"""


def test_needs_neither_torch_nor_network(demo: Tokenizer) -> None:
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(BASE_DIR)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == demo.encode_chat(chat("What colour is grass?"))
