"""`TextEngine`: the text of what an engine streams as ids, cut at stop strings.

It stands in front of a local engine or a remote one. Not for chunks on a wire (the service's), nor
for vocabularies (tokenizer.py), templates (chat_prompts.py) and stop strings (stop_strings.py). No
torch.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from adapter_store.extras import NO_EXTRAS, AdapterExtras
from model_runner.chat_prompts import ChatPrompts
from model_runner.request import (
    ErrorCode,
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from model_runner.stop_strings import StopMatcher, StopTable
from model_runner.template_sandbox import TemplateSandbox
from model_runner.tokenizer import IncrementalDetokenizer, TemplateRefused, Tokenizer

Remake = Callable[[AdapterExtras], Awaitable[Request]]
UNKNOWN_KEY = "?"
"""The key of no extras: with it the engine tells those of the adapter."""

UNMADE_IDS = (0,)
"""The prompt of such a request: it is never computed."""

_MAX_REMADE = 3


@dataclass(frozen=True)
class TextOutput:
    """News of one sequence of one request, as text. finish_reason is None until the last one.

    text         what became certain: it lags behind token_ids while a character is incomplete or
                 a stop string possible
    stop_reason  the stop string that ended it, if one did
    num_output_tokens  so far; at a stop string, up to the token that completed it
    The other fields are those of `RequestOutput`.
    """

    request_id: str
    index: int = 0
    text: str = ""
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


class TextEngine:
    """Text around a stream of ids.

    stream  submits a request and gives its outputs; closing it aborts the request
    abort   ends one of n sequences: (request_id, index). None: what it still gives is dropped
    sandbox where adapters' chat templates are rendered, None = one of its own
    chats   makes the prompts of chats, None = one of its own
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stream: Callable[[Request], AsyncIterator[RequestOutput]],
        abort: Callable[[str, int], Awaitable[None] | None] | None = None,
        sandbox: TemplateSandbox | None = None,
        chats: ChatPrompts | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.chats = chats or ChatPrompts(tokenizer, sandbox)
        self._stream = stream
        self._abort = abort

    async def stream(
        self,
        request: Request,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        remake: Remake | None = None,
    ) -> AsyncGenerator[TextOutput, None]:
        """The request's outputs as text, cut at the first stop string (kept if include_stop).

        A sequence that meets a stop string is aborted before its last output is given. A stop
        string that ends before `min_tokens` does not count. A stop id's own text is left out, as a
        stop string's. Closing this generator closes the stream. Every sequence gets an output with
        a finish_reason: ERROR with ENGINE_DEAD if the stream ends without.

        remake  makes the request anew for the extras that its adapter turns out to bring, which
                is done before any output is given; None: that is an error output
        Errors:  ValueError for an empty stop string, before anything is submitted; those of remake.
        """
        table = StopTable(stop) if stop else None
        for num_left in range(_MAX_REMADE if remake is not None else 0, -1, -1):
            extras, has_begun = None, False
            async with aclosing(self._run(request, table, include_stop)) as outputs:
                async for output in outputs:
                    if not has_begun and output.extras is not None and num_left:
                        extras = output.extras
                        break
                    if not has_begun and output.error_code is None and request.extras_key == "":
                        self._remember(request, NO_EXTRAS)
                    has_begun = True
                    yield output
            if extras is None or remake is None:
                return
            request = await remake(extras)
            self._remember(request, extras)

    async def chat(
        self,
        request: Request,
        messages: Sequence[Mapping[str, object]],
        stop: Sequence[str] = (),
        include_stop: bool = False,
    ) -> AsyncGenerator[TextOutput, None]:
        """`stream` of a conversation, by the adapter's own chat template where it brings one.

        request  its token_ids are made here
        Errors:  TemplateRefused; ValueError if a message is malformed.
        """

        async def make(extras: AdapterExtras) -> Request:
            adapter, sampling = request.adapter, request.sampling
            ids = await self.chats.encode(messages, adapter, extras, request.tenant_id)
            if not sampling.ignore_eos:
                stop_ids = tuple(dict.fromkeys((*sampling.stop_ids, *extras.eos_ids)))
                sampling = replace(sampling, stop_ids=stop_ids)
            return replace(request, token_ids=tuple(ids), sampling=sampling, extras_key=extras.key)

        try:
            made = await make(self.chats.known(request.adapter) or NO_EXTRAS)
        except TemplateRefused:
            if request.adapter is None:
                raise
            # What is known of the adapter may not be true any more: the engine will tell.
            self.chats.forget(request.adapter)
            made = replace(request, token_ids=UNMADE_IDS, extras_key=UNKNOWN_KEY)
        async with aclosing(self.stream(made, stop, include_stop, make)) as outputs:
            async for output in outputs:
                yield output

    async def ask_extras(self, request: Request) -> AdapterExtras | None:
        """What the request's adapter brings, from the engine that would run it; None: it does not
        say, for it cannot have the adapter."""
        name = f"{request.request_id}-extras"
        asking = replace(
            request,
            request_id=name,
            token_ids=UNMADE_IDS,
            sampling=SamplingParams(),
            resumed=(),
            extras_key=UNKNOWN_KEY,
        )
        outputs = self._stream(asking)
        try:
            async for output in outputs:
                if output.extras is not None:
                    self._remember(request, output.extras)
                return output.extras
        finally:
            await _close(outputs)
        return None

    def _remember(self, request: Request, extras: AdapterExtras) -> None:
        adapter = request.adapter
        if adapter is not None and self.chats.known(adapter) != extras:
            self.chats.remember(adapter, extras)

    async def _run(
        self, request: Request, table: StopTable | None, include_stop: bool
    ) -> AsyncGenerator[TextOutput, None]:
        """One run of a request, see `stream`."""
        n = request.sampling.n
        running = {i: _SequenceText(self.tokenizer, request, table, include_stop) for i in range(n)}
        outputs = self._stream(request)
        try:
            async for output in outputs:
                sequence = running.get(output.index)
                if (
                    sequence is None
                ):  # ended by a stop string: these came before the abort was heard
                    continue
                news = sequence.read(output)
                if news.finish_reason is not None:
                    del running[output.index]
                    if output.finish_reason is None and running:
                        await self._abort_one(request.request_id, output.index)
                    if not running:
                        await _close(outputs)
                yield news
                if not running:
                    return
            for index, sequence in running.items():
                yield sequence.broken(RequestOutput(request.request_id, index))
        finally:
            await _close(outputs)

    async def complete(
        self, request: Request, stop: Sequence[str] = (), include_stop: bool = False
    ) -> list[TextOutput]:
        """`stream` to its end: one output for each sequence, with all its text and tokens."""
        pieces: dict[int, list[TextOutput]] = {i: [] for i in range(request.sampling.n)}
        async for output in self.stream(request, stop, include_stop):
            pieces[output.index].append(output)
        return [
            replace(
                parts[-1],
                text="".join(part.text for part in parts),
                token_ids=tuple(i for part in parts for i in part.token_ids),
                logprobs=tuple(entry for part in parts for entry in part.logprobs),
                prompt_logprobs=tuple(e for part in parts for e in part.prompt_logprobs),
            )
            for parts in pieces.values()
        ]

    async def _abort_one(self, request_id: str, index: int) -> None:
        if self._abort is not None:
            waiting = self._abort(request_id, index)
            if waiting is not None:
                await waiting


