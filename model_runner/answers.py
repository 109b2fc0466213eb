"""The answers under way: the sequences of each request, what they are told, what was told in all.

Not here: the words for it (outputs.py), who runs when (scheduling/).
"""

from collections import Counter
from collections.abc import Iterable

from model_runner.outputs import adapter_error, make_news
from model_runner.request import ErrorCode, FinishReason, RequestOutput, TokenLogprobs
from model_runner.scheduling.scheduler import Update
from model_runner.scheduling.sequence import Sequence


class Answers:
    """Each sequence is opened once and finished once; in between it is told its tokens.

    num_delivered  tokens told, of all tenants;  by_tenant  of each;  finished  sequences by reason
    """

    def __init__(self) -> None:
        self.num_delivered = 0
        self.by_tenant = Counter[str]()
        self.finished = Counter[str]()
        self._open: dict[str, list[Sequence]] = {}
        self._scores: dict[int, list[TokenLogprobs]] = {}  # of prompts, as far as they have come
        self._outputs: list[RequestOutput] = []

    def __bool__(self) -> bool:
        """Whether any is open, or something is still to be told."""
        return bool(self._open or self._outputs)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def open(self, seq: Sequence) -> None:
        """A new one."""
        self._open.setdefault(seq.request.request_id, []).append(seq)
        if seq.request.sampling.prompt_logprobs is not None:
            self._scores[seq.seq_id] = []

    def of(self, request_id: str) -> list[Sequence]:
        """The sequences of a request that are open."""
        return list(self._open.get(request_id, ()))

    def add_scores(self, seq_id: int, scores: Iterable[TokenLogprobs]) -> None:
        """Of the next tokens of its prompt; nothing happens if it has ended."""
        if seq_id in self._scores:
            self._scores[seq_id] += scores

    def add(self, outputs: Iterable[RequestOutput]) -> None:
        """To be told as they are, to requests that have no open sequence."""
        self._outputs += outputs

    def tell(self, update: Update, logprobs: tuple[TokenLogprobs | None, ...] | None) -> None:
        """What the scheduler says of a sequence. logprobs  of its step, None = of no row"""
        seq, token = update.seq, update.token
        if token is not None:
            found = logprobs[update.sample_idx] if logprobs is not None else None
            self.num_delivered += 1
            self.by_tenant[seq.request.tenant_id] += 1
            if update.finish_reason is None:
                scores = self._scores.pop(seq.seq_id, ()) if self._scores else ()
                logprob = (found,) if found else ()
                news = make_news(seq, (token,), logprob, prompt_logprobs=tuple(scores))
                self._outputs.append(news)
                return
            self.finish(seq, update.finish_reason, (token,), (found,) if found else ())
            return
        assert update.finish_reason is not None
        if update.error is not None:
            self.finish(seq, FinishReason.ERROR, error=adapter_error(update.error))
        elif update.finish_reason is FinishReason.ERROR:
            words = "the model gave logits that are not finite"
            self.finish(seq, FinishReason.ERROR, error=(ErrorCode.NOT_FINITE, words))
        else:
            self.finish(seq, update.finish_reason)

    def finish(
        self,
        seq: Sequence,
        reason: FinishReason,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        error: tuple[ErrorCode, str] | None = None,
    ) -> None:
        """The end of one. tokens, logprobs  its last;  error  with FinishReason.ERROR"""
        self.finished[str(reason)] += 1
        scores = tuple(self._scores.pop(seq.seq_id, ()))
        self._outputs.append(make_news(seq, tokens, logprobs, reason, error, scores))
        mine = self._open[seq.request.request_id]
        mine.remove(seq)
        if not mine:
            del self._open[seq.request.request_id]

    def take(self) -> list[RequestOutput]:
        """What is to be told since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def forget_counts(self) -> None:
        """Count from zero."""
        self.num_delivered = 0
        self.by_tenant.clear()
        self.finished.clear()
