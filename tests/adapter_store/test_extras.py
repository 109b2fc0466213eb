"""What an adapter brings besides weights: read, bounded, held against the base's vocabulary, and
part of the content that a digest names. Not here: templates that run (tests/model_runner)."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from adapter_store.contents import KnownContents
from adapter_store.errors import AdapterInvalid, AdapterUnavailable
from adapter_store.extras import NO_EXTRAS, AdapterExtras
from adapter_store.formats import extras_process
from adapter_store.formats.extras_files import BaseTokens, read_extras
from adapter_store.formats.registry import load_adapter
from adapter_store.host_cache import HostCache
from adapter_store.loader import AdapterLoader
from adapter_store.ref import AdapterRef
from adapter_store.sources.registry import open_source
from adapter_store.sources.source import OPTIONAL_FILES, S3Options
from tests.adapter_store.scripted_s3 import start_scripted_s3
from tests.adapter_store.tiny_adapters import TARGETS, write_peft_folder

VOCAB = {"a": 0, "b": 1, "ab": 2}
ADDED = [{"id": 3, "content": "<end>", "special": True}, {"id": 4, "content": "<pad>"}]
CONFIG = {"eos_token": "<end>", "pad_token": {"content": "<pad>"}}


def tokenizer(vocab: Any = None, added: Any = None, **model: Any) -> str:
    model = {"type": "BPE", "vocab": VOCAB if vocab is None else vocab, "merges": []} | model
    return json.dumps({"added_tokens": ADDED if added is None else added, "model": model})


def write(folder: Path, **files: Any) -> Path:
    """Files by their names, with _ for what cannot stand there; None = away with it."""
    folder.mkdir(parents=True, exist_ok=True)
    for key, content in files.items():
        name = next(name for name in OPTIONAL_FILES if name.partition(".")[0] == key)
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def base(tmp_path: Path) -> BaseTokens:
    files = {"tokenizer": tokenizer(), "tokenizer_config": CONFIG, "chat_template": "base"}
    return BaseTokens(write(tmp_path / "base", **files))


def found(folder: Path, base: BaseTokens, **files: Any) -> AdapterExtras:
    return read_extras(write(folder, **files), base)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer": tokenizer()},
        {"tokenizer": tokenizer(merges=["a b"]), "tokenizer_config": CONFIG},  # other bytes
        {
            "tokenizer": tokenizer().replace(
                '"merges": ', '"x":' + " " * 500_000 + f'"{"x" * 800_000}", "merges": '
            )
        },
        {"tokenizer": tokenizer({"<pad>": 4, "ab": 2, "b": 1, "a": 0, "<end>": 3})},
        {"tokenizer": tokenizer([["a", 0], ["b", -1], ["ab", -2]], type="Unigram")},
        {"tokenizer_config": CONFIG | {"added_tokens_decoder": {"3": {"content": "<end>"}}}},
        {"tokenizer_config": CONFIG, "chat_template": "base"},
        {"tokenizer_config": {"pad_token": "<end>"}},
        {"generation_config": {"max_length": 20, "transformers_version": "5"}},
        {"generation_config": '{"x": ' + "[" * 99 + "]" * 99 + "}"},
    ],
    ids=range(11),
)
def test_what_is_the_bases_own_counts_for_nothing(
    tmp_path: Path, base: BaseTokens, files: Any
) -> None:
    assert found(tmp_path / "a", base, **files) == NO_EXTRAS
    assert NO_EXTRAS.key == ""


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"tokenizer": tokenizer({"a": 0, "x": 1, "ab": 2})}, "id 1 is 'x' here, .* has 'b'"),
        ({"tokenizer": tokenizer({"b": 0, "a": 1, "ab": 2})}, "id 0 is 'b' here, .* has 'a'"),
        ({"tokenizer": tokenizer(VOCAB | {"z": 7})}, "id 7 is 'z' here, .* has none"),
        ({"tokenizer": tokenizer({"a": 0, "b": 1})}, "id 2 is no token here, .* has 'ab'"),
        ({"tokenizer": tokenizer(added=ADDED[:1])}, "id 4 is no token here, .* has '<pad>'"),
        (
            {"tokenizer": tokenizer(added=[*ADDED, {"id": 5, "content": "[PAD]"}])},
            r"id 5 is '\[PAD\]' here, .* has none",
        ),
        (
            {"tokenizer": tokenizer(added=[{"id": 3, "content": "<stop>"}, ADDED[1]])},
            "id 3 is '<stop>' here, .* has '<end>'",
        ),
        (
            {"tokenizer_config": {"added_tokens_decoder": {"4": {"content": "<fill>"}}}},
            "tokenizer_config.json: id 4 is '<fill>' here, .* has '<pad>'",
        ),
        ({"tokenizer_config": {"pad_token": "[PAD]"}}, r"id 5 is '\[PAD\]' here, .* has none"),
        ({"tokenizer": "{"}, "not valid JSON"),
        ({"tokenizer": "[" * 99999}, "not valid JSON: expecting {, near"),
        ({"tokenizer": '{"x": ' + "[" * 99999}, "nested too deep"),
        ({"tokenizer": '{"x": ' + "[" * 101 + "]" * 101 + "}"}, "nested too deep"),
        ({"tokenizer_config": '{"x": ' + "[" * 100 + "]" * 100 + "}"}, "nested too deep"),
        ({"tokenizer": json.dumps({"x": "-" * (2 << 20)})}, "a value has more than 1048576"),
        ({"tokenizer": '{"x": 1, "x": 1}'}, "the key 'x' is there twice"),
        (
            {"tokenizer": '{"model": {"vocab": {"a": 0, "b": 1, "a": 0}}}'},
            "token 'a' is there twice",
        ),
        ({"tokenizer": tokenizer(added=[*ADDED, ADDED[0]])}, "token '<end>' is there twice"),
        (
            {"tokenizer": tokenizer(merges=[["a", "b"], ["a", "b", "a"]])},
            "TypeError: .* is no merge",
        ),
        ({"tokenizer": tokenizer() + "}"}, "not valid JSON: something follows"),
        ({"tokenizer": tokenizer()[:-1]}, "not valid JSON: expecting ,, near ''"),
        ({"tokenizer": tokenizer({"a": "0"})}, "'a' has the id '0'"),
        ({"tokenizer": tokenizer({"a": 10**4000})}, "'a' has the id 10{17}"),
        ({"tokenizer": tokenizer([1, 2])}, "is no tokenizer: TypeError"),
        ({"tokenizer": tokenizer({"a": 0, "c": 0})}, "id 0 is both 'a' and 'c'"),
        ({"tokenizer": tokenizer(added=[{"id": 9}])}, "is no tokenizer: KeyError"),
        ({"tokenizer": tokenizer(added=[[[]]])}, "is no tokenizer: TypeError"),
        ({"tokenizer": json.dumps({"model": 1})}, "is no tokenizer: TypeError: model"),
        ({"tokenizer": tokenizer(merges=[""] * (3 << 20))}, "more than 2621440 values"),
        ({"tokenizer_config": {"added_tokens_decoder": {"x": {}}}}, "is no tokenizer"),
        ({"tokenizer_config": {"added_tokens_decoder": {" 3": {"content": "<end>"}}}}, "' 3' is"),
        ({"tokenizer_config": {"eos_token": 5}}, "eos_token is no token: 5"),
        ({"tokenizer_config": {"pad_token": "\ud800"}}, r"pad_token is no token: '\\ud800'"),
        ({"tokenizer_config": {"extra_special_tokens": {"x": "<x>"}}}, "id 5 is '<x>' here"),
        (
            {"tokenizer_config": {"model_specific_special_tokens": {"x": "<x>"}}},
            "id 5 is '<x>' here",
        ),
        ({"tokenizer_config": {"extra_special_tokens": 5}}, "extra_special_tokens is no token"),
    ],
    ids=range(36),
)
def test_another_tokenizer_is_refused(
    tmp_path: Path, base: BaseTokens, files: Any, words: str
) -> None:
    with pytest.raises(AdapterInvalid, match=words) as caught:
        found(tmp_path / "a", base, **files)
    assert caught.value.reason == "tokenizer"


def test_a_template_and_its_tokens(tmp_path: Path, base: BaseTokens) -> None:
    own = found(tmp_path / "file", base, chat_template="own", tokenizer_config=CONFIG)
    assert (own.chat_template, dict(own.special_tokens)) == (
        "own",
        {"eos_token": "<end>", "pad_token": "<pad>"},
    )
    plain = found(tmp_path / "plain", base, chat_template="own")
    assert plain.special_tokens == () and plain.key not in ("", own.key)
    config = {"chat_template": "from config"}
    assert found(tmp_path / "a", base, tokenizer_config=config).chat_template == "from config"
    named = {"chat_template": [{"name": n, "template": n} for n in ("rag", "default")]}
    assert found(tmp_path / "b", base, tokenizer_config=named).chat_template == "default"
    both = found(tmp_path / "c", base, tokenizer_config=config, chat_template="file")
    assert both.chat_template == "file"
    # The base's text, which writes another token here.
    other = {"eos_token": "<pad>"}
    assert found(tmp_path / "d", base, tokenizer_config=other, chat_template="base").chat_template


@pytest.mark.parametrize(
    ("files", "reason", "words"),
    [
        ({"tokenizer_config": {"chat_template": 5}}, "chat_template", "is no text: 5"),
        ({"tokenizer_config": {"chat_template": "x" * 300_000}}, "chat_template", "262144 bytes"),
        ({"tokenizer_config": {"chat_template": "x\ud800"}}, "chat_template", "half a character"),
        (
            {"tokenizer_config": {"chat_template": [{"name": "rag", "template": "x"}]}},
            "chat_template",
            "names 0 of its templates default",
        ),
        (
            {"tokenizer_config": {"chat_template": [{"name": {}}, *[{"name": "default"}] * 2]}},
            "chat_template",
            "names 2 of its templates default",
        ),
        (
            {"generation_config": '{"top_p": ' + "[" * 99 + "]" * 99 + "}"},
            "config",
            "top_p must be",
        ),
        ({"chat_template": "x" * 300_000}, "file", "chat_template.jinja has 300000 bytes"),
        ({"generation_config": {"top_p": 2}}, "config", "top_p must be a number in .*, not 2"),
        ({"generation_config": {"top_p": 0}}, "config", "top_p"),
        ({"generation_config": {"top_k": 1.5}}, "config", "top_k must be an integer"),
        ({"generation_config": {"temperature": "hot"}}, "config", "temperature.*'hot'"),
        ({"generation_config": {"temperature": True}}, "config", "temperature"),
        ({"generation_config": '{"min_p": NaN}'}, "config", "NaN"),
        ({"generation_config": {"eos_token_id": [3, 99]}}, "config", "eos_token_id.*99"),
        ({"generation_config": {"eos_token_id": [[]]}}, "config", "generation_config.json"),
        ({"generation_config": []}, "config", "not a JSON object"),
    ],
    ids=range(16),
)
def test_other_files_that_are_refused(
    tmp_path: Path, base: BaseTokens, files: Any, reason: str, words: str
) -> None:
    with pytest.raises(AdapterInvalid, match=words) as caught:
        found(tmp_path / "a", base, **files)
    assert caught.value.reason == reason


def test_links_are_not_followed(tmp_path: Path, base: BaseTokens) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "chat_template.jinja").symlink_to("/etc/hostname")
    with pytest.raises(AdapterInvalid, match="symbolic link"):
        read_extras(tmp_path / "a", base)


def test_defaults_and_ends(tmp_path: Path, base: BaseTokens) -> None:
    said = {"temperature": 0.6, "top_k": -1, "top_p": None, "eos_token_id": [4, 3, 4]}
    own = found(tmp_path / "a", base, generation_config=said)
    assert dict(own.sampling) == {"temperature": 0.6, "top_k": 0} and own.eos_ids == (3, 4)
    greedy = found(tmp_path / "b", base, generation_config={"do_sample": False, "eos_token_id": 3})
    assert dict(greedy.sampling) == {"temperature": 0} and greedy.eos_ids == (3,)


def test_an_odd_base_is_no_fault_of_the_adapter(tmp_path: Path) -> None:
    odd = {"chat_template": [{"name": "rag", "template": "x"}], "eos_token": 5}
    odd_base = write(tmp_path / "odd", tokenizer=tokenizer(), tokenizer_config=odd)
    files = {"chat_template": "own", "tokenizer_config": CONFIG}
    assert found(tmp_path / "a", BaseTokens(odd_base), **files).chat_template == "own"


# ---- in a process of its own


def test_what_unfolds_is_read_in_little_memory(tmp_path: Path, base: BaseTokens) -> None:
    """Its text alone, as Python holds it, and its merges are more than that process may take."""
    assert extras_process.MAX_MEMORY_BYTES == 256 << 20
    merges = '"\U0001f600",' * 2_600_000
    text = tokenizer(merges=["@"]).replace('"@"', merges + '""')
    folder = write(tmp_path / "a", tokenizer=text)
    assert extras_process.read_extras_apart(folder, tmp_path / "base") == NO_EXTRAS


def test_a_base_that_cannot_be_read_is_no_fault_of_the_adapter(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", tokenizer=tokenizer())
    bad = write(tmp_path / "bad", tokenizer="{")
    with pytest.raises(
        AdapterUnavailable, match="of the base model: .*tokenizer.json is not valid"
    ):
        extras_process.read_extras_apart(folder, bad)


def test_too_much_time_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel ends it; other ends are not the adapter's fault."""
    for kind, error in ((signal.SIGXCPU, AdapterInvalid), (signal.SIGKILL, AdapterUnavailable)):
        code = f"import os; os.kill(os.getpid(), {kind.value})"
        monkeypatch.setattr(extras_process, "_CODE", code)
        with pytest.raises(error, match="beside the weights"):
            extras_process.read_extras_apart(tmp_path, None)


