"""The small files beside an adapter's weights -> `AdapterExtras`; its tokenizer is held against the
base model's vocabulary.

Prompts are always tokenized as the base model does, so an adapter's own tokenizer can only be the
same one: every id the same token. Not here: what a template does when it is rendered.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from adapter_store.errors import AdapterInvalid, AdapterUnavailable
from adapter_store.extras import AdapterExtras, sampling_fields
from adapter_store.formats.bounded_files import parse_json, read_small, shown
from adapter_store.formats.tokenizer_file import read_tokens
from adapter_store.sources.source import (
    GENERATION_FILE,
    OPTIONAL_FILES,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
)

_MAX_EOS_IDS = 64
_MAX_ID = 2**31 - 1
_MAX_TOKEN_CHARS = 1024  # of a token with a role: it is kept with the adapter
_ID = re.compile(r"0|[1-9][0-9]{0,9}")
_HALVES = re.compile(r"[\ud800-\udfff]")
_STRANGE = (AttributeError, KeyError, IndexError, TypeError, ValueError)
_NAMED_TOKENS = (  # lists of tokens, or tables by their names
    "additional_special_tokens",
    "extra_special_tokens",
    "model_specific_special_tokens",
)
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class BaseTokens:
    """What the base model's folder says of tokens and templates; read when first asked for.

    folder  None, or one without tokenizer.json: nothing is known, and nothing compared
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    @cached_property
    def digest(self) -> str:
        """Names all of it."""
        digest = hashlib.sha256()
        for name in (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, TEMPLATE_FILE):
            digest.update(f"{name} {hashlib.sha256(self.read(name)).hexdigest()}\n".encode())
        return digest.hexdigest()

    @cached_property
    def tokens(self) -> Mapping[int, str]:
        """id -> token, added ones too."""
        found: dict[int, str] = {}
        try:
            raw = self.read(TOKENIZER_FILE) or b"{}"
            for _, token_id, token in read_tokens(raw, max_values=None):
                found[token_id] = token
            found.update((token_id, token) for _, token_id, token in _added_in_config(self.config))
        except (AdapterInvalid, *_STRANGE) as error:  # not the adapter's fault
            raise AdapterUnavailable(f"of the base model: {error}") from None
        return found

    @cached_property
    def config(self) -> Mapping[str, Any]:
        found: dict[str, Any] = json.loads(self.read(TOKENIZER_CONFIG_FILE) or b"{}")
        return found

    @cached_property
    def template(self) -> str:
        """Its chat template, "" = none, or none that an adapter could bring as well."""
        with suppress(AdapterInvalid):
            return _template_of(self.read(TEMPLATE_FILE), self.config)
        return ""

    @cached_property
    def roles(self) -> Mapping[str, str]:
        """`bos_token` and the like -> token."""
        with suppress(AdapterInvalid):
            return _roles(self.config)
        return {}

    def read(self, name: str) -> bytes:
        """A file's bytes; none if it is not there."""
        path = self._folder / name if self._folder else None
        return path.read_bytes() if path and path.is_file() else b""


def brings_extras(folder: Path) -> bool:
    """Whether anything lies beside the weights."""
    return any(os.path.lexists(folder / name) for name in OPTIONAL_FILES)


def read_extras(folder: Path, base: BaseTokens) -> AdapterExtras:
    """What a fetched adapter brings.

    Errors:  AdapterInvalid: "tokenizer" for one that is not the base's, with the first id that
             differs and both tokens, and for a file that is none; "chat_template"; "config" for
             generation_config.json, with the key; "file" for one that is too large or no file.
             AdapterUnavailable if the base's own cannot be read.
    Cost:    memory of the files and the base's vocabulary, some 100 MB for the largest.
    """
    there = [name for name in OPTIONAL_FILES if os.path.lexists(folder / name)]
    raw = {name: read_small(folder / name, OPTIONAL_FILES[name]) for name in there}
    config = _parse(raw, TOKENIZER_CONFIG_FILE, "tokenizer")
    if TOKENIZER_FILE in raw or TOKENIZER_CONFIG_FILE in raw:
        _check_tokens(raw, config, base)
    return AdapterExtras(**_chat_part(raw, config, base), **_sampling_part(raw, base))


