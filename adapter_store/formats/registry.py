"""`FORMATS`: which formats of adapter folders there are; `load_adapter` picks the one that matches.

A format is a file here with `matches(folder)`, `check(folder, targets, ...)` and
`load(folder, targets, ...)`. Not here: formats.
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from adapter_store.errors import AdapterNotFound
from adapter_store.weights import AdapterWeights, LoraTarget

# name -> its module, imported when asked for
FORMATS: dict[str, str] = {"peft": "adapter_store.formats.peft"}


def load_adapter(
    folder: Path,
    targets: Sequence[LoraTarget],
    *,
    max_rank: int = 256,
    max_bytes: int | None = None,
    allow_pickle: bool = False,
    base_name: str | None = None,
) -> AdapterWeights:
    """Read an adapter folder into the canonical layout.

    targets              what the model can take; nothing else is known of it
    max_rank             largest rank of one factor; gate and up with their own As count together
    max_bytes            largest adapter, in the fewest bytes that it can take in memory: a pair of
                         one expert brings zeros for all of them, which the file does not have
    allow_pickle         read `adapter_model.bin` through torch's restricted unpickler
    base_name            the served model's name: another one in the config is a warning

    Errors:  AdapterNotFound if the folder is missing or holds no adapter; AdapterInvalid with a
             reason of REFUSALS and the tensor or field at fault; AdapterUnavailable if the disk
             fails; StoreFull above max_bytes. After an error nothing stays behind.
    Cost:    memory of the tensors read and twice the largest target; no file is mapped.
    """
    weights: AdapterWeights = _format_of(folder).load(
        folder,
        targets,
        max_rank=max_rank,
        max_bytes=max_bytes,
        allow_pickle=allow_pickle,
        base_name=base_name,
    )
    return weights


def check_adapter(
    folder: Path, targets: Sequence[LoraTarget], *, max_rank: int, max_bytes: int | None = None
) -> None:
    """Judge what the config and the head of the weights tell, as `load_adapter` would, with its
    arguments and errors. No tensor is read: behind its head the file may be a hole."""
    _format_of(folder).check(folder, targets, max_rank=max_rank, max_bytes=max_bytes)


def _format_of(folder: Path) -> Any:
    if not folder.is_dir():
        raise AdapterNotFound(f"there is no folder {folder.name}")
    for name in FORMATS.values():
        module = import_module(name)
        if module.matches(folder):
            return module
    raise AdapterNotFound(f"{folder.name} holds no adapter of a known format")
