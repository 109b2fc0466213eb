"""What goes into the engine and what comes out: frozen plain values that cross processes. No torch,
no text."""

from dataclasses import dataclass, field
from enum import StrEnum

from adapter_store.extras import AdapterExtras
from adapter_store.ref import AdapterRef

MAX_IDS = 1024  # of one logit_bias, and of one request's stop ids


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class ErrorCode(StrEnum):
    """What was wrong, when finish_reason is ERROR. The ingress maps these to statuses in one
    table."""

    BAD_REQUEST = "bad_request"
    PROMPT_TOO_LONG = "prompt_too_long"
    ADAPTER_NOT_FOUND = "adapter_not_found"
    ADAPTER_INVALID = "adapter_invalid"
    ADAPTER_UNAVAILABLE = "adapter_unavailable"
    ADAPTER_TOO_LARGE = "adapter_too_large"
    OTHER_EXTRAS = "other_extras"
    NOT_FINITE = "not_finite"
    OVERLOADED = "overloaded"
    NO_ROOM = "no_room"
    ENGINE_DEAD = "engine_dead"
    REPLICAS_LOST = "replicas_lost"


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn: bias, penalties, temperature, min_p, top_k, top_p, in this order.

    temperature 0 is greedy. top_p in (0, 1]; top_k 0 = all; min_p: tokens of less than min_p times
    the best one's probability are left out. seed None: drawn once by the engine for the request.
    repetition_penalty  r: logits above 0 of tokens in prompt or output are divided by r, others
                        multiplied
    presence_penalty, frequency_penalty  taken from the logits of tokens in the output: once, and
                        once for each time
    logit_bias  (token id, what is added to its logit), each id once
    stop_ids end the request (the id is delivered); min_tokens forbids them (and end-of-text) before
    that many;
    ignore_eos leaves out the model's own end-of-text ids. logprobs None = none, n = the chosen
    token's and the n best. prompt_logprobs  the same of the prompt's tokens, all but its first,
    told with the first token of sequence 0; its prompt then takes nothing from the prefix cache.
    max_tokens 0: nothing but the prompt is computed, and no token told.
    n  number of sequences for one prompt; sequence i draws with (seed, i, position).
    mask  name of a token mask registered with the engine (`Engine.masks`), "" = none.
    Errors:  `problem()` says what is out of range, in words for the user.
    Source:  presence and frequency: OpenAI's API reference. Repetition: CTRL, arXiv 1909.05858
             (section 4.1); for logits below 0 as vLLM does it. min_p: arXiv 2407.01082.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    mask: str = ""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    prompt_logprobs: int | None = None

    def problem(self) -> str | None:
        """What is wrong with these values, or None. Types are checked too: JSON brings anything."""
        checks = (
            (
                "temperature",
                _is_number(self.temperature) and 0 <= self.temperature <= 100,
                "a number in [0, 100]",
            ),
            ("top_p", _is_number(self.top_p) and 0 < self.top_p <= 1, "a number in (0, 1]"),
            ("top_k", _is_int(self.top_k) and 0 <= self.top_k < 2**31, "an integer in 0..2^31 - 1"),
            ("min_p", _is_number(self.min_p) and 0 <= self.min_p <= 1, "a number in [0, 1]"),
            (
                "repetition_penalty",
                _is_number(self.repetition_penalty) and 0.01 <= self.repetition_penalty <= 100,
                "a number in [0.01, 100]",
            ),
            (
                "presence_penalty",
                _is_number(self.presence_penalty) and -2 <= self.presence_penalty <= 2,
                "a number in [-2, 2]",
            ),
            (
                "frequency_penalty",
                _is_number(self.frequency_penalty) and -2 <= self.frequency_penalty <= 2,
                "a number in [-2, 2]",
            ),
            (
                "logit_bias",
                _is_bias(self.logit_bias),
                f"at most {MAX_IDS} pairs of a token id, each once, and a number in [-100, 100]",
            ),
            (
                "seed",
                self.seed is None or (_is_int(self.seed) and -(2**63) <= self.seed < 2**63),
                "a 64-bit integer",
            ),
            ("ignore_eos", isinstance(self.ignore_eos, bool), "true or false"),
            ("max_tokens", _is_int(self.max_tokens) and self.max_tokens >= 0, "an integer >= 0"),
            ("min_tokens", _is_int(self.min_tokens) and self.min_tokens >= 0, "an integer >= 0"),
            (
                "stop_ids",
                isinstance(self.stop_ids, tuple)
                and len(self.stop_ids) <= MAX_IDS
                and all(_is_int(i) and i >= 0 for i in self.stop_ids),
                f"a tuple of at most {MAX_IDS} token ids >= 0",
            ),
            (
                "logprobs",
                self.logprobs is None or (_is_int(self.logprobs) and 0 <= self.logprobs <= 20),
                "in 0..20",
            ),
            (
                "prompt_logprobs",
                self.prompt_logprobs is None
                or (_is_int(self.prompt_logprobs) and 0 <= self.prompt_logprobs <= 20),
                "an integer in 0..20",
            ),
            ("n", _is_int(self.n) and 1 <= self.n <= 128, "an integer in 1..128"),
        )
        for name, ok, want in checks:
            if not ok:
                return f"{name} must be {want}, not {getattr(self, name)!r:.60}"
        if self.min_tokens > self.max_tokens:
            return f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})"
        return None


