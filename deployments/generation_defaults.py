"""How a base model's maker wants it sampled: generation_config.json, where a request says nothing.

Not here: what the values do (SamplingParams), and the end-of-text ids of that file (tokenizer).
"""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from model_runner.request import SamplingParams

_FILE = "generation_config.json"
_KEYS = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"} & {
    field.name for field in fields(SamplingParams)
}
_Wire = TypeVar("_Wire", bound=BaseModel)


def read_generation_defaults(folder: str | Path) -> dict[str, float]:
    """Fields of a request -> what its model's folder says of them; nothing where there is no file.

    `do_sample: false` is temperature 0. Errors: ValueError, which names the file and the key.
    """
    path = Path(folder) / _FILE
    if not path.is_file():
        return {}
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise ValueError(f"{path}: {exc}") from None
    if not isinstance(said, dict):
        raise ValueError(f"{path}: must be an object")
    found: dict[str, Any] = {key: said[key] for key in _KEYS if said.get(key) is not None}
    if said.get("do_sample") is False:
        found["temperature"] = 0
    if found.get("top_k") == -1:  # another way to say "all"
        found["top_k"] = 0
    if problem := SamplingParams(**found).problem():
        raise ValueError(f"{path}: {problem}")
    return found


def with_defaults(wire: _Wire, defaults: dict[str, float]) -> _Wire:
    """The request, with a default for each field that it leaves open."""
    return wire.model_copy(
        update={key: value for key, value in defaults.items() if getattr(wire, key, None) is None}
    )
