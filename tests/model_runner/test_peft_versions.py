"""Adapters as PEFT of several releases writes them, over transformers 4 and 5: each release in an
environment of its own, made for this run and gone after it. The logits are those that the writer's
own PEFT computed, no tensor is passed over, and the expert layouts are those of the loader's table.

An environment is this one with other packages before it: PEFT, and transformers 4 with what that
needs of other releases, from the package index. Torch is shared. What each wrote, by family and
case, is printed (`pytest -s -m slow tests/model_runner/test_peft_versions.py`).
Not here: the installed PEFT (test_peft_live.py), recorded files (test_golden.py).
"""

import functools
import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from adapter_store.errors import AdapterInvalid
from adapter_store.formats.registry import load_adapter
from adapter_store.ref import AdapterRef
from adapter_store.weights import assuming
from model_runner.assembly import read_model_config
from model_runner.config import EngineConfig
from model_runner.engine import Engine
from model_runner.models.lora_targets import list_lora_targets
from tests.golden import MAX_ABS_DIFF
from tests.model_runner.peft_cases import LAYOUTS, Writer, cases_of, shapes
from tests.model_runner.test_every_target import FAMILIES, PROMPT, parts_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WRITER = Path(__file__).with_name("peft_writer.py")
PIP_S, WRITER_S = 300, 400
TRANSFORMERS_4 = ("transformers==4.57.6", "huggingface_hub==0.36.2", "tokenizers==0.22.2")


@dataclass(frozen=True)
class Written:
    """What one release wrote. folder: see peft_writer.py"""

    folder: Path
    peft: str
    transformers: str
    cases: dict[str, dict[str, Any]]
    logits: dict[str, Tensor]


@pytest.fixture(scope="module")
def written(tmp_path_factory: Any) -> Iterator[Callable[[Writer], Written]]:
    """What each writer of LAYOUTS writes, written once; nothing of it is left afterwards."""
    root = tmp_path_factory.mktemp("writers")

    @functools.cache
    def install(*packages: str) -> str:
        folder = root / packages[0]
        words = ["install", "--quiet", "--no-deps", "--target", str(folder), *packages]
        done = subprocess.run(
            [sys.executable, "-m", "pip", "--disable-pip-version-check", *words],
            capture_output=True, text=True, timeout=PIP_S,
        )  # fmt: skip
        assert done.returncode == 0, f"{packages}: {done.stderr[-2000:]}"
        return str(folder)

    @functools.cache
    def write(writer: Writer) -> Written:
        peft, transformers = writer
        path = [install(f"peft=={peft}")]
        if transformers == 4:
            path.append(install(*TRANSFORMERS_4))
        models = shapes()
        jobs = {
            "prompt": PROMPT,
            "models": models,
            "cases": [
                {"model": model, "case": name, "kind": case.kind, "fields": case.fields,
                 "save": case.save}
                for model in models for name, case in cases_of(model, writer).items()
            ],
        }  # fmt: skip
        out = root / f"by-{peft}-{transformers}"
        out.mkdir()
        (out / "jobs.json").write_text(json.dumps(jobs))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1"}
        # -P: nothing of ours is in reach; transformers would take our kernels for another package.
        done = subprocess.run(
            [sys.executable, "-P", str(WRITER), str(out / "jobs.json"), str(out)],
            cwd=root, env=environment, capture_output=True, text=True, timeout=WRITER_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        told = json.loads((out / "written.json").read_text())
        logits = load_file(out / "logits.safetensors")
        return Written(out, told["peft"], told["transformers"], told["cases"], logits)

    yield write
    shutil.rmtree(root)


PARAMS = [
    pytest.param(writer, family, id=f"peft {writer[0]}, transformers {writer[1]}, {family}")
    for writer in LAYOUTS
    for family in FAMILIES
]


@pytest.mark.parametrize(("writer", "family"), PARAMS)
def test_logits_are_those_of_the_writer(
    writer: Writer, family: str, written: Callable[[Writer], Written]
) -> None:
    """Loaded side by side from the base that the same transformers saved; and each tensor of each
    file is bound or skipped for a reason, or the file is refused by the thing at fault."""
    found = written(writer)
    assert (found.peft, found.transformers.partition(".")[0]) == (writer[0], str(writer[1]))
    for model in (m for m in shapes() if m.partition(",")[0] == family):
        cases, told = cases_of(model, writer), found.cases
        errors = {name: told[f"{model}/{name}"].get("error", "") for name in cases}
        assert not any(errors.values()), errors
        served = [name for name, case in cases.items() if not case.reason]
        logits = score(found.folder / model, served, writer[1])
        base = found.logits[f"{model}/base"]
        assert (logits[""] - base).abs().max() < MAX_ABS_DIFF
        for name in served:
            want = found.logits[f"{model}/{name}"]
            assert (want - base).abs().max() > 40 * MAX_ABS_DIFF, f"{name} changes nothing"
            assert (logits[name] - want).abs().max() < MAX_ABS_DIFF, name
        model_class, config = read_model_config(found.folder / model / "base")
        targets = assuming(list_lora_targets(config, model_class.names), writer[1])
        gate = model_class.names.gate if model_class.names else ""
        for name, case in cases.items():
            folder, tensors = found.folder / model / name, told[f"{model}/{name}"]["tensors"]
            if case.reason:
                with pytest.raises(AdapterInvalid) as refusal:
                    load_adapter(folder, targets)
                assert refusal.value.reason == case.reason, name
                continue
            manifest = load_adapter(folder, targets).manifest
            assert sorted([*manifest.bound, *manifest.skipped]) == sorted(tensors), name
            copies = {key for key in tensors if "lora_" not in key}
            assert set(manifest.skipped) == copies and bool(copies) == ("copies" in name)
            assert parts_of(manifest, targets, gate) == case.parts, (name, list(tensors))
        listed = {name: sorted(case.parts) or case.reason for name, case in cases.items()}
        print(f"\nPEFT {found.peft} over transformers {found.transformers}, {model}: {listed}")


def score(root: Path, names: list[str], transformers: int) -> dict[str, Tensor]:
    """Logits of the prompt under each adapter of a folder, and of the base (""), side by side."""
    engine = Engine(
        EngineConfig(
            model=str(root / "base"),
            max_model_len=64,
            max_num_seqs=8,
            max_step_tokens=100,
            kv_bytes=4 << 20,
            prefix_cache=False,
            assume_transformers=transformers,
        )
    )
    parts: dict[str, dict[int, Tensor]] = defaultdict(dict)

    def keep(name: str) -> Callable[[int, Tensor], None]:
        return lambda first, logits: parts[name].update({first: logits.clone()})

    def done(number: int, why: str) -> None:
        assert not why, f"{['', *names][number]}: {why}"

    refs = [None, *(AdapterRef(name, str(root / name)) for name in names)]
    try:
        engine.score(
            [
                (tuple(PROMPT), ref, keep(name))
                for name, ref in zip(["", *names], refs, strict=True)
            ],
            done,
        )
        engine.check()
    finally:
        engine.close()
    return {name: torch.cat([x for _, x in sorted(part.items())]) for name, part in parts.items()}
