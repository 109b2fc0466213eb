"""`ModelRunner`: a scheduled batch in, sampled tokens out. Inputs, eager or graph, sample.

A step is launched without waiting for the one before it: the tokens that a row needs from there
stay on the device.
"""

import itertools
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.lora_decode import tokens_suffice
from kernels.lora_tables import LoraTables, Worklist
from kernels.op import use_triton
from kernels.sample_token import sample_token
from kernels.tiling import slot_block_m
from kernels.worklist import build_worklist
from model_runner.execution.cuda_graphs import (
    GraphKey,
    StepGraphs,
    decode_sizes,
    fit,
    mixed_sizes,
)
from model_runner.execution.inputs import (
    HostBuffer,
    PageTables,
    StepShape,
    fill_blank,
    fill_decode,
    fill_mixed,
    upload,
)
from model_runner.execution.kv_cache import KvLayout
from model_runner.execution.logprobs import SampledLogprobs, ScoredPrompt, copy_to_host
from model_runner.execution.sampler import Asked, Sampler, TokenMask
from model_runner.layers.context import ForwardContext, KvGroupContext
from model_runner.models.decoder import Decoder
from model_runner.request import TokenLogprobs
from model_runner.scheduling.batch import ScheduledBatch

BUFFERS = (
    3  # host buffers of one shape in turn: the step in flight may still be reading the last two
)
# Positions whose logits are held at once when all of a prompt's are wanted.
SCORE_ROWS = 1024
# Logits that are held at once for the log-probabilities of a prompt.
SCORE_LOGITS = 1 << 24
ScoreSink = Callable[[int, Tensor], None]  # (first position, logits [tokens, V])


class Wanted(NamedTuple):
    """Query tokens [first, first + num_tokens) of a batch row whose logits go to a sink, `at_once`
    in a part."""

    row: int
    first: int
    num_tokens: int
    at_once: int
    sink: ScoreSink


@dataclass
class PendingStep:
    """A launched step. `wait` gives one token per batch row that samples, in order, and their
    log-probabilities."""

    batch: ScheduledBatch
    tokens: Tensor
    sample_rows: tuple[int, ...]
    logprobs: SampledLogprobs | None
    prompts: tuple[ScoredPrompt, ...]
    event: "torch.cuda.Event | None"

    def wait(self) -> tuple[list[int], tuple[TokenLogprobs | None, ...] | None]:
        """Blocks until the device has drawn the tokens."""
        if self.event is not None:
            self.event.synchronize()
        tokens = self.tokens.tolist()
        logprobs = None if self.logprobs is None else self.logprobs.read(len(self.sample_rows))
        return [tokens[i] for i in self.sample_rows], logprobs

    def read_prompts(self) -> list[tuple[int, tuple[TokenLogprobs, ...]]]:
        """After `wait`: batch rows and the log-probabilities of their prompts' tokens, where
        wanted."""
        return [(prompt.row, prompt.read()) for prompt in self.prompts]


