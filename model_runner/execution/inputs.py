"""`ScheduledBatch` -> device tensors: the one place where lists become tensors.

All host columns of a step lie in one buffer, so a step is one copy to the device. The buffer's plan
depends on padded sizes alone:
a captured graph has one plan, and its device views never move.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from model_runner.execution.sampler import draw_uniform
from model_runner.scheduling.batch import SamplingRow, ScheduledBatch

ALIGN_BYTES = 64  # of every column: Triton compiles apart for pointers that are not aligned


@dataclass(frozen=True)
class StepShape:
    """Padded sizes of one step: S rows, T tokens, Z rows of logits, M page-table columns, G groups.

    In a decode step T = S = Z, and rows past the batch's are dummies on page 0.
    """

    rows: int
    tokens: int
    logits: int
    pages: int
    groups: int

    def columns(self) -> tuple[tuple[str, int, int, int], ...]:
        """(name, items, bytes of an item, items of a row or 0) of everything that goes to the
        device, one column a KV group."""
        s, t, z, groups = self.rows, self.tokens, self.logits, range(self.groups)
        return (
            ("token_ids", t, 8, 0),
            ("positions", t, 8, 0),
            ("sources", t, 8, 0),
            ("logit_rows", z, 8, 0),
            ("sample_rows", z, 8, 0),
            *((f"write_idx{g}", t, 8, 0) for g in groups),
            ("slot_of_token", t, 4, 0),
            ("cu_q", s + 1, 4, 0),
            ("seq_lens", s, 4, 0),
            ("num_rows", 1, 4, 0),
            *((f"page_table{g}", s * self.pages, 4, self.pages) for g in groups),
            ("temperature", z, -4, 0),
            ("uniform", z, -4, 0),
        )


_NUMPY = {8: np.int64, 4: np.int32, -4: np.float32}
_TORCH = {8: torch.int64, 4: torch.int32, -4: torch.float32}


class HostBuffer:
    """One host buffer (pinned for a GPU) with a numpy view for each column; `device_views` gives
    the same over a copy of it.

    Columns of one type lie side by side, so that views are slices of three arrays.
    """

    def __init__(self, shape: StepShape, pinned: bool) -> None:
        self.shape = shape
        self._columns = shape.columns()
        self._spans: list[tuple[int, int, int]] = []  # item size, first byte, end byte of each type
        self._places: list[tuple[int, int]] = []  # first item within its type, items with padding
        start, first, size = 0, 0, 8
        for _, count, item, _ in self._columns:
            if item != size:
                self._spans.append((size, start, start + first * abs(size)))
                start, first, size = start + first * abs(size), 0, item
            step = ALIGN_BYTES // abs(item)
            padded = -(-count // step) * step
            self._places.append((first, padded))
            first += padded
        self._spans.append((size, start, start + first * abs(size)))
        self.memory = torch.empty(self._spans[-1][2], dtype=torch.uint8, pin_memory=pinned)
        flat = self.memory.numpy()
        typed = {size: flat[a:b].view(_NUMPY[size]) for size, a, b in self._spans}
        self.view: dict[str, np.ndarray] = {}
        for (name, count, item, width), (at, _) in zip(self._columns, self._places, strict=True):
            column = typed[item][at : at + count]
            self.view[name] = column.reshape(-1, width) if width else column
        self._own: dict[str, Tensor] | None = None

    @property
    def own_views(self) -> dict[str, Tensor]:
        """The columns as tensors over this buffer itself: a CPU's device copy."""
        if self._own is None:
            self._own = self.device_views(self.memory)
        return self._own

    def device_views(self, memory: Tensor) -> dict[str, Tensor]:
        """The columns as tensors over a copy of this buffer."""
        views, at = {}, 0
        for size, first, end in self._spans:
            typed = memory[first:end].view(_TORCH[size])
            mine = [c for c in self._columns if c[2] == size]
            parts = typed.split([padded for _, padded in self._places[at : at + len(mine)]])
            at += len(mine)
            for (name, count, _, width), part in zip(mine, parts, strict=True):
                column = part[:count]
                views[name] = column.view(-1, width) if width else column
        return views


class PageTables:
    """Page tables that persist over steps: a decoding row costs a copy only when it got a new page.

    A sequence that was in the step before only appends pages; one that was left out may come back
    with others, and is copied whole.
    Pages that fell out of a window keep their old id here: nobody reads there.
    """

    def __init__(self, num_groups: int, num_rows: int, num_columns: int) -> None:
        self.table = np.zeros((num_groups, num_rows, num_columns), np.int32)  # [groups, R, M]
        self._free = list(range(num_rows - 1, -1, -1))
        self._row_of: dict[int, int] = {}
        self._seen = [-2] * num_rows  # the last step that had this row
        self._copied = [0] * num_rows

    def rows(self, batch: ScheduledBatch) -> np.ndarray:
        """The table row of each sequence of the batch, brought up to date. [S] int64"""
        found, step, first = [], batch.step, batch.pages[0]
        row_of, seen, copied = self._row_of, self._seen, self._copied
        for s, seq_id in enumerate(batch.seq_ids):
            row = row_of.get(seq_id)
            if row is None:
                row = self._take(seq_id, batch)
            have = copied[row] if seen[row] == step - 1 else 0
            seen[row] = step
            want = len(first[s])
            if have != want:
                for table, pages in zip(self.table, batch.pages, strict=True):
                    table[row, have:want] = pages[s][have:want]
                copied[row] = want
            found.append(row)
        return np.array(found)  # [S]

    def _take(self, seq_id: int, batch: ScheduledBatch) -> int:
        if not self._free:
            live = set(batch.seq_ids)
            for gone in [i for i in self._row_of if i not in live]:
                self._free.append(self._row_of.pop(gone))
        row = self._free.pop()
        self._row_of[seq_id], self._seen[row] = row, -2
        return row