def _check_tokens(raw: Mapping[str, bytes], config: Mapping[str, Any], base: BaseTokens) -> None:
    """Errors: AdapterInvalid("tokenizer") with the first id at which the two are not the same."""
    if not base.tokens:
        return
    if TOKENIZER_FILE in raw and raw[TOKENIZER_FILE] != base.read(TOKENIZER_FILE):
        _check_same(read_tokens(raw[TOKENIZER_FILE]), base.tokens, TOKENIZER_FILE, is_whole=True)
    _check_same(_added_in_config(config), base.tokens, TOKENIZER_CONFIG_FILE, is_whole=False)
    known = set(base.tokens.values())
    for token in _named_tokens(config):
        if token not in known:  # a tokenizer that reads this file gives it the next id
            raise _differs(TOKENIZER_CONFIG_FILE, max(base.tokens) + 1, token, None)


def _check_same(
    tokens: Iterable[tuple[bool, Any, Any]], base: Mapping[int, str], where: str, is_whole: bool
) -> None:
    """Hold (is added, id, token) against the base's as they come; a stranger's are not kept.

    is_whole  every token of the base must be among them
    Errors:  AdapterInvalid("tokenizer")
    """
    seen: set[int] = set()
    added: set[int] = set()  # most writers name these in the vocabulary too
    lowest: tuple[int, str] | None = None
    num_wrong = 0
    try:
        for is_added, token_id, token in tokens:
            is_id = type(token_id) is int and 0 <= token_id <= _MAX_ID
            if not is_id or not isinstance(token, str):
                raise ValueError(f"{shown(token)} has the id {shown(token_id)}")
            if base.get(token_id) == token:
                found = added if is_added else seen
                if token_id in found:
                    raise ValueError(f"the token {shown(token)} is there twice")
                found.add(token_id)
                continue
            if token_id in seen or token_id in added:
                raise ValueError(
                    f"id {token_id} is both {shown(base[token_id])} and {shown(token)}"
                )
            lowest = min(lowest or (token_id, token), (token_id, token))
            num_wrong += 1
            if num_wrong > len(base):  # an endless list of them is not worth its time
                break
        else:
            seen |= added
            absent = min((i for i in base if is_whole and i not in seen), default=None)
            if absent is not None and (lowest is None or absent < lowest[0]):
                raise _differs(where, absent, None, base[absent])
    except _STRANGE as error:
        words = f"{where} is no tokenizer: {type(error).__name__}: {str(error)[:200]}"
        raise AdapterInvalid("tokenizer", words) from None
    if lowest is not None:
        raise _differs(where, *lowest, base.get(lowest[0]))


def _differs(where: str, token_id: int, mine: str | None, other: str | None) -> AdapterInvalid:
    ours = "no token" if mine is None else shown(mine)
    theirs = "has none" if other is None else f"has {shown(other)}"
    words = f"{where}: id {token_id} is {ours} here, and the base model's vocabulary {theirs}"
    return AdapterInvalid("tokenizer", words)


def _added_in_config(config: Mapping[str, Any]) -> Iterable[tuple[bool, int, str]]:
    for token_id, token in _or(config.get("added_tokens_decoder"), {}).items():
        if not _ID.fullmatch(token_id):
            raise ValueError(f"{shown(token_id)} is no id")
        yield True, int(token_id), token["content"]


def _named_tokens(config: Mapping[str, Any]) -> list[str]:
    """Tokens that a tokenizer_config.json gives a role to."""
    given = list(_roles(config).values())
    for key in _NAMED_TOKENS:
        value = _or(config.get(key), [])
        if not isinstance(value, list | dict):
            raise _no_token(key, value)
        tokens = value.values() if isinstance(value, dict) else value
        given += [text for token in tokens if (text := _content(key, token))]
    return given


