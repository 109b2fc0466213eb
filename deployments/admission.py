"""From a parsed body to `Request`s of the engine: checked, tokenized.

Who asks for which model is known already (job_maker.py).
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, TypeVar

from adapter_store.extras import AdapterExtras
from deployments.answer_logprobs import PromptPart
from deployments.api_errors import ApiError
from deployments.openai_schema import ChatRequest, CompletionRequest
from deployments.streaming import ChatWriter, CompletionWriter, Writer
from deployments.tenants import Target, TenantConfig
from model_runner.chat_prompts import INLINE_CHARS
from model_runner.request import MAX_IDS, Request, SamplingParams
from model_runner.text import UNKNOWN_KEY, UNMADE_IDS, TextEngine
from model_runner.tokenizer import TemplateRefused, Tokenizer

_T = TypeVar("_T")
_MAX_STOP = 16
_MAX_STOP_CHARS = 4096
"""All together: each character costs the matcher a state."""

_MAX_STOP_IDS = 1024
_MAX_CHOICES = 256
_MAX_INT = 2**31 - 1
_MAX_LOGPROBS = 1 << 19
"""In one answer that is sent whole. Each takes about 700 bytes while the answer is written, and 70
in it."""

_MAX_ECHO_CHARS = 1 << 20
"""In one answer, streamed or not."""


@dataclass(frozen=True)
class Job:
    """One HTTP request, ready to run: one `Request` for each prompt.

    part    what the answer holds of the prompts
    remake  the same for what its adapter turns out to bring. Errors: ApiError
    kept_bytes  of the body, which `remake` reads again
    """

    target: Target
    requests: tuple[Request, ...]
    stop: tuple[str, ...]
    stream: bool
    writer: Writer
    part: PromptPart
    remake: Callable[[AdapterExtras], Awaitable["Job"]] | None = None
    kept_bytes: int = 0


class Remaker:
    """Makes a job anew when its adapter turns out to bring other things: once for all prompts."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._made: dict[str, tuple[Request, ...]] = {}
        self._turn = asyncio.Lock()

    async def __call__(self, number: int, extras: AdapterExtras) -> Request:
        """One of the job's requests. Errors: ApiError."""
        assert self._job.remake is not None
        async with self._turn:
            if extras.key not in self._made:
                made = await self._job.remake(extras)
                self._made[extras.key] = made.requests
                self._job.writer.take_prompt(made.writer)
        return self._made[extras.key][number]


async def chat_job(
    wire: ChatRequest,
    target: Target,
    tenant: TenantConfig,
    cache_salt: str,
    text: TextEngine,
    default_max_tokens: int,
    answer_id: str,
    extras: AdapterExtras | None,
) -> Job:
    """The chat as one `Request`.

    extras  what the adapter brings, None = a request that is never run, to be told of them
    Errors: ApiError 400; TemplateRefused.
    """
    max_tokens = wire.max_completion_tokens
    if max_tokens is None:
        max_tokens = default_max_tokens if wire.max_tokens is None else wire.max_tokens
    if wire.top_logprobs is not None and not wire.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    logprobs = (wire.top_logprobs or 0) if wire.logprobs else None
    sampling = _sampling(wire, max_tokens, logprobs)
    if not max_tokens:
        raise ApiError(400, "max_tokens must be at least 1", param="max_tokens")
    token_ids: tuple[int, ...] = UNMADE_IDS
    if extras is not None:
        token_ids = await _encode_chat(wire, target, tenant, text, extras)
    part = PromptPart(sampling.n, (token_ids,), num_told=wire.prompt_logprobs)
    return _job(
        wire,
        target,
        tenant,
        cache_salt,
        text.tokenizer,
        sampling,
        part,
        ChatWriter,
        answer_id,
        extras,
    )


async def _encode_chat(
    wire: ChatRequest,
    target: Target,
    tenant: TenantConfig,
    text: TextEngine,
    extras: AdapterExtras,
) -> tuple[int, ...]:
    """Errors: ApiError 400; TemplateRefused."""
    try:
        ids = await text.chats.encode(wire.messages, target.adapter, extras, tenant.tenant_id)
    except TemplateRefused:
        raise
    except ValueError as exc:
        raise ApiError(400, str(exc), param="messages") from None
    return tuple(ids)


