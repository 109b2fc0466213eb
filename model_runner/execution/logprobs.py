"""Log-probabilities: found on the device, on their way to the host, plain values once they are
read.

Only the chosen token's and the best ones' leave the device, never a row of the vocabulary's size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from model_runner.request import TokenLogprobs


def copy_to_host(tensor: Tensor) -> Tensor:
    """A copy that is there once the stream has come so far (a CPU's tensor itself)."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


@dataclass(frozen=True)
class FoundLogprobs:
    """On the host once the stream has come so far: chosen [n] float32 and its rank [n] int64, the
    best ones [n, k] float32 and their ids [n, k] int64."""

    chosen: Tensor
    rank: Tensor
    best: Tensor
    best_ids: Tensor

    def read(self, num_top: Sequence[int]) -> list[TokenLogprobs]:
        """Plain values of each row, with its first num_top best ones."""
        columns = (self.chosen, self.rank, self.best, self.best_ids)
        rows = zip(*(column.tolist() for column in columns), num_top, strict=True)
        return [
            TokenLogprobs(chosen, tuple(zip(ids[:k], best[:k], strict=True)), rank)
            for chosen, rank, best, ids, k in rows
        ]


def find_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> FoundLogprobs:
    """Of the given tokens and of the num_top best. logits [n, V]; token_ids [n], negative = any"""
    log = logits.float().log_softmax(-1)  # [n, V]
    chosen = log.gather(1, token_ids.clamp(min=0)[:, None])  # [n, 1]
    rank = (log > chosen).sum(-1) + 1  # [n]
    best, ids = log.topk(min(num_top, log.shape[-1]), -1)  # [n, k] twice
    return FoundLogprobs(*map(copy_to_host, (chosen[:, 0], rank, best, ids)))


@dataclass(frozen=True)
class SampledLogprobs:
    """Of a step's drawn tokens. places, num_top [n]: which of the step's samples, how many best."""

    found: FoundLogprobs
    places: tuple[int, ...]
    num_top: tuple[int, ...]

    def read(self, num_samples: int) -> tuple[TokenLogprobs | None, ...]:
        """By sample; None for those that did not ask."""
        values: list[TokenLogprobs | None] = [None] * num_samples
        for place, value in zip(self.places, self.found.read(self.num_top), strict=True):
            values[place] = value
        return tuple(values)


@dataclass(frozen=True)
class ScoredPrompt:
    """Of tokens of one row's prompt. `take` gets the logits before them, part by part.

    first  the position of the first such logits;  token_ids [n] int64 on the device
    """

    row: int
    first: int
    token_ids: Tensor
    num_top: int
    parts: list[FoundLogprobs] = field(default_factory=list)

    def take(self, position: int, logits: Tensor) -> None:
        """Logits [m, V] of positions from `position` on."""
        at = position - self.first
        self.parts.append(
            find_logprobs(logits, self.token_ids[at : at + len(logits)], self.num_top)
        )

    def read(self) -> tuple[TokenLogprobs, ...]:
        read = (part.read((self.num_top,) * len(part.chosen)) for part in self.parts)
        return tuple(chain.from_iterable(read))
