"""How far a request's answer has come, so that another replica can go on with it.

Plain values. Not for text: these are the ids that came from the replica, also those that the text
layer still holds back.
"""

from dataclasses import replace

from model_runner.request import ErrorCode, FinishReason, Request, RequestOutput


class Progress:
    """The ids that were delivered of each sequence, which sequences have ended, and the content of
    the adapter, which another replica must have as well.

    attempt  which run of the request this is, from 1; 0 = none yet
    mark     of a request that may have been run before, with another prompt
    Each run has an id of its own in the engines, so that what is left of one cannot be taken for
    another's.
    """

    def __init__(self, request: Request, mark: str = "") -> None:
        self.request = request
        self.attempt = 0
        self._mark = mark
        self._ids: dict[int, tuple[int, ...]] = {
            index: (request.resumed[index] or ()) if request.resumed else ()
            for index in request.indices
        }
        self._open = set(self._ids)
        self._num_cached: dict[int, int] = {}
        self._digest = request.adapter_digest

    @property
    def has_begun(self) -> bool:
        """A replica has had it, or something came of it before: it is not to be refused any
        more."""
        return self.attempt > 0 or bool(self._num_cached)

    @property
    def has_ended(self) -> bool:
        return not self._open

    @property
    def name(self) -> str:
        """The present attempt's id in its engine."""
        number = str(self.attempt) if self.attempt > 1 else ""
        return "/".join(filter(None, (self.request.request_id, self._mark, number)))

    def next_attempt(self) -> Request:
        """What is left to do, for another engine."""
        self.attempt += 1
        n = self.request.sampling.n
        left = tuple(self._ids[i] if i in self._open else None for i in range(n))
        return replace(
            self.request,
            request_id=self.name,
            resumed=() if left == ((),) * n else left,
            adapter_digest=self._digest,
        )

    def take(self, output: RequestOutput) -> RequestOutput:
        """Note an output of the present attempt; as the request's own, whatever attempt it is."""
        index = output.index
        self._digest = output.adapter_digest or self._digest
        self._ids[index] = self._ids.get(index, ()) + output.new_token_ids
        if output.finish_reason is not None:
            self._open.discard(index)
        # What a later attempt finds in its cache was paid for by the first.
        num_cached = self._num_cached.setdefault(index, output.num_cached_tokens)
        return replace(
            output,
            request_id=self.request.request_id,
            num_cached_tokens=num_cached,
            attempt=max(1, self.attempt),
        )

    def failure(self, code: ErrorCode, words: str) -> RequestOutput:
        """The whole request ends here."""
        return RequestOutput(
            self.request.request_id,
            min(self._open),
            finish_reason=FinishReason.ERROR,
            error_code=code,
            error=words,
        )

    def end(self, index: int) -> None:
        """Nobody wants more of this sequence."""
        self._open.discard(index)
