"""What ops launch, told without a GPU: the kernels are stood in for, and nothing is computed.

Not here: what has to be launched, or how (test_launch_options.py, tests/test_memcheck.py).
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from triton import JITFunction

import kernels


class Launch(NamedTuple):
    """One launch: file and function of the kernel; its arguments and options by name; its grid."""

    kernel: str
    given: dict[str, Any]
    grid: tuple[int, ...]


class Recorder:
    """Stands for a kernel: notes what its launches are given, and does nothing."""

    def __init__(self, kernel: JITFunction, told: list[Launch]) -> None:
        self.kernel, self.told = kernel, told

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            given = dict(zip(self.kernel.arg_names, args, strict=False))
            self.told.append(Launch(full_name(self.kernel), given | options, grid))

        return launch


def full_name(kernel: JITFunction) -> str:
    """File and function, such as kernels.norm._rms_norm_kernel."""
    return f"{kernel.fn.__module__}.{kernel.__name__}"


def all_kernels() -> set[str]:
    """Full names of all that is launched: functions within a kernel are named otherwise."""
    return {
        full_name(value)
        for module in _modules()
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and name.endswith("_kernel")
    }


@contextmanager
def recording(overlap: bool) -> Iterator[list[Launch]]:
    """Launches are noted, not made; all ops go to their kernels.

    overlap  whether the device is one that knows dependent launches
    """
    told: list[Launch] = []
    with pytest.MonkeyPatch.context() as patch:
        for module in _modules():
            for name, value in list(vars(module).items()):
                if isinstance(value, JITFunction) and name.endswith("_kernel"):
                    patch.setattr(module, name, Recorder(value, told))
                elif name == "use_triton":
                    patch.setattr(module, name, lambda x: True)
                elif name == "can_overlap":
                    patch.setattr(module, name, lambda device: overlap)
        yield told


def _modules() -> list[ModuleType]:
    found = pkgutil.iter_modules(kernels.__path__)
    return [importlib.import_module(f"kernels.{one.name}") for one in found]
