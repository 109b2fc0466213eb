"""Which kernels a call needs, found without compiling any, and compiled in several processes.

What a launch would compile is written down by Triton's own hook and not launched; processes of
their own, which need no GPU, then compile it into Triton's cache, where the launch finds it.
"""

import importlib
import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

NO_TARGET = GPUTarget("cuda", 90, 32)


@dataclass(frozen=True)
class Recorded:
    """One compilation: a jit function, by the file where it lives, and what it is specialised to
    (Triton's serialised form)."""

    module: str
    function: str
    data: str

    def key(self) -> str:
        """What Triton tells compilations of this function apart by."""
        return str(json.loads(self.data)["key"])


class _NoDevice:
    """A driver for compiling alone: a target, and no device behind it."""

    def __init__(self, target: GPUTarget, name: str) -> None:
        self._target, self._name = target, name

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:
        # Compiled kernels are remembered by device.
        return self._name

    def get_current_stream(self, device: str) -> int:
        return 0


@contextmanager
def no_device(target: GPUTarget = NO_TARGET, name: str = "compiling") -> Iterator[None]:
    """Within: Triton compiles and records for this target, with or without a GPU.

    name  what is compiled under one name is not known under another, nor on a real device
    """
    config = triton.runtime.driver
    before = config._active
    config.set_active(_NoDevice(target, name))
    try:
        yield
    finally:
        config.set_active(before)


def record_kernels(call: Callable[[], Any], target: GPUTarget = NO_TARGET) -> list[Recorded]:
    """The compilations that a call needs for this target; each once, in order.

    Nothing is compiled and no Triton kernel launched, whatever this process has compiled before.
    """
    found: dict[Recorded, None] = {}

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        found[Recorded(fn.module, fn.name, compile["specialization_data"])] = None
        return True  # it is dealt with: neither compile nor launch

    before = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = note
    try:
        # Under this name nothing is ever compiled, so nothing can be launched.
        with no_device(target, "recording"):
            call()
    finally:
        triton.knobs.runtime.jit_cache_hook = before
    return list(found)


def compile_recorded(recorded: Recorded, target: GPUTarget = NO_TARGET) -> Any:
    """Compile one into Triton's cache. Raises what the compiler raises."""
    function = getattr(importlib.import_module(recorded.module), recorded.function)
    with no_device(target):
        return function.preload(recorded.data)


def _try_compile(recorded: Recorded, target: GPUTarget) -> str:
    try:
        compile_recorded(recorded, target)
    except Exception as error:  # told when it is its turn to be measured
        return f"{type(error).__name__}: {error}".splitlines()[0][:120]
    return ""


def compile_all(
    kernels: Iterable[Recorded], target: GPUTarget, workers: int, end: float
) -> dict[Recorded, str]:
    """Compile in `workers` processes until all are done, or until `end` (time.monotonic).

    Result:  those that are done: "" or what went wrong
    """
    done: dict[Recorded, str] = {}
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    waiting = {}
    try:
        for kernel in kernels:  # each is compiled while the next is found
            waiting[pool.submit(_try_compile, kernel, target)] = kernel
            if time.monotonic() > end:
                break
        for future in as_completed(waiting, timeout=max(0.0, end - time.monotonic())):
            done[waiting[future]] = future.result()
    except (TimeoutError, BrokenProcessPool) as error:
        print(f"not all compiled: {type(error).__name__}", flush=True)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return done
