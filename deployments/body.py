"""How the body of a request comes in: how much, how fast, how much of it at once, and how many
values its JSON may hold before anybody parses it, how much text before all of it is tokenized.

Not here: what the values mean (openai_schema.py).
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from deployments.api_errors import ApiError, engine_error, overloaded
from model_runner.request import ErrorCode

BIG_BYTES = 64 << 10
"""Bodies above this are parsed one at a time per tenant, off the event loop."""

_MAX_WEIGHT = 1 << 18
_STRING_WEIGHT = 4
_CONTAINER_WEIGHT = 8
_PIECE_CHARS = 1 << 16
_PIECE_SLACK = 64


@dataclass(frozen=True)
class BodyLimits:
    """max_bytes  of one body;  max_stalled_s  how long it may lag behind min_bytes_per_s"""

    max_bytes: int
    max_stalled_s: float
    min_bytes_per_s: float


class BodyBudget:
    """Bytes of big bodies that one ingress holds: before they are token ids, some also later.

    max_bytes  of all;  max_tenant_bytes  of one tenant, so that none of them takes it all
    """

    def __init__(self, max_bytes: int, max_tenant_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_tenant_bytes = max_tenant_bytes
        self.held: Counter[str] = Counter()

    @contextmanager
    def share(self, tenant_id: str) -> Iterator["Share"]:
        """A tenant's share for one body; given back at the end."""
        share = Share(self, tenant_id)
        try:
            yield share
        finally:
            self.held[tenant_id] -= share.num_bytes
            if not self.held[tenant_id]:
                del self.held[tenant_id]

    def take(self, tenant_id: str, num_bytes: int) -> None:
        """Errors: ApiError 429 where the tenant has its fill, 503 where all together have."""
        if self.held[tenant_id] + num_bytes > self._max_tenant_bytes:
            raise overloaded("too many large requests of this tenant at once: try again")
        if self.held.total() + num_bytes > self._max_bytes:
            raise overloaded("too many large requests at once: try again", 503)
        self.held[tenant_id] += num_bytes


class Share:
    """What one body holds of the budget. Small bodies hold nothing: they always find room."""

    def __init__(self, budget: BodyBudget, tenant_id: str) -> None:
        self._budget = budget
        self._tenant_id = tenant_id
        self.num_bytes = 0

    def grow_to(self, num_bytes: int) -> None:
        """Errors: ApiError 429, 503."""
        if num_bytes > BIG_BYTES:
            self._budget.take(self._tenant_id, num_bytes - self.num_bytes)
            self.num_bytes = num_bytes

    def shrink_to(self, num_bytes: int) -> None:
        """Give back what is not held any more."""
        unused = max(0, self.num_bytes - num_bytes)
        self._budget.held[self._tenant_id] -= unused
        self.num_bytes -= unused


async def read_body(
    parts: AsyncIterator[bytes], declared: str | None, limits: BodyLimits, share: Share
) -> bytes:
    """The whole body. declared  its Content-Length, as the client says.

    Errors: ApiError 413 for a body that is too large, 408 for one that comes too slowly, 429 and
    503 where the budget is spent.
    """
    too_large = ApiError(
        413, f"the body is larger than {limits.max_bytes} bytes", code="body_too_large"
    )
    if declared and declared.isdecimal() and _exceeds(declared, limits.max_bytes):
        raise too_large
    body = bytearray()
    begun_s = time.monotonic()
    try:
        while True:
            patience_s = limits.max_stalled_s + len(body) / limits.min_bytes_per_s
            async with asyncio.timeout(begun_s + patience_s - time.monotonic()):
                part = await anext(parts, None)
            if part is None:
                return bytes(body)
            if len(body) + len(part) > limits.max_bytes:
                raise too_large
            share.grow_to(len(body) + len(part))
            body += part
    except TimeoutError:
        raise ApiError(408, "the body came too slowly", code="request_timeout") from None


def _exceeds(declared: str, limit: int) -> bool:
    """Whether a decimal number of any length is above a limit."""
    digits = declared.lstrip("0")
    return len(digits) > len(str(limit)) or int(digits or "0") > limit


def check_weight(body: bytes) -> None:
    """Refuse JSON of more values than an honest request has, at the speed of `memchr`.

    The parser holds the interpreter while it makes objects: 8 MB of text take it 15 ms, 8 MB of
    empty lists seconds. Strings and containers weigh more than numbers do. What is no JSON is
    weighed as far as it is; the parser does not get further either.
    Errors: ApiError 400.
    """
    if len(body) <= BIG_BYTES:
        return
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # no quote is inside a string now
    weight = plain.count(b'"') // 2 * _STRING_WEIGHT
    if weight <= _MAX_WEIGHT:
        outside = b" ".join(plain.split(b'"')[::2])
        containers = outside.count(b"[") + outside.count(b"{")
        weight += outside.count(b",") + containers * _CONTAINER_WEIGHT
    if weight > _MAX_WEIGHT:
        raise ApiError(
            400, "the body holds too many values: lists, objects, strings", code="body_too_complex"
        )


def strings(value: Any) -> Iterator[str]:
    """Every string in a JSON value, keys left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


def check_length(
    texts: Iterable[str], encode: Callable[[str], Sequence[int]], longest: int | None
) -> None:
    """Refuse a prompt that is too long for sure, without tokenizing all of it: 8 MB of it can be
    millions of tokens and a minute's work.

    longest  tokens that the model takes, None = not known.  A text is counted in pieces; a cut adds
    or hides a few tokens, which is what the slack is for.
    Errors: ApiError 400.
    """
    texts = list(texts)
    if longest is None or sum(map(len, texts)) <= 4 * longest:
        return
    count = 0
    for text in texts:
        for begin in range(0, len(text), _PIECE_CHARS):
            count += max(0, len(encode(text[begin : begin + _PIECE_CHARS])) - _PIECE_SLACK)
            if count > longest:
                raise prompt_too_long(f"more than {count}", longest)


def prompt_too_long(count: int | str, longest: int) -> ApiError:
    """What is said of a prompt that no replica can hold."""
    words = f"the prompt has {count} tokens, and this model takes {longest} at most"
    return engine_error(ErrorCode.PROMPT_TOO_LONG, words)