def test_nothing_is_compared_where_the_base_has_no_tokenizer(tmp_path: Path) -> None:
    other = {"tokenizer": tokenizer({"z": 0}), "chat_template": "own"}
    assert found(tmp_path / "a", BaseTokens(None), **other).chat_template == "own"


# ---- as content


def make_loader(tmp_path: Path, base: str = "base", s3: S3Options | None = None) -> AdapterLoader:
    cache = HostCache(tmp_path / "tier", 1 << 24)
    contents = KnownContents()
    folder = tmp_path / base
    return AdapterLoader(TARGETS, torch.float32, cache, 16, s3, load_adapter, contents, folder)


def test_another_template_is_another_content(tmp_path: Path, base: BaseTokens) -> None:
    folder = write_peft_folder(tmp_path / "a", 1)
    ref = AdapterRef("t/a", str(folder))
    loader = make_loader(tmp_path)
    plain = loader.load(ref)
    write(folder, chat_template="one", generation_config={"top_k": 3})
    one = loader.load(ref)
    write(folder, chat_template="two")
    two = loader.load(ref)
    assert len({plain.digest, one.digest, two.digest}) == 3
    assert plain.extras == NO_EXTRAS
    assert (one.extras.chat_template, one.extras.sampling) == ("one", (("top_k", 3),))
    assert two.extras.chat_template == "two"
    # Whoever began with the first keeps it, from the host tier alone: another process too.
    pinned = AdapterRef("t/a", str(folder), one.digest)
    assert make_loader(tmp_path).load(pinned).extras == one.extras
    (folder / "chat_template.jinja").unlink()
    (folder / "generation_config.json").unlink()
    assert loader.load(ref).digest == plain.digest