@dataclass(frozen=True)
class Request:
    """One prompt for the engine.

    request_id  unique in the engine;  adapter None = the base model;  weight = the tenant's share
                when tenants compete;
    cache_salt  seeds the prefix hash: pages are shared only between requests of one salt.
    adapter_digest  the content that its adapter must have, as a `RequestOutput` told it: another
                is never used in its place. "" = what the adapter's uri holds now.
    resumed     () = a new request; else one entry for each of its n sequences, of an answer that
                broke off: the ids that were delivered of it, or None where it had ended. What comes
                out are the ids after those, as if it had never broken off (with the same seed).
    extras_key  `AdapterExtras.key` that the prompt and its sampling were made with. Where the
                adapter brings others, the request is refused (OTHER_EXTRAS, with those). None =
                whatever it brings, the ids are as wanted.
    may_evict   False: its adapter takes a slot only if none has to leave for it; where that cannot
                be, the request is refused (NO_ROOM) instead of waiting.
    Errors: ValueError if `resumed` has not n entries, or none that is to run.
    """

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    adapter: AdapterRef | None = None
    tenant_id: str = ""
    weight: float = 1.0
    cache_salt: str = ""
    adapter_digest: str = ""
    resumed: tuple[tuple[int, ...] | None, ...] = ()
    may_evict: bool = True
    extras_key: str | None = None

    def __post_init__(self) -> None:
        if self.resumed and (len(self.resumed) != self.sampling.n or not self.indices):
            raise ValueError(f"{len(self.indices)} of n = {self.sampling.n} sequences to resume")

    @property
    def indices(self) -> tuple[int, ...]:
        """Which of its n sequences are to run."""
        if not self.resumed:
            return tuple(range(self.sampling.n))
        return tuple(index for index, ids in enumerate(self.resumed) if ids is not None)


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of the model's distribution, before everything of `SamplingParams`, at one
    position.

    chosen  of the token that was drawn, or that stands in the prompt;  top  the best ones, (token
            id, logprob), best first;  rank  how many tokens are better than the chosen one, and 1
    """

    chosen: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 1


@dataclass(frozen=True)
class RequestOutput:
    """News of one sequence of one request, as one step made it. finish_reason is None until the
    last one.

    index  which of the n sequences;  num_prompt_tokens, num_cached_tokens (of the prompt, found in
           the prefix cache),
    num_output_tokens  so far.  error_code and error go with FinishReason.ERROR.
    queue_s  from the engine's submit until it first had its adapter, its pages and its turn
    num_discarded_tokens  of the last output: drawn for this sequence and thrown away
    attempt  which replica in turn serves the request, for whoever asks a second one
    prompt_logprobs  of the prompt's tokens from its second on, in the first output of sequence 0
    adapter_digest  the content of its adapter ("" = no adapter, or not known yet).
    extras  with OTHER_EXTRAS: what the adapter brings
    """

    request_id: str
    index: int = 0
    new_token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error_code: ErrorCode | None = None
    error: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    adapter_digest: str = ""
    queue_s: float = 0.0
    num_discarded_tokens: int = 0
    attempt: int = 1
    extras: AdapterExtras | None = None

    def __reduce__(self) -> tuple[type["RequestOutput"], tuple[object, ...]]:
        """Pickled by position: these cross two processes for every message of every stream."""
        return type(self), tuple(self.__dict__.values())


@dataclass
class Completion:
    """What `Engine.generate` gives for one sequence: all outputs of one (request, index),
    joined."""

    request_id: str
    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error_code: ErrorCode | None = None
    error: str = ""
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def add(self, output: RequestOutput) -> None:
        """Join one more."""
        self.token_ids += output.new_token_ids
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.num_cached_tokens = output.num_cached_tokens
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            self.error_code, self.error = output.error_code, output.error


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _is_bias(value: object) -> bool:
    if not isinstance(value, tuple) or len(value) > MAX_IDS:
        return False
    pairs = [pair for pair in value if isinstance(pair, tuple) and len(pair) == 2]
    ok = all(_is_int(i) and i >= 0 and _is_number(x) and -100 <= x <= 100 for i, x in pairs)
    return ok and len(pairs) == len(value) == len({i for i, _ in pairs})
