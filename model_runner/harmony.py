"""OpenAI's harmony format, which GPT-OSS answers in: messages on channels, between special tokens.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>

Found by those tokens in a vocabulary. Not for prompts, which chat templates write, nor for tools.
Source: https://cookbook.openai.com/articles/openai-harmony
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from model_runner.tokenizer import IncrementalDetokenizer, Tokenizer

_MAX_HEADER_CHARS = 256
_MAX_PROMPT_END = 32
"""Of a prompt's tokens: the header that the template has begun is among them."""

_RECIPIENT = re.compile(r"(?:^|\s)to=(\S+)")


class Piece(NamedTuple):
    """Text of an answer: what is for the user, and what is not."""

    content: str = ""
    reasoning: str = ""


@dataclass(frozen=True)
class Marks:
    """The special tokens of the format. turns  all at which something begins or ends"""

    start: int
    channel: int
    message: int
    constrain: int | None
    turns: frozenset[int]


def find_marks(tokenizer: Tokenizer) -> Marks | None:
    """Those of a vocabulary that has the format; None: it has not."""
    ids = tokenizer.special_ids
    if not {"<|start|>", "<|channel|>", "<|message|>", "<|end|>"} <= ids.keys():
        return None
    begins = ids["<|start|>"], ids["<|channel|>"], ids["<|message|>"]
    ends = [ids[name] for name in ("<|end|>", "<|return|>", "<|call|>") if name in ids]
    return Marks(*begins, ids.get("<|constrain|>"), frozenset((*begins, *ends)))


@dataclass(frozen=True)
class _Part:
    """A part of a header. max_words  beside a recipient (`to=...`);  known  how it may begin"""

    max_words: int
    known: tuple[str, ...]


_ANSWER = _Part(0, ())  # where the template has written the role, and an answer may begin plainly
_ROLE = _Part(1, ("assistant", "user", "system", "developer", "tool"))
_CHANNEL = _Part(2, ("analysis", "commentary", "final"))  # and the type of what follows: `json`


class ChannelSplitter:
    """Tells the messages of one answer apart as its tokens come.

    Content is the final channel, commentary to nobody, channels that nobody knows and all that
    stands in no message. Reasoning is analysis, and what is said to a tool, behind its name as the
    model wrote it (`to=functions.x`): no tool is offered here. Messages of a kind are parted by a
    line break. Headers alone are left out: one that goes on as no header does was text.
    Cost:  constant per token, amortised.

    prompt_ids  the answer begins where these leave off, within a header or a message
    """

    def __init__(self, tokenizer: Tokenizer, marks: Marks, prompt_ids: Sequence[int]) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._marks = marks
        self._head: list[tuple[_Part, str]] = []  # of the header that is being read, if one is
        self._is_reasoning = False
        self._is_new_message = False
        self._has_given = {True: False, False: False}  # by kind
        end = list(prompt_ids[-_MAX_PROMPT_END:])
        begun = end[len(end) - 1 - end[::-1].index(marks.start) :] if marks.start in end else []
        for token_id in begun:
            self.push(token_id)
        if not begun or (self._head and self._head[-1][0] is _ROLE):
            self._head.append((_ANSWER, ""))
        self._is_new_message = False
        self._has_given = {True: False, False: False}

    def push(self, token_id: int) -> Piece:
        """The text that one more token makes certain."""
        if token_id in self._marks.turns:
            before = self._take(self._detokenizer.flush())
            return _joined(before, self._turn(token_id))
        if token_id == self._marks.constrain:
            return self._take(" ") if self._head else Piece()
        return self._take(self._detokenizer.push((token_id,)))

    def flush(self) -> Piece:
        """What is left at the end."""
        return _joined(self._take(self._detokenizer.flush()), self._drop_header(is_cut=True))

    def _turn(self, mark: int) -> Piece:
        """What a mark says of the text before it."""
        marks, head = self._marks, self._head
        if mark == marks.message:
            return self._open() if head else Piece()
        goes_on = mark == marks.channel and head and head[-1][0] is not _CHANNEL
        left = Piece() if goes_on else self._drop_header()
        if mark == marks.channel:
            self._head.append((_CHANNEL, ""))
        elif mark == marks.start:
            self._head.append((_ROLE, ""))
        else:
            self._begin(is_reasoning=False)
        return left

    def _take(self, text: str) -> Piece:
        """Text of the message, or of a header as long as it may be one."""
        if not self._head or not text:
            return self._give(text)
        part, before = self._head[-1]
        self._head[-1] = part, before + text
        return Piece() if _is_header(part, before + text) else self._drop_header()

    def _open(self) -> Piece:
        """A header is whole: its message begins."""
        channel = self._head[-1][1] if self._head[-1][0] is _CHANNEL else ""
        recipient = self._recipient()
        self._head = []
        self._begin(bool(recipient) or channel.lstrip().startswith("analysis"))
        return self._give(f"to={recipient} " if recipient else "")

    def _drop_header(self, is_cut: bool = False) -> Piece:
        """There is no header, or it was none: what it holds beside the words of one is text.

        is_cut  the answer was cut off within it
        """
        head, texts = self._head, Piece()
        is_call = bool(head) and head[-1][0] is not _ANSWER and bool(self._recipient())
        self._head = []
        for part, text in head:
            first = (text.split() or [""])[0]
            if first in part.known:
                text = text.partition(first)[2]
            elif is_cut and text.strip() == first and _begins_any(first, part.known):
                text = ""
            self._begin(is_call or (part is _CHANNEL and first == "analysis"))
            texts = _joined(texts, self._give(text if part is _ANSWER or text.strip() else ""))
        return texts

    def _recipient(self) -> str:
        """Whom the header names, "" if nobody."""
        found = [match[1] for _, text in self._head for match in _RECIPIENT.finditer(text)]
        return found[-1] if found else ""

    def _begin(self, is_reasoning: bool) -> None:
        self._is_reasoning, self._is_new_message = is_reasoning, True

    def _give(self, text: str) -> Piece:
        if not text:
            return Piece()
        kind = self._is_reasoning
        if self._is_new_message and self._has_given[kind]:
            text = "\n" + text
        self._is_new_message, self._has_given[kind] = False, True
        return Piece(reasoning=text) if kind else Piece(content=text)


def _joined(first: Piece, second: Piece) -> Piece:
    return Piece(first.content + second.content, first.reasoning + second.reasoning)


def _begins_any(text: str, words: Sequence[str]) -> bool:
    return any(word.startswith(text) for word in words)


def _is_header(part: _Part, text: str) -> bool:
    """Whether this part of a header may begin so."""
    words = [word for word in text.split() if not word.startswith("to=")]
    if words and text.endswith(words[-1]) and "to=".startswith(words[-1]):
        words.pop()  # it may become a recipient
    return len(text) <= _MAX_HEADER_CHARS and len(words) <= part.max_words
