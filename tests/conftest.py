"""What the tests of all rooms share: marks that skip where their device is absent, a quiet world.

No fixtures of one room here: they stand in that room's own conftest.
"""

import os

# Before anything imports torch, transformers or Ray; what the caller has set stays.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Despite its name this holds on Linux too: Ray stays on 127.0.0.1.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
# Two cores with two workers' tests on them are a busy machine (DEPENDENCIES.md).
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "20")

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The two longest first, so that each of two workers begins with one.
    items.sort(key=lambda item: "test_interpreter_" not in item.nodeid)
    interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    skip_interp = pytest.mark.skip(reason="needs TRITON_INTERPRET=1 (make test-interp)")
    for item in items:
        needed = 2 if item.get_closest_marker("multigpu") else int(_has(item, "gpu"))
        if needed and _num_gpus() < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s)"))
        if _has(item, "interp") and not interpreting:
            item.add_marker(skip_interp)


def _has(item: pytest.Item, mark: str) -> bool:
    return item.get_closest_marker(mark) is not None


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()
