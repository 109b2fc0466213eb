"""The small files beside an adapter's weights -> `AdapterExtras`; its tokenizer is held against the
base model's vocabulary.

Prompts are always tokenized as the base model does, so an adapter's own tokenizer can only be the
same one: every id the same token. Not here: what a template does when it is rendered.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from adapter_store.errors import AdapterInvalid
from adapter_store.extras import AdapterExtras, sampling_fields
from adapter_store.formats.bounded_files import parse_json, read_small, shown
from adapter_store.sources.source import (
    GENERATION_FILE,
    OPTIONAL_FILES,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
)

_MAX_VALUES = 5 << 19
"""Of one tokenizer.json, and its lists and objects: 200,000 tokens and twice as many merges, each a
list of two, are 1.4 million."""

_MAX_EOS_IDS = 64
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
        tokenizer = json.loads(self.read(TOKENIZER_FILE) or b"{}")
        return dict(_tokens_of(tokenizer)) | dict(_added_in_config(self.config))

    @cached_property
    def config(self) -> Mapping[str, Any]:
        found: dict[str, Any] = json.loads(self.read(TOKENIZER_CONFIG_FILE) or b"{}")
        return found

    @cached_property
    def template(self) -> str:
        """Its chat template, "" = none."""
        return _template_of(self.read(TEMPLATE_FILE), self.config)

    def read(self, name: str) -> bytes:
        """A file's bytes; none if it is not there."""
        path = self._folder / name if self._folder else None
        return path.read_bytes() if path and path.is_file() else b""


def brings_extras(folder: Path) -> bool:
    """Whether anything lies beside the weights."""
    return any((folder / name).exists() for name in OPTIONAL_FILES)


def read_extras(folder: Path, base: BaseTokens) -> AdapterExtras:
    """What a fetched adapter brings.

    Errors:  AdapterInvalid: "tokenizer" for one that is not the base's, with the first id that
             differs and both tokens, and for a file that is none; "chat_template"; "config" for
             generation_config.json, with the key; "file" for one that is too large.
    """
    there = [name for name in OPTIONAL_FILES if (folder / name).exists()]
    raw = {name: read_small(folder / name, OPTIONAL_FILES[name]) for name in there}
    config = _parse(raw, TOKENIZER_CONFIG_FILE, "tokenizer")
    if TOKENIZER_FILE in raw or TOKENIZER_CONFIG_FILE in raw:
        _check_tokens(raw, config, base)
    return AdapterExtras(**_chat_part(raw, config, base), **_sampling_part(raw, base))


def _check_tokens(raw: Mapping[str, bytes], config: Mapping[str, Any], base: BaseTokens) -> None:
    """Errors: AdapterInvalid("tokenizer") with the first id at which the two are not the same."""
    if not base.tokens:
        return
    own = dict(_unique(_added_in_config(config), TOKENIZER_CONFIG_FILE))
    ids: Iterable[int] = sorted(own)
    where = TOKENIZER_CONFIG_FILE
    if TOKENIZER_FILE in raw and raw[TOKENIZER_FILE] != base.read(TOKENIZER_FILE):
        where = TOKENIZER_FILE
        own |= _unique(_tokens_of(_parse_tokenizer(raw[TOKENIZER_FILE])), where)
        ids = sorted(own.keys() | base.tokens.keys())
    for token_id in ids:
        mine, other = own.get(token_id), base.tokens.get(token_id)
        if mine != other:
            raise _differs(where, token_id, mine, other)
    known = set(base.tokens.values())
    for token in _named_tokens(config):
        if token not in known:  # a tokenizer that reads this file gives it the next id
            raise _differs(TOKENIZER_CONFIG_FILE, max(base.tokens) + 1, token, None)


def _differs(where: str, token_id: int, mine: str | None, other: str | None) -> AdapterInvalid:
    ours = "no token" if mine is None else shown(mine)
    theirs = "has none" if other is None else f"has {shown(other)}"
    words = f"{where}: id {token_id} is {ours} here, and the base model's vocabulary {theirs}"
    return AdapterInvalid("tokenizer", words)


