"""`Admission`: those who do not run. Who comes in next, with which pages and slot, both or neither.

Not for the step itself (the scheduler's) and not for who has to leave.
"""

import time
from collections.abc import Callable, Iterable

from adapter_store.ref import AdapterRef
from model_runner.scheduling.adapter_gate import AdapterWaiters, SlotGate
from model_runner.scheduling.fairness import TenantQueue
from model_runner.scheduling.page_pool import PagePool
from model_runner.scheduling.running import RunningSet
from model_runner.scheduling.sequence import Sequence, SequenceStatus

# Steps between two looks for a cached prefix, while the next in line lacks pages.
_RETRY_STEPS = 16


class Admission:
    """The door between waiting and running.

    A head that lacks pages shuts the door for the step: smaller ones behind it do not slip through,
    so it comes in as soon as enough has ended. One that lacks its adapter steps aside and keeps
    nobody. Of the n sequences of a request all but the first wait until its prompt is computed, and
    then share its pages.
    """

    def __init__(
        self,
        pool: PagePool,
        gate: SlotGate,
        running: RunningSet,
        max_chunk: int,
        lacks_slot: Callable[[AdapterRef], bool] | None,
    ) -> None:
        self.num_prompt_tokens = self.num_cached_tokens = self.num_replayed = 0
        self.is_shut = False
        self._pool = pool
        self._gate = gate
        self._running = running
        self._max_chunk = max_chunk
        self._queue = TenantQueue()
        self._waiters = AdapterWaiters(lacks_slot)
        self._followers: dict[str, list[Sequence]] = {}
        self._probes: list[Sequence] = []

    @property
    def num_waiting_adapter(self) -> int:
        return len(self._waiters)

    def forget_counts(self) -> None:
        """Count from zero."""
        self.num_prompt_tokens = self.num_cached_tokens = self.num_replayed = 0

    def add(
        self, seq: Sequence, arrival: int, eos_ids: tuple[int, ...], max_model_len: int
    ) -> None:
        """A new one."""
        request = seq.request
        table = self._pool.open(request.cache_salt, request.adapter)
        account = self._queue.open_account(request.tenant_id)
        seq.bind(arrival, table, account, eos_ids, max_model_len)
        can_share = self._pool.prefix_cache and seq.prompt_len > self._pool.page_tokens
        if request.sampling.n > 1 and can_share and seq.index == 0:
            self._followers[request.request_id] = []
        self._queue.push(seq)

    def remove(self, seq: Sequence) -> None:
        """It has finished, waiting or not."""
        self._queue.discard(seq)
        self._waiters.discard(seq)
        followers = self._followers.get(seq.request.request_id)
        if followers is not None and seq.index == 0:
            self.free_followers(seq)
        elif followers is not None and seq in followers:
            followers.remove(seq)
        self._queue.close_account(seq.account)

    def free_followers(self, seq: Sequence) -> None:
        """Its prompt is computed, or never will be: those of its request wait no longer."""
        if seq.index == 0:
            for follower in self._followers.pop(seq.request.request_id, ()):
                self._queue.push(follower)

    def settle(self, seq: Sequence) -> None:
        """No launched step names it: pages and slot go back; a preempted one waits again."""
        self._pool.release(seq.table)
        if seq.slot is not None:
            self._gate.release(seq.slot)
            seq.slot = None
        if seq.status is SequenceStatus.WAITING:
            self._queue.push(seq)

    def wake(self, refs: Iterable[AdapterRef]) -> None:
        """These adapters are said to be in their slots now."""
        for ref in refs:
            self._waiters.wake(ref)

    def begin_step(self) -> list[tuple[Sequence, Exception]]:
        """Open the door, and let some that wait for an adapter stand in the queue.

        Gives those whose adapter is dead, and why.
        """
        self.is_shut = False
        hopeless = []
        if not self._waiters.is_idle:
            for seq in self._waiters.probes():
                ref = seq.request.adapter
                assert ref is not None
                error = self._gate.error_of(ref)
                if error is None:
                    self._probes.append(seq)
                else:
                    hopeless += [(other, error) for other in self._waiters.take_all(ref)]
            self._waiters.plan_drain(self._probes, self._running.all())
            for seq in self._probes:
                self._queue.push(seq)
        return hopeless

    def end_step(self) -> None:
        """Those whose adapter did not come leave the queue again."""
        for seq in self._probes:
            if seq.status is SequenceStatus.WAITING_ADAPTER:
                self._queue.discard(seq)
        self._probes.clear()

    def head(self) -> Sequence | None:
        """Who would enter next; None: nobody, or the door is shut."""
        return None if self.is_shut else self._queue.head()

    def enter(self, seq: Sequence, step: int) -> bool:
        """Let the head in, with what is cached of its prompt.

        False: it has stepped aside (its adapter or its sibling is not there), or the door is shut.
        """
        ref = seq.request.adapter
        followers = self._followers.get(seq.request.request_id)
        if followers is not None and seq.index:
            self._queue.discard(seq)
            followers.append(seq)
            return False
        # Sequences that run will want pages soon: one of each group is left to each.
        spare = self._pool.free_pages - len(self._running) * len(self._pool.groups)
        if len(self._running) and seq.page_need > spare and step < seq.tried_step + _RETRY_STEPS:
            self.is_shut = True
            return False
        lease = None
        if ref is not None:
            if not self._waiters.is_draining(ref):
                may_evict = seq.request.may_evict or seq.has_entered
                lease = self._gate.acquire(ref, may_evict=may_evict)
            if lease is None:
                self._queue.discard(seq)
                seq.status = SequenceStatus.WAITING_ADAPTER
                self._waiters.add(ref, seq)
                return False
        # Pages have no logits: a prompt whose log-probabilities are wanted takes none from others.
        is_scored = seq.num_scored == seq.prompt_len
        num_cached = self._pool.match(seq.table, seq.token_ids) if is_scored else 0
        num_tokens = len(seq.token_ids)
        need = self._pool.entry_pages(seq.table, num_cached, num_tokens, self._max_chunk)
        if need > spare:
            seq.page_need, seq.tried_step = need, step
            self.is_shut = True
            if lease is not None:
                self._gate.release(lease, unused=True)
            return False
        self._pool.adopt(seq.table, num_cached)
        seq.slot = lease
        seq.num_computed = num_cached
        seq.page_need = 0
        self._queue.serve(seq)
        if seq.status is SequenceStatus.WAITING_ADAPTER and ref is not None:
            self._waiters.discard(seq)
            for other in self._waiters.take_all(ref):
                other.status = SequenceStatus.WAITING
                self._queue.push(other)
        seq.status = SequenceStatus.RUNNING
        if seq.has_entered:
            self.num_replayed += max(0, seq.num_lost - num_cached)
        else:
            seq.has_entered = True
            seq.entered_s = time.monotonic()
            self.num_replayed += seq.num_given - max(seq.prompt_len, min(num_cached, seq.num_given))
            seq.num_cached_tokens = min(num_cached, seq.prompt_len)
            self.num_cached_tokens += seq.num_cached_tokens
            self.num_prompt_tokens += seq.prompt_len
        self._running.start_prefill(seq)
        return True

    def check_empty(self) -> None:
        """AssertionError if somebody is still remembered."""
        numbers = len(self._queue), len(self._waiters), len(self._followers)
        assert not any(numbers), f"waiting, for adapters, for siblings: {numbers}"
