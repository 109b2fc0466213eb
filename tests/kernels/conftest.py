"""What the kernel tests share: one torch thread, fp32 in full, the interpreter kept apart."""

import sys

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


@pytest.fixture
def h200_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the CPU take the host code that an H200's take, up to the launch: to record it.

    Nothing can be launched, so calls belong into `record_kernels`.
    """
    monkeypatch.setattr("kernels.op._INTERPRETING", True)
    for name, module in list(sys.modules.items()):
        if name.startswith("kernels."):
            for function, answer in (("gpu_name", "NVIDIA H200"), ("can_overlap", True)):
                if hasattr(module, function):
                    monkeypatch.setattr(module, function, lambda device, answer=answer: answer)
    monkeypatch.setattr("kernels.tune.inputs._dtype", lambda device: torch.bfloat16, raising=False)
