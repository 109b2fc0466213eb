"""Stop strings in a text that comes in pieces. Not here: what happens when one is met (text.py)."""

from collections.abc import Sequence


class StopTable:
    """Stop strings as an Aho-Corasick automaton: made once, shared by all sequences of a request.

    Cost:    memory and time linear in the strings' characters.
    Errors:  ValueError for an empty string, and for what is no string.
    Source:  Aho and Corasick, "Efficient string matching", CACM 1975.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str):
            raise ValueError("stop must be a list of strings, not one string")
        # Per state: its edges, the state of its longest proper suffix, its length, the longest
        # stop string that ends in it.
        self.edges: list[dict[str, int]] = [{}]
        self.fallback = [0]
        self.depth = [0]
        self.found: list[str | None] = [None]
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise ValueError(
                    f"a stop string must be a string that is not empty, not {stop!r:.60}"
                )
            self._add(stop)
        self._link()

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            following = self.edges[state].get(char)
            if following is None:
                following = self.edges[state][char] = len(self.edges)
                self.edges.append({})
                self.fallback.append(0)
                self.depth.append(self.depth[state] + 1)
                self.found.append(None)
            state = following
        self.found[state] = stop

    def _link(self) -> None:
        queue = list(self.edges[0].values())
        for state in queue:  # grows while it is walked: shorter states come first
            for char, following in self.edges[state].items():
                self.fallback[following] = self.step(self.fallback[state], char)
                queue.append(following)
            if self.found[state] is None:
                self.found[state] = self.found[self.fallback[state]]

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        edges, fallback = self.edges, self.fallback
        while char not in edges[state]:
            if state == 0:
                return 0
            state = fallback[state]
        return edges[state][char]


class StopMatcher:
    """Finds the first stop string in a text that comes in pieces, however it is cut.

    The first is the one that ends first; of those that end together the longest. Text that may be
    the start of a stop string is held back, and no other.
    Cost:  constant per character, amortised.
    """

    def __init__(self, stops: Sequence[str] | StopTable) -> None:
        self._table = stops if isinstance(stops, StopTable) else StopTable(stops)
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str, accept: bool = True) -> str:
        """The text that this piece makes certain, none of a match; "" after one (`matched`).

        accept  whether a stop string that ends in this piece counts; it is passed over if not.
        """
        if self.matched is not None:
            return ""
        table, state = self._table, self._state
        text = self._held + piece
        for end, char in enumerate(piece, len(self._held) + 1):
            state = table.step(state, char)
            found = table.found[state]
            if accept and found is not None:
                self.matched, self._held = found, ""
                return text[: end - len(found)]
        certain = len(text) - table.depth[state]
        self._state, self._held = state, text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held, self._state = self._held, "", 0
        return held
