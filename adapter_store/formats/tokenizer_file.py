"""The tokens of a tokenizer.json that somebody else wrote, one after the other.

Such a file has tens of megabytes and unfolds to ten times as much: it is walked, and no more than a
window of its text is held. Not here: whose tokens they should be (extras_files).
"""

import codecs
import re
from collections.abc import Iterator
from json import JSONDecodeError
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

from adapter_store.errors import AdapterInvalid
from adapter_store.formats.bounded_files import DECODER, check_depth, json_errors, shown
from adapter_store.sources.source import TOKENIZER_FILE

MAX_VALUES = 5 << 19
"""Of one file, and its lists and objects: 200,000 tokens and twice as many merges, each a list of
two, are 1.4 million."""

_WINDOW_CHARS = 1 << 20
"""So long may one value be; tables of tokens and merges are as long as they are."""

_MAX_KEYS = 1000
_SPACE = re.compile(r"[ \t\n\r]*")
# The usual forms of what there are hundreds of thousands of; others are read piece by piece.
_S, _PLAIN = r"[ \t\n\r]*", r'"[^"\\\x00-\x1f]*"'
_ENTRY = re.compile(rf"{_S}({_PLAIN}){_S}:{_S}(0|[1-9][0-9]{{0,8}}){_S},")
_ESCAPE = r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})'
_TEXT = rf'"[^"\\\x00-\x1f]*(?:{_ESCAPE}[^"\\\x00-\x1f]*){{0,64}}"'
_MERGE = rf"(?:{_TEXT}|\[{_S}{_TEXT}{_S},{_S}{_TEXT}{_S}\])"
_MERGES = re.compile(rf"(?:{_S}{_MERGE}{_S},){{1,1000}}")


def read_tokens(raw: bytes, max_values: int | None = MAX_VALUES) -> Iterator[tuple[bool, Any, Any]]:
    """(is added, id, token), as they stand there: of the vocabulary, and of added tokens.

    Ids and tokens may be of any kind, and come twice.
    Errors:  while it goes, AdapterInvalid("tokenizer") for what is no JSON or has more than
             `max_values`; KeyError, IndexError and TypeError for JSON of another form.
    Cost:    memory of a window; about 1 s for 200,000 tokens and 400,000 merges.
    """
    walk = _Walk(raw, max_values)
    with json_errors("tokenizer", TOKENIZER_FILE):
        for key in walk.fields():
            if key == "model" and walk.peek() == "{":
                for name in walk.fields():
                    if name == "vocab":
                        for token_id, token in _vocabulary(walk):
                            yield False, token_id, token
                    elif name == "merges" and walk.peek() == "[":
                        walk.pass_merges()
                    else:
                        walk.value()
            elif key == "added_tokens" and walk.peek() == "[":
                for _ in walk.elements():
                    token = walk.value()
                    yield True, token["id"], token["content"]
            elif walk.value() is not None and key in ("model", "added_tokens"):
                raise TypeError(f"{key} is of another kind")
        walk.end()


def _vocabulary(walk: "_Walk") -> Iterator[tuple[Any, Any]]:
    if walk.peek() == "{":
        yield from walk.entries()
    elif walk.peek() == "[":  # Unigram: pairs of token and score, in the order of ids
        for token_id, _ in enumerate(walk.elements()):
            yield token_id, walk.value()[0]
    elif walk.value() is not None:
        raise TypeError("vocab is neither a table nor a list")


