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
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
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
from tests.model_runner.test_against_transformers import COMMON, MODELS
from tests.model_runner.test_every_target import FAMILIES, PROMPT, parts_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WRITER = Path(__file__).with_name("peft_writer.py")
PIP_S, WRITER_S = 300, 400
TRANSFORMERS_4 = ("transformers==4.57.6", "huggingface_hub==0.36.2", "tokenizers==0.22.2")
# (PEFT, transformers) -> how experts lie in their files: gpt-oss, the families that transformers 4
# has one by one, llama4. The first release with target_parameters does not load beside 5.
LAYOUTS = {
    ("0.17.1", 4): ("natural", "one by one", "natural"),
    ("0.18.1", 4): ("natural", "one by one", "natural"),
    ("0.18.1", 5): ("natural", "swapped", "natural"),
    ("0.19.0", 4): ("natural", "one by one", "natural"),
    ("0.19.0", 5): ("swapped", "swapped", "natural"),
    ("0.21.2", 4): ("swapped", "one by one", "swapped"),
    ("0.21.2", 5): ("natural", "natural", "swapped"),
}
Writer = tuple[str, int]

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
DENSE = ["gate_proj", "up_proj", "down_proj"]
MIXTRAL = ["w1", "w3", "w2"]
# The square sizes of another model of the family, where sizes do not tell the layout; gpt-oss has
# such a down_proj itself.
SQUARE = {"qwen3-moe": {"moe_intermediate_size": 16}, "llama4": {"intermediate_size": 32}}


@dataclass(frozen=True)
class Case:
    """One adapter. fields, kind: of PEFT's configuration;  save: of save_pretrained

    parts   what its tensors must be, in the words of test_every_target.PARTS
    reason  why it must be refused; "" = its logits must be PEFT's
    error   words of PEFT's own error, where it cannot write what it was asked for
    """

    fields: dict[str, Any]
    parts: frozenset[str] = frozenset()
    save: dict[str, Any] = field(default_factory=dict)
    kind: str = "Lora"
    reason: str = ""
    error: str = ""


def shapes() -> dict[str, tuple[str, dict[str, Any]]]:
    """Model -> its configuration in words that both releases of transformers know."""
    found = {}
    for family, shape in FAMILIES.items():
        kind, fields = MODELS[shape]
        plain = {k: v for k, v in (COMMON | fields).items() if k != "rope_parameters"}
        found[family] = kind, plain
        if family in SQUARE:
            found[f"{family}, square"] = kind, plain | SQUARE[family]
    return found


