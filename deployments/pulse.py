"""Whether the replicas that run an ingress' requests still answer.

Ray finds a dead process at once, and a node that is silent only after many seconds. Not here: what
is done about it (replica_backend.py), nor how one asks a replica.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

PERIOD_S = 0.5
SHUNNED_S = 10.0
"""How long a replica that was silent gets no new requests from here."""

SILENT_TURNS = 3
"""So often in a row a replica may leave the question unanswered. Turns are counted and not seconds:
while this process itself stands still, nobody is blamed."""


class Pulse:
    """Asks replicas in turn for as long as somebody depends on them.

    ask  a question to one replica; what it raises is no answer
    """

    def __init__(self, ask: Callable[[str], Awaitable[object]]) -> None:
        self._ask = ask
        self._watchers: dict[int, tuple[Sequence[str], Callable[[], None]]] = {}
        self._unanswered: Counter[str] = Counter()
        self._questions: dict[str, asyncio.Task[None]] = {}
        self._shunned_until: dict[str, float] = {}
        self._turns: asyncio.Task[None] | None = None

    def shunned(self) -> tuple[str, ...]:
        """Those that were silent a short while ago."""
        now = asyncio.get_running_loop().time()
        return tuple(name for name, until in self._shunned_until.items() if now < until)

    @contextmanager
    def watching(self, taken_by: Sequence[str], lose: Callable[[], None]) -> Iterator[None]:
        """`lose` is called, perhaps more than once, while the last of `taken_by` is silent.

        While `taken_by` is empty nobody is asked.
        """
        key = id(lose)
        self._watchers[key] = taken_by, lose
        if self._turns is None or self._turns.done():
            self._turns = asyncio.create_task(self._ask_in_turn())
        try:
            yield
        finally:
            del self._watchers[key]

    async def _ask_in_turn(self) -> None:
        """Ends when nobody depends on anybody."""
        while self._watchers:
            await asyncio.sleep(PERIOD_S)
            watched = {taken_by[-1] for taken_by, _ in self._watchers.values() if taken_by}
            for name in self._unanswered.keys() - watched:
                del self._unanswered[name]
            for name in watched:
                self._unanswered[name] += 1
                if name not in self._questions:
                    self._questions[name] = asyncio.create_task(self._question(name))
            for taken_by, lose in list(self._watchers.values()):
                if taken_by and self._unanswered[taken_by[-1]] > SILENT_TURNS:
                    known = {name: self._shunned_until[name] for name in self.shunned()}
                    until = asyncio.get_running_loop().time() + SHUNNED_S
                    self._shunned_until = {taken_by[-1]: until} | known
                    lose()
        self._unanswered.clear()

    async def _question(self, name: str) -> None:
        try:
            with suppress(Exception):
                async with asyncio.timeout(SILENT_TURNS * PERIOD_S):
                    await self._ask(name)
                self._unanswered[name] = 0
        finally:
            del self._questions[name]
