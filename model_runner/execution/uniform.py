"""The random numbers of draws: a hash of (seed, index, position), and of nothing else.

Made on the host and sent along as one float a row: there is no generator state, and a request
repeated elsewhere draws the same tokens.
"""

from collections.abc import Sequence

import numpy as np

MASK_64 = (1 << 64) - 1
GOLDEN, MIX_1, MIX_2 = (
    np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def draw_uniform(
    seeds: Sequence[int], indices: Sequence[int], positions: Sequence[int] | np.ndarray
) -> np.ndarray:
    """A number in (0, 1) from each (seed, index, position): splitmix64 over the three. [n] float32,
    [n] ints each

    Source: Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014.
    """
    x = np.array([s & MASK_64 for s in seeds], np.uint64)  # [n]
    for words in (indices, positions):
        x += GOLDEN * (np.array(words, np.uint64) + np.uint64(1))
        x = (x ^ (x >> np.uint64(30))) * MIX_1
        x = (x ^ (x >> np.uint64(27))) * MIX_2
        x ^= x >> np.uint64(31)
    # 23 bits and a half: exact in float32, never 0 or 1
    return (((x >> np.uint64(41)).astype(np.float64) + 0.5) / (1 << 23)).astype(np.float32)
