"""`Sampler`: the rows that want more than a temperature, from logits to tokens.

A row's draw depends on its logits, its own tokens so far and (seed, index, position) alone, never
on its company. Nothing here waits for the device: what a step needs goes up in one copy, and which
tokens came before stands on the device already (token_counts.py). Not for plain rows, which
`sample_token` serves inside the step's graph.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.sample_token import NOT_FINITE, sample_token
from model_runner.execution.inputs import upload
from model_runner.execution.logprobs import SampledLogprobs, find_logprobs
from model_runner.execution.token_counts import TokenCounts
from model_runner.execution.uniform import draw_uniform
from model_runner.scheduling.batch import History, SamplingRow

TokenMask = Callable[[SamplingRow, int], Tensor]


class Asked(NamedTuple):
    """A row that is not plain: its number among the step's samples, in the batch, in the logits."""

    sample_idx: int
    batch_row: int
    logit_row: int
    row: SamplingRow
    position: int
    seq_id: int


@dataclass(frozen=True)
class Sampled:
    """What was drawn, on the device: tokens [n], where their logits were and their batch rows [n]
    int64; and the log-probabilities of those that asked."""

    tokens: Tensor
    logit_rows: Tensor
    batch_rows: Tensor
    logprobs: SampledLogprobs | None = None


