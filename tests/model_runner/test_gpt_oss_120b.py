"""GPT-OSS 120B: its published configuration is read, its memory is planned as its publisher counts
it, and 128 experts run.

Sizes come from the model built on torch's `meta` device, which holds no values. Not here: speed
(tests/bench), and what the family computes (test_against_transformers.py, test_golden.py).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from adapter_store.errors import StoreFull
from adapter_store.packed_layout import check_share, layout_of
from adapter_store.weights import AdapterManifest, AdapterWeights, LoraFactors, LoraTarget
from kernels.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from model_runner.assembly import arena_bytes, read_model_config
from model_runner.config import EngineConfig
from model_runner.engine import Engine
from model_runner.execution.kv_cache import allocate_kv, page_bytes, plan_kv
from model_runner.models.lora_targets import list_lora_targets
from model_runner.request import Request, SamplingParams
from tests.bench.shapes import GPT_OSS_20B, GPT_OSS_120B, cut_layers, write_model
from tests.golden import MAX_ABS_DIFF
from tests.model_runner.test_against_transformers import MODELS, logits_of, save_model

# As their model card has it: all parameters, the checkpoint's bytes.
PUBLISHED = {"20b": (GPT_OSS_20B, 20.91e9, 12.8), "120b": (GPT_OSS_120B, 116.83e9, 60.8)}


class MetaReader:
    """Tensors without values; remembers what was asked for."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def has(self, name: str) -> bool:
        return True

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        assert name not in self.tensors, name
        tensor = torch.empty(shape, dtype=dtype or torch.bfloat16, device="meta")
        self.tensors[name] = tensor
        return tensor


def read(config: dict[str, Any], folder: Path) -> Any:
    write_model(folder, config)
    return read_model_config(folder)


