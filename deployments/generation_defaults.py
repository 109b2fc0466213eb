"""How a base model's maker wants it sampled: generation_config.json, where a request says nothing.

Not here: an adapter's own file (its replica reads it), what the values do (SamplingParams), and the
end-of-text ids of that file (tokenizer).
"""

import json
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from adapter_store.extras import sampling_fields

_FILE = "generation_config.json"
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
    try:
        return sampling_fields(said)
    except ValueError as exc:
        raise ValueError(f"{path}: {exc}") from None


def with_defaults(wire: _Wire, defaults: dict[str, float]) -> _Wire:
    """The request, with a default for each field that it leaves open."""
    return wire.model_copy(
        update={key: value for key, value in defaults.items() if getattr(wire, key, None) is None}
    )
