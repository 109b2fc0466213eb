"""`ScheduledBatch` -> device tensors: the one place where lists become tensors.

All host columns of a step lie in one buffer, so a step is one copy to the device. The buffer's plan
depends on padded sizes alone:
a captured graph has one plan, and its device views never move.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from model_runner.execution.uniform import draw_uniform
from model_runner.scheduling.batch import ScheduledBatch

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
        s, t, z = self.rows, self.tokens, self.logits
        writes, tables = _group_names(self.groups)
        return (
            ("token_ids", t, 8, 0),
            ("positions", t, 8, 0),
            ("sources", t, 8, 0),
            *[(name, t, 8, 0) for name in writes],
            ("logit_rows", z, 8, 0),
            ("sample_rows", z, 8, 0),
            ("slot_of_token", t, 4, 0),
            ("cu_q", s + 1, 4, 0),
            ("seq_lens", s, 4, 0),
            ("num_rows", 1, 4, 0),
            *[(name, s * self.pages, 4, self.pages) for name in tables],
            ("temperature", z, -4, 0),
            ("uniform", z, -4, 0),
        )


@cache
def _group_names(groups: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The columns of cache indices to write, and of page tables, by KV group."""
    numbers = range(groups)
    return tuple(f"write_idx{g}" for g in numbers), tuple(f"page_table{g}" for g in numbers)


_NUMPY = {8: np.int64, 4: np.int32, -4: np.float32}
_TORCH = {8: torch.int64, 4: torch.int32, -4: torch.float32}