class _SequenceText:
    """The text of one sequence so far."""

    def __init__(
        self, tokenizer: Tokenizer, request: Request, table: StopTable | None, include_stop: bool
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._matcher = None if table is None else StopMatcher(table)
        self._include_stop = include_stop
        self._stop_ids = frozenset(request.sampling.stop_ids)
        self._min_tokens = request.sampling.min_tokens
        self._num_tokens = 0
        self._last: RequestOutput | None = None

    def read(self, output: RequestOutput) -> TextOutput:
        """The output as text. Token by token, so that it does not matter how many come at once."""
        self._last = output
        ids = output.new_token_ids
        text: list[str] = []
        for position, token_id in enumerate(ids):
            self._num_tokens += 1
            is_last = output.finish_reason is FinishReason.STOP and position == len(ids) - 1
            if is_last and token_id in self._stop_ids and not self._include_stop:
                break
            text.append(self._cut(self._detokenizer.push((token_id,))))
            if self._matched:
                return self._stopped(output, text, position + 1)
        if output.finish_reason is not None:
            text.append(self._cut(self._detokenizer.flush()))
            if self._matched:
                return self._stopped(output, text, len(ids))
            if self._matcher is not None:
                text.append(self._matcher.flush())
        return _as_text(output, "".join(text))

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

    def _cut(self, piece: str) -> str:
        if self._matcher is None:
            return piece
        return self._matcher.push(piece, accept=self._num_tokens >= self._min_tokens)

    def _stopped(self, output: RequestOutput, text: list[str], num_read: int) -> TextOutput:
        """Ends at the token that completed the stop string, as if the others had not come."""
        if self._include_stop:
            text.append(self._matched or "")
        cut = replace(
            output,
            new_token_ids=output.new_token_ids[:num_read],
            logprobs=output.logprobs[:num_read],
            finish_reason=FinishReason.STOP,
            error_code=None,
            error="",
            num_output_tokens=output.num_output_tokens - (len(output.new_token_ids) - num_read),
        )
        return replace(_as_text(cut, "".join(text)), stop_reason=self._matched)


def _as_text(output: RequestOutput, text: str) -> TextOutput:
    return TextOutput(
        request_id=output.request_id,
        index=output.index,
        text=text,
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


async def _close(outputs: AsyncIterator[RequestOutput]) -> None:
    close = getattr(outputs, "aclose", None)
    if close is not None:
        await close()