def test_one_content_under_two_bases_of_the_same_sizes(tmp_path: Path, base: BaseTokens) -> None:
    write(tmp_path / "other", tokenizer=tokenizer({"b": 0, "a": 1, "ab": 2}))
    folder = write_peft_folder(tmp_path / "a", 1)
    write(folder, tokenizer=tokenizer(merges=[]))
    ref = AdapterRef("t/a", str(folder))
    assert make_loader(tmp_path).load(ref).digest
    with pytest.raises(AdapterInvalid, match="id 0 is 'a' here, .* has 'b'"):
        make_loader(tmp_path, "other").load(ref)
    assert make_loader(tmp_path).load(ref).fetched_bytes == 0


def test_two_bases_of_the_same_sizes_keep_their_own(tmp_path: Path, base: BaseTokens) -> None:
    """A base and its instruct form on one node: neither fetches for ever what the other has."""
    shutil.copytree(tmp_path / "base", tmp_path / "instruct")
    write(tmp_path / "instruct", chat_template="theirs")
    folder = write_peft_folder(tmp_path / "a", 1)
    write(folder, tokenizer=tokenizer(merges=[]), chat_template="theirs")
    loaders = [make_loader(tmp_path, name) for name in ("base", "instruct")]
    ref = AdapterRef("t/a", str(folder))
    assert all(loader.load(ref).fetched_bytes for loader in loaders)
    for _ in range(2):
        found = [loader.load(ref) for loader in loaders]
        assert [one.fetched_bytes for one in found] == [0, 0]
        assert [one.extras.chat_template for one in found] == ["theirs", ""]


