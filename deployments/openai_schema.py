"""The wire types of OpenAI's API as far as this service speaks it, and nothing else.

Requests name every field that is understood. Those that are known but not supported pass with the
values alone that mean "not used", and a field nobody knows is refused by its name: what would
change an answer is never silently left out.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
)

from deployments.api_errors import ApiError

Number = StrictFloat | StrictInt
TokenIds = Annotated[list[Annotated[StrictInt, Field(ge=0)]], Field(min_length=1, fail_fast=True)]
# A list is given up at its first wrong item: an error line for each of a million costs gigabytes.
Texts = Annotated[list[StrictStr], Field(fail_fast=True)]

_NO_EFFECT = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "parallel_tool_calls",
)  # fmt: skip
"""Fields that change no answer: accepted and left alone."""

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
    "echo": (None, False),
    "suffix": (None, ""),
    "best_of": (None, 1),
}
"""Fields of the API that are not supported, with the values that mean "not used"."""


class _Wire(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)


class StreamOptions(BaseModel):
    """include_usage  a last chunk without choices that bears the usage."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    include_usage: StrictBool = False
    include_obfuscation: Literal[False] = False


class _GenerationRequest(_Wire):
    model: StrictStr = Field(min_length=1, max_length=512)
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: StrictInt | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: StrictInt | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    prompt_logprobs: StrictInt | None = None
    seed: StrictInt | None = None
    n: StrictInt | None = None
    stop: StrictStr | Texts | None = None
    stop_token_ids: Annotated[list[StrictInt], Field(fail_fast=True)] | None = None
    min_tokens: StrictInt | None = None
    ignore_eos: StrictBool | None = None

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """A body as it came. Errors: ApiError 400, or 422 where a field has the wrong type."""
        try:
            wire = cls.model_validate_json(body)
        except ValidationError as exc:
            raise _malformed(exc) from None
        field = wire._unsupported()
        if field is not None:
            words = (
                "supported by this service with that value" if field in _NEUTRAL else "known here"
            )
            raise ApiError(
                400, f"`{field:.80}` is not {words}", param=field[:80], code="unsupported_parameter"
            )
        if wire.model_extra:
            wire.model_extra.clear()  # of any size, and nobody looks at them again
        return wire

    def _unsupported(self) -> str | None:
        """The first field that would change the answer and is not supported, or None."""
        for name, value in (self.model_extra or {}).items():
            neutral = _NEUTRAL.get(name)
            if name in _NO_EFFECT or (neutral is not None and _is_one_of(value, neutral)):
                continue
            return name
        return None

    def stop_strings(self) -> tuple[str, ...]:
        """As many as came, empty ones too."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatRequest(_GenerationRequest):
    """Body of /v1/chat/completions. Messages are checked by the chat template's own door."""

    messages: list[dict[str, Any]] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None


class CompletionRequest(_GenerationRequest):
    """Body of /v1/completions. A prompt is text, texts, token ids, or lists of token ids."""

    prompt: StrictStr | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)] | Texts
    logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    echo: StrictBool | None = None
    best_of: StrictInt | None = None


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True)


class PromptDetails(_Answer):
    cached_tokens: int = 0


class Usage(_Answer):
    """Tokens of one HTTP request, all prompts and all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class TopLogprob(_Answer):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Answer):
    content: list[TokenLogprob]


class PromptLogprob(_Answer):
    """As vLLM writes it. rank  1 = nothing is better."""

    logprob: float
    rank: int
    decoded_token: str


class ChatMessage(_Answer):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ReasonedMessage(ChatMessage):
    """Of a model that tells its reasoning apart: under both of the names that vLLM gave it."""

    reasoning_content: str
    reasoning: str


class ChatChoice(_Answer):
    index: int
    message: ReasonedMessage | ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None


class ChatAnswer(_Answer):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


class CompletionLogprobs(_Answer):
    """A prompt's first token, in an echo, has null for its log-probabilities."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(_Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


class CompletionAnswer(_Answer):
    """The whole answer, and a chunk of a streamed one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ModelCard(_Answer):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    parent: str | None = None


class ModelList(_Answer):
    object: Literal["list"] = "list"
    data: list[ModelCard]


def _is_one_of(value: object, allowed: tuple[object, ...]) -> bool:
    return any(
        value == item and isinstance(value, bool) == isinstance(item, bool) for item in allowed
    )


def _malformed(exc: ValidationError) -> ApiError:
    problem: Mapping[str, Any] = exc.errors(include_url=False, include_context=False)[0]
    if problem["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {problem['msg']}", code="invalid_json")
    where = [str(part) for part in problem["loc"]]
    missing = problem["type"] == "missing"
    return ApiError(
        400 if missing else 422,
        f"{'.'.join(where) or 'the body'}: {problem['msg']}"[:500],
        param=where[0] if where else None,
        code="missing_parameter" if missing else "invalid_type",
    )
