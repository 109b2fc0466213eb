"""rank_pattern and alpha_pattern: the first key `k` for which `re.match(rf"(.*\\.)?({k})$", name)`.

The keys are regular expressions of a stranger, and Python's own engine can be made to run for
years. So: names without special characters are looked up, the rest run as position automata
(Glushkov), whose time is linear in the name, under a budget of steps. What an automaton cannot do
(references, look-around, flags) is refused. Not here: what ranks and alphas are for.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from adapter_store.errors import AdapterInvalid
from adapter_store.formats.bounded_files import shown

MAX_KEY_CHARS = 256
MAX_KEYS = 100_000
MAX_EXPRESSIONS = 128
MAX_POSITIONS = 256
MAX_NESTING = 16
MAX_STEPS = 20_000_000  # a few seconds

_PLAIN = re.compile(r"(\^?)((?:[\w.-]|\\[.-])+)\$?", re.ASCII)
_COUNT = re.compile(r"\{(\d*)(,?)(\d*)\}")


class PatternTable:
    """The values of one pattern field by module or parameter name.

    Errors:  AdapterInvalid("config") at construction for a key that is too long or not understood,
             in `lookup` when the budget of steps is spent; both name the field.
    """

    def __init__(self, field: str, values: Mapping[str, float]) -> None:
        self._field, self._steps = field, 0
        self._values = tuple(values.values())
        # In a key a bare `.` stands for any character: plain keys are found by length, anchor and
        # the places of those dots.
        self._plain: dict[int, dict[tuple[bool, tuple[int, ...]], dict[str, int]]] = {}
        self._automata: list[tuple[int, Automaton]] = []
        if len(values) > MAX_KEYS:
            raise AdapterInvalid("config", f"{field} has more than {MAX_KEYS} keys")
        for i, key in enumerate(values):
            if not 0 < len(key) <= MAX_KEY_CHARS:
                raise AdapterInvalid(
                    "config", f"{field}: a key has 1 to {MAX_KEY_CHARS} characters: {shown(key)}"
                )
            if plain := _PLAIN.fullmatch(key):
                text, dots = _unescape(plain[2])
                same_length = self._plain.setdefault(len(text), {})
                same_length.setdefault((bool(plain[1]), dots), {}).setdefault(text, i)
            else:
                try:
                    self._automata += [(i, a) for a in compile_key(key)]
                except ValueError as error:
                    what = f"{field}: key {shown(key)}: {error}"
                    raise AdapterInvalid("config", what) from None
        if len(self._automata) > MAX_EXPRESSIONS:
            raise AdapterInvalid("config", f"{field}: more than {MAX_EXPRESSIONS} expressions")

    def lookup(self, name: str) -> float | None:
        """The value of the first key that matches `name`, None if none does."""
        starts = [0, *(at + 1 for at, char in enumerate(name) if char == ".")]
        found = len(self._values)
        for start in starts:
            suffix = name[start:]
            for (anchored, dots), keys in self._plain.get(len(suffix), {}).items():
                self._spend(1 + len(dots))
                if anchored and start:
                    continue
                masked = list(suffix)
                for at in dots:
                    masked[at] = "."
                found = min(found, keys.get("".join(masked), found))
        for i, automaton in self._automata:
            if i >= found:
                break
            self._spend(len(name))
            if automaton.matches(name):
                found = i
        self._spend(sum(a.take_extra_steps() for _, a in self._automata))
        return self._values[found] if found < len(self._values) else None

    def _spend(self, steps: int) -> None:
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise AdapterInvalid("config", f"{self._field}: its keys take too long to match")


def _unescape(text: str) -> tuple[str, tuple[int, ...]]:
    """A plain key without its backslashes, and where its bare dots are."""
    chars: list[str] = []
    dots: list[int] = []
    escaped = False
    for char in text:
        if char == "\\" and not escaped:
            escaped = True
            continue
        if char == "." and not escaped:
            dots.append(len(chars))
        chars.append(char)
        escaped = False
    return "".join(chars), tuple(dots)


@dataclass(frozen=True)
class Fragment:
    """A part of an expression as Glushkov sees it: sets of positions are bit masks."""

    nullable: bool
    first: int
    last: int


@dataclass(frozen=True)
class Node:
    """Syntax tree: one character ("char", its source text), "concat", "either" or "repeat".

    size  positions that it takes; 0 matches nothing but the empty text
    """

    kind: str
    size: int
    text: str = ""
    parts: tuple["Node", ...] = ()
    least: int = 0
    most: int | None = None


class Automaton:
    """One alternative of a key. A state is a bit mask of positions, with one more bit, `_begin`:
    the key may begin at the next character (the name's first, or one after a dot).
    """

    def __init__(self, node: Node, anchored: bool) -> None:
        self._anchored = anchored
        self._sources: list[str] = []
        self._follow: list[int] = []
        self._whole = self._build(node)
        self._begin = 1 << len(self._sources)
        self._classes = {text: re.compile(text, re.DOTALL) for text in set(self._sources)}
        self._masks: dict[str, int] = {}
        self._rows: dict[int, dict[str, int]] = {}  # the states met so far, by state and character
        self._extra_steps = 0

    def matches(self, name: str) -> bool:
        """True if the key covers the name from a beginning to its end; linear in the name."""
        state = self._begin
        for char in name:
            row = self._rows.get(state)
            after = None if row is None else row.get(char)
            state = self._advance(state, char) if after is None else after
        return bool(state & self._whole.last) or (
            self._whole.nullable and bool(state & self._begin)
        )

    def take_extra_steps(self) -> int:
        """Steps that new states took since the last call."""
        steps, self._extra_steps = self._extra_steps, 0
        return steps

    def _advance(self, state: int, char: str) -> int:
        """The state after `char`, which is remembered."""
        self._extra_steps += 4 + 2 * state.bit_count()
        union, rest = self._whole.first if state & self._begin else 0, state & ~self._begin
        while rest:
            low = rest & -rest
            union |= self._follow[low.bit_length() - 1]
            rest ^= low
        after = union & self._mask(char)
        if char == "." and not self._anchored:
            after |= self._begin
        if len(self._rows) >= 1024:  # memory stays bounded, whatever the names
            self._rows.clear()
        self._rows.setdefault(state, {})[char] = after
        return after

    def _mask(self, char: str) -> int:
        if char not in self._masks:
            ok = {text for text, one in self._classes.items() if one.fullmatch(char)}
            self._masks[char] = sum(1 << p for p, text in enumerate(self._sources) if text in ok)
            self._extra_steps += 4 * len(self._sources)
        return self._masks[char]

    def _build(self, node: Node) -> Fragment:
        if node.kind == "char":
            bit = 1 << len(self._sources)
            self._sources.append(node.text)
            self._follow.append(0)
            return Fragment(False, bit, bit)
        if node.kind == "either":
            parts = [self._build(part) for part in node.parts]
            first = last = 0
            for part in parts:
                first, last = first | part.first, last | part.last
            return Fragment(any(part.nullable for part in parts), first, last)
        if node.kind == "concat":
            whole = Fragment(True, 0, 0)
            for child in node.parts:
                whole = self._join(whole, self._build(child))
            return whole
        return self._build_repeat(node)

    def _build_repeat(self, node: Node) -> Fragment:
        inner, whole = node.parts[0], Fragment(True, 0, 0)
        for _ in range(node.least if node.most is not None else max(node.least - 1, 0)):
            whole = self._join(whole, self._build(inner))
        if node.most is None:  # the last copy loops
            part = self._build(inner)
            self._link(part.last, part.first)
            nullable = part.nullable or node.least == 0
            return self._join(whole, Fragment(nullable, part.first, part.last))
        for _ in range(node.most - node.least):
            part = self._build(inner)
            whole = self._join(whole, Fragment(True, part.first, part.last))
        return whole

    def _join(self, left: Fragment, right: Fragment) -> Fragment:
        self._link(left.last, right.first)
        return Fragment(
            left.nullable and right.nullable,
            left.first | (right.first if left.nullable else 0),
            right.last | (left.last if right.nullable else 0),
        )

    def _link(self, lasts: int, firsts: int) -> None:
        while lasts:
            low = lasts & -lasts
            self._follow[low.bit_length() - 1] |= firsts
            lasts ^= low


def compile_key(key: str) -> list[Automaton]:
    """One automaton for each alternative at the top of a key. ValueError: what is unsupported."""
    automata, at = [], 0
    while True:
        anchored = key.startswith("^", at)
        node, at = _parse_concat(key, at + anchored, depth=0)
        if key.startswith("$", at):
            at += 1
        automata.append(Automaton(node, anchored))
        if at == len(key):
            return automata
        if key[at] != "|":
            raise ValueError(f"{key[at]!r} at character {at} is not supported there")
        at += 1


def _sized(node: Node) -> Node:
    if node.size > MAX_POSITIONS:
        raise ValueError(f"it unfolds to more than {MAX_POSITIONS} characters")
    return node


def _parse_concat(key: str, at: int, depth: int) -> tuple[Node, int]:
    parts: list[Node] = []
    while at < len(key) and key[at] not in "|)^$":
        atom, at = _parse_atom(key, at, depth)
        node, at = _parse_repeat(key, at, atom)
        parts.append(node)
    return _sized(Node("concat", sum(p.size for p in parts), parts=tuple(parts))), at


def _parse_atom(key: str, at: int, depth: int) -> tuple[Node, int]:
    char = key[at]
    if char == "(":
        return _parse_group(key, at + 1, depth + 1)
    if char == "[":
        return _parse_class(key, at)
    if char == "\\":
        escaped = key[at + 1 : at + 2]
        if not escaped or (escaped.isalnum() and escaped not in "dDwWsS"):
            raise ValueError(f"the escape at character {at} is not supported")
        return Node("char", 1, key[at : at + 2]), at + 2
    if char in "*+?":
        raise ValueError(f"nothing to repeat at character {at}")
    return Node("char", 1, char if char == "." else re.escape(char)), at + 1


def _parse_group(key: str, at: int, depth: int) -> tuple[Node, int]:
    if depth > MAX_NESTING:
        raise ValueError(f"groups are nested deeper than {MAX_NESTING}")
    if key.startswith("?:", at):
        at += 2
    elif key.startswith("?", at):
        raise ValueError(f"the group at character {at} is not supported")
    parts: list[Node] = []
    while True:
        node, at = _parse_concat(key, at, depth)
        parts.append(node)
        if key.startswith(")", at):
            return _sized(Node("either", sum(p.size for p in parts), parts=tuple(parts))), at + 1
        if not key.startswith("|", at):
            raise ValueError("a group is not closed, or has ^ or $ inside")
        at += 1


def _parse_class(key: str, at: int) -> tuple[Node, int]:
    end = at + 1 + key.startswith("^", at + 1)
    end += 2 if key.startswith("\\", end) else 1  # a bracket that comes first is a member
    while end < len(key) and key[end] != "]":
        end += 2 if key[end] == "\\" else 1
    text = key[at : end + 1]
    if end >= len(key) or "[" in text[1:] or any(pair in text for pair in ("--", "&&", "~~", "||")):
        raise ValueError(f"the class at character {at} is not supported")
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"the class at character {at}: {error}") from None
    return Node("char", 1, text), end + 1


def _parse_repeat(key: str, at: int, atom: Node) -> tuple[Node, int]:
    count = _COUNT.match(key, at)
    if key[at : at + 1] in ("*", "+", "?"):
        least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[key[at]]
        at += 1
    elif count and (count[1] or count[2]):
        if len(count[1]) > 4 or len(count[3]) > 4:
            raise ValueError(f"the count at character {at} is too large")
        least = int(count[1] or 0)
        most = (int(count[3]) if count[3] else None) if count[2] else least
        if most is not None and most < least:
            raise ValueError(f"the count at character {at} runs backwards")
        at = count.end()
    else:
        return atom, at
    if key.startswith("?", at):  # lazy: the same for a full match
        at += 1
    following = _COUNT.match(key, at)
    if key[at : at + 1] in ("*", "+") or (following and (following[1] or following[2])):
        raise ValueError(f"two repeats at character {at}")
    if atom.size == 0:
        return atom, at
    copies = max(most if most is not None else least, 1)
    node = Node("repeat", atom.size * copies, parts=(atom,), least=least, most=most)
    return _sized(node), at