def _tokens_of(tokenizer: Mapping[str, Any]) -> Iterable[tuple[int, str]]:
    """(id, token) of a tokenizer.json, in its own order. Errors: as for any strange JSON."""
    vocab = (tokenizer.get("model") or {}).get("vocab") or {}
    if isinstance(vocab, dict):
        yield from ((token_id, token) for token, token_id in vocab.items())
    else:  # Unigram: pairs of token and score, in the order of ids
        yield from ((token_id, pair[0]) for token_id, pair in enumerate(vocab))
    yield from ((token["id"], token["content"]) for token in tokenizer.get("added_tokens") or ())


def _added_in_config(config: Mapping[str, Any]) -> Iterable[tuple[int, str]]:
    for token_id, token in (config.get("added_tokens_decoder") or {}).items():
        yield int(token_id), token["content"]


def _unique(pairs: Iterable[tuple[int, str]], where: str) -> dict[int, str]:
    """id -> token of a stranger's file. Errors: AdapterInvalid("tokenizer")."""
    found: dict[int, str] = {}
    try:
        for token_id, token in pairs:
            if type(token_id) is not int or not isinstance(token, str) or token_id < 0:
                raise ValueError(f"{shown(token)} has the id {shown(token_id)}")
            if found.setdefault(token_id, token) != token:
                raise ValueError(
                    f"id {token_id} is both {shown(found[token_id])} and {shown(token)}"
                )
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        words = f"{where} is no tokenizer: {type(error).__name__}: {str(error)[:200]}"
        raise AdapterInvalid("tokenizer", words) from None
    return found


def _named_tokens(config: Mapping[str, Any]) -> list[str]:
    """Tokens that a tokenizer_config.json gives a role to."""
    more = [config.get("additional_special_tokens"), config.get("extra_special_tokens")]
    lists = [value for value in more if isinstance(value, list)]
    given = [*_roles(config).values(), *(token for value in lists for token in value)]
    return [text for token in given if (text := _content(token))]


def _roles(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like -> token."""
    named = {f"{role}_token": _content(config.get(f"{role}_token")) for role in _ROLES}
    return {role: token for role, token in named.items() if token}


def _content(token: Any) -> str:
    """A token as transformers writes it: its text, or an object with it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _chat_part(
    raw: Mapping[str, bytes], config: Mapping[str, Any], base: BaseTokens
) -> dict[str, Any]:
    """Template and its tokens; nothing where they are the base's own, which costs less to use."""
    template = _template_of(raw.get(TEMPLATE_FILE, b""), config)
    if not template:
        return {}
    most = OPTIONAL_FILES[TEMPLATE_FILE]
    if len(template.encode("utf-8", "surrogatepass")) > most:
        words = f"{TOKENIZER_CONFIG_FILE}: chat_template has more than {most} bytes"
        raise AdapterInvalid("chat_template", words)
    roles = _roles(config)
    if template == base.template and roles.items() <= _roles(base.config).items():
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
    said = config.get("chat_template")
    if isinstance(said, list):
        named = {t.get("name"): t.get("template") for t in said if isinstance(t, dict)}
        said = named.get("default")
    if said is not None and not isinstance(said, str):
        words = f"{TOKENIZER_CONFIG_FILE}: chat_template is no text: {shown(said)}"
        raise AdapterInvalid("chat_template", words)
    return said or ""


def _sampling_part(raw: Mapping[str, bytes], base: BaseTokens) -> dict[str, Any]:
    said = _parse(raw, GENERATION_FILE, "config")
    try:
        sampling = sampling_fields(said)
        eos = said.get("eos_token_id")
        ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
        for token_id in ids:
            known = not base.tokens or token_id in base.tokens
            if type(token_id) is not int or token_id < 0 or not known:
                raise ValueError(f"eos_token_id: the base model has no token {shown(token_id)}")
        if len(ids) > _MAX_EOS_IDS:
            raise ValueError(f"eos_token_id: {len(ids)} ids, more than {_MAX_EOS_IDS}")
    except (TypeError, ValueError) as error:
        raise AdapterInvalid("config", f"{GENERATION_FILE}: {error}") from None
    return {"sampling": tuple(sorted(sampling.items())), "eos_ids": tuple(sorted(set(ids)))}


def _parse(raw: Mapping[str, bytes], name: str, reason: str) -> dict[str, Any]:
    """One of the small files; {} if it is not there."""
    return parse_json(raw[name], reason, name, max_items=1 << 17) if name in raw else {}


def _parse_tokenizer(raw: bytes) -> dict[str, Any]:
    return parse_json(raw, "tokenizer", TOKENIZER_FILE, max_items=_MAX_VALUES)
