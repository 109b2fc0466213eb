"""`ForwardContext`: the device tensors of one step. An argument of every forward, never a
global."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.lora_tables import LoraTables, Worklist


@dataclass(frozen=True)
class KvGroupContext:
    """One KV group (full, or a window of W tokens) in one step.

    page_table [S, M] int32, M = pages of the longest row;  write_idx [T] int64: page·C + offset, -1
    = do not write.
    """

    page_table: Tensor
    write_idx: Tensor


@dataclass(frozen=True)
class ForwardContext:
    """Everything of one step that layers read.

    Shapes:  positions [T] int64;  cu_q [S + 1] int32: first query token of each row;  seq_lens [S]
             int32: keys of each row, this step's included;
             slot_of_token [T] int32, -1 = base model;  logit_rows [Z] int64: tokens whose logits
             are wanted.
    max_q       longest row's query tokens (1 = every row decodes); max_len  longest row's keys:
                launch sizes, host integers
    caches      by layer: (k [P, C, G, D], v [P, C, G, D]);  group_of_layer  which of `groups` a
                layer writes to
    slot_work   tokens grouped by adapter slot, for plain linears (None: few tokens, each by
                itself);  logit_slot_work  the same over logit_rows
    experts_hit  if a list, MoE layers append their chosen expert ids [T, K] to it (statistics)
    deterministic  LoRA products sum in a fixed order
    seldom_lora  whether an adapter of this step changes the embedding, a router or the head: else
                 their kernels are left out
    lora        None only if the engine has no adapter slots at all: base and mixed batches run the
                same kernels
    """

    positions: Tensor
    cu_q: Tensor
    seq_lens: Tensor
    slot_of_token: Tensor
    logit_rows: Tensor
    groups: tuple[KvGroupContext, ...]
    group_of_layer: tuple[int, ...]
    caches: tuple[tuple[Tensor, Tensor], ...]
    max_q: int
    max_len: int
    lora: LoraTables | None = None
    slot_work: Worklist | None = None
    logit_slot_work: Worklist | None = None
    experts_hit: list[Tensor] | None = None
    deterministic: bool = False
    seldom_lora: bool = True

    @property
    def dtype(self) -> torch.dtype:
        """What activations, keys and values are kept in."""
        return self.caches[0][0].dtype
