"""Logits to tokens. A row's draw depends on its logits and on (seed, index, position) alone, never
on its company.

The random number is made on the host by a hash and sent along as one float: the device inverts the
cumulative distribution, so there is no generator state, and a request repeated elsewhere draws the
same tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.sample_token import NOT_FINITE, sample_token
from model_runner.request import TokenLogprobs
from model_runner.scheduling.batch import SamplingRow

MASK_64 = (1 << 64) - 1
GOLDEN, MIX_1, MIX_2 = (
    np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)

TokenMask = Callable[[SamplingRow, int], Tensor]


def draw_uniform(
    seeds: Sequence[int], indices: Sequence[int], positions: Sequence[int]
) -> np.ndarray:
    """A number in (0, 1) from each (seed, index, position): splitmix64 over the three. [n] float32,
    [n] ints each

    Source: Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014.
    """
    x = np.array([s & MASK_64 for s in seeds], np.uint64)  # [n]
    for words in (indices, positions):
        x += GOLDEN * (np.array(words, np.uint64) + np.uint64(1))
        x = (x ^ (x >> np.uint64(30))) * MIX_1
        x = (x ^ (x >> np.uint64(27))) * MIX_2
        x ^= x >> np.uint64(31)
    # 23 bits and a half: exact in float32, never 0 or 1
    return (((x >> np.uint64(41)).astype(np.float64) + 0.5) / (1 << 23)).astype(np.float32)


@dataclass(frozen=True)
class Sampled:
    """What one step drew: tokens [Z] on the device, and for rows that asked, their
    log-probabilities (else None)."""

    tokens: Tensor
    logprobs: tuple[TokenLogprobs | None, ...] | None = None


def is_plain(rows: Sequence[SamplingRow]) -> bool:
    """Whether `sample_token` serves all these rows."""
    return all(
        r.top_p >= 1 and not r.top_k and not r.banned_ids and not r.mask and r.logprobs is None
        for r in rows
    )


def sample(
    logits: Tensor,
    rows: Sequence[SamplingRow],
    temperature: Tensor,
    uniform: Tensor,
    masks: dict[str, TokenMask],
    positions: Sequence[int],
) -> Sampled:
    """Every kind of row. Log-probabilities are of the model's distribution, before temperature,
    bans and masks.

    Shapes:  logits [Z, V]; temperature, uniform [Z] float32, rows and positions of length Z.
    """
    raw = logits.float()  # [Z, V]
    work = raw
    for z, row in enumerate(rows):
        if row.banned_ids or row.mask:
            work = work.clone() if work is raw else work
            if row.banned_ids:
                work[z, list(row.banned_ids)] = -torch.inf
            if row.mask:
                work[z].masked_fill_(
                    ~masks[row.mask](row, positions[z]).to(work.device), -torch.inf
                )
    cut = [z for z, r in enumerate(rows) if r.temperature > 0 and (r.top_p < 1 or r.top_k)]
    if cut:
        work = work.clone() if work is raw else work
        work[cut] = _keep_top(work[cut], [rows[z] for z in cut])
    tokens = sample_token(work, temperature, uniform)
    tokens = torch.where(torch.isfinite(raw.amax(-1)), tokens, NOT_FINITE)
    wanted = [z for z, r in enumerate(rows) if r.logprobs is not None]
    return Sampled(tokens, _logprobs(raw, tokens, rows, wanted) if wanted else None)


def _keep_top(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Cut each row to its top_k best tokens, then to the fewest of those that hold top_p of the
    tempered mass. [n, V] -> [n, V]"""
    device, vocab = logits.device, logits.shape[-1]
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)  # [n, V] twice
    top_k = torch.tensor([min(r.top_k or vocab, vocab) for r in rows], device=device)[
        :, None
    ]  # [n, 1]
    top_p = torch.tensor([r.top_p for r in rows], device=device)[:, None]  # [n, 1]
    temperature = torch.tensor([r.temperature for r in rows], device=device)[:, None]  # [n, 1]
    beyond = torch.arange(vocab, device=device)[None] >= top_k  # [n, V]
    mass = ((ordered - ordered[:, :1]) / temperature).exp().masked_fill(beyond, 0)  # [n, V]
    before = mass.cumsum(-1) - mass  # [n, V] mass of the better ones
    beyond |= before >= top_p * mass.sum(-1, keepdim=True)
    beyond[:, 0] = False
    return torch.empty_like(logits).scatter_(
        1, ids, ordered.masked_fill(beyond, -torch.inf)
    )  # [n, V]


def _logprobs(
    raw: Tensor, tokens: Tensor, rows: Sequence[SamplingRow], wanted: Sequence[int]
) -> tuple[TokenLogprobs | None, ...]:
    most = max(rows[z].logprobs or 0 for z in wanted)
    log = raw[list(wanted)].log_softmax(-1)  # [w, V]
    chosen = log.gather(1, tokens[list(wanted)].clamp(min=0)[:, None])[:, 0].tolist()  # [w]
    best = log.topk(most, -1) if most else None
    values = best.values.tolist() if best else [[]] * len(wanted)
    ids = best.indices.tolist() if best else [[]] * len(wanted)
    found: list[TokenLogprobs | None] = [None] * len(rows)
    for i, z in enumerate(wanted):
        count = rows[z].logprobs or 0
        found[z] = TokenLogprobs(
            chosen[i], tuple(zip(ids[i][:count], values[i][:count], strict=True))
        )
    return tuple(found)
