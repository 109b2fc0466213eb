"""Every family from every kind of checkpoint: shards in bf16, experts fused or one by one, fp8 in
blocks, MXFP4; the logits are those of a plain file with the same values, or the refusal names what
is wrong.

Not here: whether the plain file's logits are right (test_against_transformers.py), published MXFP4
weights (test_golden.py).
"""

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model_runner.execution.checkpoint import FP8_BLOCK, CheckpointError
from model_runner.models.base import ModelUnsupported
from tests.model_runner.test_against_transformers import logits_of, save_model
from tests.model_runner.test_every_target import FAMILIES

PROMPT = [list(range(24))]
FP8 = {"quant_method": "fp8", "weight_block_size": [FP8_BLOCK, FP8_BLOCK]}
FUSED_ALWAYS = ("gpt-oss", "llama4")
DENSE = ("llama", "qwen3")
FORMATS = ("shards", "fused", "one by one", "fp8", "mxfp4")
# (family, format) -> what the refusal names; the others load.
REFUSED = {
    **{(family, "one by one"): "experts.gate_up_proj" for family in FUSED_ALWAYS},
    **{(family, "mxfp4"): "mxfp4" for family in FAMILIES if family != "gpt-oss"},
    ("gpt-oss", "fp8"): "fp8",
}
# gpt-oss' own MXFP4 files are in test_golden.py.
CELLS = [
    (family, kind)
    for family in FAMILIES
    for kind in FORMATS
    if (family, kind) != ("gpt-oss", "mxfp4")
    and not (family in DENSE and kind in ("fused", "one by one"))
]
_ONE = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
_LINEAR = re.compile(r"(_proj|_proj_with_mqa|\.w[123])\.weight$")
_FUSED = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")


