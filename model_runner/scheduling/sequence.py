"""`Sequence`: the mutable life of one answer to a request in the engine. The scheduler owns it.

Not for decisions: who runs when is the scheduler's, which page belongs to whom the pool's.
"""

from array import array
from enum import Enum, auto
from hashlib import blake2b
from typing import Protocol

from model_runner.request import FinishReason, Request
from model_runner.scheduling.batch import SamplingRow
from model_runner.scheduling.page_pool import PageTable

PROMPT_COST = 1.0  # what a token adds to its tenant's counter: a decoded one costs about twice
OUTPUT_COST = 2.0


class SequenceStatus(Enum):
    """Where a sequence is. RUNNING: it holds pages and, with an adapter, a slot."""

    WAITING_ADAPTER = auto()
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class SlotLease(Protocol):
    """The right to a resident adapter, given back exactly once."""

    @property
    def index(self) -> int: ...


class Account:
    """What a tenant was served, in weighted tokens over its weight (`fairness`)."""

    __slots__ = ("counter", "num_sequences", "tenant_id")

    def __init__(self, tenant_id: str) -> None:
        self.tenant_id = tenant_id
        self.counter = 0.0
        self.num_sequences = 0


class Sequence:
    """Tokens, and how far they are computed, of sequence `index` of a request.

    token_ids       prompt and output, as far as known on the host
    num_computed    tokens in the cache once every step that was launched has run
    num_pending     tokens that launched steps draw and that are not in token_ids yet
    num_in_flight   launched steps that name it: until their commit its pages and its slot stay
    in_batch        it takes part in the next step (not so if finished, preempted, or full)
    row             its row in the newest step that names it
    next_event      num_computed at which a decode needs more than one more token: a page, its end,
                    min_tokens
    num_given       tokens it came with: the prompt, and the output of a resumed one, which is
                    computed again as after a preemption
    num_cached_tokens  of the prompt, found in the prefix cache when it first entered
    num_lost        tokens that were in the cache when it was last preempted
    num_discarded   tokens drawn for it and thrown away, known when it finishes
    submitted_s, entered_s  on the monotonic clock: when the engine got it, when it first entered
    num_scored      tokens of the prompt whose log-probabilities launched steps give, or which are
                    not wanted; its first has none
    seat            its number among those that take part in steps, -1 = it does not
    Errors: ValueError for an empty prompt or a weight that is not positive.
    """

    __slots__ = (
        "account",
        "arrival",
        "blocked_counter",
        "entered_s",
        "eos_ids",
        "finish_reason",
        "has_entered",
        "in_batch",
        "index",
        "max_tokens_total",
        "next_event",
        "num_cached_tokens",
        "num_charged",
        "num_computed",
        "num_discarded",
        "num_given",
        "num_in_flight",
        "num_lost",
        "num_pending",
        "num_scored",
        "output_cost",
        "page_need",
        "prompt_cost",
        "prompt_len",
        "request",
        "row",
        "sampling_row",
        "seat",
        "seed",
        "seq_id",
        "slot",
        "status",
        "stop_ids",
        "submitted_s",
        "table",
        "token_ids",
        "tried_step",
    )

    def __init__(self, seq_id: int, request: Request, index: int = 0, seed: int = 0) -> None:
        if not request.token_ids:
            raise ValueError(f"request {request.request_id!r} has an empty prompt")
        if not request.weight > 0:
            raise ValueError(f"request {request.request_id!r} has weight {request.weight}")
        self.seq_id = seq_id
        self.request = request
        self.index = index
        self.seed = seed
        self.token_ids = array("q", request.token_ids)
        self.prompt_len = len(self.token_ids)
        if request.resumed:
            self.token_ids.extend(request.resumed[index] or ())
        self.num_given = len(self.token_ids)
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.slot: SlotLease | None = None
        self.num_computed = 0
        self.num_pending = 0
        self.num_in_flight = 0
        self.in_batch = False
        self.row = self.seat = -1
        self.next_event = 0
        self.num_cached_tokens = 0
        self.num_lost = 0
        self.num_discarded = 0
        self.submitted_s = self.entered_s = 0.0
        # What a broken answer goes on from was told with its first part.
        is_new = len(self.token_ids) == self.prompt_len
        wanted = request.sampling.prompt_logprobs is not None and not index and is_new
        self.num_scored = 1 if wanted else self.prompt_len
        self.has_entered = False
        self.num_charged = 0
        self.prompt_cost = PROMPT_COST / request.weight
        self.output_cost = OUTPUT_COST / request.weight
        self.page_need = 0
        self.tried_step = -1
        self.blocked_counter = 0.0
        self.bind(0, PageTable(blake2b(), 0), Account(request.tenant_id), (), 0)

    def bind(
        self,
        arrival: int,
        table: PageTable,
        account: Account,
        eos_ids: tuple[int, ...],
        max_model_len: int,
    ) -> None:
        """What the scheduler knows and the request does not; called once, when it is added."""
        sampling = self.request.sampling
        self.arrival = arrival
        self.table = table
        self.account = account
        self.eos_ids = eos_ids
        self.stop_ids = frozenset(sampling.stop_ids + (() if sampling.ignore_eos else eos_ids))
        self.max_tokens_total = min(self.prompt_len + max(1, sampling.max_tokens), max_model_len)
        self.sampling_row = self.make_sampling_row()

    @property
    def slot_index(self) -> int:
        """The adapter slot, -1 = base model."""
        return -1 if self.slot is None else self.slot.index

    @property
    def num_output(self) -> int:
        """Tokens that were delivered."""
        return len(self.token_ids) - self.prompt_len

    @property
    def num_total(self) -> int:
        """Tokens of which all but the last can be computed: known ones and those being drawn."""
        return len(self.token_ids) + self.num_pending

    @property
    def is_prefilling(self) -> bool:
        """More than its newest token is to be computed before the next can be drawn."""
        return self.num_computed < self.num_total - 1 or self.num_total == self.num_given

    @property
    def bans_end(self) -> bool:
        """The token to be drawn next comes before min_tokens."""
        return self.num_total - self.prompt_len < self.request.sampling.min_tokens

    def make_sampling_row(self) -> SamplingRow:
        """What the sampler needs for the next token; before min_tokens every end is banned."""
        s = self.request.sampling
        banned = tuple(sorted({*s.stop_ids, *self.eos_ids})) if self.bans_end else ()
        return SamplingRow(
            s.temperature,
            s.top_p,
            s.top_k,
            self.seed,
            self.index,
            s.logprobs,
            banned,
            s.mask,
            s.min_p,
            s.repetition_penalty,
            s.presence_penalty,
            s.frequency_penalty,
            s.logit_bias,
        )

    def plan_event(self, capacity: int) -> None:
        """Set next_event. capacity: tokens that its pages hold. With a mask every step is one."""
        event = min(capacity, self.max_tokens_total - 1)
        if self.sampling_row.banned_ids:
            event = min(event, self.prompt_len + self.request.sampling.min_tokens - 1)
        self.next_event = -1 if self.request.sampling.mask else event

    def reason_to_finish(self) -> FinishReason | None:
        """Whether the newest token is the last one. It is delivered, also if it is a stop id."""
        ids, sampling = self.token_ids, self.request.sampling
        is_counted = sampling.min_tokens < self.num_output <= sampling.max_tokens
        if ids[-1] in self.stop_ids and is_counted:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(ids) >= self.max_tokens_total else None
