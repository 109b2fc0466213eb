"""A guard taken out of the living program, so that the test of that guard can be seen to fail.

For one function or method in place. Not here: whole kernel files with a line reversed
(tests/kernels/mutant.py), because a `@triton.jit` function is found by its file.
"""

import inspect
import textwrap
from types import ModuleType

import pytest


def take_out(
    patch: pytest.MonkeyPatch, owner: ModuleType | type, name: str, line: str, instead: str
) -> None:
    """Let `owner.name` run with `line` replaced by `instead`, until `patch` is undone.

    Errors: AssertionError unless the function's source has `line` exactly once.
    """
    function = inspect.unwrap(getattr(owner, name))
    source = textwrap.dedent(inspect.getsource(function))
    count = source.count(line)
    assert count == 1, f"{owner.__name__}.{name} has {line!r} {count} times, not once"
    found: dict[str, object] = {}
    exec(compile(source.replace(line, instead), f"<{name} without {line!r}>", "exec"),
         function.__globals__, found)  # fmt: skip
    patch.setattr(owner, name, found[name])
