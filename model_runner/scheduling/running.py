"""`RunningSet`: the sequences that take part in steps, and the columns of the next batch.

Not for choosing: the scheduler says who comes in, who goes, and which chunk of a prompt is
computed.
"""

from collections.abc import Sequence as Items
from typing import TypeVar

from model_runner.scheduling.batch import History, PromptScore, SamplingRow, ScheduledBatch
from model_runner.scheduling.sequence import Sequence

_Entry = TypeVar("_Entry")


class RunningSet:
    """Decodes in the order of their rows, prompts in the making, and decodes that miss a step.

    The columns that do not change while a sequence decodes (id, slot, seat, page lists) are kept
    from step to step.
    """

    def __init__(self, num_groups: int) -> None:
        self.decoding: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.stalled: list[Sequence] = []  # their pages are on the way
        self._free_seats: list[int] = []
        self._num_seats = 0  # handed out or free
        self._seq_ids: list[int] = []
        self._slots: list[int] = []
        self._seats: list[int] = []
        self._pages: tuple[list[list[int]], ...] = tuple([] for _ in range(num_groups))

    def __len__(self) -> int:
        return len(self.decoding) + len(self.prefilling) + len(self.stalled)

    def start_prefill(self, seq: Sequence) -> None:
        """It has entered: its prompt is computed chunk by chunk."""
        seq.in_batch = True
        self.prefilling.append(seq)
        if not self._free_seats:
            self._free_seats.append(self._num_seats)
            self._num_seats += 1
        seq.seat = self._free_seats.pop()

    def stall(self, seq: Sequence) -> None:
        """A decode sits out one step."""
        self._drop_row(seq)
        self.stalled.append(seq)

    def resume_stalled(self) -> None:
        """Those that sat out take part again."""
        for seq in self.stalled:
            self._append_row(seq)
        self.stalled.clear()

    def remove(self, seq: Sequence) -> None:
        """It takes part no longer. The last decode row takes the place of one that leaves."""
        assert seq.in_batch, f"sequence {seq.seq_id} is in no batch"
        seq.in_batch = False
        if seq in self.prefilling:
            self.prefilling.remove(seq)
        elif seq in self.stalled:
            self.stalled.remove(seq)
        else:
            self._drop_row(seq)
        self._free_seats.append(seq.seat)
        seq.seat = -1

    def all(self) -> list[Sequence]:
        """Everyone, in no particular order."""
        return self.decoding + self.prefilling + self.stalled

    def victim(self) -> Sequence | None:
        """Who gives its pages back when they run out: the newest of the most served tenant.

        Never the oldest of all, so that somebody always comes to an end: None if there is nobody
        else.
        """
        seqs = self.all()
        oldest = min(seqs, key=lambda seq: seq.arrival)
        others = [seq for seq in seqs if seq is not oldest]
        return max(others, key=lambda seq: (seq.account.counter, seq.arrival), default=None)

    def build(
        self, step: int, chunks: dict[Sequence, int]
    ) -> tuple[ScheduledBatch, list[Sequence]]:
        """One token of every decode, then the chunks up to the ends given; and whose rows they are.

        The sequences are booked as if the step had run; a prompt that this completes decodes from
        the next step on.
        """
        rows = self.decoding.copy()
        starts: list[int] = []
        token_ids: list[Items[int]] = []
        sources: list[int] = []
        samples: list[SamplingRow | None] = [seq.sampling_row for seq in rows]
        histories: list[History] = []
        scores: list[PromptScore] = []
        for row, seq in enumerate(rows):
            start = seq.num_computed
            starts.append(start)
            if seq.num_pending:
                token_ids.append(())
                sources.append(seq.row)
                seq.num_pending += 1
            else:
                token_ids.append((seq.token_ids[-1],))
                sources.append(-1)
                seq.num_pending = 1
            seq.num_computed = start + 1
            seq.num_in_flight += 1
            seq.row = row
        num_tokens = [1] * len(rows)
        seq_ids, slots, seats = self._seq_ids.copy(), self._slots.copy(), self._seats.copy()
        pages = tuple(column.copy() for column in self._pages)
        for seq, end in chunks.items():
            start = seq.num_computed
            is_last = end == len(seq.token_ids)
            seq_ids.append(seq.seq_id)
            num_tokens.append(end - start)
            starts.append(start)
            token_ids.append(seq.token_ids[start:end])
            sources.append(-1)
            slots.append(seq.slot_index)
            seats.append(seq.seat)
            for column, ids in zip(pages, seq.table.pages, strict=True):
                column.append(ids)
            if seq.sampling_row.banned_ids and not seq.bans_end:
                seq.sampling_row = seq.make_sampling_row()
            samples.append(seq.sampling_row if is_last else None)
            if is_last and seq.sampling_row.has_penalties:
                known = tuple(seq.token_ids)
                histories.append(History(len(rows), seq.seat, known, seq.prompt_len))
            if seq.num_scored < min(end + 1, seq.prompt_len):
                scores.append(_score(seq, len(rows), start, end))
            seq.num_computed = end
            seq.num_in_flight += 1
            seq.row = len(rows)
            rows.append(seq)
            if is_last:
                seq.num_pending += 1
                self.prefilling.remove(seq)
                self._append_row(seq)
        batch = ScheduledBatch(
            step,
            tuple(seq_ids),
            tuple(num_tokens),
            tuple(starts),
            tuple(token_ids),
            tuple(sources),
            tuple(slots),
            tuple(seats),
            tuple(map(tuple, pages)),
            tuple(samples),
            tuple(histories),
            tuple(scores),
        )
        return batch, rows

    def check(self) -> None:
        """AssertionError if a column no longer belongs to the row beside it."""
        assert self._seq_ids == [seq.seq_id for seq in self.decoding], "rows and ids differ"
        assert self._slots == [seq.slot_index for seq in self.decoding], "rows and slots differ"
        assert self._seats == [seq.seat for seq in self.decoding], "rows and seats differ"
        for g, column in enumerate(self._pages):
            own = [seq.table.pages[g] for seq in self.decoding]
            assert len(column) == len(own), f"{len(column)} page lists for {len(own)} rows"
            assert all(a is b for a, b in zip(column, own, strict=True)), "not the row's own pages"
        assert all(seq.in_batch for seq in self.all()), "a sequence that left is still here"
        seats = [seq.seat for seq in self.all()] + self._free_seats
        assert sorted(seats) == list(range(self._num_seats)), f"seats {seats}"

    def _append_row(self, seq: Sequence) -> None:
        self.decoding.append(seq)
        self._seq_ids.append(seq.seq_id)
        self._slots.append(seq.slot_index)
        self._seats.append(seq.seat)
        for column, ids in zip(self._pages, seq.table.pages, strict=True):
            column.append(ids)

    def _drop_row(self, seq: Sequence) -> None:
        row = self.decoding.index(seq)
        _move_last(self.decoding, row)
        _move_last(self._seq_ids, row)
        _move_last(self._slots, row)
        _move_last(self._seats, row)
        for column in self._pages:
            _move_last(column, row)


def _score(seq: Sequence, row: int, start: int, end: int) -> PromptScore:
    """What a chunk gives that was not given before; booked as given."""
    first, seq.num_scored = seq.num_scored, min(end + 1, seq.prompt_len)
    assert start < first, f"tokens {first} to {start} of sequence {seq.seq_id} have no logits"
    wanted = tuple(seq.token_ids[first : seq.num_scored])
    return PromptScore(row, first - 1 - start, wanted, seq.request.sampling.prompt_logprobs or 0)


def _move_last(column: list[_Entry], row: int) -> None:
    last = column.pop()
    if row < len(column):
        column[row] = last
