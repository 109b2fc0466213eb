"""Whole-step CUDA graphs for decode, two for each padded batch size (with LoRA on every target, and
without the seldom ones).

Mixed steps run eagerly. A graph reads one static device copy of a `HostBuffer`: replaying is one
copy and one launch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model_runner.execution.inputs import HostBuffer

StepFn = Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]]


def padded_sizes(most: int) -> tuple[int, ...]:
    """Batch sizes to capture: powers of two to 8, then multiples of 8, so that padding wastes
    little."""
    sizes = [s for s in (1, 2, 4, 8, *range(16, 65, 8), *range(80, most + 16, 16)) if s < most]
    return (*sizes, most)


@dataclass(frozen=True)
class _Captured:
    graph: "torch.cuda.CUDAGraph"
    memory: Tensor
    logits: Tensor
    tokens: Tensor


class DecodeGraphs:
    """Captured decode steps by padded size. All share one memory pool: only one runs at a time."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self._captured: dict[tuple[int, bool], _Captured] = {}
        self._pool: Any = None

    def fit(self, rows: int) -> int | None:
        """The smallest captured size that holds `rows`, or None."""
        return next((s for s in self.sizes if s >= rows and (s, True) in self._captured), None)

    def capture(self, size: int, buffer: HostBuffer, step: StepFn, seldom: bool = True) -> None:
        """Run `step` eagerly until its kernels are compiled, then capture it.

        seldom  it adds the LoRA of seldom targets
        """
        for name, view in buffer.view.items():
            view[...] = -1 if name.startswith(("slot_of_token", "sources", "write_idx")) else 0
        buffer.view["seq_lens"][:] = 1
        buffer.view["cu_q"][:] = range(buffer.shape.rows + 1)
        buffer.view["logit_rows"][:] = range(buffer.shape.rows)
        memory = buffer.memory.to("cuda")
        views = buffer.device_views(memory)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.inference_mode(), torch.cuda.stream(side):
            for _ in range(2):
                step(views)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph, pool=self._pool):
            logits, tokens = step(views)
        self._pool = self._pool or graph.pool()
        self._captured[size, seldom] = _Captured(graph, memory, logits, tokens)

    def replay(self, size: int, buffer: HostBuffer, seldom: bool = True) -> tuple[Tensor, Tensor]:
        """Copy the columns in and run. The results are overwritten by the next replay of any
        size."""
        captured = self._captured[size, seldom]
        captured.memory.copy_(buffer.memory, non_blocking=True)
        captured.graph.replay()
        return captured.logits, captured.tokens
