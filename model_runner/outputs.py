"""What a request is told: the outputs of an engine, and the words for what is wrong with a request.

Plain values only: nothing here changes any state.
"""

import dataclasses

from adapter_store.errors import AdapterInvalid, AdapterNotFound, StoreFull
from adapter_store.extras import AdapterExtras
from adapter_store.ref import AdapterRef, is_digest
from model_runner.request import (
    ErrorCode,
    FinishReason,
    Request,
    RequestOutput,
    TokenLogprobs,
)
from model_runner.scheduling.sequence import Sequence


def find_fault(request: Request, vocab_size: int, max_len: int) -> tuple[ErrorCode, str] | None:
    """What is wrong with a request as such, for a model of this vocabulary and length; None if
    nothing is."""
    s, ids = request.sampling, request.token_ids
    for name in ("request_id", "tenant_id", "cache_salt", "adapter_digest"):
        if not isinstance(getattr(request, name), str):
            return ErrorCode.BAD_REQUEST, f"{name} must be a string"
    problem = s.problem()
    if problem:
        return ErrorCode.BAD_REQUEST, problem
    if not isinstance(ids, tuple | list):
        return ErrorCode.BAD_REQUEST, f"token_ids must be a tuple, not {type(ids).__name__}"
    if not ids:
        return ErrorCode.BAD_REQUEST, "the prompt is empty"
    if request.adapter is not None and not isinstance(request.adapter, AdapterRef):
        return ErrorCode.BAD_REQUEST, f"adapter must be an AdapterRef, not {request.adapter!r:.60}"
    if not isinstance(request.extras_key, str | None):
        return ErrorCode.BAD_REQUEST, "extras_key must be a string or None"
    if request.adapter_digest and not is_digest(request.adapter_digest):
        text = f"adapter_digest must be a sha256 in hex, not {request.adapter_digest!r:.80}"
        return ErrorCode.BAD_REQUEST, text
    for i in ids:
        if type(i) is not int or not 0 <= i < vocab_size:
            return ErrorCode.BAD_REQUEST, f"token id {i!r:.40} is not in 0..{vocab_size - 1}"
    if any(i >= vocab_size for i in s.stop_ids):
        return ErrorCode.BAD_REQUEST, f"stop_ids must be below {vocab_size}"
    for i, _ in s.logit_bias:
        if i >= vocab_size:
            return ErrorCode.BAD_REQUEST, f"logit_bias: token id {i} is not in 0..{vocab_size - 1}"
    if not request.weight > 0:
        return ErrorCode.BAD_REQUEST, f"weight must be above 0, not {request.weight}"
    if len(ids) >= max_len:
        return (
            ErrorCode.PROMPT_TOO_LONG,
            f"the prompt has {len(ids)} tokens; {max_len - 1} are possible",
        )
    return _find_fault_in_resumed(request, vocab_size, max_len)


def _find_fault_in_resumed(
    request: Request, vocab_size: int, max_len: int
) -> tuple[ErrorCode, str] | None:
    most = max(0, min(request.sampling.max_tokens, max_len - len(request.token_ids)) - 1)
    for index, ids in enumerate(request.resumed):
        if ids is None:
            continue
        if not isinstance(ids, tuple) or len(ids) > most:
            words = f"resumed[{index}] must be None or a tuple of at most {most} token ids"
            return ErrorCode.BAD_REQUEST, words
        for i in ids:
            if type(i) is not int or not 0 <= i < vocab_size:
                words = f"resumed[{index}]: token id {i!r:.40} is not in 0..{vocab_size - 1}"
                return ErrorCode.BAD_REQUEST, words
    return None


def adapter_error(error: Exception) -> tuple[ErrorCode, str]:
    """What a request is told when its adapter cannot be had."""
    codes = (
        (AdapterNotFound, ErrorCode.ADAPTER_NOT_FOUND),
        (AdapterInvalid, ErrorCode.ADAPTER_INVALID),
        (StoreFull, ErrorCode.ADAPTER_TOO_LARGE),
    )
    return next(
        (code for kind, code in codes if isinstance(error, kind)), ErrorCode.ADAPTER_UNAVAILABLE
    ), str(error)


def other_extras(request: Request, extras: AdapterExtras) -> tuple[ErrorCode, str] | None:
    """What is wrong where the prompt was made for other extras than its adapter brings."""
    if request.extras_key in (None, extras.key):
        return None
    words = "the adapter has another chat template or other defaults than the prompt was made for"
    return ErrorCode.OTHER_EXTRAS, words


def make_news(
    life: Sequence,
    tokens: tuple[int, ...],
    logprobs: tuple[TokenLogprobs, ...],
    reason: FinishReason | None = None,
    error: tuple[ErrorCode, str] | None = None,
    prompt_logprobs: tuple[TokenLogprobs, ...] = (),
) -> RequestOutput:
    adapter = life.request.adapter
    return RequestOutput(
        life.request.request_id,
        life.index,
        tokens,
        logprobs,
        reason,
        error[0] if error else None,
        error[1] if error else "",
        life.prompt_len,
        max(0, life.num_cached_tokens),
        life.num_output,
        prompt_logprobs,
        adapter.revision if adapter else "",  # the engine has bound it to a content by now
        life.entered_s - life.submitted_s if life.has_entered else 0.0,
        life.num_discarded,
    )


def make_end(request: Request, index: int, reason: FinishReason) -> RequestOutput:
    ids = request.token_ids
    length = len(ids) if isinstance(ids, tuple | list) else 0  # it may be refused for just that
    return RequestOutput(request.request_id, index, finish_reason=reason, num_prompt_tokens=length)


def make_failure(
    request: Request, index: int, code: ErrorCode, why: str, extras: AdapterExtras | None = None
) -> RequestOutput:
    end = make_end(request, index, FinishReason.ERROR)
    return dataclasses.replace(end, error_code=code, error=why, extras=extras)
