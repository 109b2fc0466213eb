"""Times a batch as it runs in service: in a captured graph, with nothing of it in the L2 cache."""

import torch

from kernels.tune.inputs import Batch

REPLAYS = 12
# Read before every replay: several times what any cache holds. Read, not written: what is dirty
# would have to be written back while the replay runs.
FLUSH_BYTES = 256 << 20


class GraphTimer:
    """Calling it gives the median microseconds of one of a batch's calls."""

    def __init__(self, replays: int = REPLAYS) -> None:
        self._replays = replays
        self._flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")
        self._sum = torch.zeros((), device="cuda")

    def __call__(self, batch: Batch) -> float:
        """Errors: what a launch raises."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = [call() for call in batch.calls]
        marks = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(self._replays)
        ]
        graph.replay()
        for before, after in marks:
            torch.sum(self._flush, 0, out=self._sum)
            before.record()
            graph.replay()
            after.record()
        torch.cuda.synchronize()
        del kept
        batch.restore()
        times = sorted(1e3 * before.elapsed_time(after) for before, after in marks)
        return times[len(times) // 2] / len(batch.calls)
