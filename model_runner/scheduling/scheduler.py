"""`Scheduler`: who takes part in the next step, and what becomes of them once its tokens are known.

Continuous batching: every decode first, then prompt chunks in what is left of the step, the least
served tenant first. `schedule` may run one step ahead of `commit`: then a row's input is the token
that the previous step is still drawing. One thread owns it.
Not for tensors, the memory of adapters, or text.
"""

from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from typing import NamedTuple

from adapter_store.ref import AdapterRef
from model_runner.request import FinishReason
from model_runner.scheduling.adapter_gate import SlotGate
from model_runner.scheduling.admission import Admission
from model_runner.scheduling.batch import ScheduledBatch
from model_runner.scheduling.page_pool import PagePool
from model_runner.scheduling.running import RunningSet
from model_runner.scheduling.sequence import Sequence, SequenceStatus


class Update(NamedTuple):
    """News of one sequence.

    sample_idx  which of the tokens given to `commit` it was (for log-probabilities), -1 = none
    error       with FinishReason.ERROR: why its adapter never comes; None = logits not finite
    """

    seq: Sequence
    token: int | None
    finish_reason: FinishReason | None
    sample_idx: int = -1
    error: Exception | None = None


class Scheduler:
    """Sequences in, batches out.

    lacks_slot(ref)  whether a waiting adapter is on the host and only room on the device is
                     missing; with it, adapters in endless use make room for waiting ones
                     (`AdapterWaiters`); None = they do not
    Counters since the start: num_preemptions, num_discarded (tokens drawn and thrown away),
    num_prompt_tokens, num_cached_tokens, num_replayed. Every token drawn is told in an `Update` or
    is discarded, once.
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
        self._seqs: dict[int, Sequence] = {}  # unfinished
        self._running = RunningSet(len(pool.groups))
        self._admission = Admission(pool, gate, self._running, max_step_tokens, lacks_slot)
        self._chunks: dict[Sequence, int] = {}  # of the step being planned: the chunk's end
        self._in_flight: deque[tuple[ScheduledBatch, list[Sequence]]] = deque()
        self._failures: list[Update] = []
        self._step = -1
        self._num_added = 0

    @property
    def num_running(self) -> int:
        """Sequences that take part in steps."""
        return len(self._running)

    @property
    def num_waiting_adapter(self) -> int:
        """Sequences whose adapter is not in a slot yet."""
        return self._admission.num_waiting_adapter

    @property
    def num_waiting(self) -> int:
        """Sequences that wait, but not for an adapter."""
        ending = {seq for seq in self._leaving() if seq.status is SequenceStatus.RUNNING}
        waiting = len(self._seqs) - len(self._running) - len(ending)
        return waiting - self.num_waiting_adapter

    @property
    def num_prompt_tokens(self) -> int:
        """Of all sequences that entered; `num_cached_tokens` of them came from the prefix cache."""
        return self._admission.num_prompt_tokens

    @property
    def num_cached_tokens(self) -> int:
        """See `num_prompt_tokens`."""
        return self._admission.num_cached_tokens

    @property
    def num_replayed(self) -> int:
        """Computed again: what a preempted sequence had in the cache, a resumed one's output."""
        return self._admission.num_replayed

    def forget_counts(self) -> None:
        """Count from zero: what was served until now was no request of anybody."""
        self.num_preemptions = self.num_discarded = 0
        self._admission.forget_counts()

    @property
    def has_work(self) -> bool:
        """Something is unfinished, launched and not committed, or failed and not taken."""
        return bool(self._seqs or self._in_flight or self._failures)

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence of so many tokens in all can be served at all, alone at least."""
        peak = self.pool.peak_pages(num_tokens - 1, self.max_step_tokens)
        return num_tokens <= self.max_model_len and peak < self.pool.num_pages

    def add(self, seq: Sequence) -> None:
        """Let it wait for its turn. The engine refuses what does not fit before."""
        total = min(seq.prompt_len + max(1, seq.request.sampling.max_tokens), self.max_model_len)
        assert seq.num_given < total and self.fits(total), (
            f"{seq.num_given} of {total} tokens, {self.max_model_len} allowed, "
            f"{self.pool.num_pages} pages"
        )
        assert seq.seq_id not in self._seqs, f"sequence {seq.seq_id} twice"
        self._admission.add(seq, self._num_added, self.eos_ids, self.max_model_len)
        self._num_added += 1
        self._seqs[seq.seq_id] = seq

    def abort(self, seq_id: int) -> bool:
        """End it now; False if it is not there any more.

        What a launched step still uses goes back at the commit of that step.
        """
        seq = self._seqs.get(seq_id)
        if seq is not None:
            self._finish(seq, FinishReason.ABORT)
        return seq is not None

    def wake(self, refs: Iterable[AdapterRef]) -> None:
        """These adapters came into their slots: who waits for them tries first in the next step.

        Only a hint that saves time where many adapters wait: without it each is asked for in turn.
        """
        self._admission.wake(refs)

    def take_failures(self) -> list[Update]:
        """Sequences that ended since the last call because their adapter will never come."""
        failures, self._failures = self._failures, []
        return failures

    def schedule(self) -> ScheduledBatch | None:
        """Decide the next step.

        None if nothing can run before something else happens: a commit, an adapter, a request.
        """
        assert len(self._in_flight) <= 1, f"{len(self._in_flight)} steps ahead"
        # A step that comes to nothing has a number too: who is in two steps that follow each other
        # by number was never away, and has the same pages.
        self._step += 1
        self._chunks = {}
        for seq, error in self._admission.begin_step():
            self._finish(seq, FinishReason.ERROR)
            self._failures.append(Update(seq, None, FinishReason.ERROR, -1, error))
        self._running.resume_stalled()
        decoding = self._running.decoding
        due = [seq for seq in decoding if seq.num_computed >= seq.next_event]
        for seq in sorted(due, key=_arrival):
            if seq.in_batch:  # else preempted for an older one
                self._meet_event(seq)
        self._plan_chunks()
        self._admission.end_step()
        if not decoding and not self._chunks:
            return None
        batch, rows = self._running.build(self._step, self._chunks)
        self._in_flight.append((batch, rows))
        for seq, end in self._chunks.items():
            self.pool.offer(seq.table, seq.token_ids, end)  # found from the next step on
            if seq.num_pending:
                seq.plan_event(self._capacity(seq))
                self._admission.free_followers(seq)
        return batch

    def _meet_event(self, seq: Sequence) -> None:
        """A decode that needs more than one more token: its end, the end of a ban, or a page."""
        start = seq.num_computed
        if start >= seq.max_tokens_total - 1:
            self._running.remove(seq)  # its last token is being drawn
            return
        if seq.num_pending and seq.request.sampling.mask:
            self._running.stall(seq)  # its mask depends on the token that is being drawn
            return
        if seq.sampling_row.banned_ids and not seq.bans_end:
            seq.sampling_row = seq.make_sampling_row()
        if self._make_room(seq, start + 1):
            seq.plan_event(self._capacity(seq))
        elif seq.in_batch:
            self._running.stall(seq)

    def _plan_chunks(self) -> None:
        """Fill the step with prompt chunks, the least served tenant's first.

        Of one tenant, a prompt that was begun comes before those that wait.
        """
        budget = self.max_step_tokens - len(self._running.decoding)
        going = self._running.prefilling.copy()
        while budget > 0:
            has_seat = len(self._running) < self.max_num_seqs
            head = self._admission.head() if has_seat else None
            seq = min(going, key=_counter) if going else None
            if seq and (head is None or seq.account.counter <= head.account.counter):
                going.remove(seq)
                end = min(len(seq.token_ids), seq.num_computed + budget)
                if not seq.in_batch or not self._make_room(seq, end):
                    continue
            elif head is not None:
                seq = head
                if not self._admission.enter(seq, self._step):
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
                seq.account.counter += new * seq.prompt_cost
                seq.num_charged = end

    def commit(self, batch: ScheduledBatch, tokens: Items[int]) -> list[Update]:
        """Take in what the oldest launched step drew.

        tokens: one for each row with a sample, in the order of the rows; negative = not finite.
        """
        launched, rows = self._in_flight.popleft()
        assert launched is batch, f"step {batch.step} committed, {launched.step} is due"
        updates: list[Update] = []
        sample_idx = -1
        page_tokens = self.pool.page_tokens
        finished = SequenceStatus.FINISHED
        for seq, sample in zip(rows, batch.samples, strict=True):
            seq.num_in_flight -= 1
            if sample is not None:
                sample_idx += 1
                token = tokens[sample_idx]
                seq.num_pending -= 1
                if seq.status is finished:
                    self.num_discarded += 1
                elif token < 0:
                    self.num_discarded += 1
                    self.pool.forget(seq.table)
                    updates.append(Update(seq, None, FinishReason.ERROR, sample_idx))
                    seq.num_discarded += 1
                    self._finish(seq, FinishReason.ERROR)
                    continue
                else:
                    ids = seq.token_ids
                    known = len(ids)
                    if not known % page_tokens:
                        self.pool.offer(seq.table, ids, known)
                    ids.append(token)
                    seq.account.counter += seq.output_cost
                    if known + 1 >= seq.max_tokens_total or token in seq.stop_ids:
                        reason = seq.reason_to_finish()
                        if not seq.request.sampling.max_tokens:  # its prompt alone was wanted
                            ids.pop()
                            self.num_discarded += 1
                            seq.num_discarded += 1
                            updates.append(Update(seq, None, reason, sample_idx))
                        else:
                            updates.append(Update(seq, token, reason, sample_idx))
                        if reason is not None:
                            self._finish(seq, reason)
                            continue
                    else:
                        updates.append(Update(seq, token, None, sample_idx))
            if not seq.in_batch and not seq.num_in_flight:
                self._admission.settle(seq)
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
            self._admission.check_empty()

    def _make_room(self, seq: Sequence, num_tokens: int) -> bool:
        """Pages for `num_tokens` tokens, from others if need be.

        False: not in this step, for they are on their way back, or it had to go itself.
        """
        while missing := self.pool.grow(seq.table, num_tokens, seq.num_computed):
            self._admission.is_shut = True
            if missing <= self.pool.reclaimable(seq.table for seq in self._leaving()):
                return False  # they come with the next commit
            victim = self._running.victim()
            assert victim is not None, f"{missing} pages missing for sequence {seq.seq_id} alone"
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Back to the queue without pages and slot: what it has is computed again.

        A token that is being drawn is kept when it arrives.
        """
        self.num_preemptions += 1
        self._running.remove(seq)
        self._chunks.pop(seq, None)
        if seq.num_total > seq.num_given:  # that was charged, what followed as it was drawn
            seq.num_charged = seq.num_total
        seq.num_lost = seq.num_computed
        seq.num_computed = 0
        seq.status = SequenceStatus.WAITING
        if not seq.num_in_flight:
            self._admission.settle(seq)

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        """It ends, wherever it stands."""
        del self._seqs[seq.seq_id]
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        seq.num_discarded += seq.num_pending  # launched steps are still drawing them
        if seq.in_batch:
            self._running.remove(seq)
        self._admission.remove(seq)
        if not seq.num_in_flight:
            self._admission.settle(seq)

    def _leaving(self) -> set[Sequence]:
        """Those in launched steps and in no other: what they hold comes back with the commits."""
        return {seq for _, rows in self._in_flight for seq in rows if not seq.in_batch}

    def _capacity(self, seq: Sequence) -> int:
        return len(seq.table.pages[0]) * self.pool.page_tokens


def _arrival(seq: Sequence) -> int:
    return seq.arrival


def _counter(seq: Sequence) -> float:
    return seq.account.counter