async def completion_job(
    wire: CompletionRequest,
    target: Target,
    tenant: TenantConfig,
    cache_salt: str,
    tokenizer: Tokenizer,
    max_prompts: int,
    answer_id: str,
    extras: AdapterExtras,
    part: PromptPart | None = None,
) -> Job:
    """Each prompt as one `Request`.

    part  of a job that was made of the same request: its prompts are not looked at again
    Errors: ApiError 400.
    """
    max_tokens = 16 if wire.max_tokens is None else wire.max_tokens
    sampling = _sampling(wire, max_tokens, wire.logprobs)
    if not max_tokens and not wire.echo:
        raise ApiError(400, "max_tokens must be at least 1 without echo", param="max_tokens")
    if wire.best_of not in (None, sampling.n):
        raise ApiError(400, f"best_of must equal n ({sampling.n}) if given", param="best_of")
    num_echoed = wire.logprobs if wire.echo else None
    if num_echoed is not None:
        if wire.stream:
            raise ApiError(400, "echo with logprobs cannot be streamed", param="echo")
        most = max(num_echoed, sampling.prompt_logprobs or 0)
        sampling = replace(sampling, prompt_logprobs=most)
    if part is None:
        part = await _read_prompts(wire, sampling.n, num_echoed, tokenizer, max_prompts)
    return _job(
        wire,
        target,
        tenant,
        cache_salt,
        tokenizer,
        sampling,
        part,
        CompletionWriter,
        answer_id,
        extras,
    )


async def _read_prompts(
    wire: CompletionRequest,
    num_choices: int,
    num_echoed: int | None,
    tokenizer: Tokenizer,
    max_prompts: int,
) -> PromptPart:
    """The prompts' ids, and their texts where they are echoed. Errors: ApiError 400."""
    prompts: list[Any] = [wire.prompt]
    if isinstance(wire.prompt, list) and not (wire.prompt and isinstance(wire.prompt[0], int)):
        prompts = list(wire.prompt)
    if not prompts:
        raise ApiError(400, "prompt must not be an empty list", param="prompt")
    if len(prompts) > max_prompts:
        raise ApiError(400, f"at most {max_prompts} prompts, not {len(prompts)}", param="prompt")
    if len(prompts) * num_choices > _MAX_CHOICES:
        words = f"n: at most {_MAX_CHOICES} choices over all prompts, not {len(prompts)} times that"
        raise ApiError(400, words, param="n")
    if any(max(p, default=0) > _MAX_INT for p in prompts if not isinstance(p, str)):
        raise ApiError(400, f"prompt: token ids must be at most {_MAX_INT}", param="prompt")
    token_lists = [
        await _tokenize(len(prompt), tokenizer.encode, prompt, param="prompt")
        if isinstance(prompt, str)
        else prompt
        for prompt in prompts
    ]
    texts = []
    for prompt in prompts if wire.echo else ():
        if isinstance(prompt, str):
            texts.append(prompt)
        else:
            texts.append(await _off_the_loop(len(prompt), tokenizer.decode, prompt))
    num_chars = sum(map(len, texts)) * num_choices
    if num_chars > _MAX_ECHO_CHARS:
        words = f"echo: the answer would repeat {num_chars} characters, {_MAX_ECHO_CHARS} at most: "
        raise ApiError(400, words + "ask for fewer choices or prompts", param="echo")
    ids = tuple(map(tuple, token_lists))
    return PromptPart(num_choices, ids, tuple(texts), num_echoed, wire.prompt_logprobs)


def _job(
    wire: ChatRequest | CompletionRequest,
    target: Target,
    tenant: TenantConfig,
    cache_salt: str,
    tokenizer: Tokenizer,
    sampling: SamplingParams,
    part: PromptPart,
    writer: type[Writer],
    answer_id: str,
    extras: AdapterExtras | None,
) -> Job:
    _check_logprobs(wire, sampling, part, sampling.n if writer is CompletionWriter else 1)
    if extras is not None and extras.eos_ids and not sampling.ignore_eos:
        stop_ids = dict.fromkeys((*sampling.stop_ids, *extras.eos_ids))
        sampling = replace(sampling, stop_ids=tuple(stop_ids))
    requests = []
    for number, token_ids in enumerate(part.token_ids):
        if not token_ids:
            raise ApiError(400, "the prompt has no tokens", param="prompt")
        request_id = f"{answer_id}-{number}"
        seed = _seed_of(request_id) if sampling.seed is None else sampling.seed
        requests.append(
            Request(
                request_id=request_id,
                token_ids=token_ids,
                sampling=replace(sampling, seed=seed),
                adapter=target.adapter,
                tenant_id=tenant.tenant_id,
                weight=tenant.weight,
                cache_salt=cache_salt,
                extras_key=UNKNOWN_KEY if extras is None else extras.key,
            )
        )
    options = wire.stream_options
    if options is not None and not wire.stream:
        raise ApiError(400, "stream_options needs stream to be true", param="stream_options")
    return Job(
        target=target,
        requests=tuple(requests),
        stop=wire.stop_strings(),
        stream=bool(wire.stream),
        part=part,
        writer=writer(
            answer_id,
            wire.model,
            tokenizer,
            sampling.logprobs is not None,
            bool(options and options.include_usage),
            part,
        ),
    )