def test_the_published_config_is_read(tmp_path: Path) -> None:
    family, config = read(GPT_OSS_120B, tmp_path)
    assert family.__name__ == "GptOss" and config.mxfp4 and config.sinks
    assert config.num_layers == 36 and config.experts_of_layer == (128,) * 36 and config.top_k == 4
    assert (config.hidden_size, config.expert_intermediate_size) == (2880, 2880)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (64, 8, 64)
    assert config.windows == (128, 0) * 18 and config.vocab_size == 201088
    # As it was published: with transformers 4's words for rotations and experts.
    rope = dict(GPT_OSS_120B["rope_parameters"])
    old = GPT_OSS_120B | {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    old |= {"experts_per_token": old.pop("num_experts_per_tok"), "initial_context_length": 4096}
    del old["rope_parameters"]
    assert read(old, tmp_path / "old")[1] == config


@pytest.mark.parametrize("size", PUBLISHED)
def test_weights_are_as_many_as_published(size: str, tmp_path: Path) -> None:
    raw, num_parameters, gib = PUBLISHED[size]
    family, config = read(raw, tmp_path)
    reader = MetaReader()
    model = family(config, reader, 4096)
    counted = sum(  # two weights in a byte of blocks, none in a scale
        0 if name.endswith("_scales") else t.numel() * (1 + name.endswith("_blocks"))
        for name, t in reader.tensors.items()
    )
    num_bytes = sum(t.numel() * t.itemsize for t in reader.tensors.values())
    assert abs(counted / num_parameters - 1) < 0.001
    assert abs(num_bytes / 2**30 - gib) < 0.1
    kept = {id(t): t.numel() * t.itemsize for t in tensors_of(model)}
    assert num_bytes <= sum(kept.values()) < num_bytes * 1.001, "nothing is kept twice"


def tensors_of(value: Any, seen: set[int] | None = None) -> list[Tensor]:
    """Every tensor that an object holds, through attributes, lists and tables."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, str | int | float | type | LoraTarget):
        return []
    seen.add(id(value))
    if isinstance(value, Tensor):
        return [value]
    inner: Sequence[Any] = ()
    if isinstance(value, list | tuple):
        inner = value
    elif isinstance(value, dict):
        inner = tuple(value.values())
    elif hasattr(value, "__dict__"):
        inner = tuple(vars(value).values())
    return [tensor for item in inner for tensor in tensors_of(item, seen)]


def test_a_page_holds_what_its_tokens_need(tmp_path: Path) -> None:
    _, config = read(GPT_OSS_120B, tmp_path)
    layout = plan_kv(config)
    assert [(group.name, group.window) for group in layout.groups] == [
        ("full", 0),
        ("window128", 128),
    ]
    size = page_bytes(config, layout, 16, torch.bfloat16)
    a_layers = 2 * 8 * 64 * 2  # bytes of one token: K and V, heads, their width, bf16
    assert size == 16 * 18 * a_layers, "18 layers of each kind share a page's memory"
    caches = allocate_kv(config, layout, 10, 16, torch.bfloat16, torch.device("meta"))
    distinct = {id(t): t.numel() * t.itemsize for pair in caches for t in pair}
    assert len(caches) == 36 and sum(distinct.values()) == 10 * size


def test_an_adapter_on_all_experts_takes_its_bytes_of_the_arena(tmp_path: Path) -> None:
    family, config = read(GPT_OSS_120B, tmp_path)
    targets = list_lora_targets(config, family.names)
    pool = arena_bytes(EngineConfig("x"), on_cpu=False)
    for rank in (8, 32, 40):
        factors = {
            t.name: LoraFactors(
                torch.empty(128, rank, t.in_features, device="meta"),
                torch.empty(128, rank, t.out_features, device="meta"),
            )
            for t in targets
            if t.kind == "experts"
        }
        weights = AdapterWeights(factors, AdapterManifest())
        num_bytes = layout_of(weights, targets, torch.bfloat16).num_bytes
        # gate_up: 2880 in, 5760 out; down: 2880 in and out.
        assert num_bytes == 36 * 128 * rank * (2880 + 5760 + 2880 + 2880) * 2
        if rank <= 32:
            check_share("a", num_bytes, pool)
        else:
            with pytest.raises(StoreFull, match=str(num_bytes)):
                check_share("a", num_bytes, pool)


@pytest.mark.parametrize("stored", ["plain", "mxfp4"])
def test_128_experts_are_those_of_transformers(
    stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, fields = MODELS["gpt-oss"]
    wide = fields | {"num_local_experts": 128, "num_experts_per_tok": 4}
    monkeypatch.setitem(MODELS, "gpt-oss, 128 experts", (kind, wide))
    model = save_model("gpt-oss, 128 experts", tmp_path, seed=5)
    if stored == "mxfp4":
        store_as_mxfp4(model, tmp_path)
    prompt = torch.randint(96, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        want = model(torch.tensor([prompt])).logits[0]
    for limits in ({"max_num_seqs": 1}, {"max_num_seqs": 4, "max_step_tokens": 16}):
        (found,) = logits_of(tmp_path, [prompt], **limits)
        assert (found - want).abs().max() < MAX_ABS_DIFF


def store_as_mxfp4(model: torch.nn.Module, folder: Path) -> None:
    """Write the experts as the publisher does; the model gets the values that these stand for."""
    tensors = load_file(folder / "model.safetensors")
    params = dict(model.named_parameters())
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales = quantize_mxfp4(
            tensors.pop(name).transpose(1, 2).contiguous()
        )  # of [E, out, in]
        tensors[f"{name}_blocks"] = blocks.unflatten(-1, (-1, 16)).contiguous()
        tensors[f"{name}_scales"] = scales
        with torch.no_grad():
            values = dequantize_mxfp4(blocks, scales, torch.float32)  # [E, out, in]
            params[name].copy_(values.transpose(1, 2))
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))


def test_a_cut_checkpoint_runs_on_a_cpu(tmp_path: Path) -> None:
    """A layer of each kind with all 128 experts in MXFP4, a tenth as wide: a CPU keeps experts
    unpacked, which is more than 6 GB for each layer of full width."""
    cut = {"hidden_size": 288, "intermediate_size": 288, "num_attention_heads": 8,
           "num_key_value_heads": 1, "vocab_size": 1000, "eos_token_id": 2}  # fmt: skip
    write_model(tmp_path, cut_layers(GPT_OSS_120B, 2) | cut)
    engine = Engine(
        EngineConfig(
            str(tmp_path),
            load_format="random:1",
            device="cpu",
            dtype="bfloat16",
            max_model_len=64,
            kv_bytes=4 << 20,
        )
    )
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = {name: tuple(range(5 + i, 45 + i)) for i, name in enumerate("abc")}
    try:
        beside = engine.generate([Request(n, ids, greedy) for n, ids in prompts.items()])
        again = engine.generate([Request("a", prompts["a"], greedy)])
        engine.check()
    finally:
        engine.close()
    answers = [tuple(answer.token_ids) for answer in beside]
    assert all(len(ids) == 8 for ids in answers) and len(set(answers)) == 3
    assert tuple(again[0].token_ids) == answers[0]
