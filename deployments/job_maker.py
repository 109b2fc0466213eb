"""From a body to a `Job`: what model it names, what its adapter and its base say of what it leaves
open, whether it is short enough.

Who asks is known already. Not here: the requests that a job is made of (admission.py), how bodies
come in (body.py).
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from adapter_store.extras import NO_EXTRAS, AdapterExtras
from deployments.admission import Job, chat_job, completion_job
from deployments.answer_logprobs import PromptPart
from deployments.api_errors import ApiError, ambiguous_model, model_not_found
from deployments.body import BIG_BYTES, check_length, check_weight, prompt_too_long, strings
from deployments.config import ModelSettings, ServiceConfig
from deployments.generation_defaults import with_defaults
from deployments.openai_schema import ChatRequest, CompletionRequest
from deployments.tenants import Target, TenantConfig, TenantDirectory
from model_runner.context_length import count_positions
from model_runner.text import TextEngine
from model_runner.tokenizer import TemplateRefused

_Wire = TypeVar("_Wire", ChatRequest, CompletionRequest)


class JobMaker:
    """Makes jobs for the base models of a configuration. texts  by the models' names."""

    def __init__(
        self, config: ServiceConfig, directory: TenantDirectory, texts: Mapping[str, TextEngine]
    ) -> None:
        self._directory = directory
        self._texts = texts
        self._max_prompts = config.ingress.max_prompts
        self._settings = {model.name: model for model in config.models}
        self._defaults = {model.name: model.sampling_defaults() for model in config.models}
        self._longest = {model.name: _longest_prompt(model) for model in config.models}

    async def chat(self, tenant: TenantConfig, body: bytes, answer_id: str) -> Job:
        """A chat, ready to run. Errors: ApiError 400, 404, 422."""
        wire = await _parsed(ChatRequest, body)
        target = self.resolve(tenant, wire.model)
        owner = target.owner or tenant
        salt, text = self._directory.cache_salt(owner), self._texts[target.model]
        await self._check_size(body, target, wire.messages)
        default = self._settings[target.model].default_max_tokens

        async def make(wire: ChatRequest, extras: AdapterExtras | None) -> Job:
            filled = self._filled(wire, target, extras)
            return self._checked(
                await chat_job(filled, target, owner, salt, text, default, answer_id, extras)
            )

        async def remake(extras: AdapterExtras, wire: ChatRequest | None = None) -> Job:
            try:
                # Read once more: kept as it was parsed, it takes several times its bytes.
                return await make(wire or await _parsed(ChatRequest, body), extras)
            except TemplateRefused as refusal:
                raise ApiError(400, str(refusal), param="messages") from None

        if target.adapter is None:
            return await remake(NO_EXTRAS, wire)
        try:
            job = await make(wire, text.chats.known(target.adapter) or NO_EXTRAS)
        except TemplateRefused:
            # What is known of the adapter may not be true any more: the engine will tell.
            text.chats.forget(target.adapter)
            job = await make(wire, None)
        return replace(job, remake=remake, kept_bytes=len(body))

    async def completion(self, tenant: TenantConfig, body: bytes, answer_id: str) -> Job:
        """A completion, ready to run. Errors: ApiError 400, 404, 422."""
        wire = await _parsed(CompletionRequest, body)
        target = self.resolve(tenant, wire.model)
        owner = target.owner or tenant
        salt, text = self._directory.cache_salt(owner), self._texts[target.model]
        given = [wire.prompt] if isinstance(wire.prompt, str) else wire.prompt
        for prompt in given:
            if isinstance(prompt, str):
                await self._check_size(body, target, prompt)
        limit, tokenizer = self._max_prompts, text.tokenizer

        async def make(
            wire: CompletionRequest, extras: AdapterExtras, part: PromptPart | None = None
        ) -> Job:
            filled = self._filled(wire, target, extras)
            job = await completion_job(
                filled, target, owner, salt, tokenizer, limit, answer_id, extras, part
            )
            return self._checked(job)

        job = await make(wire, text.chats.known(target.adapter) or NO_EXTRAS)
        bare, part = wire.model_copy(update={"prompt": ""}), job.part
        return replace(job, remake=lambda extras: make(bare, extras, part))

    def _filled(self, wire: _Wire, target: Target, extras: AdapterExtras | None) -> _Wire:
        """The request with what its adapter, then its base model, says of what it leaves open."""
        if extras is not None and self._settings[target.model].generation_defaults:
            wire = with_defaults(wire, dict(extras.sampling))
        return with_defaults(wire, self._defaults[target.model])

    async def _check_size(self, body: bytes, target: Target, prompt: object) -> None:
        """Refuse early what is far too long. Errors: ApiError 400."""
        if len(body) > BIG_BYTES:
            encode = self._texts[target.model].tokenizer.encode
            longest = self._longest[target.model]
            await asyncio.to_thread(check_length, strings(prompt), encode, longest)

    def _checked(self, job: Job) -> Job:
        """Refuse here what no replica can hold: a prompt is millions of integers at worst.

        Errors: ApiError 400.
        """
        longest = self._longest[job.target.model]
        for request in job.requests:
            if longest is not None and len(request.token_ids) > longest:
                raise prompt_too_long(len(request.token_ids), longest)
        return job

    def resolve(self, tenant: TenantConfig, name: str) -> Target:
        """What a name means for this tenant. Errors: ApiError 404."""
        target = self._directory.resolve(tenant, name)
        if target is None:
            if full_names := self._directory.full_names(tenant, name):
                raise ambiguous_model(name, full_names)
            raise model_not_found(name)
        return target


async def _parsed(wire: type[_Wire], body: bytes) -> _Wire:
    """A body as its wire type. Errors: ApiError 400, 422."""
    if len(body) <= BIG_BYTES:
        return wire.parse(body)
    await asyncio.to_thread(check_weight, body)
    return await asyncio.to_thread(wire.parse, body)


def _longest_prompt(model: ModelSettings) -> int | None:
    """The tokens that a model has positions for, as its files say; replicas may hold less."""
    shape = json.loads((Path(model.path) / "config.json").read_text(encoding="utf-8"))
    shape = shape.get("text_config") or shape
    positions = count_positions(shape) if "max_position_embeddings" in shape else 0
    limits = [n for n in (positions, model.engine_config().max_model_len) if n]
    return min(limits, default=None)
