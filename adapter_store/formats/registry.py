"""`FORMATS`: which formats of adapter folders there are; `load_adapter` picks the one that matches.

A format is a file here with `matches(folder)` and `load(folder, targets, ...)`. Not here: formats.
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from adapter_store.errors import AdapterNotFound
from adapter_store.weights import AdapterWeights, LoraTarget

# name -> ("module:matches", "module:load"), imported when asked for
FORMATS: dict[str, tuple[str, str]] = {
    "peft": ("adapter_store.formats.peft:matches", "adapter_store.formats.peft:load"),
}


def load_adapter(
    folder: Path,
    targets: Sequence[LoraTarget],
    *,
    max_rank: int = 256,
    allow_pickle: bool = False,
    base_name: str | None = None,
) -> AdapterWeights:
    """Read an adapter folder into the canonical layout.

    targets              what the model can take; nothing else is known of it
    max_rank             largest rank of one factor; gate and up with their own As count together
    allow_pickle         read `adapter_model.bin` through torch's restricted unpickler
    base_name            the served model's name: another one in the config is a warning

    Errors:  AdapterNotFound if the folder is missing or holds no adapter; AdapterInvalid with a
             reason of REFUSALS and the tensor or field at fault; AdapterUnavailable if the disk
             fails. After an error nothing stays behind.
    Cost:    memory of the tensors read and twice the largest target; no file is mapped.
    """
    if not folder.is_dir():
        raise AdapterNotFound(f"there is no folder {folder.name}")
    for matches, load in FORMATS.values():
        if _function(matches)(folder):
            weights: AdapterWeights = _function(load)(
                folder,
                targets,
                max_rank=max_rank,
                allow_pickle=allow_pickle,
                base_name=base_name,
            )
            return weights
    raise AdapterNotFound(f"{folder.name} holds no adapter of a known format")


def _function(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
