"""`TextEngine`: the text of what an engine streams as ids, cut at stop strings.

It stands in front of a local engine or a remote one. Not for chunks on a wire (the service's), nor
for the text of a sequence (sequence_text.py), vocabularies (tokenizer.py) and templates
(chat_prompts.py). No torch.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from copy import copy
from dataclasses import replace

from adapter_store.extras import NO_EXTRAS, AdapterExtras
from model_runner.chat_prompts import ChatPrompts
from model_runner.harmony import ChannelSplitter, find_marks
from model_runner.request import (
    Request,
    RequestOutput,
    SamplingParams,
)
from model_runner.sequence_text import PlainReader, Reader, SequenceText, TextOutput
from model_runner.stop_strings import StopTable
from model_runner.template_sandbox import TemplateSandbox
from model_runner.tokenizer import IncrementalDetokenizer, TemplateRefused, Tokenizer

Remake = Callable[[AdapterExtras], Awaitable[Request]]
UNKNOWN_KEY = "?"
"""The key of no extras: with it the engine tells those of the adapter."""

UNMADE_IDS = (0,)
"""The prompt of such a request: it is never computed."""

_MAX_REMADE = 3


class TextEngine:
    """Text around a stream of ids.

    stream  submits a request and gives its outputs; closing it aborts the request
    abort   ends one of n sequences: (request_id, index). None: what it still gives is dropped
    sandbox where adapters' chat templates are rendered, None = one of its own
    chats   makes the prompts of chats
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stream: Callable[[Request], AsyncIterator[RequestOutput]],
        abort: Callable[[str, int], Awaitable[None] | None] | None = None,
        sandbox: TemplateSandbox | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.chats = ChatPrompts(tokenizer, sandbox)
        self._marks = find_marks(tokenizer)
        self._stream = stream
        self._abort = abort

    def around(
        self,
        stream: Callable[[Request], AsyncIterator[RequestOutput]],
        abort: Callable[[str, int], Awaitable[None] | None],
    ) -> "TextEngine":
        """The same, with all that is known of adapters, around another stream."""
        other = copy(self)
        other._stream, other._abort = stream, abort
        return other

    async def stream(
        self,
        request: Request,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        remake: Remake | None = None,
        is_chat: bool = False,
    ) -> AsyncGenerator[TextOutput, None]:
        """The request's outputs as text, cut at the first stop string (kept if include_stop).

        A sequence that meets a stop string is aborted before its last output is given. A stop
        string that ends before `min_tokens` does not count. A stop id's own text is left out, as a
        stop string's. Closing this generator closes the stream. Every sequence gets an output with
        a finish_reason: ERROR with ENGINE_DEAD if the stream ends without.

        remake  makes the request anew for the extras that its adapter turns out to bring, which
                is done before any output is given; None: that is an error output
        is_chat the answer is a text of its own, and its channels are told apart where the tokens
                for them are known; else it goes on with the prompt's text (a word's first token
                brings its space)
        Errors:  ValueError for an empty stop string, before anything is submitted; those of remake.
        """
        table = StopTable(stop) if stop else None
        for num_left in range(_MAX_REMADE if remake is not None else 0, -1, -1):
            extras, has_begun = None, False
            async with aclosing(self._run(request, table, include_stop, is_chat)) as outputs:
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
        async with aclosing(self.stream(made, stop, include_stop, make, True)) as outputs:
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
        self, request: Request, table: StopTable | None, include_stop: bool, is_chat: bool
    ) -> AsyncGenerator[TextOutput, None]:
        """One run of a request, see `stream`."""
        running = {
            index: SequenceText(self._reader(request, is_chat), request, index, table, include_stop)
            for index in request.indices
        }
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

    def _reader(self, request: Request, is_chat: bool) -> Reader:
        """What one of its sequences is read with."""
        if is_chat and self._marks is not None:
            return ChannelSplitter(self.tokenizer, self._marks, request.token_ids)
        before = () if is_chat else request.token_ids
        return PlainReader(IncrementalDetokenizer(self.tokenizer, before))

    async def complete(
        self, request: Request, stop: Sequence[str] = (), include_stop: bool = False
    ) -> list[TextOutput]:
        """`stream` to its end: one output for each sequence, with all its text and tokens."""
        pieces: dict[int, list[TextOutput]] = {i: [] for i in request.indices}
        async for output in self.stream(request, stop, include_stop):
            pieces[output.index].append(output)
        return [
            replace(
                parts[-1],
                text="".join(part.text for part in parts),
                reasoning="".join(part.reasoning for part in parts),
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


async def _close(outputs: AsyncIterator[RequestOutput]) -> None:
    close = getattr(outputs, "aclose", None)
    if close is not None:
        await close()
