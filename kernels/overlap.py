"""Kernels that start before their predecessor ends (programmatic dependent launch), and the rule
that keeps it safe.

A *follower* is launched with `launch_pdl=True`: it may start as soon as every program of the kernel
before it has called `gdc_launch_dependents` or ended, so that its launch, its set-up and its
weights come while that one still computes. The rule: **in every program and on every path, a
follower calls `gdc_wait` before it writes anything, before it reads anything that some kernel of
the step writes, and before it ends.** It may read earlier what no kernel of a step writes: weights.

Why this suffices. `gdc_wait` returns when the kernel before is complete and its writes are visible:
complete, not merely triggered. So when a kernel triggers promises nothing about memory, and it may
do so in its first line. The complete predecessor was either launched in the ordinary way, and
started after everything before it was over; or it is a follower, and every program of it has
waited, so that its own predecessor was complete: by induction all earlier ones are. A follower
whose programs end without waiting breaks the chain: it may be complete while its predecessor still
runs. Writes follow the wait too, since memory is used again: a new buffer may lie where a kernel
that is not yet over still reads. Reads after the wait go past the L1, which may hold lines from
before it.

A kernel launched in the ordinary way starts after all of its predecessor. Directly behind it, a
follower may also read early whatever that kernel does not write (lora_decode.py does).
Not here: any kernel.
"""

from functools import lru_cache

import torch


@lru_cache(maxsize=16)
def can_overlap(device: torch.device) -> bool:
    """Whether the device knows programmatic dependent launches."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9
