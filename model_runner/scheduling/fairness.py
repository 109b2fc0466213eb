"""Whose turn it is: the least served tenant's, and inside a tenant first come, first served.

Source: Sheng et al., Fairness in Serving Large Language Models, arXiv 2401.00588 (virtual token
counters). Ours charges tokens as they are computed, not the whole prompt at entry, so that a long
prompt in chunks pays chunk by chunk.
"""

from heapq import heapify, heappop, heappush, heapreplace
from itertools import count

from model_runner.scheduling.sequence import Account, Sequence

# Tenants without a sequence whose account is kept, for they were served more than a newcomer.
_MAX_DEBTS = 4096


class _TenantLine:
    """The waiting sequences of one tenant. `order`, a heap of arrivals, may name some that left."""

    __slots__ = ("account", "is_listed", "order", "waiting")

    def __init__(self, account: Account) -> None:
        self.account = account
        self.waiting: dict[int, Sequence] = {}
        self.order: list[int] = []
        self.is_listed = False


class TenantQueue:
    """The waiting sequences of all tenants.

    Counters only grow, so a heap with outdated entries is right as soon as its top is up to date.
    Whoever comes to an empty line is lifted to the least counter in the queue: idleness earns no
    credit.
    """

    def __init__(self) -> None:
        self._lines: dict[str, _TenantLine] = {}
        self._heap: list[tuple[float, int, _TenantLine]] = []
        self._debts: list[tuple[float, int, Account]] = []  # a heap; some have paid or come back
        self._tie_breaker = count()
        self._floor = 0.0  # the counter of the last one served
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def open_account(self, tenant_id: str) -> Account:
        """The tenant's account, with one more sequence on it."""
        line = self._lines.get(tenant_id)
        if line is None:
            line = self._lines[tenant_id] = _TenantLine(Account(tenant_id))
        line.account.num_sequences += 1
        return line.account

    def close_account(self, account: Account) -> None:
        """One sequence less. An empty account goes once a newcomer would be lifted as high, or if
        too many others owe more."""
        account.num_sequences -= 1
        if not account.num_sequences:
            heappush(self._debts, (account.counter, next(self._tie_breaker), account))
        debts = self._debts
        while debts and (debts[0][0] <= self._floor or len(debts) > _MAX_DEBTS):
            counter, _, debtor = heappop(debts)
            line = self._lines.get(debtor.tenant_id)
            is_same = line is not None and line.account is debtor and debtor.counter == counter
            if is_same and not debtor.num_sequences:
                del self._lines[debtor.tenant_id]

    def push(self, seq: Sequence) -> None:
        """Put it in its tenant's line, at the place of its arrival."""
        line = self._lines[seq.account.tenant_id]
        if seq.arrival in line.waiting:
            return
        if not line.waiting:
            head = self.head()
            least = self._floor if head is None else head.account.counter
            line.account.counter = max(line.account.counter, least)
        line.waiting[seq.arrival] = seq
        heappush(line.order, seq.arrival)
        self._num_waiting += 1
        if not line.is_listed:
            line.is_listed = True
            heappush(self._heap, (line.account.counter, next(self._tie_breaker), line))

    def discard(self, seq: Sequence) -> None:
        """Take it out, wherever it stands; nothing happens if it is not there."""
        line = self._lines.get(seq.account.tenant_id)
        if line is None or line.waiting.pop(seq.arrival, None) is None:
            return
        self._num_waiting -= 1
        if len(line.order) > 2 * len(line.waiting) + 64:
            line.order = list(line.waiting)
            heapify(line.order)

    def serve(self, seq: Sequence) -> None:
        """Take out the one that enters."""
        self._floor = max(self._floor, seq.account.counter)
        self.discard(seq)

    def head(self) -> Sequence | None:
        """The oldest sequence of the tenant with the least counter."""
        while self._heap:
            counter, number, line = self._heap[0]
            if not line.waiting:
                heappop(self._heap)
                line.is_listed = False
            elif counter != line.account.counter:
                heapreplace(self._heap, (line.account.counter, number, line))
            else:
                while line.order[0] not in line.waiting:
                    heappop(line.order)
                return line.waiting[line.order[0]]
        return None
