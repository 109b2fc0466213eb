"""A kernel file with one guard reversed: the test of that guard must fail on it.

Not here: the promises themselves (test_<kernel>.py).
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

KERNELS = Path(__file__).parents[2] / "kernels"


def mutant(name: str, changes: Mapping[str, str], folder: Path) -> ModuleType:
    """kernels/<name>.py with each key of `changes` replaced by its value wherever it occurs.

    It is loaded as a module of its own. AssertionError if a key does not occur.
    """
    source = (KERNELS / f"{name}.py").read_text()
    for old, new in changes.items():
        assert old in source, f"kernels/{name}.py has no {old!r} any more"
        source = source.replace(old, new)
    path = folder / f"{name}_mutant.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
