"""Kernels that start before their predecessor ends (programmatic dependent launch), and the rule
that keeps it safe.

A *follower* is launched with `launch_pdl=True`: it may start as soon as every program of the kernel
before it has called `gdc_launch_dependents` ("triggered") or ended, so that its launch, its set-up
and its weights come while that one still computes. The rule: **in every program and on every path,
a follower calls `gdc_wait` before it writes anything, before it reads anything that a kernel still
running may write, and before it ends.** It may read earlier what no kernel of a step writes:
weights, the step's inputs (slots, positions, places).

Why this suffices. `gdc_wait` returns when the kernel before is complete and its writes are visible:
complete, not merely triggered. The complete predecessor was either launched in the ordinary way,
and started after everything before it was over; or it is a follower, and every program of it has
waited, so that its own predecessor was complete: by induction all earlier ones are. A follower
whose programs end without waiting breaks the chain: it may be complete while its predecessor still
runs. Writes follow the wait too, since memory is used again: a new buffer may lie where a kernel
that is not yet over still reads. Who reads anything early reads the rest past the L1, which may
hold lines from before the wait.

A trigger alone promises nothing about memory, so most kernels trigger in their first line. **A
product with LoRA behind it triggers after its wait**, or is launched in the ordinary way: whoever
starts behind it then knows that what the product reads is complete, and may read it early
(lora_decode.py does). An op cannot know what was launched in front of it: what its caller promises
to be that old is called `settled`. A kernel launched in the ordinary way, torch's too, starts after
everything before it is over: the chain begins anew behind it.
Not here: any kernel.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch

_allowed = True


def can_overlap(device: torch.device) -> bool:
    """Whether kernels may start early there: the device knows programmatic dependent launches."""
    return _allowed and _knows(device)


@contextmanager
def without_overlap() -> Iterator[None]:
    """Ordinary launches alone, for whoever compares. For the whole process; graphs that are
    captured meanwhile stay so."""
    global _allowed
    before, _allowed = _allowed, False
    try:
        yield
    finally:
        _allowed = before


@lru_cache(maxsize=16)
def _knows(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


def follow(overlap: bool) -> dict[str, bool]:
    """Launch options of a follower; none where it cannot be: other backends refuse the option."""
    return {"launch_pdl": True} if overlap else {}