class ModelRunner:
    """Runs one model on one device.

    caches  by layer, see ForwardContext;  lora  None when the engine has no slots
    seldom_slots  slots whose adapter changes one of `Decoder.seldom_targets`; read at every launch,
                  None = any may
    """

    def __init__(
        self,
        model: Decoder,
        layout: KvLayout,
        caches: tuple[tuple[Tensor, Tensor], ...],
        lora: LoraTables | None,
        *,
        device: torch.device,
        page_tokens: int,
        max_num_seqs: int,
        max_step_tokens: int,
        max_len: int,
        use_graphs: bool,
        deterministic: bool = False,
        seldom_slots: AbstractSet[int] | None = None,
    ) -> None:
        self.model, self.device = model, device
        self._sampler = Sampler(model.config.vocab_size, max_num_seqs, device)
        self._layout, self._caches, self._lora = layout, caches, lora
        self._page_tokens, self._max_len, self._deterministic = page_tokens, max_len, deterministic
        self._seldom_slots, self._seldom = seldom_slots, True
        self._columns = -(-max_len // page_tokens)
        groups = len(layout.groups)
        self._tables = PageTables(groups, max_num_seqs, self._columns, page_tokens)
        self._max_num_seqs = max_num_seqs
        # Tokens by row of the last step; the last place takes what padding draws.
        self._previous = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        self._ring: dict[StepShape, list[HostBuffer]] = {}
        self._last_buffer: HostBuffer | None = None
        self._step = 0
        self._hits = torch.zeros((), dtype=torch.int64, device=device)
        self._hit_steps = 0
        self._moe_layers = sum(1 for e in model.config.experts_of_layer if e)
        self._graphs = StepGraphs() if use_graphs else None
        self._decode_sizes, self._mixed_sizes = (
            decode_sizes(max_num_seqs),
            mixed_sizes(max_step_tokens),
        )

    @property
    def masks(self) -> dict[str, TokenMask]:
        """Token masks by name."""
        return self._sampler.masks

    def warm_up(self) -> None:
        """Compile everything and capture every graph, so that no request pays for it. Does nothing
        on a CPU."""
        if self._graphs is None:
            return
        both = self._lora is not None and self._seldom_slots is not None
        kinds = (True, False) if both else (True,)
        # Prompts of adapters with seldom targets run eagerly: graphs of theirs would hardly be
        # used. The largest comes first: the others fit into its memory.
        keys = [GraphKey(False, size, kinds[-1]) for size in reversed(self._mixed_sizes)]
        keys += [GraphKey(True, size, kind) for size in self._decode_sizes for kind in kinds]
        for key in keys:
            buffer = HostBuffer(self._shape_of(key), pinned=True)
            fill_blank(buffer, key.is_decode, self._max_num_seqs)
            self._seldom = key.seldom
            step = self._decode_step if key.is_decode else self._mixed_step
            self._graphs.capture(key, buffer, partial(step, shape=buffer.shape))
        self._seldom = True

    @torch.inference_mode()
    def launch(
        self, batch: ScheduledBatch, scored: dict[int, ScoreSink] | None = None
    ) -> PendingStep:
        """Queue one step on the device: a graph's replay where one was captured, else eagerly.

        scored  batch row -> sink(first position, logits [tokens, V]): rows whose every
                position's logits are wanted
        """
        self._step += 1
        self._seldom = (
            self._seldom_slots is None
            or self._lora is None
            or not self._seldom_slots.isdisjoint(batch.slots)
        )
        sample_rows = tuple(s for s, row in enumerate(batch.samples) if row is not None)
        decode = all(count == 1 for count in batch.num_tokens)
        counts = batch.num_tokens
        wanted = [Wanted(s, 0, counts[s], SCORE_ROWS, sink) for s, sink in (scored or {}).items()]
        prompts = self._scored_prompts(batch, wanted) if batch.prompt_scores else ()
        key = self._find_graph(batch, decode) if not wanted else None
        if decode and not wanted:
            at = sample_rows
            logits, tokens = self._replay_decode(batch, key) if key else self._run_decode(batch)
        else:
            at = tuple(range(len(sample_rows)))
            logits, tokens = self._run_mixed(batch, sample_rows, wanted, key)
        asked = [
            Asked(i, s, at[i], row, batch.position(s), batch.seq_ids[s])
            for i, s in enumerate(sample_rows)
            if (row := batch.samples[s]) is not None and not row.is_plain
        ]
        logprobs = None
        if asked:
            drawn = self._sampler.draw(asked, batch.histories, logits)
            tokens = tokens.index_copy(0, drawn.logit_rows, drawn.tokens)
            self._previous.index_copy_(0, drawn.batch_rows, drawn.tokens)
            logprobs = drawn.logprobs
        return PendingStep(batch, copy_to_host(tokens), at, logprobs, prompts, self._record())

    def distinct_experts(self) -> float:
        """Mean over MoE layers and decode steps of the experts hit, since the last call; 0 if there
        were none."""
        steps, self._hit_steps = self._hit_steps, 0
        hits = int(self._hits.item())
        self._hits.zero_()
        return hits / (steps * self._moe_layers) if steps and self._moe_layers else 0.0

    # The ways to run a step

    def _find_graph(self, batch: ScheduledBatch, decode: bool) -> GraphKey | None:
        if self._graphs is None:
            return None
        if decode:
            size = fit(self._decode_sizes, len(batch.seq_ids))
        else:
            size = fit(self._mixed_sizes, sum(batch.num_tokens))
        key = GraphKey(decode, size, self._seldom)
        return key if key in self._graphs else None

    def _replay_decode(self, batch: ScheduledBatch, key: GraphKey) -> tuple[Tensor, Tensor]:
        assert self._graphs is not None
        buffer = self._ring_buffer(self._shape_of(key))
        fill_decode(buffer, self._tables, batch)
        self._hit_steps += 1
        return self._graphs.replay(key, buffer)

    def _run_decode(self, batch: ScheduledBatch) -> tuple[Tensor, Tensor]:
        columns = -(-(max(batch.starts) + 1) // self._page_tokens)
        shape = StepShape(*(len(batch.seq_ids),) * 3, columns, len(self._layout.groups))
        buffer = self._host_buffer(shape)
        fill_decode(buffer, self._tables, batch)
        self._hit_steps += 1
        return self._decode_step(self._upload(buffer), shape, max(batch.starts) + 1)

    def _run_mixed(
        self,
        batch: ScheduledBatch,
        sample_rows: Sequence[int],
        wanted: Sequence[Wanted],
        key: GraphKey | None,
    ) -> tuple[Tensor, Tensor]:
        counts = batch.num_tokens
        ends = list(itertools.accumulate(counts))
        logit_rows = [ends[s] - 1 for s in sample_rows]
        for s, first, count, _, _ in wanted:
            start = ends[s] - counts[s] + first
            logit_rows += range(start, start + count)
        if key is not None and self._graphs is not None:
            buffer = self._ring_buffer(self._shape_of(key))
            self._fill_mixed(buffer, batch, logit_rows, sample_rows)
            return self._graphs.replay(key, buffer)
        max_len = max(start + count for start, count in zip(batch.starts, counts, strict=True))
        columns = -(-max_len // self._page_tokens)
        shape = StepShape(len(counts), ends[-1], len(logit_rows), columns, len(self._layout.groups))
        buffer = self._host_buffer(shape)
        self._fill_mixed(buffer, batch, logit_rows, sample_rows)
        # With positions for query tokens.
        placed = [w._replace(first=batch.starts[w.row] + w.first) for w in wanted]
        num_samples = len(sample_rows)
        return self._mixed_step(self._upload(buffer), shape, max_len, num_samples, placed)

    def _fill_mixed(
        self,
        buffer: HostBuffer,
        batch: ScheduledBatch,
        logit_rows: Sequence[int],
        sample_rows: Sequence[int],
    ) -> None:
        fill_mixed(buffer, self._tables, batch, logit_rows, sample_rows, self._max_num_seqs)

    def _mixed_step(
        self,
        views: dict[str, Tensor],
        shape: StepShape,
        max_len: int = 0,
        num_samples: int | None = None,
        wanted: Sequence[Wanted] = (),
    ) -> tuple[Tensor, Tensor]:
        """One step with prompt chunks over device columns; what a graph captures. Gives logits
        [n, V] and tokens [n] of the first n = `num_samples` logit rows (default: all).

        wanted  whose logit rows follow those, in this order; `first` is a position. Their logits go
                out part by part: all at once they could be larger than the model
        """
        ctx = self._context(views, shape.tokens, max_len or self._max_len)
        n = shape.logits if num_samples is None else num_samples
        if wanted:
            x = self.model.hidden(self._token_ids(views), ctx)  # [Z, H]
            logits = self._head(x, ctx, 0, n)  # [n, V]
            at = n
            for _, first, count, at_once, sink in wanted:
                for done in range(0, count, at_once):
                    end = at + min(done + at_once, count)
                    sink(first + done, self._head(x, ctx, at + done, end))
                at += count
        else:
            logits = self.model.forward(self._token_ids(views), ctx)  # [n, V]
        tokens = sample_token(logits, views["temperature"][:n], views["uniform"][:n])  # [n]
        self._previous[views["sample_rows"][:n]] = tokens
        return logits, tokens

    def _head(self, x: Tensor, ctx: ForwardContext, first: int, end: int) -> Tensor:
        """Logits [end - first, V] of some of the step's logit rows. x [Z, H]"""
        slots = ctx.slot_of_token[ctx.logit_rows[first:end]]
        work = self._slot_work(slots) if self._lora is not None and self._seldom else None
        return self.model.head.apply(x[first:end], ctx, slots, work)

    def _decode_step(
        self, views: dict[str, Tensor], shape: StepShape, max_len: int = 0
    ) -> tuple[Tensor, Tensor]:
        """One decode step over device columns; what a graph captures. Gives logits [S, V] and
        tokens [S]."""
        hit: list[Tensor] = []
        ctx = self._context(views, 1, max_len or self._max_len, hit, decode=True)
        logits = self.model.forward(self._token_ids(views), ctx)  # [S, V]
        tokens = sample_token(logits, views["temperature"], views["uniform"])  # [S]
        self._previous[: shape.rows].copy_(tokens)
        if hit:
            self._count_experts(torch.stack(hit), views["num_rows"])
        return logits, tokens

    # Pieces

    def _token_ids(self, views: dict[str, Tensor]) -> Tensor:
        sources = views["sources"]
        return torch.where(
            sources >= 0, self._previous[sources.clamp(min=0)].clamp(min=0), views["token_ids"]
        )  # [T]

    def _context(
        self,
        views: dict[str, Tensor],
        max_q: int,
        max_len: int,
        experts_hit: list[Tensor] | None = None,
        decode: bool = False,
    ) -> ForwardContext:
        slots, work, logit_work = views["slot_of_token"], None, None
        if self._lora is not None:
            work = self._slot_work(slots)
            logit_work = (
                work if decode or not self._seldom else self._slot_work(slots[views["logit_rows"]])
            )
        groups = range(len(self._layout.groups))
        return ForwardContext(
            positions=views["positions"],
            cu_q=views["cu_q"],
            seq_lens=views["seq_lens"],
            slot_of_token=slots,
            logit_rows=views["logit_rows"],
            groups=tuple(
                KvGroupContext(views[f"page_table{g}"], views[f"write_idx{g}"]) for g in groups
            ),
            group_of_layer=self._layout.group_of_layer,
            caches=self._caches,
            max_q=max_q,
            max_len=max_len,
            lora=self._lora,
            slot_work=work,
            logit_slot_work=logit_work,
            experts_hit=experts_hit,
            deterministic=self._deterministic,
            seldom_lora=self._seldom,
        )

    def _slot_work(self, slots: Tensor) -> Worklist | None:
        assert self._lora is not None
        if use_triton(slots) and tokens_suffice(len(slots), self._lora):
            return None
        block_m = slot_block_m(len(slots)) if use_triton(slots) else max(1, len(slots))
        return build_worklist(None, slots, 1, self._lora.num_slots, block_m)

    def _count_experts(self, ids: Tensor, num_rows: Tensor) -> None:
        """Add the number of distinct experts of the real rows, over all layers. ids [N, T, K];
        num_rows [1]"""
        layers, rows, _ = ids.shape
        experts = self.model.config.num_experts
        real = torch.arange(rows, device=ids.device)[:, None] < num_rows  # [T, 1]
        flat = torch.where(real, ids, experts).reshape(layers, -1).long()  # [N, T K]
        seen = torch.zeros(layers, experts + 1, dtype=torch.int64, device=ids.device)  # [N, E + 1]
        self._hits += seen.scatter_(1, flat, 1)[:, :experts].sum()

    def _scored_prompts(
        self, batch: ScheduledBatch, wanted: list[Wanted]
    ) -> tuple[ScoredPrompt, ...]:
        """Who takes the logits before the prompts' tokens; their query tokens go to `wanted`."""
        ids = [np.array(score.token_ids, np.int64) for score in batch.prompt_scores]
        views = upload({"token_ids": np.concatenate(ids)}, self.device)
        parts = views["token_ids"].split([len(part) for part in ids])
        at_once = max(1, min(SCORE_ROWS, SCORE_LOGITS // self.model.config.vocab_size))
        prompts = []
        for score, part in zip(batch.prompt_scores, parts, strict=True):
            row, first = score.row, score.first
            prompt = ScoredPrompt(row, batch.starts[row] + first, part, score.num_top)
            wanted.append(Wanted(row, first, len(part), at_once, prompt.take))
            prompts.append(prompt)
        return tuple(prompts)

    def _record(self) -> "torch.cuda.Event | None":
        if self.device.type == "cpu":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _shape_of(self, key: GraphKey) -> StepShape:
        rows = key.size if key.is_decode else self._max_num_seqs
        return StepShape(rows, key.size, rows, self._columns, len(self._layout.groups))

    def _ring_buffer(self, shape: StepShape) -> HostBuffer:
        """A buffer of a graph's shape (pinned on a GPU) that no step in flight reads."""
        ring = self._ring.setdefault(shape, [])
        if len(ring) < BUFFERS:
            ring.append(HostBuffer(shape, pinned=self.device.type != "cpu"))
            return ring[-1]
        ring.append(ring.pop(0))
        return ring[-1]

    def _host_buffer(self, shape: StepShape) -> HostBuffer:
        """A buffer for an eager step. On a CPU a step is over when launch returns, so the last one
        serves again."""
        if self.device.type != "cpu":
            return HostBuffer(shape, pinned=True)
        if self._last_buffer is None or self._last_buffer.shape != shape:
            self._last_buffer = HostBuffer(shape, pinned=False)
        return self._last_buffer

    def _upload(self, buffer: HostBuffer) -> dict[str, Tensor]:
        if self.device.type == "cpu":
            return buffer.own_views
        return buffer.device_views(buffer.memory.to(self.device, non_blocking=True))