@functools.cache
def cases_of(model: str, writer: Writer) -> dict[str, Case]:
    """What is adapted in a model, by a name for it."""
    family = model.partition(",")[0]
    latent, routed = family.startswith("deepseek"), family not in ("llama", "qwen3")
    layout = LAYOUTS[writer][{"gpt-oss": 0, "llama4": 2}.get(family, 1)]
    experts, one_by_one = f"experts, {layout}", routed and layout == "one by one"
    # These take the names of one expert's linears in transformers 4 for all experts' together, and
    # whatever else is called so.
    rewritten = writer in (("0.19.0", 5), ("0.21.2", 5)) and layout != "one by one"
    rewritten = rewritten and routed and family not in ("gpt-oss", "llama4")
    mlp = "feed_forward" if family == "llama4" else "mlp"
    both = [f"{mlp}.experts.gate_up_proj", f"{mlp}.experts.down_proj"]
    layer = 2 if family == "qwen3-moe" else 1  # that has experts, below it one without
    cases: dict[str, Case] = {}

    def add(
        name: str, parts: str, modules: Any, params: Any = None, reason: str = "", **more: Any
    ) -> None:
        fields = {"r": 4, "lora_alpha": 8, "target_modules": modules} | more
        if params:
            fields["target_parameters"] = params
        named = frozenset(experts if p == "experts" else p for p in parts.split(" and ") if p)
        cases[name] = Case(fields, named, {"save_embedding_layers": False}, reason=reason)

    if routed and not one_by_one:
        # Nothing else in the file tells its layout; PEFT 0.17 did not even say its own release.
        lost = "ambiguous_layout" if writer[0] == "0.17.1" else ""
        square_down = family == "gpt-oss" or model == "llama4, square"
        add("gate_up alone", "experts", [], both[:1])
        add("down alone", "experts", [], both[1:], reason=lost if square_down else "")
        add("experts", "experts and attention", ["o_proj"], both)
    if model != family:
        return cases
    if routed and not one_by_one:
        add(
            "experts, rslora and patterns",
            "experts",
            [],
            both,
            use_rslora=True,
            rank_pattern={"experts.down_proj": 2},
            alpha_pattern={"experts.gate_up_proj": 5},
        )
        add("experts of one layer", "experts", [], [f"layers.{layer}.{name}" for name in both])
        gate = "router" if family in ("gpt-oss", "llama4") else "gate"
        add("router", "router and attention", ["o_proj"], [f"{mlp}.{gate}.weight"])
    if rewritten:
        names = MIXTRAL if family == "mixtral" else DENSE
        add("old names", "experts", names)
        add(
            "old names, rslora and patterns",
            "experts",
            names,
            use_rslora=True,
            rank_pattern={names[2]: 2},
            alpha_pattern={names[0]: 5, names[1]: 5},
        )
    if one_by_one:
        at = rf"model\.layers\.\d+\.{'block_sparse_moe' if family == 'mixtral' else 'mlp'}"
        gate, up, down = MIXTRAL if family == "mixtral" else DENSE
        one = rf"{at}\.experts\.\d+\.({gate}|{up}|{down})"
        add("experts", "experts", one)
        add("some experts", "experts and attention", rf"{at}\.experts\.[02]\.{up}|.*\.o_proj")
        add(
            "experts, rslora and patterns",
            "experts",
            one,
            use_rslora=True,
            rank_pattern={up: 2, rf"experts\.1\.{down}": 7},
            alpha_pattern={gate: 5},
        )
        if latent:  # no module, so a parameter
            add("router", "router and attention", ["o_proj"], ["mlp.gate.weight"])
        else:
            add("router", "router", rf"{at}\.gate")
    attention = LATENT if latent else ATTENTION
    add("attention", "attention and latent" if latent else "attention", attention)
    add(
        "attention, rslora and patterns",
        "attention",
        ["o_proj", attention[0], attention[1]],
        use_rslora=True,
        rank_pattern={attention[0]: 8, r"layers\.1\.self_attn\.o_proj": 2},
        alpha_pattern={attention[1]: 3, r"^model\.layers\.0\.self_attn\.o_proj": 1},
    )
    add("attention of one layer", "attention", ["o_proj"], layers_to_transform=[1])
    if latent or family == "llama4":
        at = "shared_experts" if latent else "shared_expert"
        part = "experts" if rewritten else "shared expert"
        add("shared expert", part, [f"{at}.{name}" for name in DENSE])
    if family in ("deepseek v2", "deepseek v3", "qwen3-moe"):
        add(
            "dense MLP",
            "experts" if rewritten else "dense MLP",
            [f"layers.{layer - 1}.mlp.{name}" for name in DENSE],
        )
    elif not routed or family == "llama4":
        add("dense MLP", "dense MLP", rf".*\.layers\.\d+\.{mlp}\.(gate|up|down)_proj")
    add("vocabulary", "embedding and lm_head", ["embed_tokens", "lm_head"])
    return cases | (unusual() if family == "llama" else {})


def unusual() -> dict[str, Case]:
    """Vocabulary as PEFT saves it by default, the base's own beside the factors; and what changes
    more than a LoRA may, or is none."""
    plain = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    both = {"r": 4, "lora_alpha": 8, "target_modules": ["embed_tokens", "lm_head"]}
    parts = frozenset({"embedding", "lm_head"})
    found = {"vocabulary, with copies": Case(both, parts, {"save_embedding_layers": True})}
    for reason, more in (
        ("dora", {"use_dora": True}),
        ("bias", {"bias": "all"}),
        ("modules_to_save", {"modules_to_save": ["lm_head"]}),
        ("trainable_tokens", {"trainable_token_indices": [1, 2]}),
        ("layer_replication", {"layer_replication": [[0, 2], [1, 2]]}),
        ("changes_base", {"init_lora_weights": "pissa"}),
        ("changes_base", {"init_lora_weights": "olora"}),
    ):
        (what,) = more.items()
        found[f"refused: {what[0]} {what[1]}"] = Case(plain | more, reason=reason)
    others: dict[str, dict[str, Any]] = {
        "LoHa": {"r": 4, "target_modules": ["q_proj"]},
        "IA3": {"target_modules": ["q_proj"], "feedforward_modules": []},
        "PromptTuning": {"num_virtual_tokens": 3},
    }
    for kind, fields in others.items():
        found[f"refused: {kind}"] = Case(fields, kind=kind, reason="peft_type")
    return found


@dataclass(frozen=True)
class Written:
    """What one release wrote. folder: see peft_writer.py"""

    folder: Path
    peft: str
    transformers: str
    cases: dict[str, dict[str, Any]]
    logits: dict[str, Tensor]


@pytest.fixture(scope="module")
def written(tmp_path_factory: Any) -> Callable[[Writer], Written]:
    """What each of WRITERS writes, written once."""
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

    return write


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
        for name, case in cases.items():
            assert case.error in errors[name] and bool(case.error) == bool(errors[name]), errors
        cases = {name: case for name, case in cases.items() if not case.error}
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
