"""`Scheduler`: which sequences take part in the next step, and what becomes of them when its tokens are known.

Continuous batching: every decode first, then prompt chunks in what is left of the step, the least served tenant first.
`schedule` may run one step ahead of `commit`: then a row's input is the token that the previous step is still drawing.
Not for tensors, adapters' memory or requests' texts. One thread owns it.
"""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import NamedTuple

from adapter_store.ref import AdapterRef
from model_runner.request import FinishReason
from model_runner.scheduling.adapter_gate import AdapterWaiters, SlotGate
from model_runner.scheduling.batch import ScheduledBatch
from model_runner.scheduling.fairness import OUTPUT_COST, PROMPT_COST, TenantQueue
from model_runner.scheduling.page_pool import PagePool
from model_runner.scheduling.running import RunningSet
from model_runner.scheduling.sequence import Sequence, SequenceStatus

# Steps between two looks for a cached prefix, while the next in line lacks pages.
_RETRY_STEPS = 16


class Update(NamedTuple):
    """News of one sequence. sample_idx: which of the tokens given to `commit` (for log-probabilities), -1 = none.

    ERROR without `error`: its logits were not finite. The sequence knows its tokens and its num_cached_tokens.
    """

    seq: Sequence
    token: int | None
    finish_reason: FinishReason | None
    sample_idx: int = -1
    error: Exception | None = None


