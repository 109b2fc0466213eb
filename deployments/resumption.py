"""Streams that a client takes up again: what each event's `id` says, and what `Last-Event-ID` asks.

A cursor names the answer and what was delivered of each choice. It is bound to the tenant and the
body by a keyed hash, so it needs no memory here: any ingress can read it. The answer is made once
more (with the same draws, from the ids where a replica still has them), what was delivered is
passed over, and a hash in the cursor tells whether it was the same. Not here: HTTP, engines.
"""

import hmac
import struct
import time
from base64 import b64decode, urlsafe_b64encode
from dataclasses import dataclass, replace
from hashlib import blake2b, sha256
from uuid import UUID, uuid4

from deployments.admission import Job
from deployments.api_errors import ApiError
from deployments.streaming import Writer
from model_runner.sequence_text import TextOutput

MAX_CHOICES = 16
"""A stream of more choices has no cursors: they would be larger than its chunks."""

_HEAD = struct.Struct("<16sQ")  # the answer's id, when it was begun
_CHOICE = struct.Struct("<HIII?8s")  # index, characters of text and reasoning, log-probabilities,
# has it ended, hash
_MAC_BYTES = 16


@dataclass
class _Delivered:
    """What the client has of one choice."""

    chars: int = 0
    reasoning: int = 0  # characters
    logprobs: int = 0
    has_ended: bool = False
    digest: bytes = b""


class Resumption:
    """One HTTP request's place in its answer.

    answer_id, created  of the answer: new ones, or those in the cursor
    has_begun           the client has a part of it already
    Errors: ApiError 400 for a cursor that is not of this tenant, path and body.
    """

    def __init__(
        self, secret: bytes, tenant_id: str, path: str, body: bytes, cursor: str | None
    ) -> None:
        key = sha256(b"cursors of streams, 2\0" + secret).digest()
        self._mac = blake2b(key=key, digest_size=_MAC_BYTES)
        for part in (tenant_id.encode(), path.encode(), body):
            self._mac.update(sha256(part).digest())
        self._goals: dict[int, _Delivered] = {}
        self._now: dict[int, _Delivered] = {}
        self._texts: dict[tuple[int, bool], blake2b] = {}  # by choice, of its reasoning or not
        self.answer_id, self.created = uuid4().hex, int(time.time())
        self.has_begun = cursor is not None
        self._has_ids = True
        if cursor is not None:
            self._read(cursor)
        self._head = _HEAD.pack(UUID(self.answer_id).bytes, self.created)

    def begin(self, job: Job) -> None:
        """Make the answer this one."""
        job.writer.created = self.created
        self._has_ids = len(job.requests) * job.requests[0].sampling.n <= MAX_CHOICES

    def event(self, writer: Writer, index: int, output: TextOutput) -> bytes:
        """The event of one output with its id; b"" if it says nothing that the client lacks.

        Errors: ApiError if what the client has is not what came this time.
        """
        goal = self._goals.get(index)
        if goal is not None:
            old, output = self._split(index, output, goal)
            writer.chunk(index, old)  # it counts offsets and beginnings
            if goal.has_ended and index not in self._goals:
                return b""
        chunk = writer.chunk(index, output)
        if not chunk:
            return b""
        self._advance(index, output)
        if not self._has_ids:
            return chunk
        return b"id: " + self._cursor() + b"\n" + chunk

    def _split(
        self, index: int, output: TextOutput, goal: _Delivered
    ) -> tuple[TextOutput, TextOutput]:
        """The output in what the client has and what it lacks."""
        now = self._now.setdefault(index, _Delivered())
        chars, logprobs = goal.chars - now.chars, goal.logprobs - now.logprobs
        reasoning = goal.reasoning - now.reasoning
        old = replace(
            output,
            text=output.text[:chars],
            reasoning=output.reasoning[:reasoning],
            token_ids=output.token_ids[:logprobs],
            logprobs=output.logprobs[:logprobs],
            finish_reason=None,
            stop_reason=None,
        )
        self._advance(index, old)
        new = replace(
            output,
            text=output.text[chars:],
            reasoning=output.reasoning[reasoning:],
            token_ids=output.token_ids[logprobs:] if output.logprobs else output.token_ids,
            logprobs=output.logprobs[logprobs:],
        )
        is_there = (now.chars, now.reasoning, now.logprobs) == (
            goal.chars,
            goal.reasoning,
            goal.logprobs,
        )
        if is_there and now.digest != goal.digest:
            raise _another_answer()
        if output.finish_reason is not None and not is_there:
            raise _another_answer()
        if is_there and goal.has_ended:
            if new.text or new.reasoning or new.logprobs:
                raise _another_answer()
            if output.finish_reason is not None:
                now.has_ended = True
                del self._goals[index]
        elif is_there:
            del self._goals[index]
        return old, new

    def _advance(self, index: int, output: TextOutput) -> None:
        now = self._now.setdefault(index, _Delivered())
        digests = []
        for is_reasoning, text in ((False, output.text), (True, output.reasoning)):
            key = index, is_reasoning
            told = self._texts.setdefault(key, blake2b(digest_size=8, person=b"r" * is_reasoning))
            told.update(text.encode("utf-8", "surrogatepass"))
            digests.append(told.digest())
        now.chars += len(output.text)
        now.reasoning += len(output.reasoning)
        now.logprobs += len(output.logprobs)
        now.has_ended = output.finish_reason is not None
        now.digest = bytes(a ^ b for a, b in zip(*digests, strict=True))

    def _cursor(self) -> bytes:
        has = self._now | self._goals  # of a choice that is not there yet again it has more
        choices = [
            _CHOICE.pack(index, of.chars, of.reasoning, of.logprobs, of.has_ended, of.digest)
            for index, of in has.items()
        ]
        payload = self._head + b"".join(choices)
        return urlsafe_b64encode(payload + self._sign(payload))

    def _sign(self, payload: bytes) -> bytes:
        mac = self._mac.copy()
        mac.update(payload)
        return mac.digest()

    def _read(self, cursor: str) -> None:
        try:
            raw = b64decode(cursor, b"-_", validate=True)
        except ValueError:
            raw = b""
        payload, mac = raw[:-_MAC_BYTES], raw[-_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._sign(payload)):
            raise ApiError(
                400,
                "Last-Event-ID is not an id of this stream: send the same body, with the same key, "
                "that the stream was asked for with",
                param="Last-Event-ID",
                code="invalid_cursor",
            )
        answer_id, self.created = _HEAD.unpack_from(payload)
        self.answer_id = UUID(bytes=answer_id).hex
        for index, *delivered in _CHOICE.iter_unpack(payload[_HEAD.size :]):
            self._goals[index] = _Delivered(*delivered)


def _another_answer() -> ApiError:
    return ApiError(
        500,
        "the answer came out otherwise this time, so the stream cannot go on from that event: "
        "ask again without Last-Event-ID",
        kind="server_error",
        code="not_repeatable",
    )
