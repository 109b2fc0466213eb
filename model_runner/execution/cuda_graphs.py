"""Whole-step CUDA graphs, by padded size: decode steps (two each: with LoRA on every target, and
without the seldom ones) and steps with prompt chunks.

A graph reads one static device copy of a `HostBuffer`: replaying is one copy and one launch,
instead of some thirty launches a layer from Python, which take longer than a prompt does on the
device. Not for steps whose every logit is wanted: those run eagerly.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from model_runner.execution.inputs import HostBuffer

StepFn = Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]]


class GraphKey(NamedTuple):
    """Which graph. is_decode: one token a row, `size` rows; else `size` tokens. seldom: it adds the
    LoRA of seldom targets."""

    is_decode: bool
    size: int
    seldom: bool


def decode_sizes(most: int) -> tuple[int, ...]:
    """Batch sizes to capture: powers of two to 8, then multiples of 8, so that padding wastes
    little."""
    sizes = [s for s in (1, 2, 4, 8, *range(16, 65, 8), *range(80, most + 16, 16)) if s < most]
    return (*sizes, most)


def mixed_sizes(most: int) -> tuple[int, ...]:
    """Token counts of steps with prompt chunks: steps of 64 to 256, of 128 to 2048, then of
    512."""
    sizes = (*range(64, 256, 64), *range(256, 2048, 128), *range(2048, most, 512))
    return (*(s for s in sizes if s < most), most)


def fit(sizes: tuple[int, ...], number: int) -> int:
    """The smallest size that holds `number`, 0 if none does."""
    at = bisect_left(sizes, number)
    return sizes[at] if at < len(sizes) else 0


@dataclass(frozen=True)
class _Captured:
    graph: "torch.cuda.CUDAGraph"
    memory: Tensor
    logits: Tensor
    tokens: Tensor


class StepGraphs:
    """Captured steps. All share one memory pool: only one runs at a time."""

    def __init__(self) -> None:
        self._captured: dict[GraphKey, _Captured] = {}
        self._pool: Any = None
        self._logits: Tensor | None = None  # of all steps with prompt chunks

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._captured

    def capture(self, key: GraphKey, buffer: HostBuffer, step: StepFn) -> None:
        """Run `step` on a buffer of dummies until its kernels are compiled, then capture it."""
        memory = buffer.memory.to("cuda")
        views = buffer.device_views(memory)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.inference_mode(), torch.cuda.stream(side):
            for _ in range(2):
                logits, _ = step(views)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        if not key.is_decode and self._logits is None:
            self._logits = torch.empty_like(logits)  # [Z, V]
        del logits
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph, pool=self._pool):
            logits, tokens = step(views)
            if not key.is_decode and self._logits is not None:
                # One copy for all of them: else each size would keep logits of its own for ever.
                logits = self._logits.copy_(logits)
        self._pool = self._pool or graph.pool()
        self._captured[key] = _Captured(graph, memory, logits, tokens)

    def replay(self, key: GraphKey, buffer: HostBuffer) -> tuple[Tensor, Tensor]:
        """Copy the columns in and run. Logits [Z, V] and tokens [Z] are overwritten by the next
        replay of any key."""
        captured = self._captured[key]
        captured.memory.copy_(buffer.memory, non_blocking=True)
        captured.graph.replay()
        return captured.logits, captured.tokens
