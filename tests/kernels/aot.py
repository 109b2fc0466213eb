"""Compiles a kernel for the H200 (sm_90) where there is no GPU, and reads what it came to.

Not here: which kernels (`Op.aot` says it) and what is too much (test_ops.py).
"""

import inspect
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton import JITFunction
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.op import AotSpec

TARGET = GPUTarget("cuda", 90, 32)
SHARED_LIMIT_BYTES = 227 * 1024  # what one block of an sm_90 may have


@dataclass(frozen=True)
class Usage:
    """Of one compiled kernel: registers a thread, spilled bytes a thread, shared memory."""

    registers: int
    spill_bytes: int
    shared_bytes: int


def compile_spec(spec: AotSpec) -> Usage:
    """Compile one specification and report its resources."""
    compiled = _compile(spec)
    return _read_usage(compiled.asm["cubin"], int(compiled.metadata.shared))


def disassemble(spec: AotSpec) -> str:
    """The machine code of one specification."""
    return _ask("nvdisasm", ["-c"], _compile(spec).asm["cubin"])


def compile_ptx(spec: AotSpec, capability: int = 90) -> str:
    """The PTX of one specification for a compute capability (80 = sm_80)."""
    return str(_compile(spec, GPUTarget("cuda", capability, 32)).asm["ptx"])


def compile_ttir(spec: AotSpec) -> str:
    """Triton's own form of one specification, in which types are as the kernel has them."""
    return str(_compile(spec).asm["ttir"])


def _compile(spec: AotSpec, target: GPUTarget = TARGET) -> Any:
    """What Triton compiles.

    A type may end in ":16": a multiple of 16, which Triton finds out by itself at a launch.
    Pointers count as such, since torch allocates so, unless the kernel does not look at their
    alignment. Raises whatever the compiler raises.
    """
    fn = spec.fn
    while not isinstance(fn, JITFunction):
        fn = fn.fn  # heuristics and the like wrap it
    order = fn.arg_names
    named = {**spec.signature, **spec.constexprs}
    missing, unknown = set(order) - set(named), set(named) - set(order)
    assert not missing and not unknown, f"{spec.name}: missing {missing}, unknown {unknown}"
    signature, attrs = {}, {}
    for place, name in enumerate(order):
        kind, _, multiple = spec.signature.get(name, "constexpr").partition(":")
        signature[name] = kind
        aligned = kind.startswith("*") and not fn.params[place].do_not_specialize_on_alignment
        if multiple or aligned:
            attrs[(place,)] = [["tt.divisibility", int(multiple or 16)]]
    accepted = inspect.signature(ASTSource.__init__).parameters
    constants = "constexprs" if "constexprs" in accepted else "constants"
    arguments: dict[str, Any] = {constants: spec.constexprs, "attrs": attrs}
    source = ASTSource(fn, signature, **arguments)
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages}
    if spec.max_registers:
        options["maxnreg"] = spec.max_registers
    return triton.compile(source, target=target, options=options)


def _read_usage(cubin: bytes, shared_bytes: int) -> Usage:
    """What cuobjdump says: a thread's stack holds nothing but what did not fit into registers."""
    told = _ask("cuobjdump", ["--dump-resource-usage"], cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", told)
    assert found, f"cuobjdump said: {told}"
    registers, stack, local = (int(number) for number in found.groups())
    return Usage(registers, stack + local, shared_bytes)


def _ask(tool: str, options: list[str], cubin: bytes) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [path, *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
