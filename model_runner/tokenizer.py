"""Text to token ids and back: a model's fast tokenizer, its chat template, text as tokens come.

Not for the engine, which sees ids alone. The one file that knows transformers. Needs neither torch
nor the network.
"""

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

# GPT-2's alphabet: byte-level vocabularies spell every byte as one printable character.
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_BYTE_OF_CHAR = {chr(b): b for b in _PRINTABLE} | {
    chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in _PRINTABLE)
}


class TemplateRefused(ValueError):
    """There is no chat template, or it gave no text for these messages."""


class Tokenizer:
    """The tokenizer of one model. Safe to share between threads once made.

    vocab_size         number of tokens, added ones too (a model may have more rows than that)
    eos_ids            ids that end an answer: of generation_config.json, config.json, the tokenizer
    has_chat_template  whether `encode_chat` can work
    special_ids        tokens that are no text -> their ids
    special_tokens     names that templates know (`bos_token`) -> tokens
    Errors:  FileNotFoundError if `folder` is none; ValueError if it holds no fast tokenizer.
    """

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder)
        if not path.is_dir():
            raise FileNotFoundError(f"no tokenizer: {path} is not a folder")
        try:
            self._front = PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
        except Exception as error:  # what it raises depends on the file that is missing or broken
            raise ValueError(f"{path} holds no tokenizer that can be loaded: {error}") from error
        if not getattr(self._front, "is_fast", False):
            raise ValueError(f"{path} holds no fast tokenizer (tokenizer.json)")
        # The Rust tokenizer underneath is used directly: the Python front sets its padding on each
        # call, which fails when two threads do it at once.
        self._fast = self._front.backend_tokenizer
        self._fast.no_truncation()
        self._fast.no_padding()
        self.vocab_size: int = self._fast.get_vocab_size(with_added_tokens=True)
        self.has_chat_template: bool = bool(self._front.chat_template)
        named = self._front.special_tokens_map
        self.special_tokens = {role: t for role, t in named.items() if isinstance(t, str)}
        added = self._fast.get_added_tokens_decoder()
        self.special_ids = {token.content: i for i, token in added.items() if token.special}
        self._special: frozenset[int] = frozenset(self.special_ids.values())
        self.eos_ids: tuple[int, ...] = _eos_ids(path, self._front.eos_token_id)
        kinds = _decoder_kinds(self._fast.decoder)
        self._byte_level: bool = kinds == ["ByteLevel"]
        self._fallback_ids: frozenset[int] = frozenset()
        if "ByteFallback" in kinds:
            ids = (self._fast.token_to_id(f"<0x{b:02X}>") for b in range(256))
            self._fallback_ids = frozenset(i for i in ids if i is not None)
        self._bytes: dict[int, bytes] = {}
        # What a token means may depend on whether text stands before it: this one does.
        self._anchor: tuple[int, ...] = () if self._byte_level else self._find_anchor()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of plain text, with the model's own begin-of-text token where it has one.

        Errors:  ValueError if the text is no valid Unicode (a lone surrogate).
        """
        try:
            return list(self._fast.encode(text, add_special_tokens=add_special_tokens).ids)
        except (TypeError, UnicodeError) as error:
            raise ValueError(f"the text cannot be tokenized: {error}") from error

    def encode_chat(
        self, messages: Sequence[Mapping[str, object]], **template_kwargs: object
    ) -> list[int]:
        """Token ids of a conversation by the model's chat template, ready for the answer.

        messages  each with `role` and `content`: text, or a list of `{"type": "text", "text": ...}`
                  parts, joined as they are. Other keys (name, tool_calls) go to the template.
        template_kwargs  what the template knows; `add_generation_prompt` is True unless given.
        Errors:  TemplateRefused; ValueError if a message is malformed.
        """
        if not self.has_chat_template:
            raise TemplateRefused("this model has no chat template: use plain text")
        plain = plain_messages(messages)
        kwargs = {"add_generation_prompt": True} | template_kwargs | {"tokenize": False}
        try:
            text = self._front.apply_chat_template(plain, **kwargs)
        except (
            Exception
        ) as error:  # a template is a program of the model's author: it may raise anything
            raise TemplateRefused(f"the chat template refused the messages: {error}") from error
        return self.encode(text, add_special_tokens=False)  # the template writes its own

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of these ids without special tokens; ids outside the vocabulary give nothing."""
        return str(self._fast.decode(list(token_ids), skip_special_tokens=True))

    def text_end(self, token_ids: Sequence[int]) -> list[int]:
        """Their end, from the last token with text on: what decides how a text goes on after them.

        [] if none of them has text, and where it decides nothing (byte-level vocabularies). A run
        of single bytes ends with them: bytes that follow are characters of their own.
        """
        found: list[int] = []
        for i in () if self._byte_level else reversed(token_ids):
            if i in self._fallback_ids:
                return [*self._anchor, *reversed(found)]
            if i not in self._special and self._fast.id_to_token(i) is not None:
                found.append(i)
                if self.token_bytes(i):
                    return found[::-1]
        return []

    def token_bytes(self, token_id: int, begins: bool = False) -> bytes:
        """What one token stands for: UTF-8, maybe part of a character; a special one's name.

        begins  the text begins with it: the mark of a word (`\u2581`) is no space there
        """
        if begins and not self._byte_level:
            return self._spell(token_id, ())
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._spell(token_id, self._anchor)
        return known

    def _spell(self, token_id: int, before: tuple[int, ...]) -> bytes:
        token = self._fast.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._fallback_ids:
            return bytes((int(token[3:5], 16),))
        if not self._byte_level:
            if token_id in self._special:
                return str(self._fast.decode([token_id], skip_special_tokens=False)).encode()
            return self.decode((*before, token_id))[len(self.decode(before)) :].encode()
        if all(char in _BYTE_OF_CHAR for char in token):
            return bytes(_BYTE_OF_CHAR[char] for char in token)
        return str(token).encode()

    def _find_anchor(self) -> tuple[int, ...]:
        """The first token with text, () if there is none."""
        others = self._special | self._fallback_ids
        ids = (i for i in range(self.vocab_size) if i not in others)
        return next(((i,) for i in ids if self.decode((i,)).strip()), ())


