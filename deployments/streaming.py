"""From an engine's outputs to the chunks and answers of OpenAI's API.

No HTTP machinery, and no tokenizing of prompts.
"""

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from deployments.answer_logprobs import LogprobSpeller, PromptEntries, PromptPart, TextSoFar
from deployments.api_errors import ApiError
from deployments.openai_schema import (
    ChatAnswer,
    ChatChoice,
    ChatLogprobs,
    ChatMessage,
    CompletionAnswer,
    CompletionChoice,
    CompletionLogprobs,
    PromptDetails,
    ReasonedMessage,
    Usage,
)
from model_runner.request import TokenLogprobs
from model_runner.sequence_text import TextOutput
from model_runner.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: readers of server-sent events pass it over, proxies see that the stream lives."""

_LONG_CHARS = 1 << 18
"""Of an answer: so many are written in 1 to 6 ms."""


@dataclass
class Tally:
    """What one HTTP request has used so far, over all its prompts and choices."""

    prompt_tokens: dict[str, int] = field(default_factory=dict)
    cached_tokens: dict[str, int] = field(default_factory=dict)
    output_tokens: dict[tuple[str, int], int] = field(default_factory=dict)

    def add(self, output: TextOutput) -> int:
        """Take in one output; how many tokens it brought."""
        key = output.request_id, output.index
        before = self.output_tokens.get(key, 0)
        self.output_tokens[key] = max(before, output.num_output_tokens)
        # Error outputs made on this side of the wire know no counts.
        known = self.prompt_tokens.get(output.request_id, 0)
        self.prompt_tokens[output.request_id] = max(known, output.num_prompt_tokens)
        cached = self.cached_tokens.get(output.request_id, 0)
        self.cached_tokens[output.request_id] = max(cached, output.num_cached_tokens)
        return self.output_tokens[key] - before

    def usage(self) -> Usage:
        prompt, output = sum(self.prompt_tokens.values()), sum(self.output_tokens.values())
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=output,
            total_tokens=prompt + output,
            prompt_tokens_details=PromptDetails(cached_tokens=sum(self.cached_tokens.values())),
        )


@dataclass
class _Choice:
    """One choice of a whole answer as it grows."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | None = None

    def add(self, output: TextOutput) -> None:
        self.text.append(output.text)
        self.reasoning.append(output.reasoning)
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.finish_reason = output.finish_reason and output.finish_reason.value
        self.stop_reason = output.stop_reason


