"""The prompts that bring every kernel of a GPU engine into use once, so that no request waits for a
compiler.

Not here: running them (engine.py), decode steps (ModelRunner.warm_up).
"""

import dataclasses
from collections.abc import Iterator

from model_runner.request import Request, SamplingParams


def warm_up_prompts(
    max_step_tokens: int, max_num_seqs: int, max_len: int
) -> Iterator[list[Request]]:
    """The requests of one step after the other: prompts of every size class, rows of every kind.

    Where one prompt is never as long as a step (max_len, in tokens), several together are.
    """
    # Tile sizes follow the row count rounded up to a power of two: one step of each is enough.
    most = min(max_step_tokens, max_num_seqs * (max_len - 1))
    sizes = sorted({n for n in (2**k for k in range(20)) if n < most} | {most})
    sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    # And once a row that is not plain.
    general = dataclasses.replace(sampling, temperature=1.0, top_p=0.5, seed=1)
    steps = [(n, sampling) for n in sizes] + [(1, general)]
    # A prompt whose tokens are scored takes the head for all but one of them.
    scored = dataclasses.replace(sampling, prompt_logprobs=1)
    steps += [(n + 1, scored) for n in sizes if n < most]
    for number, (num_tokens, wanted) in enumerate(steps):
        # As many prompts as a step of that size needs.
        whole, rest = divmod(num_tokens, max_len - 1)
        lengths = [max_len - 1] * whole + ([rest] if rest else [])
        yield [Request(f"warm-{number}-{i}", (1,) * n, wanted) for i, n in enumerate(lengths)]