def fuse(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts of one layer in two tensors: [E, 2I, H] and [E, H, I]."""
    one_by_one = {name: match for name in tensors if (match := _ONE.fullmatch(name))}
    found = {name: t for name, t in tensors.items() if name not in one_by_one}
    for module in {match[1] for match in one_by_one.values()}:
        parts: dict[str, list[Tensor]] = {}
        mine = [m for m in one_by_one.values() if m[1] == module]
        for match in sorted(mine, key=lambda m: int(m[2])):
            parts.setdefault(match[3], []).append(tensors[match[0]])
        gate, up, down = (
            torch.stack(parts.get(new) or parts[old])
            for new, old in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
        )
        found[f"{module}.gate_up_proj"] = torch.cat([gate, up], 1)
        found[f"{module}.down_proj"] = down
    return found


def split(tensors: dict[str, Tensor], spelled: tuple[str, str, str]) -> dict[str, Tensor]:
    """The other way round."""
    found = {}
    for name, tensor in tensors.items():
        match = _FUSED.fullmatch(name)
        if match is None:
            found[name] = tensor
            continue
        for e, weight in enumerate(tensor):
            halves = weight.chunk(2) if match[2] == "gate_up_proj" else (weight,)
            names = spelled[:2] if len(halves) == 2 else spelled[2:]
            for half, part in zip(halves, names, strict=True):
                found[f"{match[1]}.{e}.{part}.weight"] = half.contiguous()
    return found


def quantise(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(linears in fp8 blocks with their scales, the values that these stand for)."""
    blocks, values = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if _LINEAR.search(name) is None:
            continue
        rows, cols = (range(0, size, FP8_BLOCK) for size in tensor.shape)
        blocks[name] = torch.empty_like(tensor, dtype=torch.float8_e4m3fn)
        blocks[f"{name}_scale_inv"] = scales = torch.empty(len(rows), len(cols))
        values[name] = torch.empty_like(tensor)
        for i, row in enumerate(rows):
            for j, col in enumerate(cols):
                here = slice(row, row + FP8_BLOCK), slice(col, col + FP8_BLOCK)
                scales[i, j] = tensor[here].abs().amax() / 448
                blocks[name][here] = (tensor[here] / scales[i, j]).to(torch.float8_e4m3fn)
                values[name][here] = blocks[name][here].float() * scales[i, j]
    return blocks, values


def save(
    folder: Path, base: Path, tensors: dict[str, Tensor], num_files: int = 1, **config
) -> Path:
    """The base's config with these fields, over these tensors."""
    folder.mkdir()
    raw = json.loads((base / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | config))
    names = [f"model-{i:05}-of-{num_files:05}.safetensors" for i in range(1, num_files + 1)]
    if num_files == 1:
        names = ["model.safetensors"]
    file_of = {name: names[i % num_files] for i, name in enumerate(sorted(tensors))}
    for file in names:
        part = {name: t.contiguous() for name, t in tensors.items() if file_of[name] == file}
        save_file(part, folder / file)
    if num_files > 1:
        index = {"weight_map": file_of}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Callable[[str], Path]:
    """A family's checkpoint as the installed transformers writes it, made once."""

    def make(family: str) -> Path:
        folder = tmp_path_factory.mktemp("base")
        save_model(FAMILIES[family], folder, seed=13)
        return folder

    return functools.cache(make)


def write(kind: str, base: Path, folder: Path) -> tuple[Path, Path]:
    """(checkpoint of this kind, a plain one with the same values)."""
    tensors = load_file(base / "model.safetensors")
    if kind == "shards":
        rounded = {name: t.bfloat16() for name, t in tensors.items()}
        plain = {name: t.float() for name, t in rounded.items()}
        return save(folder / "x", base, rounded, 3, dtype="bfloat16"), save(
            folder / "plain", base, plain
        )
    if kind == "fp8":
        blocks, values = quantise(tensors)
        assert len(blocks) > len(tensors)
        changed = save(folder / "x", base, blocks, quantization_config=FP8)
        return changed, save(folder / "plain", base, values)
    if kind == "mxfp4":
        config = {"quantization_config": {"quant_method": "mxfp4"}}
        return save(folder / "x", base, tensors, **config), base
    old = any(".w1." in name for name in tensors)
    spelled = ("w1", "w3", "w2") if old else ("gate_proj", "up_proj", "down_proj")
    changed = fuse(tensors) if kind == "fused" else split(fuse(tensors), spelled)
    assert any((_FUSED if kind == "fused" else _ONE).fullmatch(name) for name in changed)
    return save(folder / "x", base, changed), base


@pytest.mark.parametrize(("family", "kind"), CELLS, ids=[f"{f}-{k}" for f, k in CELLS])
def test_a_checkpoint_loads_as_its_values_say(
    family: str, kind: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    changed, plain = write(kind, saved(family), tmp_path)
    if (family, kind) in REFUSED:
        with pytest.raises((CheckpointError, ModelUnsupported), match=REFUSED[family, kind]):
            logits_of(changed, PROMPT)
        return
    got, want = (logits_of(folder, PROMPT)[0] for folder in (changed, plain))
    assert want.std() > 0.1 and torch.equal(got, want)
    for path in changed.iterdir():  # every file is needed
        if path.suffix == ".safetensors":
            path.unlink()
            break
    with pytest.raises(CheckpointError):
        logits_of(changed, PROMPT)


# No size is a multiple of a block, and each has several.
WIDE = {"hidden_size": 160, "intermediate_size": 288, "moe_intermediate_size": 136}
SEVERAL_BLOCKS = {
    "qwen3-moe": WIDE | {"head_dim": 40, "num_key_value_heads": 4},
    "deepseek v3": WIDE | {"q_lora_rank": 136, "kv_lora_rank": 136, "qk_nope_head_dim": 32,
                           "v_head_dim": 40},
}  # fmt: skip


@pytest.mark.parametrize("family", SEVERAL_BLOCKS)
def test_each_of_several_fp8_blocks_has_its_own_scale(family: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    save_model(FAMILIES[family], base, 13, **SEVERAL_BLOCKS[family])
    tensors = load_file(base / "model.safetensors")
    for name, tensor in tensors.items():
        if _LINEAR.search(name):  # far from each other: what a wrong scale does must be felt
            rows, cols = (torch.arange(size) // FP8_BLOCK for size in tensor.shape)
            tensor *= 2.0 ** ((rows[:, None] + 2 * cols) % 3 - 1)
    blocks, values = quantise(tensors)
    shapes = {scale.shape for name, scale in blocks.items() if name.endswith("_scale_inv")}
    assert shapes == {(2, 2), (2, 3), (3, 2)}
    folder = save(tmp_path / "blocks", base, blocks, 2, quantization_config=FP8)
    plain = save(tmp_path / "plain", base, values)
    got, want = (logits_of(at, PROMPT)[0] for at in (folder, plain))
    assert want.std() > 0.1 and torch.equal(got, want)
    # One wrong scale shows: of the last block, in which the fewest values are.
    for name, tensor in blocks.items():
        if name.endswith("layers.0.self_attn.o_proj.weight_scale_inv"):
            tensor[-1, -1] = tensor[0, 0]
    other = save(tmp_path / "other", base, blocks, 2, quantization_config=FP8)
    assert (logits_of(other, PROMPT)[0] - want).abs().max() > 0.01
    one = {
        name: tensor[:1] if name.endswith("_scale_inv") else tensor
        for name, tensor in blocks.items()
    }
    fewer = save(tmp_path / "fewer", base, one, 2, quantization_config=FP8)
    with pytest.raises(CheckpointError, match="_scale_inv has shape"):
        logits_of(fewer, PROMPT)