class IncrementalDetokenizer:
    """The text of one answer as its tokens come.

    All pieces and the last `flush()` joined are exactly `decode` of all ids; of an answer that goes
    on with the text of `before`, what `decode` of both adds to `decode` of that (bytes that it cuts
    a character in are not joined with the answer's). A piece never holds a replacement character
    for bytes that later tokens complete.
    Cost:  constant per token, amortised.

    Byte-level vocabularies feed their bytes to an incremental UTF-8 decoder. Others decode a window
    that starts at the tokens of the last piece, since a token's text depends on its left neighbour.
    Where a vocabulary falls back to single bytes (`<0xE4>`), a run of them is held to its end: one
    bad byte changes what the whole run decodes to.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # Tokens of the last piece, then those not given yet.
        self._window: list[int] = tokenizer.text_end(before)
        self._num_given = len(self._window)  # of the window

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens make certain; "" while a character is incomplete."""
        tokenizer = self._tokenizer
        ids = [i for i in token_ids if i not in tokenizer._special]
        if tokenizer._byte_level:
            return self._utf8.decode(b"".join([tokenizer.token_bytes(i) for i in ids]))
        ids = [i for i in ids if tokenizer._fast.id_to_token(i) is not None]
        if not ids:
            return ""
        self._window += ids
        return "" if ids[-1] in tokenizer._fallback_ids else self._advance()

    def flush(self) -> str:
        """What is left at the end: incomplete bytes are replaced, as `decode` does."""
        if self._tokenizer._byte_level:
            return self._utf8.decode(b"", final=True)
        return self._advance()

    def _advance(self) -> str:
        decode = self._tokenizer.decode
        given = decode(self._window[: self._num_given])
        text = decode(self._window)[len(given) :]
        if text:
            # Tokens without text stay in front: the next one is not the first of the answer.
            self._window = self._window[self._num_given :]
        self._num_given = len(self._window)
        return text


def plain_messages(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """A conversation as templates read it: each content is one string. Errors: ValueError."""
    if not messages:
        raise ValueError("messages must not be empty")
    return [_plain_message(i, message) for i, message in enumerate(messages)]


def _plain_message(position: int, message: object) -> dict[str, object]:
    """The message with its content as one string."""
    if not isinstance(message, Mapping):
        raise ValueError(f"messages[{position}] must be an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"messages[{position}].role must be a string, not {role!r:.60}")
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        parts: list[str] = []
        for i, part in enumerate(content):
            text = part.get("text") if isinstance(part, Mapping) else None
            if (
                not isinstance(part, Mapping)
                or part.get("type") != "text"
                or not isinstance(text, str)
            ):
                raise ValueError(f"messages[{position}].content[{i}] must be a part of type text")
            parts.append(text)
        content = "".join(parts)
    if content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise ValueError(f"messages[{position}].content must be text or a list of text parts")
    return {**message, "content": content}


def _eos_ids(folder: Path, own: int | None) -> tuple[int, ...]:
    found: set[int] = set() if own is None else {own}
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.is_file():
            continue
        config = json.loads(path.read_text(encoding="utf-8"))
        for level in (config, config.get("text_config") or {}):
            ids = level.get("eos_token_id")
            found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return tuple(sorted(found))


def _decoder_kinds(decoder: Any) -> list[str]:
    """The decoder's parts: ["ByteLevel"], or Llama 2's ["Replace", "ByteFallback", ...]."""
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return [part["type"] for part in state.get("decoders", [state])]
