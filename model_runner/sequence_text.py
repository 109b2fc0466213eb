"""The text of one sequence as its ids come: cut at stop strings, its reasoning apart.

Not here: streams, requests and their ends (text.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from adapter_store.extras import AdapterExtras
from model_runner.harmony import Piece
from model_runner.request import (
    ErrorCode,
    FinishReason,
    Request,
    RequestOutput,
    TokenLogprobs,
)
from model_runner.stop_strings import StopMatcher, StopTable
from model_runner.tokenizer import IncrementalDetokenizer


@dataclass(frozen=True)
class TextOutput:
    """News of one sequence of one request, as text. finish_reason is None until the last one.

    text         what became certain: it lags behind token_ids while a character is incomplete or
                 a stop string possible
    reasoning    the same of what a chat says beside its answer (harmony.py)
    stop_reason  the stop string that ended it, if one did
    num_output_tokens  so far; at a stop string, up to the token that completed it
    The other fields are those of `RequestOutput`.
    """

    request_id: str
    index: int = 0
    text: str = ""
    reasoning: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None
    error_code: ErrorCode | None = None
    error: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    extras: AdapterExtras | None = None


class Reader(Protocol):
    """Text of one sequence as its tokens come."""

    def push(self, token_id: int) -> Piece: ...

    def flush(self) -> Piece: ...


class PlainReader:
    """All of it is content."""

    def __init__(self, detokenizer: IncrementalDetokenizer) -> None:
        self._detokenizer = detokenizer

    def push(self, token_id: int) -> Piece:
        return Piece(self._detokenizer.push((token_id,)))

    def flush(self) -> Piece:
        return Piece(self._detokenizer.flush())


class SequenceText:
    """The text of one sequence so far. Of one that is resumed, the text that follows what was
    certain with the ids that were delivered."""

    def __init__(
        self,
        reader: Reader,
        request: Request,
        index: int,
        table: StopTable | None,
        include_stop: bool,
    ) -> None:
        self._reader = reader
        self._matcher = None if table is None else StopMatcher(table)
        self._include_stop = include_stop
        self._stop_ids = frozenset(request.sampling.stop_ids)
        self._min_tokens = request.sampling.min_tokens
        self._num_tokens = 0
        self._last: RequestOutput | None = None
        for token_id in (request.resumed[index] or ()) if request.resumed else ():
            self._num_tokens += 1
            self._cut(self._reader.push(token_id), [])

    def read(self, output: RequestOutput) -> TextOutput:
        """The output as text. Token by token, so that it does not matter how many come at once."""
        self._last = output
        ids = output.new_token_ids
        pieces: list[Piece] = []
        for position, token_id in enumerate(ids):
            self._num_tokens += 1
            is_last = output.finish_reason is FinishReason.STOP and position == len(ids) - 1
            if is_last and token_id in self._stop_ids and not self._include_stop:
                break
            self._cut(self._reader.push(token_id), pieces)
            if self._matched:
                return self._stopped(output, pieces, position + 1)
        if output.finish_reason is not None:
            self._cut(self._reader.flush(), pieces)
            if self._matched:
                return self._stopped(output, pieces, len(ids))
            if self._matcher is not None:
                pieces.append(Piece(self._matcher.flush()))
        return _as_text(output, pieces)

    def broken(self, empty: RequestOutput) -> TextOutput:
        """The last output of a sequence whose stream ended without one."""
        last = replace(
            self._last or empty,
            new_token_ids=(),
            logprobs=(),
            prompt_logprobs=(),
            finish_reason=FinishReason.ERROR,
            error_code=ErrorCode.ENGINE_DEAD,
            error="the engine's stream ended before the answer did",
        )
        return self.read(last)

    @property
    def _matched(self) -> str | None:
        return None if self._matcher is None else self._matcher.matched

    def _cut(self, piece: Piece, pieces: list[Piece]) -> None:
        """Add it to `pieces`, its content as far as no stop string begins there."""
        if self._matcher is not None:
            accept = self._num_tokens >= self._min_tokens
            piece = piece._replace(content=self._matcher.push(piece.content, accept=accept))
        pieces.append(piece)

    def _stopped(self, output: RequestOutput, pieces: list[Piece], num_read: int) -> TextOutput:
        """Ends at the token that completed the stop string, as if the others had not come."""
        if self._include_stop:
            pieces.append(Piece(self._matched or ""))
        cut = replace(
            output,
            new_token_ids=output.new_token_ids[:num_read],
            logprobs=output.logprobs[:num_read],
            finish_reason=FinishReason.STOP,
            error_code=None,
            error="",
            num_output_tokens=output.num_output_tokens - (len(output.new_token_ids) - num_read),
        )
        return replace(_as_text(cut, pieces), stop_reason=self._matched)


def _as_text(output: RequestOutput, pieces: Sequence[Piece]) -> TextOutput:
    return TextOutput(
        request_id=output.request_id,
        index=output.index,
        text="".join(piece.content for piece in pieces),
        reasoning="".join(piece.reasoning for piece in pieces),
        token_ids=output.new_token_ids,
        logprobs=output.logprobs,
        finish_reason=output.finish_reason,
        error_code=output.error_code,
        error=output.error,
        num_prompt_tokens=output.num_prompt_tokens,
        num_cached_tokens=output.num_cached_tokens,
        num_output_tokens=output.num_output_tokens,
        prompt_logprobs=output.prompt_logprobs,
        extras=output.extras,
    )
