"""HTTP, tenants, routing: the only room that knows Ray.

`serve run deployments:app` reads `app` here, made when asked for.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Callable[..., Any]:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: Callable[..., Any] = import_module("deployments.application").app
    return found