def fill_decode(
    buffer: HostBuffer, tables: PageTables, batch: ScheduledBatch, page_tokens: int, columns: int
) -> None:
    """Fill the buffer for a step in which every row has one token; rows past the batch's become
    dummies.

    A dummy has slot -1, one key on page 0, and writes nothing.
    """
    v, n = buffer.view, len(batch.seq_ids)
    rows = tables.rows(batch)  # [S]
    starts = np.array(batch.starts)  # [S]
    for name, values, rest in (
        ("positions", starts, 0),
        ("seq_lens", starts + 1, 1),
        ("slot_of_token", batch.slots, -1),
        ("sources", batch.sources, -1),
        ("token_ids", [ids[0] if ids else 0 for ids in batch.token_ids], 0),
    ):
        column = v[name]
        column[:n], column[n:] = values, rest
    page, offset = np.divmod(starts, page_tokens)  # [S] twice
    for g, table in enumerate(tables.table):
        pages, write = v[f"page_table{g}"], v[f"write_idx{g}"]
        pages[:n], pages[n:] = table[rows, :columns], 0
        write[:n], write[n:] = table[rows, page].astype(np.int64) * page_tokens + offset, -1
    v["cu_q"][:] = np.arange(buffer.shape.rows + 1)
    v["logit_rows"][:] = v["sample_rows"][:] = np.arange(buffer.shape.rows)
    v["num_rows"][0] = n
    fill_sampling(buffer, batch, range(n))


def fill_mixed(
    buffer: HostBuffer,
    tables: PageTables,
    batch: ScheduledBatch,
    page_tokens: int,
    columns: int,
    logit_rows: Sequence[int],
    sample_rows: Sequence[int],
) -> None:
    """Fill the buffer for any step, unpadded. `sample_rows` are the batch rows that give a token,
    `logit_rows` their last tokens."""
    v = buffer.view
    rows = tables.rows(batch)  # [S]
    counts, starts = np.array(batch.num_tokens), np.array(batch.starts)  # [S] twice
    ends, lens = counts.cumsum(), starts + counts  # [S] twice
    num_tokens = int(ends[-1])
    # What a token takes from its row, repeated in one go: the way from its number to its position,
    # its slot, and where its row begins in the page tables.
    per_row = np.stack((lens - ends, np.array(batch.slots), rows * tables.table.shape[2]))  # [3, S]
    shift, slots, table_start = per_row.repeat(counts, 1)  # [T] each
    positions = np.arange(num_tokens) + shift  # [T]
    page, offset = np.divmod(positions, page_tokens)  # [T] twice
    page += table_start
    v["cu_q"][0], v["cu_q"][1:] = 0, ends
    v["seq_lens"][:] = lens
    v["positions"][:] = positions
    v["slot_of_token"][:] = slots
    ids = chain.from_iterable(ids or (0,) for ids in batch.token_ids)
    v["token_ids"][:] = np.fromiter(ids, np.int64, num_tokens)
    sources = v["sources"]
    sources[:] = -1
    sources[ends - 1] = batch.sources
    for g, table in enumerate(tables.table):
        v[f"page_table{g}"][:] = table[rows, :columns]
        write = v[f"write_idx{g}"]
        np.multiply(table.ravel().take(page), page_tokens, out=write, dtype=np.int64)
        write += offset
    v["logit_rows"][:], v["sample_rows"][:] = logit_rows, sample_rows
    v["num_rows"][0] = len(counts)
    fill_sampling(buffer, batch, sample_rows)


def fill_sampling(buffer: HostBuffer, batch: ScheduledBatch, sample_rows: Sequence[int]) -> None:
    """Temperature and the random number of each row of logits; a row that gives no token is greedy
    and ignored."""
    drawn: list[tuple[int, SamplingRow, int]] = []
    for z, s in enumerate(sample_rows):
        row = batch.samples[s]
        if row is not None and row.temperature > 0:
            drawn.append((z, row, batch.starts[s] + batch.num_tokens[s]))
    temperature, uniform = buffer.view["temperature"], buffer.view["uniform"]
    temperature[:], uniform[:] = 0.0, 0.5
    if drawn:
        at = [z for z, _, _ in drawn]
        temperature[at] = [row.temperature for _, row, _ in drawn]
        uniform[at] = draw_uniform(
            [row.seed for _, row, _ in drawn],
            [row.index for _, row, _ in drawn],
            [p for _, _, p in drawn],
        )
