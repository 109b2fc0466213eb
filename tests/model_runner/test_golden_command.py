"""Every golden case through `python -m model_runner logits`: one call over all models, in fp32.

Not here: other ways of making up steps (test_golden.py), the command's other options
(test_commands.py).
"""

import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.golden import MAX_ABS_DIFF, NAMED_IN_REFUSAL, load_cases

ROOT = Path(__file__).parents[2]


def test_logits_match_and_refusals_name_what_is_wrong(tmp_path: Path) -> None:
    cases, jobs = load_cases(), tmp_path / "jobs.jsonl"
    assert len(cases) >= 160
    with jobs.open("w") as file:
        for case in cases:
            adapter = str(case.adapter) if case.adapter else None
            ids = case.input_ids or (5, 6, 7)
            job = {"id": case.id, "model": str(case.model), "adapter": adapter, "input_ids": ids}
            file.write(json.dumps(job) + "\n")
    words = ["logits", "--jobs", str(jobs), "--out", str(tmp_path / "out"), "--dtype", "float32"]
    command = [sys.executable, "-m", "model_runner", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-4000:]
    suffix = {"logits": "safetensors", "refuse": "error.txt"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        f"{case.id}.{suffix[case.expect]}" for case in cases
    }
    wrong = []
    for case in cases:
        file = tmp_path / "out" / f"{case.id}.{suffix[case.expect]}"
        if case.expect == "refuse":
            why = file.read_text()
            wrong += [f"{case.id}: {why}"] * (NAMED_IN_REFUSAL[case.id] not in why)
            continue
        got, want = load_file(file)["logits"], case.logits()
        assert got.dtype == torch.float32 and got.shape == want.shape, case.id
        diff = float((got - want).abs().max())
        # What an adapter that does nothing shows is far more than what is allowed.
        if not diff < MAX_ABS_DIFF < 0.01 < (case.base_max_abs_diff if case.adapter else 1.0):
            wrong.append(f"{case.id}: {diff}")
    assert not wrong, "\n".join(wrong)