class _Walk:
    """Goes through a text of JSON. Errors: ValueError; AdapterInvalid for too many values."""

    def __init__(self, raw: bytes, max_values: int | None) -> None:
        self._raw, self._num_read, self._max_values, self._num_values = raw, 0, max_values, 0
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self._text, self._at, self._is_last = "", 0, False

    def peek(self) -> str:
        """The next character that counts, "" at the end."""
        while True:
            self._at = _end_of(_SPACE.match(self._text, self._at))
            if self._at < len(self._text) or self._is_last:
                return self._text[self._at : self._at + 1]
            self._fill()

    def fields(self) -> Iterator[str]:
        """Keys of the object that begins here; who asks reads each value before the next key."""
        found: set[str] = set()
        for key in self._keys():
            if key in found or len(found) == _MAX_KEYS:
                raise ValueError(f"the key {shown(key)} is there twice, or the last of too many")
            found.add(key)
            yield key

    def entries(self) -> Iterator[tuple[Any, str]]:
        """(value, key) of the object that begins here, with keys that come twice."""
        for key in self._keys():
            yield self.value(), key
            # Up to the last but one, which has a comma behind it.
            if self.peek() == "," and (found := _ENTRY.match(self._text, self._at + 1)):
                while found:
                    yield int(found[2]), found[1][1:-1]
                    self._at = found.end() - 1
                    found = _ENTRY.match(self._text, self._at + 1)

    def elements(self) -> Iterator[None]:
        """Of the array that begins here; who asks reads each."""
        yield from self._parts("[", "]")

    def pass_merges(self) -> None:
        """Over an array of texts, or of pairs of them. Errors: TypeError."""
        for _ in self.elements():
            merge = self.value()
            parts = merge if isinstance(merge, list) and len(merge) == 2 else [merge]
            if not all(isinstance(part, str) for part in parts):
                raise TypeError(f"{shown(merge)} is no merge")
            if self.peek() == "," and (found := _MERGES.match(self._text, self._at + 1)):
                self._at = found.end() - 1

    def value(self) -> Any:
        """All of what begins here."""
        self.peek()
        self._fill()
        try:
            value, at = DECODER.raw_decode(self._text, self._at)
        except JSONDecodeError as error:
            raise self._wrong(error.msg) from None
        if at == len(self._text) and not self._is_last:
            raise self._wrong("it goes on")
        self._at = at
        check_depth(value)
        return value

    def end(self) -> None:
        """Nothing may follow."""
        if self.peek():
            raise self._wrong("something follows")

    def _keys(self) -> Iterator[str]:
        for _ in self._parts("{", "}"):
            self.peek()
            self._fill()
            self._take('"')
            try:
                key, self._at = scanstring(self._text, self._at, True)
            except JSONDecodeError as error:
                raise self._wrong(error.msg) from None
            self._take(":")
            yield key

    def _parts(self, opening: str, closing: str) -> Iterator[None]:
        self._take(opening)
        if self.peek() == closing:
            self._at += 1
            return
        while True:
            yield
            if self.peek() == closing:
                self._at += 1
                return
            self._take(",")

    def _take(self, char: str) -> None:
        if self.peek() != char:
            raise self._wrong(f"expecting {char}")
        self._at += 1

    def _fill(self) -> None:
        """Have a window's text from here on, if there is so much."""
        if self._is_last or len(self._text) - self._at >= _WINDOW_CHARS:
            return
        part = self._raw[self._num_read : self._num_read + _WINDOW_CHARS]
        self._num_read += len(part)
        self._num_values += part.count(b",") + part.count(b"[") + part.count(b"{")
        if self._max_values is not None and self._num_values > self._max_values:
            words = f"{TOKENIZER_FILE} has more than {self._max_values} values"
            raise AdapterInvalid("tokenizer", words)
        self._is_last = self._num_read == len(self._raw)
        self._text = self._text[self._at :] + self._decode(part, self._is_last)
        self._at = 0

    def _wrong(self, words: str) -> ValueError:
        where = f"near {shown(self._text[self._at : self._at + 40])}, before byte {self._num_read}"
        more = "" if self._is_last else f", or a value has more than {_WINDOW_CHARS} characters"
        return ValueError(f"{words}, {where}{more}")


def _end_of(found: re.Match[str] | None) -> int:
    assert found is not None  # spaces, maybe none
    return found.end()
