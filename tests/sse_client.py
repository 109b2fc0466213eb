"""A client of event streams that comes back when its connection breaks, as browsers' EventSource
does: the same request again, with the last id it saw as `Last-Event-ID`.

Not for what the events mean.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass(frozen=True)
class Event:
    """One event; id "" where it has none."""

    data: str
    id: str = ""


def read_events(lines: Iterable[str]) -> Iterator[Event]:
    """Events of whole lines. A block that the end of the stream cuts off is none."""
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(": ")
        if name:
            fields[name] = value
        elif not line:
            if "data" in fields:
                yield Event(fields["data"], fields.get("id", ""))
            fields = {}


@dataclass
class ReconnectingStream:
    """The chunks of one stream, over as many connections as it takes.

    A connection that breaks, ends before `[DONE]`, is refused with a 5xx status, or is silent for
    `silence_s` (from the third time in a row on twice as long) is taken up again; errors, and
    whatever comes after `patience_s`, are raised.
    gaps_s  between two chunks;  num_connections  so far
    """

    client: httpx.AsyncClient
    url: str
    body: dict[str, Any]
    headers: dict[str, str]
    patience_s: float = 30.0
    silence_s: float = 1.2
    gaps_s: list[float] = field(default_factory=list)
    num_connections: int = 0
    last_id: str = ""

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Errors: httpx.HTTPStatusError; RuntimeError with the event that was an error."""
        broken_at = seen_at = time.monotonic()
        in_vain = 0
        while True:
            try:
                async for event in self._connection(self.silence_s * 2 ** max(0, in_vain - 1)):
                    in_vain = 0
                    now = time.monotonic()
                    self.gaps_s.append(now - seen_at)
                    broken_at = seen_at = now
                    if event.data == "[DONE]":
                        return
                    self.last_id = event.id or self.last_id
                    chunk = json.loads(event.data)
                    if "error" in chunk:
                        raise RuntimeError(event.data)
                    yield chunk
            except httpx.HTTPStatusError as error:
                if error.response.status_code < 500 or self._is_over(broken_at):
                    raise
            except httpx.TransportError:
                if self._is_over(broken_at):
                    raise
            else:
                if self._is_over(broken_at):
                    raise RuntimeError("the stream ended before [DONE]")
            in_vain += 1
            await asyncio.sleep(0.05)

    def _is_over(self, since: float) -> bool:
        return time.monotonic() - since > self.patience_s

    async def _connection(self, silence_s: float) -> AsyncIterator[Event]:
        self.num_connections += 1
        headers = self.headers | ({"Last-Event-ID": self.last_id} if self.last_id else {})
        block: list[str] = []
        async with self.client.stream(
            "POST", self.url, json=self.body, headers=headers, timeout=silence_s
        ) as response:
            if response.status_code != 200:
                await response.aread()
            response.raise_for_status()
            async for line in response.aiter_lines():
                block.append(line)
                if not line:
                    for event in read_events(block):
                        yield event
                    block.clear()