def _roles(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like -> token."""
    keys = [f"{role}_token" for role in _ROLES]
    return {key: token for key in keys if (token := _content(key, config.get(key)))}


def _content(key: str, token: Any) -> str:
    """A token as transformers writes it: its text, or an object with it; "" for none.

    Errors:  AdapterInvalid("tokenizer").
    """
    text = token.get("content") if isinstance(token, dict) else _or(token, "")
    if not isinstance(text, str) or len(text) > _MAX_TOKEN_CHARS or not _is_unicode(text):
        raise _no_token(key, token)
    return text


def _or(value: Any, other: Any) -> Any:
    """JSON's null is as if the key were not there; 0, false and empty ones are values."""
    return other if value is None else value


def _no_token(key: str, value: Any) -> AdapterInvalid:
    words = f"{TOKENIZER_CONFIG_FILE}: {key} is no token: {shown(value)}"
    return AdapterInvalid("tokenizer", words)


def _is_unicode(text: str) -> bool:
    """Whether it has whole characters alone: JSON can write halves of them."""
    return not _HALVES.search(text)


def _chat_part(
    raw: Mapping[str, bytes], config: Mapping[str, Any], base: BaseTokens
) -> dict[str, Any]:
    """Template and its tokens; nothing where they are the base's own, which costs less to use."""
    template = _template_of(raw.get(TEMPLATE_FILE, b""), config)
    if not template:
        return {}
    most = OPTIONAL_FILES[TEMPLATE_FILE]
    if len(template.encode()) > most:
        words = f"{TOKENIZER_CONFIG_FILE}: chat_template has more than {most} bytes"
        raise AdapterInvalid("chat_template", words)
    roles = _roles(config)
    if template == base.template and roles.items() <= base.roles.items():
        return {}
    return {"chat_template": template, "special_tokens": tuple(sorted(roles.items()))}


def _template_of(file: bytes, config: Mapping[str, Any]) -> str:
    """The file's text, else what tokenizer_config.json says: a text, or some with names.

    Errors:  AdapterInvalid("chat_template").
    """
    if file:
        try:
            return file.decode()
        except UnicodeDecodeError as error:
            raise AdapterInvalid("chat_template", f"{TEMPLATE_FILE}: {error}") from None
    said = _or(config.get("chat_template"), "")
    wrong = ""
    if isinstance(said, list):
        default = [t for t in said if isinstance(t, dict) and t.get("name") == "default"]
        if len(default) != 1:
            wrong = f"names {len(default)} of its templates default"
        else:
            said = default[0].get("template")
    if not wrong and not isinstance(said, str):
        wrong = f"is no text: {shown(said)}"
    if not wrong and not _is_unicode(said):
        wrong = "has half a character"
    if wrong:
        words = f"{TOKENIZER_CONFIG_FILE}: chat_template {wrong}"
        raise AdapterInvalid("chat_template", words)
    return str(said)


def _sampling_part(raw: Mapping[str, bytes], base: BaseTokens) -> dict[str, Any]:
    said = _parse(raw, GENERATION_FILE, "config")
    try:
        sampling = sampling_fields(said)
        eos = said.get("eos_token_id")
        ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
        for token_id in ids:
            known = not base.tokens or token_id in base.tokens
            if type(token_id) is not int or not 0 <= token_id <= _MAX_ID or not known:
                raise ValueError(f"eos_token_id: the base model has no token {shown(token_id)}")
        if len(ids) > _MAX_EOS_IDS:
            raise ValueError(f"eos_token_id: {len(ids)} ids, more than {_MAX_EOS_IDS}")
    except (TypeError, ValueError) as error:
        raise AdapterInvalid("config", f"{GENERATION_FILE}: {error}") from None
    return {"sampling": tuple(sorted(sampling.items())), "eos_ids": tuple(sorted(set(ids)))}


def _parse(raw: Mapping[str, bytes], name: str, reason: str) -> dict[str, Any]:
    """One of the small files; {} if it is not there."""
    return parse_json(raw[name], reason, name, max_items=1 << 17) if name in raw else {}