class HostBuffer:
    """One host buffer (pinned for a GPU) with a numpy view for each column; `device_views` gives
    the same over a copy of it.

    write_idx, page_tables  those of all KV groups in one view: [G, T] int64, [G, S, M] int32
    numbers  0, 1, 2, ...: as many as tokens, and as rows and one
    Columns of one type lie side by side, so that views are slices of three arrays.
    """

    def __init__(self, shape: StepShape, pinned: bool) -> None:
        self.shape = shape
        self._columns = shape.columns()
        self._spans: list[tuple[int, int, int]] = []  # item size, first byte, end byte of each type
        places: list[tuple[int, int]] = []  # first item within its type, items with padding
        start, first, size, step = 0, 0, 8, ALIGN_BYTES // 8
        for _, count, item, _ in self._columns:
            if item != size:
                end = start + first * abs(size)
                self._spans.append((size, start, end))
                start, first, size, step = end, 0, item, ALIGN_BYTES // abs(item)
            padded = -(-count // step) * step
            places.append((first, padded))
            first += padded
        self._spans.append((size, start, start + first * abs(size)))
        self._places = places
        # Zeros: a place that no step has filled yet is an index that exists.
        self.memory = torch.zeros(self._spans[-1][2], dtype=torch.uint8, pin_memory=pinned)
        flat = self.memory.numpy()
        typed = {size: flat[a:b].view(_NUMPY[size]) for size, a, b in self._spans}
        view: dict[str, np.ndarray] = {}
        for (name, count, item, width), (at, _) in zip(self._columns, places, strict=True):
            column = typed[item][at : at + count]
            view[name] = column.reshape(-1, width) if width else column
        self.view = view
        writes, tables = _group_names(shape.groups)
        self.write_idx = _stack([view[name] for name in writes])
        self.page_tables = _stack([view[name] for name in tables])
        self.numbers = np.arange(max(shape.tokens, shape.rows + 1))
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


def _stack(columns: list[np.ndarray]) -> np.ndarray:
    """One view of columns that lie at equal distances in one memory."""
    first = columns[0]
    places = [column.ctypes.data for column in columns]
    step = places[1] - places[0] if len(places) > 1 else first.nbytes
    assert places == [places[0] + i * step for i in range(len(places))], f"uneven: {places}"
    shape, strides = (len(columns), *first.shape), (step, *first.strides)
    return np.lib.stride_tricks.as_strided(first, shape, strides)


class PageTables:
    """Page tables that persist over steps, by seat: a decoding sequence costs a copy only when it
    got a new page.

    One that was in the step before only appends pages; one that was left out may come back with
    others, and is copied whole.
    Pages that fell out of a window keep their old id here: nobody reads there.
    """

    def __init__(self, num_groups: int, num_seats: int, num_columns: int, page_tokens: int) -> None:
        self.table = np.zeros((num_groups, num_seats, num_columns), np.int32)  # [G, seats, M]
        self.flat = self.table.reshape(num_groups, -1)  # [G, seats M]
        self.page_tokens = page_tokens
        self._owner = np.full(num_seats, -1)  # [seats] the sequences of the last step, -1 = none
        self._held = np.zeros(num_seats, np.int64)  # [seats] tokens that their copied pages hold
        self._last_step = -2

    def update(
        self, batch: ScheduledBatch, seats: np.ndarray, seq_ids: np.ndarray, lens: np.ndarray
    ) -> None:
        """Bring the tables of the batch's seats up to date. [S] int64 each

        lens: tokens that each row reads or writes. Only rows whose known pages hold fewer, or
        that are new or were left out, cost a look at their lists.
        """
        held = self._held[seats]  # [S]
        held *= self._owner[seats] == seq_ids
        if batch.step != self._last_step + 1:
            held[:] = 0
        for s in (held < lens).nonzero()[0].tolist():
            seat, have, want = batch.seats[s], held[s] // self.page_tokens, len(batch.pages[0][s])
            for table, pages in zip(self.table, batch.pages, strict=True):
                table[seat, have:want] = pages[s][have:want]
            held[s] = want * self.page_tokens
        self._owner.fill(-1)
        self._owner[seats], self._held[seats] = seq_ids, held
        self._last_step = batch.step


def _by_row(batch: ScheduledBatch) -> np.ndarray:
    """Starts, slots, sources, numbers of tokens, seats, sequences. [6, S] int64"""
    columns = (
        batch.starts, batch.slots, batch.sources, batch.num_tokens, batch.seats, batch.seq_ids
    )  # fmt: skip
    n = len(batch.starts)
    return np.fromiter(chain.from_iterable(columns), np.int64, 6 * n).reshape(6, n)


def fill_decode(buffer: HostBuffer, tables: PageTables, batch: ScheduledBatch) -> None:
    """Fill the buffer for a step in which every row has one token; rows past the batch's become
    dummies.

    A dummy has slot -1, one key on page 0, and writes nothing.
    Of the page tables the columns up to the longest row's are filled: all of them may be as many
    as the model has positions, and a row reads no further than its own keys.
    """
    v, n = buffer.view, len(batch.seq_ids)
    starts, slots, sources, _, seats, seq_ids = _by_row(batch)  # [S] each
    lens = starts + 1  # [S]
    tables.update(batch, seats, seq_ids, lens)
    for name, values, rest in (
        ("positions", starts, 0),
        ("seq_lens", lens, 1),
        ("slot_of_token", slots, -1),
        ("sources", sources, -1),
        ("token_ids", [ids[0] if ids else 0 for ids in batch.token_ids], 0),
    ):
        column = v[name]
        column[:n], column[n:] = values, rest
    page, offset = np.divmod(starts, tables.page_tokens)  # [S] twice
    columns = int(page.max()) + 1
    named = tables.table[:, seats, :columns]  # [G, S, pages]
    buffer.page_tables[:, :n, :columns], buffer.page_tables[:, n:, :columns] = named, 0
    write = buffer.write_idx  # [G, S]
    places = np.multiply(tables.table[:, seats, page], tables.page_tokens, dtype=np.int64)  # [G, S]
    write[:, :n], write[:, n:] = places + offset, -1
    v["cu_q"][:] = buffer.numbers[: buffer.shape.rows + 1]
    v["logit_rows"][:] = v["sample_rows"][:] = buffer.numbers[: buffer.shape.rows]
    v["num_rows"][0] = n
    fill_sampling(buffer, batch, range(n), lens)


def fill_mixed(
    buffer: HostBuffer,
    tables: PageTables,
    batch: ScheduledBatch,
    logit_rows: Sequence[int],
    sample_rows: Sequence[int],
    spare_row: int,
) -> None:
    """Fill the buffer for any step. `sample_rows` are the batch rows that give a token,
    `logit_rows` their last tokens, then further ones.

    What the shape has more becomes padding: tokens of no row with slot -1 that write nothing, rows
    without tokens, logits of token 0 whose draw goes to the place `spare_row`.
    Of the page tables as much is filled as in `fill_decode`.
    """
    v, page_tokens, n = buffer.view, tables.page_tokens, len(batch.starts)
    by_row = _by_row(batch)
    starts, _, sources, counts, seats, seq_ids = by_row  # [S] each
    ends, lens = counts.cumsum(), starts + counts  # [S] twice
    tables.update(batch, seats, seq_ids, lens)
    t, z = int(ends[-1]), len(logit_rows)
    v["sources"].fill(-1)
    v["sources"][ends - 1] = sources
    first = ends - counts  # [S]
    ids = v["token_ids"]
    ids[first] = [row[0] if row else 0 for row in batch.token_ids]
    for s in (counts > 1).nonzero()[0].tolist():
        ids[first[s] : ends[s]] = batch.token_ids[s]
    # What a token takes from its row, repeated in one go: the way from its number to its position,
    # its slot, and where its row begins in the page tables.
    by_row[0] = starts - first
    by_row[2] = seats * tables.table.shape[2]
    shift, slots, table_start = by_row[:3].repeat(counts, 1)  # [T] each
    positions = v["positions"][:t]
    np.add(buffer.numbers[:t], shift, out=positions)
    page, offset = np.divmod(positions, page_tokens)  # [T] twice
    page += table_start
    cu_q = v["cu_q"]
    cu_q[0], cu_q[1 : n + 1] = 0, ends
    v["seq_lens"][:n] = lens
    v["slot_of_token"][:t] = slots
    longest = -(-max(lens.tolist()) // page_tokens)  # pages
    buffer.page_tables[:, :n, :longest] = tables.table[:, seats, :longest]
    write = buffer.write_idx  # [G, T]
    write[:, :t] = np.multiply(tables.flat.take(page, 1), page_tokens, dtype=np.int64) + offset
    write[:, t:] = -1
    v["logit_rows"][:z], v["sample_rows"][: len(sample_rows)] = logit_rows, sample_rows
    v["sample_rows"][len(sample_rows) :] = spare_row
    v["num_rows"][0] = n
    if buffer.shape.rows > n:
        cu_q[n + 1 :], v["seq_lens"][n:] = t, 0
    if buffer.shape.tokens > t:
        positions = v["positions"]
        ids[t:], positions[t:], v["slot_of_token"][t:] = 0, 0, -1
    if buffer.shape.logits > z:
        v["logit_rows"][z:] = 0
    fill_sampling(buffer, batch, sample_rows, lens)


def fill_blank(buffer: HostBuffer, is_decode: bool, spare_row: int) -> None:
    """A step of dummies alone, which reads no page but page 0 and writes nothing."""
    v = buffer.view
    for name, column in v.items():
        column.fill(-1 if name.startswith(("slot_of_token", "sources", "write_idx")) else 0)
    v["sample_rows"].fill(spare_row)
    if is_decode:
        v["seq_lens"].fill(1)
        v["cu_q"][:] = buffer.numbers[: buffer.shape.rows + 1]
        v["logit_rows"][:] = buffer.numbers[: buffer.shape.rows]


def fill_sampling(
    buffer: HostBuffer, batch: ScheduledBatch, sample_rows: Sequence[int], lens: np.ndarray
) -> None:
    """Temperature and the random number of each row of logits; a row that gives no token is greedy
    and ignored. lens [S]: the position of the token that a row draws"""
    samples = batch.samples
    drawn = [
        (z, s, row)
        for z, s in enumerate(sample_rows)
        if (row := samples[s]) is not None and row.temperature > 0
    ]
    temperature, uniform = buffer.view["temperature"], buffer.view["uniform"]
    temperature.fill(0.0)
    uniform.fill(0.5)
    if drawn:
        at = [z for z, _, _ in drawn]
        temperature[at] = [row.temperature for _, _, row in drawn]
        uniform[at] = draw_uniform(
            [row.seed for _, _, row in drawn],
            [row.index for _, _, row in drawn],
            lens[[s for _, s, _ in drawn]],
        )


def upload(columns: Mapping[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """Columns [n] of one kind of row, as tensors on the device: one copy, for which nobody
    waits."""
    places, end = dict[str, int](), 0
    for name, column in columns.items():
        places[name], end = end, end + -(-column.nbytes // ALIGN_BYTES) * ALIGN_BYTES
    host = torch.empty(end, dtype=torch.uint8, pin_memory=device.type != "cpu")
    flat = host.numpy()
    for name, column in columns.items():
        flat[places[name] : places[name] + column.nbytes] = column.view(np.uint8)
    memory = host.to(device, non_blocking=True)
    return {
        name: memory[places[name] : places[name] + column.nbytes].view(
            torch.from_numpy(column).dtype
        )
        for name, column in columns.items()
    }
