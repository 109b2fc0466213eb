"""Kernels that start before their predecessor ends (programmatic dependent launch), and the rule
that keeps it safe.

A *follower* is launched with `launch_pdl=True`: it may start as soon as every program of the kernel
before it has called `gdc_launch_dependents` ("triggered") or ended, so that its launch, its set-up
and its weights come while that one still computes. The rule, for every program and on every path:

1. A follower calls `gdc_wait` before it writes anything and before it ends. `gdc_wait` returns when
   the kernel before is complete, not merely triggered, and its writes are visible; a complete
   follower has waited for its own predecessor: so by induction all earlier ones are complete too.
   One that ends without waiting breaks the chain. Writes wait as well, since memory is used again:
   a new buffer may lie where a kernel that is not yet over still reads. Reads after the wait go
   past the L1, which may hold lines from before it.
2. It triggers after its wait. So whoever starts knows that at most the one kernel in front of it is
   unfinished.
3. Before the wait it reads only what that one kernel does not write: weights, the step's inputs
   (slots, positions, places), results of the kernel before the last. An op cannot know who was
   launched in front of it: what its caller promises to be older than that is called `settled`.

Two bend rule 2 and trigger before they wait, so that more than one kernel may be unfinished when
the next one starts. The norm: directly behind it nothing that a kernel of the step writes counts as
settled; there stand linears, which have weights to fetch. The shrink of lora_decode.py, which says
what its only successor must not read for it.
A kernel that is launched in the ordinary way waits for all of its predecessor, and may trigger at
once. Not here: any kernel.
"""

from functools import lru_cache

import torch


@lru_cache(maxsize=16)
def can_overlap(device: torch.device) -> bool:
    """Whether the device knows programmatic dependent launches."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


def follow(overlap: bool) -> dict[str, bool]:
    """Launch options of a follower; none where it cannot be: other backends refuse the option."""
    return {"launch_pdl": True} if overlap else {}
