"""A kernel file with one guard reversed: the test of that guard must fail on it.

Not here: the promises themselves (test_<kernel>.py).
"""

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest

KERNELS = Path(__file__).parents[2] / "kernels"


def mutant(
    name: str, changes: Mapping[str, str], folder: Path, on: ModuleType | None = None
) -> ModuleType:
    """kernels/<name>.py with each key of `changes` replaced by its value wherever it occurs.

    on  another mutant, from which it takes what it would take from that one's file

    It is loaded as a module of its own. AssertionError if a key does not occur.
    """
    source = (KERNELS / f"{name}.py").read_text()
    for old, new in changes.items():
        assert old in source, f"kernels/{name}.py has no {old!r} any more"
        source = source.replace(old, new)
    if on is not None:
        took = f"from kernels.{on.__name__.removesuffix('_mutant')} import"
        assert took in source, f"kernels/{name}.py does not say {took!r}"
        source = source.replace(took, f"from {on.__name__} import")
    path = folder / f"{name}_mutant.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        if on is not None:
            patch.setitem(sys.modules, on.__name__, on)
        spec.loader.exec_module(module)
    return module
