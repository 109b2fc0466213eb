"""An engine without a model: ready tokens, at a pace that the request asks for. No torch.

For tests of what stands around an engine, and for measuring the path without one.
"""

import time
from dataclasses import dataclass, field

from adapter_store.sources.source import S3Options
from model_runner.config import EngineConfig
from model_runner.request import FinishReason, Request, RequestOutput
from model_runner.stats import EngineStats

FIRST_ID, NUM_IDS = 300, 1000
_SEED_BITS = 31


def pace_seed(first_s: float, step_s: float) -> int:
    """The sampling seed that asks for a first token after `first_s` and a step every `step_s`."""
    return (int(first_s * 1e6) << _SEED_BITS) | int(step_s * 1e6)


@dataclass
class _Life:
    request: Request
    due: float  # when its first token is
    step_s: float
    sent: int = 0


@dataclass
class _Counts:
    steps: int = 0
    tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)


class ReadyEngine:
    """One token a step for each request. A request without a seed gets them as fast as it goes."""

    targets = ()
    dtype = None
    num_gpus = 0
    is_stepping = True

    def __init__(self, config: EngineConfig | None = None, s3: S3Options | None = None) -> None:
        self._lives: dict[str, _Life] = {}
        self._ended: list[RequestOutput] = []
        self._counts = _Counts()
        self._next_step = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._lives or self._ended)

    def submit(self, request: Request) -> None:
        seed = request.sampling.seed or 0
        first_s, step_s = (seed >> _SEED_BITS) / 1e6, (seed & ((1 << _SEED_BITS) - 1)) / 1e6
        self._lives[request.request_id] = _Life(request, time.monotonic() + first_s, step_s)

    def abort(self, request_id: str, index: int | None = None) -> None:
        if self._lives.pop(request_id, None) is not None:
            self._ended.append(RequestOutput(request_id, finish_reason=FinishReason.ABORT))

    def step(self) -> list[RequestOutput]:
        self._counts.steps += 1
        lives, now = self._lives.values(), time.monotonic()
        begun = [life for life in lives if life.sent]
        start = self._next_step if begun else min((life.due for life in lives), default=now)
        start = min([start, *(life.due for life in lives if not life.sent)])
        if start > now:
            time.sleep(start - now)
            now = start
        outputs, self._ended = self._ended, []
        is_step = now >= self._next_step
        for life in list(lives):
            if (life.sent and is_step) or (not life.sent and life.due <= now):
                outputs.append(self._advance(life))
        if is_step and lives:
            # A late step does not hurry those after it, as a device's would not.
            step_s = max(life.step_s for life in lives)
            late = time.monotonic() - now
            self._next_step = now + step_s + (late if late > step_s else 0.0)
        return outputs

    def _advance(self, life: _Life) -> RequestOutput:
        life.sent += 1
        self._counts.tokens += 1
        request = life.request
        end = FinishReason.LENGTH if life.sent >= request.sampling.max_tokens else None
        if end is not None:
            del self._lives[request.request_id]
            self._counts.finished[end] = self._counts.finished.get(end, 0) + 1
        return RequestOutput(
            request.request_id,
            0,
            (FIRST_ID + life.sent % NUM_IDS,),
            finish_reason=end,
            num_prompt_tokens=len(request.token_ids),
            num_output_tokens=life.sent,
        )

    def stats(self) -> EngineStats:
        counts = self._counts
        return EngineStats(
            num_steps=counts.steps,
            sampled_tokens=counts.tokens,
            delivered_tokens=counts.tokens,
            finished=dict(counts.finished),
            running=len(self._lives),
        )

    def close(self) -> None:
        self._lives.clear()
