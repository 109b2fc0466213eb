"""What the kernel tests share: one torch thread, fp32 in full, the interpreter kept apart."""

import pytest
import torch

from kernels.op import interpreting


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under TRITON_INTERPRET=1 a CPU tensor goes to the kernel; other tests mean the reference."""
    if interpreting():
        for item in items:
            if not item.get_closest_marker("interp"):
                item.add_marker(pytest.mark.skip(reason="not under TRITON_INTERPRET=1"))


@pytest.fixture(autouse=True)
def _exact() -> None:
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
