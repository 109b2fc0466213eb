"""What an adapter may bring besides its weights: a chat template, defaults of sampling.

Plain values without torch: they travel from the store through the engine to whoever makes prompts.
Not here: the files (formats/extras_files.py), and what renders a template.
"""

import hashlib
import json
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
}


@dataclass(frozen=True)
class AdapterExtras:
    """All empty = the adapter is used as its base is.

    chat_template   Jinja, written by a tenant: hostile until rendered in a sandbox
    special_tokens  names that the template knows -> tokens, where the adapter's files name them
    sampling        fields of a request that leaves them open -> values
    eos_ids         end an answer besides the base's own
    """

    chat_template: str = ""
    special_tokens: tuple[tuple[str, str], ...] = ()
    sampling: tuple[tuple[str, float], ...] = ()
    eos_ids: tuple[int, ...] = ()

    @cached_property
    def key(self) -> str:
        """Equal keys, equal extras; "" = nothing is brought."""
        if self == AdapterExtras():
            return ""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:32]


NO_EXTRAS = AdapterExtras()


def extras_from_json(said: Mapping[str, Any]) -> AdapterExtras:
    """What `asdict` made and JSON carried: its lists are the tuples that they were.

    Errors:  KeyError, TypeError, ValueError for what is no such thing.
    """
    return AdapterExtras(
        chat_template=said["chat_template"],
        special_tokens=tuple((name, token) for name, token in said["special_tokens"]),
        sampling=tuple((key, value) for key, value in said["sampling"]),
        eos_ids=tuple(said["eos_ids"]),
    )


def sampling_fields(said: Mapping[str, Any]) -> dict[str, float]:
    """What a generation_config.json says of sampling, as fields of a request.

    `do_sample: false` is temperature 0.  Errors: ValueError, which names the key.
    """
    found: dict[str, float] = {}
    for key, (least, most) in _RANGES.items():
        value = said.get(key)
        if value is None:
            continue
        is_number = isinstance(value, int if key == "top_k" else int | float)
        if not is_number or isinstance(value, bool) or not least <= value <= most:
            what = "an integer" if key == "top_k" else "a number"
            told = reprlib.repr(value)  # does not walk all of a deep or long one
            raise ValueError(f"{key} must be {what} in [{least}, {most}], not {told:.60}")
        found[key] = value
    if found.get("top_p") == 0:
        raise ValueError("top_p must be above 0")
    if found.get("top_k") == -1:  # another way to say "all"
        found["top_k"] = 0
    if said.get("do_sample") is False:
        found["temperature"] = 0
    return found
