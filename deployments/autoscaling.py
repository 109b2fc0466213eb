"""How many replicas a base model should have: pure, from what its replicas say and its limits.

Ray Serve calls `ReplicaCount` in its controller, ten times a second, and makes or stops replicas
accordingly. A stopped one takes no new requests, ends its streams and gives its seat back; only
then, or at once where ingresses see it gone, its adapters live elsewhere. Not here: which replica
goes (Serve's choice), and where adapters go (placement).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from model_runner.stats import EngineStats

BUSY = 0.8
"""Used part of a replica's sequences or pages above which there is one replica too few."""
IDLE = 0.6
"""A replica goes only if the others are used less than this without it."""
PAGES_FULL = 0.9


@dataclass(frozen=True)
class ScaleLimits:
    """min_replicas, max_replicas;  sequences  that one replica computes side by side: those of its
    engine's largest batch, or the requests that are let in, where those are fewer."""

    min_replicas: int
    max_replicas: int
    sequences: int


@dataclass(frozen=True)
class Demand:
    """What one replica has to do. sequences  that run or wait there;  pages  used part of its KV
    pages, 0..1."""

    sequences: float = 0.0
    pages: float = 0.0

    @classmethod
    def of(cls, stats: EngineStats) -> "Demand":
        sequences = stats.running + stats.waiting + stats.waiting_for_adapter
        used = 1 - stats.free_pages / stats.num_pages if stats.num_pages else 0.0
        return cls(float(sequences), used)

    def metrics(self) -> dict[str, float]:
        """The form in which Serve carries it to its controller."""
        return {"sequences": self.sequences, "pages": self.pages}


def target_replicas(
    demands: Iterable[Demand], queued: float, current: int, limits: ScaleLimits
) -> int:
    """The number of replicas to have.

    demands  of the replicas that have told theirs;  queued  requests that no replica has yet
    current  the number that is aimed at now

    More before the replicas are full, and so before anything queues: at 0.8 of their
    sequences, or of 0.9 of their pages. Less only where the rest is used below 0.6, so that the
    number does not swing.
    """
    found = list(demands)
    sequences = sum(demand.sequences for demand in found) + queued
    # In replicas' worth: what would be full with so many.
    worth = max(sequences / limits.sequences, sum(d.pages for d in found) / PAGES_FULL)
    target = current
    if worth > BUSY * current:
        target = ceil(worth / BUSY)
    elif worth < IDLE * (current - 1):
        target = max(1, ceil(worth / IDLE))
    return min(max(target, limits.min_replicas), limits.max_replicas)


class ReplicaCount:
    """`target_replicas` as Serve's autoscaling policy. `sequences` as in `ScaleLimits`."""

    def __init__(self, sequences: int) -> None:
        self._sequences = sequences

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """context  Serve's AutoscalingContext. The number, and no state."""
        metrics: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        sequences, pages = metrics.get("sequences", {}), metrics.get("pages", {})
        demands = [Demand(value, pages.get(name, 0.0)) for name, value in sequences.items()]
        limits = ScaleLimits(
            context.capacity_adjusted_min_replicas,
            context.capacity_adjusted_max_replicas,
            self._sequences,
        )
        queued = context.total_queued_requests or 0.0
        return target_replicas(demands, queued, context.target_num_replicas, limits), {}
