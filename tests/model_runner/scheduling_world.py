"""A small world for the scheduler's tests: a model whose token is a hash of what it reads through
the pages, and slots.

The model writes and reads real (Python) pages, so a page that was given away, reused or shared too
early is noticed at the first token; the slots notice a reload while a launched step names them.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256

import numpy as np

from adapter_store.errors import AdapterNotFound
from adapter_store.ref import AdapterRef
from model_runner.execution.inputs import PageTables
from model_runner.request import FinishReason, Request, SamplingParams
from model_runner.scheduling.batch import ScheduledBatch
from model_runner.scheduling.page_pool import KvGroup, PagePool
from model_runner.scheduling.scheduler import Scheduler, Update
from model_runner.scheduling.sequence import Sequence

EOS = 0
VOCAB = 24


def adapter(name: str, revision: str = "") -> AdapterRef:
    return AdapterRef(name, f"file:///{name}", revision)


def draw(ids: tuple[int, ...], ref: AdapterRef | None, index: int, banned: tuple[int, ...]) -> int:
    """The token after `ids`: a function of what attention reads, the adapter and the index."""
    digest = sha256(repr((ids, ref, index)).encode()).digest()
    return next(t for t in (b % VOCAB for b in digest) if t not in banned)


def answer(request: Request, index: int, max_model_len: int) -> tuple[list[int], FinishReason]:
    """What the model says to a request alone, without any scheduler."""
    s, ids = request.sampling, list(request.token_ids)
    stops = {*s.stop_ids} | (set() if s.ignore_eos else {EOS})
    if not s.max_tokens:
        return [], FinishReason.LENGTH
    while True:
        num_output = len(ids) - len(request.token_ids)
        banned = (*s.stop_ids, EOS) if num_output < s.min_tokens else ()
        ids.append(draw(tuple(ids), request.adapter, index, banned))
        output = ids[len(request.token_ids) :]
        if ids[-1] in stops and num_output >= s.min_tokens:
            return output, FinishReason.STOP
        if len(output) >= s.max_tokens or len(ids) >= max_model_len:
            return output, FinishReason.LENGTH


@dataclass(frozen=True)
class Lease:
    index: int
    number: int


class FakeGate:
    """Slots that load in ticks. `dead` adapters never come, `absent` ones are not yet here."""

    def __init__(self, num_slots: int = 4, load_ticks: int = 2) -> None:
        self.slots: list[AdapterRef | None] = [None] * num_slots
        self.load_ticks = load_ticks
        self.ready: dict[AdapterRef, int] = {}  # slot, least recently used first
        self.loading: dict[AdapterRef, tuple[int, int]] = {}
        self.unused: set[AdapterRef] = set()  # loaded and not used yet: not evicted
        self.is_wanted: Callable[[AdapterRef], bool] = lambda ref: True  # somebody waits for it
        self.held: dict[Lease, AdapterRef] = {}
        self.dead: set[AdapterRef] = set()
        self.absent: set[AdapterRef] = set()
        self.named_in_flight: set[int] = set()
        self.now = self.num_leases = self.num_loads = self.num_asked = 0

    def tick(self) -> list[AdapterRef]:
        """Time passes; gives the adapters that are in their slots now."""
        self.now += 1
        came = []
        for ref, (slot, done) in list(self.loading.items()):
            if done <= self.now:
                del self.loading[ref]
                self.slots[slot] = ref
                self.ready[ref] = slot
                self.unused.add(ref)
                came.append(ref)
        return came

    def acquire(self, ref: AdapterRef, *, may_evict: bool = True) -> Lease | None:
        self.num_asked += 1
        if ref in self.ready:
            self.unused.discard(ref)
            self.ready[ref] = self.ready.pop(ref)
            self.num_leases += 1
            lease = Lease(self.ready[ref], self.num_leases)
            self.held[lease] = ref
            return lease
        if ref not in self.loading and ref not in self.dead | self.absent:
            slot = self._room()
            if slot is not None:
                assert slot not in self.named_in_flight, (
                    f"slot {slot} reloaded under a launched step"
                )
                self.slots[slot] = None
                self.loading[ref] = (slot, self.now + self.load_ticks)
                self.num_loads += 1
        return None

    def _room(self) -> int | None:
        used = {slot for slot, _ in self.loading.values()} | set(self.ready.values())
        for slot in range(len(self.slots)):
            if slot not in used:
                return slot
        for ref, slot in self.ready.items():
            is_kept = ref in self.unused and self.is_wanted(ref)
            if ref not in self.held.values() and not is_kept:
                del self.ready[ref]
                return slot
        return None

    def release(self, lease: Lease, /, *, unused: bool = False) -> None:
        ref = self.held.pop(lease)  # KeyError: given back twice
        if unused:
            self.unused.add(ref)

    def forget(self, ref: AdapterRef) -> None:
        """Nobody waits for it any more."""
        self.unused.discard(ref)

    def error_of(self, ref: AdapterRef) -> Exception | None:
        return AdapterNotFound(str(ref)) if ref in self.dead else None

    def lacks_slot(self, ref: AdapterRef) -> bool:
        return ref not in self.dead | self.absent | self.ready.keys() | self.loading.keys()


@dataclass
class World:
    """A scheduler, its pages and slots, and a device that runs launched steps in order."""

    num_pages: int = 64
    page_tokens: int = 4
    windows: tuple[int, ...] = (0,)
    max_num_seqs: int = 4
    max_step_tokens: int = 16
    max_model_len: int = 64
    prefix_cache: bool = True
    look_ahead: bool = False
    gate: FakeGate = field(default_factory=FakeGate)
    makes_room: bool = True
    wakes: bool = True

    def __post_init__(self) -> None:
        groups = tuple(KvGroup(f"g{w}", w) for w in self.windows)
        self.pool = PagePool(self.num_pages, self.page_tokens, groups, self.prefix_cache)
        self.scheduler = Scheduler(
            self.max_num_seqs,
            self.max_step_tokens,
            self.max_model_len,
            self.pool,
            self.gate,
            (EOS,),
            self.gate.lacks_slot if self.makes_room else None,
        )
        columns = -(-self.max_model_len // self.page_tokens)
        self.tables = PageTables(len(self.windows), self.max_num_seqs, columns, self.page_tokens)
        self.seqs: dict[int, Sequence] = {}
        self.delivered: dict[int, list[int]] = {}
        self.finished: dict[int, Update] = {}
        self.aborted: set[int] = set()
        self.memory: dict[tuple[int, int], tuple[object, ...]] = {}  # (page, offset)
        self.launched: deque[tuple[ScheduledBatch, list[int]]] = deque()
        self.last_rows: list[int] = []
        self.counted: dict[int, tuple[int, list[int]]] = {}  # seat: sequence, tokens on the device
        self.scored: dict[int, list[int]] = {}  # tokens of its prompt that were given logits
        self.batches: list[ScheduledBatch] = []
        self.num_sampled = 0
        self.gate.is_wanted = self._is_wanted

    def add(self, request: Request) -> list[int]:
        ids = []
        for index in range(request.sampling.n):
            seq = Sequence(len(self.seqs), request, index, seed=7)
            self.seqs[seq.seq_id] = seq
            self.delivered[seq.seq_id] = []
            self.scheduler.add(seq)
            ids.append(seq.seq_id)
        return ids

    def abort(self, seq_id: int) -> bool:
        done = self.scheduler.abort(seq_id)
        if done:
            self.aborted.add(seq_id)
            ref = self.seqs[seq_id].request.adapter
            ended = self.finished.keys() | self.aborted
            waiting = (s for i, s in self.seqs.items() if i not in ended)
            if ref is not None and all(s.request.adapter != ref for s in waiting):
                self.gate.forget(ref)
        return done

    def step(self) -> ScheduledBatch | None:
        """Launch one step if there is one; read back what is due."""
        batch = self.scheduler.schedule()
        if batch is not None:
            self.launched.append((batch, self._run(batch)))
            self.batches.append(batch)
        if self.launched and (not self.look_ahead or batch is None or len(self.launched) > 1):
            self.commit()
        for update in self.scheduler.take_failures():
            self.finished[update.seq.seq_id] = update
        came = self.gate.tick()
        if self.wakes:
            self.scheduler.wake(came)
        return batch

    def commit(self) -> None:
        batch, tokens = self.launched.popleft()
        self.num_sampled += len(tokens)
        for update in self.scheduler.commit(batch, tokens):
            seq_id = update.seq.seq_id
            assert seq_id not in self.finished and seq_id not in self.aborted
            if update.token is not None:
                assert tokens[update.sample_idx] == update.token
                self.delivered[seq_id].append(update.token)
            if update.finish_reason is not None:
                self.finished[seq_id] = update
        self._note_slots()

    def drain(self, max_steps: int = 3000) -> int:
        """Run until nothing is left; the number of steps it took."""
        for step in range(max_steps):
            if not self.scheduler.has_work:
                self.scheduler.check()
                self.check_counts()
                assert not self.gate.held
                return step
            self.step()
            self.scheduler.check()
        raise AssertionError(f"not done after {max_steps} steps")

    def check_counts(self) -> None:
        """Every token drawn was told or thrown away, for all together and for each."""
        told = sum(map(len, self.delivered.values()))
        assert told + self.scheduler.num_discarded == self.num_sampled
        by_sequence = sum(seq.num_discarded for seq in self.seqs.values())
        assert by_sequence == self.scheduler.num_discarded

    def check_answers(self) -> None:
        """Every sequence that ended by itself said what it says alone."""
        for seq_id, update in self.finished.items():
            if update.finish_reason is not FinishReason.ERROR:
                request, index = self.seqs[seq_id].request, self.seqs[seq_id].index
                want = answer(request, index, self.max_model_len)
                assert (self.delivered[seq_id], update.finish_reason) == want
                wanted = request.sampling.prompt_logprobs is not None and not index
                scored = list(request.token_ids[1:]) if wanted else []
                assert self.scored.get(seq_id, []) == scored

    def _run(self, batch: ScheduledBatch) -> list[int]:
        """Write all rows' keys, then read, as a layer does. Gives the sampling rows' tokens."""
        assert len(batch.seq_ids) <= self.max_num_seqs
        assert sum(batch.num_tokens) <= self.max_step_tokens
        assert len(set(batch.seq_ids)) == len(batch.seq_ids)
        self._check_tables(batch)
        inputs = []
        for row, seq_id in enumerate(batch.seq_ids):
            ids = batch.token_ids[row]
            if not ids:
                ids = (self.last_rows[batch.sources[row]],)
            else:
                assert batch.sources[row] == -1
            assert len(ids) == batch.num_tokens[row] > 0
            inputs.append(ids)
            owner = self._owner(seq_id)
            for i, token in enumerate(ids):
                position = batch.starts[row] + i
                for g in range(len(self.windows)):
                    page = batch.pages[g][row][position // self.page_tokens]
                    assert page, f"sequence {seq_id} writes position {position} to page 0"
                    cell = (page, position % self.page_tokens)
                    self.memory[cell] = (g, position, token, owner)
        for history in batch.histories:
            assert history.prompt_len == self.seqs[batch.seq_ids[history.row]].prompt_len
            assert 0 <= history.seat < self.max_num_seqs
            seq_id = batch.seq_ids[history.row]
            others = {seat: held for seat, held in self.counted.items() if held[0] != seq_id}
            self.counted = others | {history.seat: (seq_id, list(history.token_ids))}
        for score in batch.prompt_scores:
            first = batch.starts[score.row] + score.first + 1
            assert batch.starts[score.row] < first
            end = first + len(score.token_ids)
            assert end <= batch.starts[score.row] + batch.num_tokens[score.row] + 1
            seq = self.seqs[batch.seq_ids[score.row]]
            assert list(score.token_ids) == seq.token_ids[first:end].tolist()
            told = self.scored.setdefault(seq.seq_id, [])
            assert len(told) == first - 1
            told += score.token_ids
        rows, tokens = [], []
        for row, seq_id in enumerate(batch.seq_ids):
            seq, owner = self.seqs[seq_id], self._owner(seq_id)
            slot = batch.slots[row]
            assert (self.gate.slots[slot] if slot >= 0 else None) == seq.request.adapter
            end = batch.starts[row] + batch.num_tokens[row]
            known: list[int] = []
            for g, window in enumerate(self.windows):
                first = max(0, batch.starts[row] - window + 1) if window else 0
                read = []
                for position in range(first, end):
                    page = batch.pages[g][row][position // self.page_tokens]
                    cell = self.memory.get((page, position % self.page_tokens))
                    assert cell is not None and cell[:2] == (g, position), f"{cell} at {position}"
                    assert cell[3] == owner, f"{cell} read by {owner}"
                    read.append(cell[2])
                if not window:
                    known = read
            assert known[batch.starts[row] :] == list(inputs[row])
            sample = batch.samples[row]
            rows.append(-2)
            if sample is not None:
                assert (sample.index, sample.seed) == (seq.index, 7)
                banned = sample.banned_ids
                rows[-1] = draw(tuple(known), seq.request.adapter, seq.index, banned)
                if sample.has_penalties:
                    (counted,) = (ids for i, ids in self.counted.values() if i == seq_id)
                    assert counted == known, f"{counted} counted of {known}"
                    counted.append(rows[-1])
                tokens.append(rows[-1])
        self.last_rows = rows
        self._note_slots(batch)
        return tokens

    def _check_tables(self, batch: ScheduledBatch) -> None:
        """What the device reads pages from, kept from step to step, names those of the batch."""
        ends = np.array(batch.starts) + np.array(batch.num_tokens)  # [S]
        assert len(set(batch.seats)) == len(batch.seats)
        self.tables.update(batch, np.array(batch.seats), np.array(batch.seq_ids), ends)
        for s, seat in enumerate(batch.seats):
            num_blocks = -(-int(ends[s]) // self.page_tokens)
            for table, pages in zip(self.tables.table, batch.pages, strict=True):
                want = np.array(pages[s][:num_blocks])
                kept = table[seat, :num_blocks]
                assert (kept[want > 0] == want[want > 0]).all(), (
                    f"sequence {batch.seq_ids[s]} has pages {want}, not {kept}"
                )

    def _note_slots(self, batch: ScheduledBatch | None = None) -> None:
        batches = [b for b, _ in self.launched] + ([batch] if batch else [])
        self.gate.named_in_flight = {s for b in batches for s in b.slots if s >= 0}

    def _is_wanted(self, ref: AdapterRef) -> bool:
        ended = self.finished.keys() | self.aborted
        return any(s.request.adapter == ref for i, s in self.seqs.items() if i not in ended)

    def _owner(self, seq_id: int) -> tuple[str, AdapterRef | None]:
        request = self.seqs[seq_id].request
        return request.cache_salt, request.adapter


def request(
    number: int,
    prompt: tuple[int, ...] = (1, 2, 3),
    ref: AdapterRef | None = None,
    tenant: str = "",
    salt: str = "",
    weight: float = 1.0,
    **sampling: object,
) -> Request:
    params = SamplingParams(**{"max_tokens": 8, **sampling})  # type: ignore[arg-type]
    return Request(f"r{number}", prompt, params, ref, tenant, weight, salt)