class Writer:
    """Spells the outputs of one HTTP request. `index` is the choice's number, over all prompts."""

    prefix = ""
    object = ""

    def __init__(
        self,
        answer_id: str,
        model: str,
        tokenizer: Tokenizer,
        logprobs: bool,
        include_usage: bool,
        part: PromptPart,
    ) -> None:
        self.answer_id = f"{self.prefix}-{answer_id}"
        self.created = int(time.time())
        self.model = model
        self.tally = Tally()
        self._speller = LogprobSpeller(tokenizer)
        self._part = part
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._choices: dict[int, _Choice] = {}

    def take_prompt(self, other: "Writer") -> None:
        """The prompt was made anew, as `other` has it."""
        self._part = other._part

    def collect(self, index: int, output: TextOutput) -> None:
        """Keep an output for `whole`."""
        self._choices.setdefault(index, _Choice()).add(output)

    @property
    def is_long(self) -> bool:
        """Whether `whole` keeps its thread for so long that others would notice."""
        if self._logprobs or self._part.num_told is not None:
            return True  # several entries for each token: seconds, much memory
        num_chars = sum(map(len, self._part.texts)) * self._part.num_choices
        for choice in self._choices.values():
            num_chars += sum(map(len, choice.text)) + sum(map(len, choice.reasoning))
        return num_chars > _LONG_CHARS

    def whole(self) -> bytes:
        """The answer of a request that is not streamed, as JSON."""
        raise NotImplementedError

    def chunk(self, index: int, output: TextOutput) -> bytes:
        """One output as an event; b"" if it says nothing."""
        raise NotImplementedError

    def last_chunks(self) -> bytes:
        """What ends a stream: the usage, where asked for, and the end mark."""
        if not self._include_usage:
            return DONE
        return self._event([], self.tally.usage().model_dump()) + DONE

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        chunk: dict[str, Any] = {
            "id": self.answer_id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        if self._include_usage:
            chunk["usage"] = usage
        return sse(chunk)

    def _prompt_logprobs(self, index: int) -> list[TokenLogprobs]:
        """Of the prompt of a choice: the first of its choices is told them."""
        count = self._part.num_choices
        return self._choices[index // count * count].prompt_logprobs

    def _prompt_entries(self, index: int) -> PromptEntries | None:
        """The field `prompt_logprobs` of a choice, where asked for."""
        part = self._part
        if part.num_told is None:
            return None
        ids = part.token_ids[index // part.num_choices]
        return self._speller.prompt(ids, self._prompt_logprobs(index), part.num_told)


class ChatWriter(Writer):
    """/v1/chat/completions."""

    prefix = "chatcmpl"
    object = "chat.completion.chunk"

    def __init__(
        self,
        answer_id: str,
        model: str,
        tokenizer: Tokenizer,
        logprobs: bool,
        include_usage: bool,
        part: PromptPart,
    ) -> None:
        super().__init__(answer_id, model, tokenizer, logprobs, include_usage, part)
        self._begun: set[int] = set()
        self._spelled: defaultdict[int, TextSoFar] = defaultdict(TextSoFar)

    def whole(self) -> bytes:
        choices = [
            ChatChoice(
                index=index,
                message=_message("".join(choice.text), "".join(choice.reasoning)),
                logprobs=self._lines(index, choice.token_ids, choice.logprobs),
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
            )
            for index, choice in sorted(self._choices.items())
        ]
        answer = ChatAnswer(
            id=self.answer_id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=self.tally.usage(),
            prompt_logprobs=self._prompt_entries(0),
        )
        return answer.model_dump_json().encode()

    def chunk(self, index: int, output: TextOutput) -> bytes:
        delta: dict[str, str] = {}
        if index not in self._begun:
            self._begun.add(index)
            delta = {"role": "assistant", "content": ""}
        if output.text:
            delta["content"] = output.text
        if output.reasoning:
            delta |= {"reasoning_content": output.reasoning, "reasoning": output.reasoning}
        lines = self._lines(index, output.token_ids, output.logprobs)
        if not delta and not output.finish_reason and not (lines and lines.content):
            return b""
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": lines and lines.model_dump(),
            "finish_reason": output.finish_reason and output.finish_reason.value,
        }
        if output.stop_reason is not None:
            choice["stop_reason"] = output.stop_reason
        return self._event([choice])

    def _lines(
        self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> ChatLogprobs | None:
        if not self._logprobs:
            return None
        return self._speller.chat(token_ids, logprobs, self._spelled[index])


class CompletionWriter(Writer):
    """/v1/completions."""

    prefix = "cmpl"
    object = "text_completion"

    def __init__(
        self,
        answer_id: str,
        model: str,
        tokenizer: Tokenizer,
        logprobs: bool,
        include_usage: bool,
        part: PromptPart,
    ) -> None:
        super().__init__(answer_id, model, tokenizer, logprobs, include_usage, part)
        self._spelled: dict[int, TextSoFar] = {}

    def whole(self) -> bytes:
        choices = [
            CompletionChoice(
                index=index,
                text=self._echo(index) + "".join(choice.text),
                logprobs=self._all_lines(index, choice),
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
                prompt_logprobs=self._prompt_entries(index),
            )
            for index, choice in sorted(self._choices.items())
        ]
        answer = CompletionAnswer(
            id=self.answer_id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=self.tally.usage(),
        )
        return answer.model_dump_json().encode()

    def chunk(self, index: int, output: TextOutput) -> bytes:
        text = output.text
        if index not in self._spelled:
            text = self._echo(index) + text
        lines = self._lines(index, output.token_ids, output.logprobs)
        if not text and not output.finish_reason and not (lines and lines.tokens):
            return b""
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": lines and lines.model_dump(),
            "finish_reason": output.finish_reason and output.finish_reason.value,
        }
        if output.stop_reason is not None:
            choice["stop_reason"] = output.stop_reason
        return self._event([choice])

    def _lines(
        self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> CompletionLogprobs | None:
        if index not in self._spelled:
            self._spelled[index] = self._speller.after(self._prompt(index))
        if not self._logprobs:
            return None
        return self._speller.completion(token_ids, logprobs, self._spelled[index])

    def _all_lines(self, index: int, choice: _Choice) -> CompletionLogprobs | None:
        """Of a whole answer, its echo too."""
        part = self._part
        if part.num_echoed is None:
            return self._lines(index, choice.token_ids, choice.logprobs)
        top = part.num_echoed
        told = [replace(e, top=e.top[:top]) for e in self._prompt_logprobs(index)]
        ids = (*self._prompt(index), *choice.token_ids)
        return self._speller.completion(ids, [None, *told, *choice.logprobs], TextSoFar())

    def _prompt(self, index: int) -> tuple[int, ...]:
        return self._part.token_ids[index // self._part.num_choices]

    def _echo(self, index: int) -> str:
        return self._part.texts[index // self._part.num_choices] if self._part.texts else ""


def _message(content: str, reasoning: str) -> ChatMessage:
    if not reasoning:
        return ChatMessage(content=content)
    return ReasonedMessage(content=content, reasoning_content=reasoning, reasoning=reasoning)


def sse(value: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return (
        b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
    )


def error_events(error: ApiError) -> bytes:
    """How a stream that has begun says that it failed."""
    return sse(dict(error.body())) + DONE


async def interleave(
    streams: Sequence[AsyncGenerator[TextOutput, None]],
) -> AsyncGenerator[tuple[int, TextOutput], None]:
    """Outputs of several streams as they come, each with its stream's number.

    Closing this closes all of them.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for output in only:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, TextOutput | BaseException | None]] = asyncio.Queue()

    async def pump(number: int, stream: AsyncGenerator[TextOutput, None]) -> None:
        end: BaseException | None = None
        try:
            async with aclosing(stream):
                async for output in stream:
                    queue.put_nowait((number, output))
        except Exception as exc:
            end = exc
        finally:
            queue.put_nowait((number, end))

    tasks = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            number, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