class Sampler:
    """Draws for one engine, and counts what it drew where penalties want it.

    masks  token masks by name: (row, position) -> [V] bool, True = allowed
    """

    def __init__(self, vocab_size: int, max_num_seqs: int, device: torch.device) -> None:
        self.masks: dict[str, TokenMask] = {}
        self._vocab, self._device = vocab_size, device
        self._counts = TokenCounts(max_num_seqs, vocab_size, device)
        self._seat_of: dict[int, int] = {}
        self._max_edits = 4 * max_num_seqs
        # What is added to which logits, by the row it belongs to, which is kept with it.
        self._edits: dict[int, tuple[SamplingRow, np.ndarray, np.ndarray]] = {}

    def draw(self, asked: Sequence[Asked], histories: Sequence[History], logits: Tensor) -> Sampled:
        """A token for each. logits [Z, V] of the step.

        histories  of those of the step that begin: their rows are among the asked
        Log-probabilities are of the model's distribution, before everything.
        """
        rows = [a.row for a in asked]
        self._seat(asked, histories)
        v = upload(self._columns(asked, histories), self._device)
        raw = logits.index_select(0, v["logit_rows"]).float()  # [n, V]
        if histories:
            self._counts.begin(v)
        work = self._edit(raw, asked, v)
        if len(v["penalized"]):
            part = work.index_select(0, v["penalized"])  # [p, V]
            penalties = v["repetition"], v["presence"], v["frequency"]
            part = self._counts.penalize(part, v["seats"], *penalties)
            work = work.index_copy(0, v["penalized"], part)
        if any(r.temperature > 0 and r.min_p > 0 for r in rows):
            floor = work.amax(-1, keepdim=True) + v["min_gap"][:, None]  # [n, 1]
            work = work.masked_fill(work < floor, -torch.inf)
        if len(v["cut"]):
            part = work.index_select(0, v["cut"])  # [c, V]
            part = keep_top(part, v["top_k"], v["top_p"], v["cut_temperature"])
            work = work.index_copy(0, v["cut"], part)
        tokens = sample_token(work, v["temperature"], v["uniform"])  # [n]
        tokens = torch.where(torch.isfinite(raw.amax(-1)), tokens, NOT_FINITE)
        if len(v["penalized"]):
            self._counts.add(v["seats"], tokens.index_select(0, v["penalized"]))
        wanted = [a for a in asked if a.row.logprobs is not None]
        logprobs = None
        if wanted:
            num_top = tuple(a.row.logprobs or 0 for a in wanted)
            mine, drawn = (x.index_select(0, v["wanted"]) for x in (raw, tokens))
            found = find_logprobs(mine, drawn, max(num_top))
            logprobs = SampledLogprobs(found, tuple(a.sample_idx for a in wanted), num_top)
        return Sampled(tokens, v["logit_rows"], v["batch_rows"], logprobs)

    def _seat(self, asked: Sequence[Asked], histories: Sequence[History]) -> None:
        """Who begins takes a seat from whoever had it."""
        if not histories:
            return
        taken = {history.seat for history in histories}
        self._seat_of = {i: seat for i, seat in self._seat_of.items() if seat not in taken}
        seq_ids = {a.batch_row: a.seq_id for a in asked}
        for history in histories:
            self._seat_of[seq_ids[history.row]] = history.seat

    def _columns(
        self, asked: Sequence[Asked], histories: Sequence[History]
    ) -> dict[str, np.ndarray]:
        rows = [a.row for a in asked]
        penalized = [i for i, r in enumerate(rows) if r.has_penalties]
        cut = [i for i, r in enumerate(rows) if r.is_cut]
        wanted = [i for i, r in enumerate(rows) if r.logprobs is not None]
        edits = [self._edits_of(r) for r in rows]
        ints: dict[str, Sequence[int]] = {
            "logit_rows": [a.logit_row for a in asked],
            "batch_rows": [a.batch_row for a in asked],
            "penalized": penalized,
            "seats": [self._seat_of[asked[i].seq_id] for i in penalized],
            "cut": cut,
            "top_k": [min(rows[i].top_k or self._vocab, self._vocab) for i in cut],
            "wanted": wanted,
        }
        floats: dict[str, Sequence[float]] = {
            "temperature": [r.temperature for r in rows],
            "min_gap": [_min_gap(r) for r in rows],
            "repetition": [rows[i].repetition_penalty for i in penalized],
            "presence": [rows[i].presence_penalty for i in penalized],
            "frequency": [rows[i].frequency_penalty for i in penalized],
            "top_p": [rows[i].top_p for i in cut],
            "cut_temperature": [rows[i].temperature for i in cut],
        }
        columns = {name: np.array(values, np.int64) for name, values in ints.items()}
        columns |= {name: np.array(values, np.float32) for name, values in floats.items()}
        columns["uniform"] = draw_uniform(
            [r.seed for r in rows], [r.index for r in rows], [a.position for a in asked]
        )
        columns["edit_at"] = np.concatenate(
            [i * self._vocab + ids for i, (ids, _) in enumerate(edits)]
        )
        columns["edit_by"] = np.concatenate([by for _, by in edits])
        return columns | (self._counts.columns(histories) if histories else {})

    def _edits_of(self, row: SamplingRow) -> tuple[np.ndarray, np.ndarray]:
        """Ids [m] int64, none twice, and what is added to their logits [m] float32."""
        known = self._edits.get(id(row))
        if known is None:
            if len(self._edits) >= self._max_edits:
                self._edits.clear()
            added = dict(row.logit_bias) | dict.fromkeys(row.banned_ids, -math.inf)
            # An end of text beyond the vocabulary cannot be drawn anyway.
            pairs = [(i, by) for i, by in added.items() if i < self._vocab]
            ids = np.array([i for i, _ in pairs], np.int64)
            known = self._edits[id(row)] = row, ids, np.array([by for _, by in pairs], np.float32)
        return known[1:]

    def _edit(self, raw: Tensor, asked: Sequence[Asked], v: dict[str, Tensor]) -> Tensor:
        """Bias, bans and masks. [n, V] -> [n, V], another tensor if there are any"""
        masked = [i for i, a in enumerate(asked) if a.row.mask]
        if not masked and not len(v["edit_at"]):
            return raw
        work = raw.clone()
        work.view(-1).index_add_(0, v["edit_at"], v["edit_by"])
        for i in masked:
            row, position = asked[i].row, asked[i].position
            allowed = self.masks[row.mask](row, position).to(work.device, non_blocking=True)
            work[i].masked_fill_(~allowed, -torch.inf)
        return work


def keep_top(logits: Tensor, top_k: Tensor, top_p: Tensor, temperature: Tensor) -> Tensor:
    """Cut each row to its top_k best tokens, then to the fewest of those that hold top_p of the
    tempered mass. [n, V] -> [n, V]; top_k [n] int64, top_p and temperature [n] float32"""
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)  # [n, V] twice
    beyond = torch.arange(logits.shape[-1], device=logits.device) >= top_k[:, None]  # [n, V]
    mass = ((ordered - ordered[:, :1]) / temperature[:, None]).exp()  # [n, V]
    mass = mass.masked_fill(beyond, 0)  # [n, V]
    before = mass.cumsum(-1) - mass  # [n, V] mass of the better ones
    beyond |= before >= top_p[:, None] * mass.sum(-1, keepdim=True)
    beyond[:, 0] = False
    return torch.empty_like(logits).scatter_(
        1, ids, ordered.masked_fill(beyond, -torch.inf)
    )  # [n, V]


def _min_gap(row: SamplingRow) -> float:
    """How far below the best logit one may lie: p >= min_p * best p, in logits."""
    if row.temperature <= 0 or row.min_p <= 0:
        return -math.inf
    return row.temperature * math.log(row.min_p)