def _check_logprobs(
    wire: ChatRequest | CompletionRequest, sampling: SamplingParams, part: PromptPart, copies: int
) -> None:
    """Refuse an answer that would hold too many of them at once; a stream holds none of its own.

    copies  how often those of a prompt are written.  Errors: ApiError 400.
    """

    def per_token(num_top: int | None) -> int:
        return 0 if num_top is None else 1 + num_top

    per_prompt_token = per_token(part.num_told) + per_token(part.num_echoed)
    count = sum(map(len, part.token_ids)) * copies * per_prompt_token
    if not wire.stream:
        num_choices = len(part.token_ids) * sampling.n
        count += num_choices * sampling.max_tokens * per_token(sampling.logprobs)
    if count > _MAX_LOGPROBS:
        words = f"logprobs: the answer could hold {count} of them, {_MAX_LOGPROBS} at most: "
        raise ApiError(400, words + "ask for fewer tokens, choices or top ones", param="logprobs")


def _seed_of(request_id: str) -> int:
    """The draws of a request that names no seed: as random as its id, and the same wherever the
    request is run again."""
    return int.from_bytes(sha256(request_id.encode()).digest()[:8], "little", signed=True)


def _sampling(
    wire: ChatRequest | CompletionRequest, max_tokens: int, logprobs: int | None
) -> SamplingParams:
    given: dict[str, Any] = {
        "temperature": wire.temperature,
        "top_p": wire.top_p,
        "top_k": 0 if wire.top_k == -1 else wire.top_k,  # -1 is how other servers say "all"
        "n": wire.n,
        "min_tokens": wire.min_tokens,
        "ignore_eos": wire.ignore_eos,
        "min_p": wire.min_p,
        "repetition_penalty": wire.repetition_penalty,
        "presence_penalty": wire.presence_penalty,
        "frequency_penalty": wire.frequency_penalty,
        "logit_bias": _read_bias(wire.logit_bias or {}),
        "prompt_logprobs": wire.prompt_logprobs,
        "stop_ids": None if wire.stop_token_ids is None else tuple(wire.stop_token_ids),
    }
    values = {name: value for name, value in given.items() if value is not None}
    sampling = SamplingParams(seed=wire.seed, max_tokens=max_tokens, logprobs=logprobs, **values)
    problem = (sampling.problem() or "").replace("stop_ids", "stop_token_ids")
    if problem:
        raise ApiError(400, problem, param=problem.split()[0])
    stop = wire.stop_strings()
    if len(stop) > _MAX_STOP:
        raise ApiError(400, f"at most {_MAX_STOP} stop strings", param="stop")
    if sum(map(len, stop)) > _MAX_STOP_CHARS:
        words = f"stop strings of at most {_MAX_STOP_CHARS} characters together"
        raise ApiError(400, words, param="stop")
    if "" in stop:
        raise ApiError(400, "a stop string must not be empty", param="stop")
    if wire.stream and wire.prompt_logprobs is not None:
        raise ApiError(400, "prompt_logprobs cannot be streamed", param="prompt_logprobs")
    if max_tokens > _MAX_INT:
        raise ApiError(400, f"max_tokens must be at most {_MAX_INT}", param="max_tokens")
    if any(token_id > _MAX_INT for token_id in sampling.stop_ids):
        raise ApiError(400, f"stop_token_ids must be at most {_MAX_INT}", param="stop_token_ids")
    if len(sampling.stop_ids) > _MAX_STOP_IDS:
        raise ApiError(400, f"at most {_MAX_STOP_IDS} stop_token_ids", param="stop_token_ids")
    return sampling


def _read_bias(bias: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    """JSON's keys are strings: token ids in decimal."""
    if len(bias) > MAX_IDS:
        raise ApiError(400, f"logit_bias may hold {MAX_IDS} tokens", param="logit_bias")
    for key in bias:
        if not re.fullmatch(r"0|[1-9][0-9]{0,8}", key, re.ASCII):
            raise ApiError(400, f"logit_bias: {key!r:.40} is no token id", param="logit_bias")
    return tuple((int(key), by) for key, by in bias.items())


async def _tokenize(size: int, encode: Any, value: Any, param: str) -> list[int]:
    try:
        return list(await _off_the_loop(size, encode, value))
    except ValueError as exc:
        raise ApiError(400, str(exc), param=param) from None


async def _off_the_loop(size: int, work: Callable[[Any], _T], value: Any) -> _T:
    """`work(value)`: in a thread if it is long."""
    return work(value) if size <= INLINE_CHARS else await asyncio.to_thread(work, value)
