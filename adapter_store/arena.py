"""The adapter memory of one device: one tensor of fixed address, and the tables that say which
bytes are whose.

Who lives where is decided elsewhere (slot_table); what kernels make of the tables is theirs. On a
CPU the same, without streams.

Bytes come in on any one thread (`copy_in`) and show in no table. Tables change on the engine's
thread: `show` and `clear` write a host copy, `publish` sends it, on the stream that computes, so
that a step sees the tables either before or after, never between.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adapter_store.packed import PackedAdapter
from adapter_store.packed_layout import ALIGN_BYTES, PackedLayout, padded_rank
from adapter_store.slot_table import Span
from adapter_store.weights import LoraTarget

_cuda: Any = torch.cuda  # torch types it only in part
_STAGING_BYTES = 8 << 20
_NUM_STAGING = 3
_NUM_MIRRORS = 2


@dataclass(frozen=True)
class SlotRows:
    """What the tables will say of one adapter: columns [N] on the host, offsets in elements."""

    a_off: Tensor
    b_off: Tensor
    a_stride: Tensor
    b_stride: Tensor
    lora_rank: Tensor


class AdapterArena:
    """Memory and tables for the adapters of one device.

    Shapes:  memory [num_bytes / itemsize];  a_off, b_off, a_stride, b_stride [N, L] int64;
             lora_rank [N, L] int32;  N targets in the model's order, L slots;  what each one
             says stands in kernels/lora_tables.py
    Units:   offsets and strides in elements; an offset of -1 and a rank of 0 mean no delta
    num_bytes is rounded down, max_rank up to what memory holds (multiples of 256 and 8).
    copy_stream  CUDA only: where copies run, None = a stream of its own
    watched      targets;  watched_slots  the slots whose shown adapter changes one of them
    All six tensors keep their addresses as long as the arena lives.
    """

    def __init__(
        self,
        targets: Sequence[LoraTarget],
        num_slots: int,
        num_bytes: int,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        max_rank: int = 64,
        copy_stream: Any = None,
        watched: Sequence[int] = (),
    ) -> None:
        self.targets = tuple(targets)
        self.watched_slots: set[int] = set()
        self._watched = torch.tensor(tuple(watched), dtype=torch.int64)  # [targets watched]
        self.num_slots = num_slots
        self.num_bytes = num_bytes // ALIGN_BYTES * ALIGN_BYTES
        self.dtype = dtype
        self.max_rank = padded_rank(max_rank)
        self.memory = torch.zeros(self.num_bytes // dtype.itemsize, dtype=dtype, device=device)
        self.device = self.memory.device
        self._bytes = self.memory.view(torch.uint8)  # [num_bytes]
        self._is_cuda = self.device.type == "cuda"
        num_cells = len(self.targets) * num_slots
        # One block for all tables, so that a publish is one copy: four of int64, then one of int32.
        self._tables = torch.zeros(num_cells * 36, dtype=torch.uint8, device=self.device)
        self._device_views = self._views(self._tables)
        self.a_off, self.b_off, self.a_stride, self.b_stride, self.lora_rank = self._device_views
        self._host = torch.zeros(num_cells * 36, dtype=torch.uint8)
        self._host_views = self._views(self._host)
        self._mirrors = [
            _Mirror(torch.zeros(num_cells * 36, dtype=torch.uint8, pin_memory=True))
            for _ in range(_NUM_MIRRORS if self._is_cuda else 0)
        ]
        # Now, and not at the first copy: pinning memory would break a graph that is being captured.
        self._staging = _Staging(self.device, copy_stream) if self._is_cuda else None
        self._changed: set[int] = set()
        for table, fill in zip(self._host_views, (-1, -1, 0, 0, 0), strict=True):
            table.fill_(fill)
        self._tables.copy_(self._host)

    def rows_of(self, layout: PackedLayout, spans: Sequence[Span]) -> SlotRows:
        """The tables' columns for an adapter that lies in these spans."""
        starts = torch.empty(len(layout.ends) - 1, dtype=torch.int64)  # [2 · targets of it]
        ends = torch.tensor(layout.ends, dtype=torch.int64)
        for span in spans:
            part = slice(span.first, span.first + span.count)
            starts[part] = ends[part] - layout.ends[span.first] + span.start
        starts = torch.div(starts, layout.itemsize, rounding_mode="floor").view(-1, 2)  # [n, 2]
        num_targets = len(self.targets)
        a_off, b_off = (torch.full((num_targets,), -1) for _ in range(2))  # [N] int64
        a_stride, b_stride = (torch.zeros(num_targets, dtype=torch.int64) for _ in range(2))  # [N]
        lora_rank = torch.zeros(num_targets, dtype=torch.int32)  # [N]
        index = torch.tensor([t.index for t in layout.targets], dtype=torch.int64)  # [n]
        a_off[index] = starts[:, 0]
        b_off[index] = starts[:, 1]
        a_stride[index] = torch.tensor([t.a_stride for t in layout.targets])
        b_stride[index] = torch.tensor([t.b_stride for t in layout.targets])
        ranks = [t.lora_rank for t in layout.targets]
        lora_rank[index] = torch.tensor(ranks, dtype=torch.int32)
        return SlotRows(a_off, b_off, a_stride, b_stride, lora_rank)

    def copy_in(self, packed: PackedAdapter, spans: Sequence[Span], stream: Any = None) -> SlotRows:
        """Copy an adapter into its spans, first layer first, and wait until it is there.

        Blocks: for the copy thread. On a GPU through pinned buffers, on a stream beside the steps.
        At most one call at a time. Who frees spans must know that no running step reads them.
        Errors:  AssertionError if the spans are not the packed adapter's.
        """
        assert sum(span.size for span in spans) == packed.layout.num_bytes, spans
        pieces = []
        for span in spans:
            source = packed.layout.ends[span.first]
            pieces.append((source, span.start, span.size))
        if self._staging is not None:
            self._staging.copy(packed.data, self._bytes, pieces)
        else:
            for source, start, size in pieces:
                self._bytes[start : start + size] = packed.data[source : source + size]
        return self.rows_of(packed.layout, spans)

    def show(self, slot: int, rows: SlotRows) -> None:
        """Let the tables name an adapter, from the next `publish` on."""
        columns = (rows.a_off, rows.b_off, rows.a_stride, rows.b_stride, rows.lora_rank)
        for table, column in zip(self._host_views, columns, strict=True):
            table[:, slot] = column
        self._changed.add(slot)
        self.watched_slots.discard(slot)
        if (rows.lora_rank[self._watched] > 0).any():
            self.watched_slots.add(slot)

    def clear(self, slot: int) -> None:
        """Let the tables name nothing in this slot, from the next `publish` on."""
        for table, fill in zip(self._host_views, (-1, -1, 0, 0, 0), strict=True):
            table[:, slot] = fill
        self._changed.add(slot)
        self.watched_slots.discard(slot)

    def publish(self, stream: Any = None) -> bool:
        """Send changed tables to the device; whether they are all sent.

        stream  CUDA only: the one that steps run on (None: the calling thread's current one). The
                copy is ordered with the steps on it, before the next and after the last. Never
                waits: if the last two tables are still on their way, False, and the next call tries
                again.
        """
        if not self._changed:
            return True
        if not self._is_cuda:
            for table, host in zip(self._device_views, self._host_views, strict=True):
                for slot in self._changed:
                    table[:, slot] = host[:, slot]
        else:
            mirror = next((m for m in self._mirrors if m.is_free()), None)
            if mirror is None:
                return False
            mirror.send(self._host, self._tables, stream)
        self._changed.clear()
        return True

    def _views(self, block: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        shape = len(self.targets), self.num_slots
        num_cells = shape[0] * shape[1]
        longs = block[: num_cells * 32].view(torch.int64).view(4, *shape)  # [4, N, L]
        ranks = block[num_cells * 32 :].view(torch.int32).view(shape)  # [N, L]
        return longs[0], longs[1], longs[2], longs[3], ranks


class _Mirror:
    """A pinned copy of the tables that one send at a time reads."""

    def __init__(self, block: Tensor) -> None:
        self._block = block
        self._sent: Any = None

    def is_free(self) -> bool:
        return self._sent is None or bool(self._sent.query())

    def send(self, host: Tensor, tables: Tensor, stream: Any) -> None:
        self._block.copy_(host)
        stream = stream or _cuda.current_stream(tables.device)
        with _cuda.stream(stream):
            tables.copy_(self._block, non_blocking=True)
            self._sent = _cuda.Event()
            self._sent.record(stream)


class _Staging:
    """Pinned buffers between mapped files and the device: one is filled while the others travel."""

    def __init__(self, device: torch.device, stream: Any) -> None:
        self._device = device
        self._stream = stream or _cuda.Stream(device)
        self._buffers = [
            torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
            for _ in range(_NUM_STAGING)
        ]
        self._free = [_cuda.Event() for _ in range(_NUM_STAGING)]
        self._turn = 0

    def copy(self, source: Tensor, target: Tensor, pieces: Sequence[tuple[int, int, int]]) -> None:
        """Copy (source start, target start, size) pieces and wait for the last."""
        with _cuda.device(self._device), _cuda.stream(self._stream):
            for start, into, size in pieces:
                for done in range(0, size, _STAGING_BYTES):
                    count = min(_STAGING_BYTES, size - done)
                    turn = self._turn = (self._turn + 1) % _NUM_STAGING
                    self._free[turn].synchronize()  # at once if it was never recorded
                    buffer = self._buffers[turn][:count]
                    buffer.copy_(source[start + done : start + done + count])
                    target[into + done : into + done + count].copy_(buffer, non_blocking=True)
                    self._free[turn].record(self._stream)
            self._stream.synchronize()
