"""Log-probabilities as OpenAI's API spells them, and those of prompts as vLLM's does.

Not here: where they come from, and the answers around them (streaming.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from deployments.openai_schema import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    TokenLogprob,
    TopLogprob,
)
from model_runner.request import TokenLogprobs
from model_runner.tokenizer import Tokenizer

PromptEntries = list[dict[str, PromptLogprob] | None]


@dataclass(frozen=True)
class PromptPart:
    """What an answer holds of its prompts.

    num_choices  of each prompt;  token_ids  by prompt;  texts  the echo, by prompt: () = none
    num_echoed  best tokens beside each echoed one, None = no log-probabilities in the echo
    num_told    the same for `prompt_logprobs`, None = no such field
    """

    num_choices: int
    token_ids: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...] = ()
    num_echoed: int | None = None
    num_told: int | None = None


@dataclass
class TextSoFar:
    """How far the spelled tokens of one choice have come.

    offset  its characters;  is_empty  whether the next token begins a text
    """

    offset: int = 0
    is_empty: bool = True


class LogprobSpeller:
    """Spells tokens and their log-probabilities with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def after(self, token_ids: Sequence[int]) -> TextSoFar:
        """Of a choice that goes on with the text of these."""
        return TextSoFar(is_empty=not self._tokenizer.text_end(token_ids))

    def chat(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], so_far: TextSoFar
    ) -> ChatLogprobs:
        """`logprobs` of a chat's choice, which goes on from `so_far`; that is moved on."""
        content = []
        for token_id, entry in zip(token_ids, logprobs, strict=False):
            begins = so_far.is_empty
            chosen = self._spell(token_id, entry.chosen, begins)
            top = [self._spell(other, value, begins) for other, value in entry.top]
            self._advance(so_far, token_id, chosen)
            content.append(
                TokenLogprob(
                    token=chosen.token,
                    logprob=chosen.logprob,
                    bytes=chosen.bytes,
                    top_logprobs=top,
                )
            )
        return ChatLogprobs(content=content)

    def completion(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs | None],
        so_far: TextSoFar,
    ) -> CompletionLogprobs:
        """`logprobs` of a completion's choice, which goes on from `so_far`; that is moved on. A
        token without an entry (a prompt's first) has null."""
        lines = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token_id, entry in zip(token_ids, logprobs, strict=False):
            begins = so_far.is_empty
            chosen = self._spell(token_id, entry.chosen if entry else 0.0, begins)
            lines.tokens.append(chosen.token)
            lines.token_logprobs.append(chosen.logprob if entry else None)
            others = entry.top if entry else ()
            top = [self._spell(other, value, begins) for other, value in others]
            best = {line.token: line.logprob for line in reversed(top)}
            lines.top_logprobs.append(best if entry else None)
            lines.text_offset.append(so_far.offset)
            self._advance(so_far, token_id, chosen)
        return lines

    def prompt(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], num_top: int
    ) -> PromptEntries:
        """`prompt_logprobs`: by token, those of the best ones and of itself; the first has none."""
        found: PromptEntries = [None]
        for token_id, entry in zip(token_ids[1:], logprobs, strict=False):
            ranked = [(i, value, rank) for rank, (i, value) in enumerate(entry.top[:num_top], 1)]
            spelled: dict[str, PromptLogprob] = {}
            for i, value, rank in [(token_id, entry.chosen, entry.rank), *ranked]:
                line = self._spell(i, value)
                spelled.setdefault(
                    str(i),
                    PromptLogprob(logprob=line.logprob, rank=rank, decoded_token=line.token),
                )
            found.append(spelled)
        return found

    def _advance(self, so_far: TextSoFar, token_id: int, spelled: TopLogprob) -> None:
        so_far.offset += len(spelled.token)
        so_far.is_empty = so_far.is_empty and not self._tokenizer.text_end((token_id,))

    def _spell(self, token_id: int, logprob: float, begins: bool = False) -> TopLogprob:
        raw = self._tokenizer.token_bytes(token_id, begins)
        text = raw.decode("utf-8", "replace")
        return TopLogprob(token=text, logprob=_finite(logprob), bytes=list(raw))


def _finite(logprob: float) -> float:
    """JSON has no infinity: OpenAI writes -9999 for what cannot happen."""
    return max(logprob, -9999.0) if logprob == logprob else -9999.0
