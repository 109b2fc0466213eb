"""`ScheduledBatch`: one step's decision, as every worker gets it. Host integers, frozen, small.

A batch is columns, not a list of objects: `inputs` turns a column into a tensor with no loop per
token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What the sampler needs for a row that gives a token, apart from the position of the token.

    One object serves a sequence for many steps (a second one from `min_tokens` on, without
    banned_ids), so what is derived from it may be kept by identity. Draws depend on (seed, index,
    position): see `ScheduledBatch.position`. The meaning of each is `SamplingParams`'s.
    """

    temperature: float
    top_p: float
    top_k: int
    seed: int
    index: int
    logprobs: int | None = None
    banned_ids: tuple[int, ...] = ()
    mask: str = ""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    is_plain: bool = field(init=False)  # temperature alone: looked at in every step

    @property
    def has_penalties(self) -> bool:
        """Whether the draw depends on which tokens came before, and how often."""
        no_others = self.presence_penalty == self.frequency_penalty == 0
        return self.repetition_penalty != 1 or not no_others

    @property
    def is_cut(self) -> bool:
        """Whether it draws from the best tokens alone; the best one itself is the same."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)

    def __post_init__(self) -> None:
        is_edited = self.banned_ids or self.logit_bias or self.mask or self.has_penalties
        is_narrow = self.is_cut or (self.temperature > 0 and self.min_p > 0)
        plain = not is_edited and not is_narrow and self.logprobs is None
        object.__setattr__(self, "is_plain", plain)


@dataclass(frozen=True, slots=True)
class History:
    """The tokens of a row with penalties, told once, in the step that draws its first token since
    it entered: what is drawn from then on is counted on the device.

    seat  the row's, see `ScheduledBatch.seats`
    token_ids  its prompt, of prompt_len tokens, then its output so far
    """

    row: int
    seat: int
    token_ids: tuple[int, ...]
    prompt_len: int


@dataclass(frozen=True, slots=True)
class PromptScore:
    """Tokens of a prompt whose log-probabilities are wanted: those that follow the row's query
    tokens first, first + 1, ...; and how many of the best beside each."""

    row: int
    first: int
    token_ids: tuple[int, ...]
    num_top: int


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step: S rows, one a sequence, decodes first, then prefill chunks.

    step            counts calls of `schedule()` from 0, those too that gave no step
    seq_ids         [S] the engine's numbers of the sequences
    num_tokens      [S] query tokens of the row (1 = decode)
    starts          [S] position of the row's first query token (= tokens already in the cache)
    token_ids       [S] num_tokens ids of each row; none: the row's one token is the one that
                    `sources` names
    sources         [S] row of the previous step whose sampled token is this row's input, -1 =
                    token_ids has it
    slots           [S] adapter slot, -1 = base model
    seats           [S] the sequence's number among those that take part in steps, below the most
                    that may; another sequence's as soon as it has left
    pages           [G][S] page ids of the row by KV group, index = position // page_tokens; freed
                    ones (window) are 0
    samples         [S] a SamplingRow where the row gives a token, else None
    histories       of the rows with penalties that give their first token since they entered
    prompt_scores   of the rows whose prompt's log-probabilities are wanted
    tokens are those of the rows, one after the other: T = sum(num_tokens).

    For inputs that keep tables from step to step: a sequence keeps its seat while it takes part,
    but not its row (the last decode row moves into the place of one that left). The lists in
    `pages` are the scheduler's own (all groups of a row are equally long): read them before the
    next `schedule()`. While a sequence stays in consecutive steps its lists change only in steps
    where they grow: new ids at the end, and at the front some set to 0. A sequence that was left
    out of a step may come back with other pages.
    """

    step: int
    seq_ids: tuple[int, ...]
    num_tokens: tuple[int, ...]
    starts: tuple[int, ...]
    token_ids: tuple[Sequence[int], ...]
    sources: tuple[int, ...]
    slots: tuple[int, ...]
    seats: tuple[int, ...]
    pages: tuple[tuple[list[int], ...], ...]
    samples: tuple[SamplingRow | None, ...]
    histories: tuple[History, ...] = ()
    prompt_scores: tuple[PromptScore, ...] = ()

    def position(self, row: int) -> int:
        """Position of the token that the row's sample draws: the one after its last query token."""
        return self.starts[row] + self.num_tokens[row]
