"""Which operands a compiled kernel reads on the way to its first `griddepcontrol.wait`.

Told from the PTX: whatever is reached from the entry without a wait, and where each address comes
from. Not here: what a kernel may read by then (test_overlap.py).
"""

import re
from dataclasses import dataclass, field

from kernels.op import AotSpec
from tests.kernels.aot import compile_ptx

_REGISTER = re.compile(r"%[a-z]+\d+")
_PARAMETER = re.compile(r"_param_(\d+)")
_BRANCH = re.compile(r"bra(?:\.uni)?\s+(\$\w+)")


@dataclass
class Early:
    """Up to the first wait, over all paths: names of pointers that loads depend on; instructions
    that a follower must not reach without having waited."""

    reads: set[str] = field(default_factory=set)
    faults: set[str] = field(default_factory=set)


def before_the_wait(spec: AotSpec) -> Early:
    """What is done before any wait."""
    lines = _instructions(compile_ptx(spec))
    sources = _sources(lines)
    names = [name for name in spec.fn.arg_names if name in spec.signature]
    labels = {line[:-1]: at for at, line in enumerate(lines) if line.endswith(":")}
    early, seen, todo = Early(), set[int](), [0]
    while todo:
        at = todo.pop()
        while at not in seen:
            seen.add(at)
            line = lines[at]
            if "griddepcontrol.wait" in line:
                break
            code = re.sub(r"^@!?%p\d+\s+", "", line)
            target = _BRANCH.match(code)
            if target:
                todo.append(labels[target[1]])
            elif re.match(r"(ret|exit|st\.global|red\.|atom)", code):
                early.faults.add(code.split()[0])
            elif re.match(r"ld\.global|cp\.async\S*global", code):
                address = code[code.rindex("[") :]
                roots = _roots(_REGISTER.findall(address), sources)
                early.reads |= {names[n] for n in roots if spec.signature[names[n]][0] == "*"}
            if code == line and re.match(r"bra|ret", code):
                break
            at += 1
    return early


def _instructions(ptx: str) -> list[str]:
    """One each, labels too; comments, directives and the braces of inline assembly gone."""
    found = []
    for line in re.sub(r"//[^\n]*", "", ptx[ptx.index("\n{") :]).splitlines():
        if line.strip().startswith("."):
            continue
        for part in line.split(";"):
            code = " ".join(re.sub(r"^[{}\s]+(?=[a-z@$]|$)", "", part).split())
            if code and not code.startswith(".reg"):
                found.append(code)
    return found


def _sources(lines: list[str]) -> dict[str, set[str | int]]:
    """Of every register, the registers and parameters that it is computed from."""
    found: dict[str, set[str | int]] = {}
    for line in lines:
        code = re.sub(r"^@!?%p\d+\s+", "", line)
        match = re.match(r"\S+\s+(\{[^}]*\}|[^,]+)(.*)", code)
        if not match or re.match(r"st\.|bra|cp\.async", code):
            continue
        inputs: set[str | int] = set(_REGISTER.findall(match[2]))
        inputs |= {int(n) for n in _PARAMETER.findall(match[2])}
        for register in _REGISTER.findall(match[1]):
            found.setdefault(register, set()).update(inputs)
    return found


def _roots(registers: list[str], sources: dict[str, set[str | int]]) -> set[int]:
    """Parameters, by their number, that these registers depend on."""
    seen: set[str | int] = set()
    todo: list[str | int] = list(registers)
    while todo:
        one = todo.pop()
        if one not in seen:
            seen.add(one)
            todo += sources.get(one, ()) if isinstance(one, str) else ()
    return {one for one in seen if isinstance(one, int)}
