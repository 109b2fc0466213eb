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


class LogprobSpeller:
    """Spells tokens and their log-probabilities with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def chat(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs:
        """`logprobs` of a chat's choice."""
        content = []
        for token_id, entry in zip(token_ids, logprobs, strict=False):
            chosen = self._spell(token_id, entry.chosen)
            top = [self._spell(other, value) for other, value in entry.top]
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
        offset: int = 0,
    ) -> tuple[CompletionLogprobs, int]:
        """`logprobs` of a completion's choice whose text goes on at `offset`; where it ends. A
        token without an entry (a prompt's first) has null."""
        lines = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token_id, entry in zip(token_ids, logprobs, strict=False):
            chosen = self._spell(token_id, entry.chosen if entry else 0.0)
            lines.tokens.append(chosen.token)
            lines.token_logprobs.append(chosen.logprob if entry else None)
            top = [self._spell(other, value) for other, value in entry.top] if entry else []
            best = {line.token: line.logprob for line in reversed(top)}
            lines.top_logprobs.append(best if entry else None)
            lines.text_offset.append(offset)
            offset += len(chosen.token)
        return lines, offset

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

    def _spell(self, token_id: int, logprob: float) -> TopLogprob:
        raw = self._tokenizer.token_bytes(token_id)
        text = raw.decode("utf-8", "replace")
        return TopLogprob(token=text, logprob=_finite(logprob), bytes=list(raw))


def _finite(logprob: float) -> float:
    """JSON has no infinity: OpenAI writes -9999 for what cannot happen."""
    return max(logprob, -9999.0) if logprob == logprob else -9999.0
