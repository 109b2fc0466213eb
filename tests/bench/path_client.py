"""A closed loop of streaming HTTP clients in a process of its own, on raw sockets: what it costs
must not be taken for the service's.

Not here: which requests, and what the times say (path_cost.py).
"""

import asyncio
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

_TAIL_BYTES = 4096
_USAGE = re.compile(rb'"completion_tokens":(\d+)')


@dataclass
class Sample:
    """One answered request. Times are of the machine's monotonic clock, in seconds.

    times  when each message with tokens came;  error  "" = all came
    """

    sent: float
    times: list[float] = field(default_factory=list)
    num_tokens: int = 0
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.sent

    @property
    def token_s(self) -> float:
        """Mean time of a token after the first."""
        return (self.times[-1] - self.times[0]) / max(1, self.num_tokens - 1)


@dataclass(frozen=True)
class Order:
    """What to ask: each body once, by `clients` at a time, in order."""

    host: str
    port: int
    api_key: str
    bodies: tuple[dict[str, Any], ...]
    clients: int
    timeout_s: float = 120.0


def run_order(order: Order) -> list[Sample]:
    """The samples, in the order of the bodies. For a process pool."""
    return asyncio.run(_run(order))


async def _run(order: Order) -> list[Sample]:
    requests = [_http(order, body) for body in order.bodies]
    samples: list[Sample | None] = [None] * len(requests)
    numbers = iter(range(len(requests)))

    async def client(numbers: Iterator[int]) -> None:
        for number in numbers:
            try:
                async with asyncio.timeout(order.timeout_s):
                    samples[number] = await _ask(order, requests[number])
            except (OSError, TimeoutError) as exc:
                samples[number] = Sample(time.monotonic(), error=f"{type(exc).__name__}: {exc}")

    await asyncio.gather(*(client(numbers) for _ in range(order.clients)))
    return [sample for sample in samples if sample is not None]


def _http(order: Order, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {order.host}:{order.port}\r\n"
        f"Authorization: Bearer {order.api_key}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + data


async def _ask(order: Order, request: bytes) -> Sample:
    """Events are counted by their ends, not parsed. The last two are the usage and the end mark."""
    sample = Sample(time.monotonic())
    reader, writer = await asyncio.open_connection(order.host, order.port)
    try:
        writer.write(request)
        tail = b""
        while data := await reader.read(1 << 16):
            now = time.monotonic()
            ends = (tail[-1:] + data).count(b"\n\n")
            sample.times += [now] * ends
            tail = (tail + data)[-_TAIL_BYTES:]
    finally:
        writer.close()
    found = _USAGE.findall(tail)
    if not found or b"data: [DONE]" not in tail:
        sample.error = f"no end: {tail[-300:]!r}"
        return sample
    del sample.times[-2:]
    sample.num_tokens = int(found[-1])
    return sample


def find_error(samples: Sequence[Sample], num_tokens: int) -> str:
    """What is wrong with the first sample that is not what was asked for; "" = all are right."""
    for sample in samples:
        if sample.error or sample.num_tokens != num_tokens or not sample.times:
            return sample.error or f"{sample.num_tokens} tokens, not {num_tokens}"
    return ""
