"""`ScheduledBatch` -> device tensors: the one place where lists become tensors.

All host columns of a step lie in one buffer, so a step is one copy to the device. The buffer's plan depends on padded sizes alone:
a captured graph has one plan, and its device views never move.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model_runner.execution.sampler import draw_uniform
from model_runner.scheduling.batch import ScheduledBatch

ALIGN = 64


@dataclass(frozen=True)
class StepShape:
    """Padded sizes of one step: S rows, T tokens, Z rows of logits, M page-table columns, G groups.

    One T for decode (T = S = Z); the pad rows have no tokens in the sense of cu_q only in prefill, in decode they are dummies on page 0.
    """

    rows: int
    tokens: int
    logits: int
    pages: int
    groups: int

    def columns(self) -> tuple[tuple[str, tuple[int, ...], type], ...]:
        """(name, shape, numpy type) of everything that goes to the device.

        One column a KV group, not one array: each begins aligned, and Triton compiles apart for pointers that do not.
        """
        s, t, z = self.rows, self.tokens, self.logits
        return (
            ("token_ids", (t,), np.int64),
            ("positions", (t,), np.int64),
            *((f"write_idx{g}", (t,), np.int64) for g in range(self.groups)),
            ("logit_rows", (z,), np.int64),
            ("sources", (t,), np.int64),
            ("sample_rows", (z,), np.int64),
            ("slot_of_token", (t,), np.int32),
            ("cu_q", (s + 1,), np.int32),
            ("seq_lens", (s,), np.int32),
            *((f"page_table{g}", (s, self.pages), np.int32) for g in range(self.groups)),
            ("temperature", (z,), np.float32),
            ("uniform", (z,), np.float32),
            ("num_rows", (1,), np.int32),
        )


class HostBuffer:
    """One host buffer (pinned for a GPU) with a numpy view per column, and the same views on a device copy."""

    def __init__(self, shape: StepShape, pinned: bool) -> None:
        self.shape = shape
        self._plan, size = [], 0
        for name, dims, kind in shape.columns():
            count = int(np.prod(dims))
            self._plan.append((name, dims, kind, size, count * np.dtype(kind).itemsize))
            size += -(-count * np.dtype(kind).itemsize // ALIGN) * ALIGN
        self.memory = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
        flat = self.memory.numpy()
        self.view = {n: flat[o : o + b].view(kind).reshape(dims) for n, dims, kind, o, b in self._plan}
        self.own_views = self.device_views(self.memory)

    def device_views(self, memory: Tensor) -> dict[str, Tensor]:
        """The columns as tensors over a copy of this buffer."""
        kinds = {np.int64: torch.int64, np.int32: torch.int32, np.float32: torch.float32}
        return {n: memory[o : o + b].view(kinds[kind]).view(dims) for n, dims, kind, o, b in self._plan}


class PageTables:
    """Page tables that persist over steps: a decoding row costs a copy only when it got a new page.

    A sequence that was in the step before only appends pages; one that was left out may come back with others, and is copied whole.
    Pages that fell out of a window keep their old id here: nobody reads there.
    """

    def __init__(self, num_groups: int, num_rows: int, num_columns: int) -> None:
        self.table = np.zeros((num_groups, num_rows, num_columns), np.int32)  # [groups, R, M]
        self._free = list(range(num_rows - 1, -1, -1))
        self._row_of: dict[int, int] = {}
        self._seen = [-2] * num_rows  # the last step that had this row
        self._copied = [0] * num_rows

    def rows(self, batch: ScheduledBatch) -> list[int]:
        """The table row of each sequence of the batch, brought up to date."""
        found, step = [], batch.step
        for s, seq_id in enumerate(batch.seq_ids):
            row = self._row_of.get(seq_id)
            if row is None:
                row = self._take(seq_id, batch)
            have = self._copied[row] if self._seen[row] == step - 1 else 0
            self._seen[row] = step
            want = len(batch.pages[0][s])
            if have != want:
                for g, pages in enumerate(batch.pages):
                    self.table[g, row, have:want] = pages[s][have:want]
                self._copied[row] = want
            found.append(row)
        return found

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
    """Fill the buffer for a step in which every row has one token; rows past the batch's become dummies.

    A dummy has slot -1, one key on page 0, and writes nothing.
    """
    v, n = buffer.view, len(batch.seq_ids)
    rows = tables.rows(batch)
    starts = np.array(batch.starts, np.int64)  # [S]
    v["positions"][:n], v["positions"][n:] = starts, 0
    v["seq_lens"][:n], v["seq_lens"][n:] = starts + 1, 1
    v["slot_of_token"][:n], v["slot_of_token"][n:] = batch.slots, -1
    v["sources"][:n], v["sources"][n:] = batch.sources, -1
    v["token_ids"][:n] = [ids[0] if ids else 0 for ids in batch.token_ids]
    v["token_ids"][n:] = 0
    table = tables.table[:, rows, :columns]  # [groups, S, M]
    page, offset = np.divmod(starts, page_tokens)  # [S] twice
    at = np.arange(n)
    for g, pages in enumerate(table):
        v[f"page_table{g}"][:n], v[f"page_table{g}"][n:] = pages, 0
        v[f"write_idx{g}"][:n] = pages[at, page].astype(np.int64) * page_tokens + offset
        v[f"write_idx{g}"][n:] = -1
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
    """Fill the buffer for any step, unpadded. `sample_rows` are the batch rows that give a token, `logit_rows` their last tokens."""
    v = buffer.view
    rows = tables.rows(batch)
    table = tables.table[:, rows, :columns]  # [groups, S, M]
    counts = np.array(batch.num_tokens, np.int64)  # [S]
    starts = np.array(batch.starts, np.int64)  # [S]
    ends = counts.cumsum()
    v["cu_q"][0], v["cu_q"][1:] = 0, ends
    v["seq_lens"][:] = starts + counts
    row_of_token = np.repeat(np.arange(len(counts)), counts)  # [T]
    positions = np.arange(ends[-1]) - (ends - counts)[row_of_token] + starts[row_of_token]  # [T]
    v["positions"][:] = positions
    v["slot_of_token"][:] = np.array(batch.slots, np.int32)[row_of_token]
    v["sources"][:] = -1
    for s, ids in enumerate(batch.token_ids):
        end = ends[s]
        if ids:
            v["token_ids"][end - counts[s] : end] = ids
        else:
            v["token_ids"][end - 1], v["sources"][end - 1] = 0, batch.sources[s]
    page, offset = np.divmod(positions, page_tokens)  # [T] twice
    for g, pages in enumerate(table):
        v[f"page_table{g}"][:] = pages
        v[f"write_idx{g}"][:] = pages[row_of_token, page].astype(np.int64) * page_tokens + offset
    v["logit_rows"][:], v["sample_rows"][:] = logit_rows, sample_rows
    v["num_rows"][0] = len(counts)
    fill_sampling(buffer, batch, sample_rows)


def fill_sampling(buffer: HostBuffer, batch: ScheduledBatch, sample_rows: Sequence[int]) -> None:
    """Temperature and the random number of each row of logits; a row that gives no token is greedy and ignored."""
    temperature, uniform = buffer.view["temperature"], buffer.view["uniform"]
    temperature[:] = 0.0
    for z, s in enumerate(sample_rows):
        row = batch.samples[s]
        if row is not None and row.temperature > 0:
            temperature[z] = row.temperature
            uniform[z] = draw_uniform(row.seed, row.index, batch.position(s))
