"""Tensors of more elements than 32 bits count, without the memory: pages that nobody writes are
none.

Not here: what is put there (test_far_memory.py, test_layouts.py).
"""

import mmap
from math import prod

import torch
from torch import Tensor

_NORESERVE = 0x4000  # of Linux; Python names it from 3.13 on
FAR = 1 << 31  # the first number of an element that an int32 cannot hold


def far_empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros of this shape, contiguous. As many elements lie in front of them as a number that has
    wrapped around goes back: a kernel that counts so finds zeros there, not the end of the process.
    """
    count = FAR + prod(shape)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype, count=count)[FAR:].view(shape)


def far_rows(x: Tensor) -> Tensor:
    """The same values, the rows so far apart that the last one begins past FAR."""
    stride = -(-FAR // (len(x) - 1)) + 16
    stride += -stride % 16
    span = stride * (len(x) - 1) + x[0].numel()
    wide = far_empty(span, dtype=x.dtype)
    moved = wide.as_strided(x.shape, (stride, *x[0].contiguous().stride()), wide.storage_offset())
    return moved.copy_(x)
