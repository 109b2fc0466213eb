"""How kernels see the adapter memory: one arena and offset tables. Who fills it is not their business.

Fixed addresses: built once per device, so that captured graphs stay valid.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LoraTables:
    """Device views of every resident adapter.

    Shapes:  memory [bytes / itemsize] in the model's dtype;  a_off, b_off [N, L] int64, in elements, -1 = no delta;
             a_stride, b_stride [N, L] int64, elements from one expert to the next, 0 = shared by all experts;
             lora_rank [N, L] int32, a multiple of 8 (padded rows are zero), 0 = no delta.
    N is the number of targets, L of slots. A factor is rank-major: A[e] [r, in], B[e] [r, out], alpha/r folded into B.
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