class Scheduler:
    """Sequences in, batches out.

    lacks_slot(ref)  whether a waiting adapter is on the host and only room on the device is missing; with it, adapters
                     in endless use make room for waiting ones (`AdapterWaiters`); None = they do not
    Counters for ever: num_preemptions, num_discarded (tokens drawn and thrown away), num_prompt_tokens and
    num_cached_tokens (of sequences that entered).
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_step_tokens: int,
        max_model_len: int,
        pool: PagePool,
        gate: SlotGate,
        eos_ids: tuple[int, ...] = (),
        lacks_slot: Callable[[AdapterRef], bool] | None = None,
    ) -> None:
        if not 1 <= max_num_seqs <= max_step_tokens:
            raise ValueError(f"{max_num_seqs} sequences in steps of {max_step_tokens} tokens")
        self.max_num_seqs = max_num_seqs
        self.max_step_tokens = max_step_tokens
        self.max_model_len = max_model_len
        self.eos_ids = eos_ids
        self.pool = pool
        self.num_preemptions = 0
        self.num_discarded = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self._gate = gate
        self._queue = TenantQueue()
        self._waiters = AdapterWaiters(lacks_slot)
        self._seqs: dict[int, Sequence] = {}  # unfinished
        self._followers: dict[str, list[Sequence]] = {}  # they wait for the first one's prompt
        self._running = RunningSet(len(pool.groups))
        self._chunks: dict[Sequence, int] = {}  # of the step being planned: the chunk's end
        self._is_tight = False  # pages ran short in the step being planned: nobody enters
        self._in_flight: deque[tuple[ScheduledBatch, list[Sequence]]] = deque()
        self._failures: list[Update] = []
        self._step = 0
        self._num_added = 0

    @property
    def num_running(self) -> int:
        """Sequences that take part in steps."""
        return len(self._running)

    @property
    def num_waiting_adapter(self) -> int:
        return len(self._waiters)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait, but not for an adapter."""
        in_steps = sum(seq.status is SequenceStatus.RUNNING for seq in self._seqs.values())
        return len(self._seqs) - in_steps - len(self._waiters)

    @property
    def has_work(self) -> bool:
        """Something is unfinished, or a launched step is not committed, or a failure was not taken."""
        return bool(self._seqs or self._in_flight or self._failures)

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence of so many tokens in all can be served at all, alone at least."""
        peak = self.pool.peak_pages(num_tokens - 1, self.max_step_tokens)
        return num_tokens <= self.max_model_len and peak < self.pool.num_pages

    def add(self, seq: Sequence) -> None:
        """Let it wait for its turn. The engine refuses what does not fit before."""
        request = seq.request
        table = self.pool.open(request.cache_salt, request.adapter)
        account = self._queue.open_account(request.tenant_id)
        seq.bind(self._num_added, table, account, self.eos_ids, self.max_model_len)
        assert seq.prompt_len < seq.max_tokens_total and self.fits(seq.max_tokens_total), (
            f"{seq.prompt_len} of {seq.max_tokens_total} tokens, {self.max_model_len} allowed, "
            f"{self.pool.num_pages} pages"
        )
        assert seq.seq_id not in self._seqs, f"sequence {seq.seq_id} twice"
        self._num_added += 1
        self._seqs[seq.seq_id] = seq
        if request.sampling.n > 1 and self.pool.prefix_cache:
            if seq.prompt_len > self.pool.page_tokens and seq.index == 0:
                self._followers[request.request_id] = []
        self._queue.push(seq)

    def abort(self, seq_id: int) -> bool:
        """End it now; False if it is not there any more. What a launched step still uses is given back at its commit."""
        seq = self._seqs.get(seq_id)
        if seq is not None:
            self._finish(seq, FinishReason.ABORT)
        return seq is not None

    def take_failures(self) -> list[Update]:
        """Sequences that ended outside a step, since the last call: their adapter will never come."""
        failures, self._failures = self._failures, []
        return failures

    # One step

    def schedule(self) -> ScheduledBatch | None:
        """Decide the next step; None if nothing can run before something else happens (a commit, an adapter, a request)."""
        assert len(self._in_flight) <= 1, f"{len(self._in_flight)} steps ahead"
        self._is_tight = False
        self._chunks = {}
        self._running.resume_stalled()
        decoding = self._running.decoding
        due = [seq for seq in decoding if seq.num_computed >= seq.next_event]
        for seq in sorted(due, key=_arrival):
            if seq.in_batch:  # else preempted for an older one
                self._meet_event(seq)
        self._plan_chunks()
        if not decoding and not self._chunks:
            return None
        batch, rows = self._running.build(self._step, self._chunks)
        self._in_flight.append((batch, rows))
        self._step += 1
        for seq, end in self._chunks.items():
            self.pool.offer(seq.table, seq.token_ids, end)  # found from the next step on
            if seq.num_pending:
                seq.plan_event(self._capacity(seq))
                self._free_followers(seq.request.request_id)
        return batch

    def _meet_event(self, seq: Sequence) -> None:
        """A decode that needs more than one more token: its end, the end of a ban, or a page."""
        start = seq.num_computed
        if start >= seq.max_tokens_total - 1:
            self._running.remove(seq)  # its last token is being drawn
            return
        if seq.sampling_row.banned_ids and not seq.bans_end:
            seq.sampling_row = seq.make_sampling_row()
        if self._make_room(seq, start + 1):
            seq.plan_event(self._capacity(seq))
        elif seq.in_batch:
            self._running.stall(seq)

    def _plan_chunks(self) -> None:
        """Fill the step with prompt chunks: of the least served tenant first, what it began before what waits."""
        budget = self.max_step_tokens - len(self._running.decoding)
        going = self._running.prefilling.copy()
        probes = self._probe() if len(self._waiters) else []
        while budget > 0:
            has_seat = not self._is_tight and len(self._running) < self.max_num_seqs
            head = self._queue.head() if has_seat else None
            seq = min(going, key=_counter) if going else None
            if seq and (head is None or seq.account.counter <= head.account.counter):
                going.remove(seq)
                end = min(len(seq.token_ids), seq.num_computed + budget)
                if not seq.in_batch or not self._make_room(seq, end):
                    continue
            elif head is not None:
                seq = head
                if not self._enter(seq):
                    continue
                end = min(len(seq.token_ids), seq.num_computed + budget)
                missing = self.pool.grow(seq.table, end, seq.num_computed)
                assert not missing, f"{missing} pages missing for a chunk that was to fit"
            else:
                break
            self._chunks[seq] = end
            budget -= end - seq.num_computed
            if end > seq.num_charged:
                new = end - max(seq.num_charged, seq.num_computed)
                seq.account.counter += PROMPT_COST * new / seq.request.weight
                seq.num_charged = end
        for seq in probes:
            if seq.status is SequenceStatus.WAITING_ADAPTER:
                self._queue.discard(seq)

    def commit(self, batch: ScheduledBatch, tokens: Items[int]) -> list[Update]:
        """Take in what the oldest launched step drew: one token for each row with a sample, in order; < 0: not finite."""
        launched, rows = self._in_flight.popleft()
        assert launched is batch, f"step {batch.step} committed, {launched.step} is due"
        updates: list[Update] = []
        sample_idx = -1
        page_tokens = self.pool.page_tokens
        for row, seq in enumerate(rows):
            seq.num_in_flight -= 1
            if batch.samples[row] is not None:
                sample_idx += 1
                token = tokens[sample_idx]
                seq.num_pending -= 1
                if seq.status is SequenceStatus.FINISHED:
                    self.num_discarded += 1
                elif token < 0:
                    self.pool.forget(seq.table)
                    self._finish(seq, FinishReason.ERROR)
                    updates.append(Update(seq, None, FinishReason.ERROR, sample_idx))
                    continue
                else:
                    seq.token_ids.append(token)
                    seq.account.counter += OUTPUT_COST / seq.request.weight
                    num_computed = len(seq.token_ids) - 1
                    if not num_computed % page_tokens:
                        self.pool.offer(seq.table, seq.token_ids, num_computed)
                    reason = seq.reason_to_finish()
                    updates.append(Update(seq, token, reason, sample_idx))
                    if reason is not None:
                        self._finish(seq, reason)
                        continue
            if not seq.in_batch and not seq.num_in_flight:
                self._settle(seq)
        assert sample_idx + 1 == len(tokens), f"{len(tokens)} tokens for {sample_idx + 1} samples"
        return updates

    def check(self) -> None:
        """AssertionError with the numbers if pages, rows or leases do not add up."""
        self.pool.check()
        self._running.check()
        in_steps = {seq for _, rows in self._in_flight for seq in rows} | set(self._running.all())
        for seq in self._seqs.values():
            has_pages = any(seq.table.pages)
            assert not has_pages or seq in in_steps, f"sequence {seq.seq_id} waits with pages"
            has_slot = seq.slot is not None
            wants_slot = seq.request.adapter is not None
            assert has_slot == (wants_slot and seq in in_steps), f"sequence {seq.seq_id}: slot"
        if not self._seqs and not self._in_flight:
            assert self.pool.free_pages == self.pool.num_pages - 1, (
                f"idle, and {self.pool.free_pages} of {self.pool.num_pages - 1} pages free"
            )
            assert not self._followers and not len(self._queue) and not len(self._waiters)

    # Who comes in

    def _probe(self) -> list[Sequence]:
        """Let some of those that wait for an adapter stand in the queue during this step; end the hopeless ones."""
        probes = []
        for seq in self._waiters.probes():
            ref = seq.request.adapter
            assert ref is not None
            error = self._gate.error_of(ref)
            if error is None:
                probes.append(seq)
                continue
            for hopeless in self._waiters.take_all(ref):
                self._finish(hopeless, FinishReason.ERROR)
                self._failures.append(Update(hopeless, None, FinishReason.ERROR, -1, error))
        self._waiters.plan_drain(probes, self._running.all())
        for seq in probes:
            self._queue.push(seq)
        return probes

    def _enter(self, seq: Sequence) -> bool:
        """The head of the queue gets its pages and its slot, both or neither. If not, it steps aside or shuts the door."""
        ref = seq.request.adapter
        followers = self._followers.get(seq.request.request_id)
        if followers is not None and seq.index:
            self._queue.discard(seq)
            followers.append(seq)
            return False
        # Sequences that run will want pages soon: one each is left to them.
        spare = self.pool.free_pages - len(self._running) * len(self.pool.groups)
        has_waited = self._step >= seq.tried_step + _RETRY_STEPS
        if len(self._running) and seq.page_need > spare and not has_waited:
            self._is_tight = True
            return False
        if ref is not None and self._waiters.is_draining(ref):
            return self._wait_for_adapter(ref, seq)
        lease = None
        if ref is not None:
            lease = self._gate.acquire(ref)
            if lease is None:
                return self._wait_for_adapter(ref, seq)
        num_cached = self.pool.match(seq.table, seq.token_ids)
        seq.page_need = self.pool.entry_pages(
            seq.table, num_cached, len(seq.token_ids), self.max_step_tokens
        )
        if seq.page_need > spare:
            seq.tried_step = self._step
            self._is_tight = True
            if lease is not None:
                self._gate.release(lease)
            return False
        self.pool.adopt(seq.table, num_cached)
        seq.slot = lease
        seq.num_computed = num_cached
        self._queue.serve(seq)
        if seq.status is SequenceStatus.WAITING_ADAPTER and ref is not None:
            self._waiters.discard(seq)
            for other in self._waiters.take_all(ref):
                other.status = SequenceStatus.WAITING
                self._queue.push(other)
        seq.status = SequenceStatus.RUNNING
        if seq.sampling_row.banned_ids and not seq.bans_end:
            seq.sampling_row = seq.make_sampling_row()
        if seq.num_cached_tokens < 0:
            seq.num_cached_tokens = num_cached
            self.num_cached_tokens += num_cached
            self.num_prompt_tokens += seq.prompt_len
        self._running.start_prefill(seq)
        return True

    def _wait_for_adapter(self, ref: AdapterRef, seq: Sequence) -> bool:
        self._queue.discard(seq)
        seq.status = SequenceStatus.WAITING_ADAPTER
        self._waiters.add(ref, seq)
        return False

    # Who goes

    def _make_room(self, seq: Sequence, num_tokens: int) -> bool:
        """Pages for `num_tokens` tokens, from others if need be. False: not in this step (or it had to go itself)."""
        while missing := self.pool.grow(seq.table, num_tokens, seq.num_computed):
            self._is_tight = True
            leaving = {s.table for _, rows in self._in_flight for s in rows if not s.in_batch}
            if missing <= self.pool.reclaimable(leaving):
                return False  # they come with the next commit
            victim = self._running.victim()
            assert victim is not None, f"{missing} pages missing for sequence {seq.seq_id} alone"
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Back to the queue without pages and slot; what it has is computed again. A token being drawn is kept."""
        self.num_preemptions += 1
        self._running.remove(seq)
        self._chunks.pop(seq, None)
        seq.num_charged = max(seq.num_charged, seq.num_computed)
        seq.num_computed = 0
        seq.status = SequenceStatus.WAITING
        if not seq.num_in_flight:
            self._settle(seq)

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        """It ends, wherever it stands."""
        del self._seqs[seq.seq_id]
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        if seq.in_batch:
            self._running.remove(seq)
        self._queue.discard(seq)
        self._waiters.discard(seq)
        followers = self._followers.get(seq.request.request_id)
        if followers is not None and seq.index == 0:
            self._free_followers(seq.request.request_id)
        elif followers is not None and seq in followers:
            followers.remove(seq)
        self._queue.close_account(seq.account)
        if not seq.num_in_flight:
            self._settle(seq)

    def _settle(self, seq: Sequence) -> None:
        """No launched step names it any more: its pages and its slot go back, and a preempted one waits again."""
        self.pool.release(seq.table)
        if seq.slot is not None:
            self._gate.release(seq.slot)
            seq.slot = None
        if seq.status is SequenceStatus.WAITING:
            self._queue.push(seq)

    def _free_followers(self, request_id: str) -> None:
        """The prompt of the request's first sequence is computed, or never will be: the others no longer wait for it."""
        for seq in self._followers.pop(request_id, []):
            self._queue.push(seq)

    def _capacity(self, seq: Sequence) -> int:
        return len(seq.table.pages[0]) * self.pool.page_tokens


def _arrival(seq: Sequence) -> int:
    return seq.arrival


def _counter(seq: Sequence) -> float:
    return seq.account.counter
