"""How kernels see the adapter memory (`LoraTables`) and find their work (`Worklist`). Who fills the
memory is not their business.

Fixed addresses: built once per device, so that captured graphs stay valid.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LoraTables:
    """Device views of every resident adapter.

    Shapes:  memory [bytes / itemsize] in the model's dtype;  a_off, b_off [N, L] int64, in
             elements, -1 = no delta;
             a_stride, b_stride [N, L] int64, elements from one expert to the next, 0 = shared by
             all experts;
             lora_rank [N, L] int32, a multiple of 8 (padded rows are zero), 0 = no delta.
    Offsets and strides are multiples of 8 elements: kernels read 16 bytes at a time.
    N is the number of targets, L of slots. A factor is rank-major: A[e] [r, in], B[e] [r, out],
    alpha/r folded into B.
    max_rank is the largest rank that may be loaded: what buffers are sized by.
    """

    memory: Tensor
    a_off: Tensor
    b_off: Tensor
    a_stride: Tensor
    b_stride: Tensor
    lora_rank: Tensor
    max_rank: int

    @property
    def num_slots(self) -> int:
        return int(self.a_off.shape[1])


@dataclass(frozen=True)
class Worklist:
    """Rows grouped for a grouped product: by expert, by adapter slot, or by (slot, expert). Written
    on the device, no synchronisation.

    Shapes:  rows [N] int32: row indices, group by group, left-out rows (base model) last;
             segments [W, 4] int32: (slot, expert, first, count): rows[first : first + count] share
             slot and expert, count <= block_m,
             sorted by slot*E + expert; unused ones have count 0. A fixed grid walks all W; W is
             what the worst case needs, so it cannot overflow.
    In a list by expert alone slot is -1; in one by slot alone expert is 0.
    groups  CPU only, for references: (slot, row indices int64) of every slot in use, left-out rows
            not among them; None on a GPU.
    """

    rows: Tensor
    segments: Tensor
    block_m: int
    groups: tuple[tuple[int, Tensor], ...] | None = None