@pytest.mark.parametrize("status", [404, 403])
def test_s3_names_them_in_its_revision(tmp_path: Path, base: BaseTokens, status: int) -> None:
    """403: of what is not there, to whoever may not list the bucket."""
    folder = write_peft_folder(tmp_path / "a", 1)
    with start_scripted_s3() as s3:
        s3.script = lambda method, path, number: None if path in s3.objects else status
        s3.put_folder("b/a", folder)
        options = S3Options(s3.endpoint_url, "us-east-1", "key", "secret", attempts=1)
        loader = make_loader(tmp_path, s3=options)
        ref = AdapterRef("t/a", "s3://b/a")
        plain = open_source(ref.uri, options).revision(ref)
        assert plain.count("+") == 1, "as ever, where nothing else lies beside"
        assert loader.load(ref).extras == NO_EXTRAS
        s3.objects["b/a/generation_config.json"] = b'{"top_k": 3}'
        s3.objects["b/a/chat_template.jinja"] = b"own"
        own = loader.load(ref)
        assert own.extras.chat_template == "own" and own.extras.sampling == (("top_k", 3),)
        source, into = open_source(ref.uri, options), tmp_path / "copy"
        into.mkdir()
        source.fetch(ref, into, source.revision(ref))
        assert (into / "chat_template.jinja").read_bytes() == b"own"
        assert len(list(into.iterdir())) == 4
        s3.objects["b/a/chat_template.jinja"] = b"x" * 300_000
        with pytest.raises(AdapterInvalid, match="a/chat_template.jinja has 300000 bytes"):
            source.revision(ref)
