"""What the kernel tests share: marks that skip themselves, one torch thread, full fp32 precision."""

import pytest
import torch

from kernels.op import interpreting


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "interp: Triton's interpreter (TRITON_INTERPRET=1)")
    config.addinivalue_line("markers", "gpu: needs a GPU")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="no GPU")
    plain = pytest.mark.skip(reason="needs TRITON_INTERPRET=1")
    interpreted = pytest.mark.skip(reason="not under TRITON_INTERPRET=1")
    for item in items:
        if "kernels" not in item.path.parts:
            continue
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if item.get_closest_marker("interp"):
            if not interpreting():
                item.add_marker(plain)
        elif interpreting():
            item.add_marker(interpreted)


@pytest.fixture(autouse=True)
def _exact() -> None:
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
