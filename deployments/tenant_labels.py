"""Which tenants have a label of their own in the metrics: the busiest few. The others share one.

Pure bookkeeping: the clock is an argument, and what is counted under a label is the registry's.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass

OTHER_TENANT = "other"
RANK_PERIOD_S = 30.0
HALF_LIFE_S = 600.0
FORGET_S = 3600.0
"""A label without a place keeps its series so long at least: longer than `rate()` looks back."""

_LEAD = 1.5  # times the traffic of a tenant with a place, before another takes it


@dataclass(frozen=True)
class LabelledTenants:
    """The tenants with a label of their own, as ingresses know them. version grows with changes."""

    version: int = 0
    tenant_ids: frozenset[str] = frozenset()

    def label(self, tenant_id: str) -> str:
        return tenant_id if tenant_id in self.tenant_ids else OTHER_TENANT


def first_tenants(tenant_ids: Iterable[str], limit: int) -> LabelledTenants:
    """Who has a label before there was traffic: router and ingresses start from the same set."""
    return LabelledTenants(0, frozenset(list(tenant_ids)[:limit]) - {OTHER_TENANT})


class TenantRanking:
    """`limit` places for the tenants with the most tokens lately, not given up for a small lead.

    Who loses its place is counted under `other` from then on, and its old series stand still
    beside it, so that sums over tenants stay exact. Of such there are `limit` at most: one goes
    when it has stood still for an hour and its room is wanted; until then nobody new gets a place.
    """

    def __init__(self, first: LabelledTenants, limit: int, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._clock = clock
        self._scores: dict[str, float] = dict.fromkeys(first.tenant_ids, 0.0)
        self._still: OrderedDict[str, float] = OrderedDict()  # without a place, since when
        self._ranked_at_s = clock()
        self.labelled = first

    @property
    def exposed(self) -> frozenset[str]:
        """Tenants with series: those with a place, and those whose series stand still."""
        return self.labelled.tenant_ids | self._still.keys()

    def adopt(self, known: LabelledTenants) -> None:
        """An ingress knows a newer set: this ranking began anew, and goes on from there."""
        if known.version > self.labelled.version:
            self.labelled = known
            for tenant_id in known.tenant_ids:
                self._scores.setdefault(tenant_id, 0.0)
                self._still.pop(tenant_id, None)

    def add(self, tokens: Iterable[tuple[str, int]]) -> None:
        """Tokens that tenants used since the last time."""
        for tenant_id, number in tokens:
            if tenant_id != OTHER_TENANT:
                self._scores[tenant_id] = self._scores.get(tenant_id, 0.0) + number

    @property
    def is_due(self) -> bool:
        """Whether it is time to rank."""
        return self._clock() - self._ranked_at_s >= RANK_PERIOD_S

    def rank(self, shown: Container[str]) -> frozenset[str]:
        """Give the places anew; the tenants whose series are to go.

        shown  tenants that have series at all: without any, a place is lost without a trace
        """
        now = self._clock()
        self._fade(0.5 ** ((now - self._ranked_at_s) / HALF_LIFE_S))
        self._ranked_at_s = now
        placed, scores = set(self.labelled.tenant_ids), self._scores
        gone: set[str] = set()
        weakest = sorted(placed, key=lambda t: (scores.get(t, 0.0), t), reverse=True)
        others = {t: score for t, score in scores.items() if score and t not in placed}
        for tenant_id in _largest(others, self._limit):
            if len(placed) >= self._limit:
                loser = weakest[-1]
                if others[tenant_id] <= _LEAD * scores.get(loser, 0.0):
                    break
                leaves_some = loser in shown and tenant_id not in self._still
                if leaves_some and not self._make_room(now, gone):
                    continue
                placed.remove(weakest.pop())
                if loser in shown:
                    self._still[loser] = now
            placed.add(tenant_id)
            self._still.pop(tenant_id, None)
        if placed != self.labelled.tenant_ids:
            self.labelled = LabelledTenants(self.labelled.version + 1, frozenset(placed))
        return frozenset(gone)

    def _make_room(self, now: float, gone: set[str]) -> bool:
        """Room for one more whose series stand still."""
        if len(self._still) < self._limit:
            return True
        oldest, since = next(iter(self._still.items()))
        if now - since < FORGET_S:
            return False
        del self._still[oldest]
        gone.add(oldest)
        return True

    def _fade(self, factor: float) -> None:
        keep = _largest(self._scores, 20 * self._limit) + list(self.labelled.tenant_ids)
        self._scores = {t: self._scores.get(t, 0.0) * factor for t in keep}


def _largest(scores: Mapping[str, float], number: int) -> list[str]:
    return heapq.nlargest(number, scores, key=lambda t: (scores[t], t))
