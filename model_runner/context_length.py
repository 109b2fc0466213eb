"""How many positions a model has, as its config.json says. The service asks it too: no torch."""

from collections.abc import Mapping
from typing import Any


def count_positions(raw: Mapping[str, Any]) -> int:
    """Tokens of the longest sequence, prompt and output together.

    YaRN stretches `original_max_position_embeddings` by its factor; files whose authors switched it
    on by hand, as the Qwen3 cards tell, keep the `max_position_embeddings` from before.
    Errors:  KeyError, TypeError or ValueError for a config without them.
    Source:  YaRN, arXiv 2309.00071; https://huggingface.co/Qwen/Qwen3-32B (processing long texts).
    """
    positions = int(raw["max_position_embeddings"])
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if (rope.get("rope_type") or rope.get("type")) != "yarn":
        return positions
    original = rope.get("original_max_position_embeddings") or positions
    return max(positions, int(float(rope.get("factor") or 1) * int(original)))
