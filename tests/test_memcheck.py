"""The parts of `python -m tests.memcheck` that need no GPU and no sanitizer."""

import subprocess

import pytest
import torch

import kernels.paged_attention_triton
import tests.memcheck as memcheck
from kernels.registry import OPS
from tests.kernels.launches import all_kernels, full_name, recording
from tests.memcheck import ALL, BAND, DONE, Bands, cases, judge, run_inside


def test_the_cases_and_the_engine_run_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    run_inside("cpu")
    told = capsys.readouterr().out
    assert DONE in told and ALL in told


def test_the_cases_launch_every_kernel_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the list that a run asks for names them all."""
    monkeypatch.setattr(kernels.paged_attention_triton, "_num_sms", lambda index: 132)
    assert {full_name(spec.fn) for op in OPS.values() for spec in op.aot()} == all_kernels()
    with recording(overlap=True) as told:
        for op, case in cases():
            op.run(**case.make("cpu", torch.bfloat16, 0))
    assert {launch.kernel for launch in told} == all_kernels()


@pytest.mark.parametrize("place", [-1, 10])
def test_a_write_beside_the_memory_is_seen(place: int) -> None:
    bands = Bands(torch.arange(10.0))
    assert torch.equal(bands.inner, torch.arange(10.0))
    bands.inner[3] = 7
    bands.check()
    bands._whole[BAND + place] = 0
    with pytest.raises(AssertionError, match="band"):
        bands.check()


@pytest.mark.parametrize(
    ("planted", "inside", "verdict"),
    [
        ("ERROR SUMMARY: 3 errors", f"{ALL}\n{DONE}\nERROR SUMMARY: 0 errors", 0),
        ("ERROR SUMMARY: 0 errors", f"{ALL}\n{DONE}\nERROR SUMMARY: 0 errors", 1),
        ("ERROR SUMMARY: 3 errors", f"{ALL}\n{DONE}\nERROR SUMMARY: 1 error", 1),
        ("ERROR SUMMARY: 3 errors", f", 7 not\n{DONE}\nERROR SUMMARY: 0 errors", 1),
        ("ERROR SUMMARY: 3 errors", "Traceback\nERROR SUMMARY: 0 errors", 1),
        ("ERROR SUMMARY: 3 errors", "device not supported", 1),
    ],
)
def test_the_verdict(
    planted: str, inside: str, verdict: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"--planted": planted, "--inside": inside}

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, told[command[-1]], "")

    monkeypatch.setattr(memcheck.subprocess, "run", run)
    assert judge() == verdict
