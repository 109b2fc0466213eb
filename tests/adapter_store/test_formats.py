"""Single rules of the adapter formats, on adapters made here: layouts, names, ranks, what is said.

Not here: whole adapters against their writers' logits (test_formats_golden), hostile files
(test_formats_hostile).
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from adapter_store.errors import AdapterInvalid, AdapterNotFound
from adapter_store.formats.registry import load_adapter
from adapter_store.weights import AdapterWeights, LoraTarget, assuming, merge_delta
from tests.golden import GOLDEN, golden_targets, load_cases

H, INNER, E, R = 6, 6, 3, 2  # down is square, gate_up is not
X = "model.layers.0.mlp.experts"


def _experts(layer: int = 0, **changes: Any) -> tuple[LoraTarget, LoraTarget]:
    at = f"model.layers.{layer}.mlp.experts"
    up = {"interleaved": changes.pop("interleaved", False), **changes}
    return (
        LoraTarget(
            f"{at}.gate_up_proj", H, 2 * INNER, "experts", E, ("gate_proj", "up_proj"), **up
        ),
        LoraTarget(f"{at}.down_proj", INNER, H, "experts", E, ("down_proj",), **changes),
    )


LINEAR = LoraTarget("model.layers.0.self_attn.q_proj", H, 4)
EMBEDDING = LoraTarget("model.embed_tokens", 9, H, "embedding")
HEAD = LoraTarget("lm_head", H, 9)
TARGETS = (EMBEDDING, LINEAR, *_experts(0), *_experts(1), HEAD)


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def _write(folder: Path, tensors: dict[str, Tensor], **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": R, "lora_alpha": R, **fields}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "adapter_model.safetensors")
    return folder


def _pair(path: str, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    return {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}


def _linear(path: str = LINEAR.name, r: int = R) -> dict[str, Tensor]:
    return _pair(path, _random(r, H), _random(4, r))


def _delta(weights: AdapterWeights, target: LoraTarget) -> Tensor:
    return merge_delta(target, weights.factors[target.name])


def _refused(folder: Path, reason: str, named: str, **options: Any) -> None:
    targets = options.pop("targets", TARGETS)
    with pytest.raises(AdapterInvalid) as refusal:
        load_adapter(folder, targets, **options)
    assert refusal.value.reason == reason, str(refusal.value)
    assert named in str(refusal.value)


# ---- flat layouts


def _flat(fan_in: int, fan_out: int) -> tuple[Tensor, Tensor]:
    return _random(R * E, fan_in), _random(fan_out, R * E)


def _natural(a: Tensor, b: Tensor) -> Tensor:
    """The formula as PEFT's: [E, out, in]."""
    a_e, b_e = a.reshape(E, R, -1), b.reshape(-1, R, E)
    return torch.stack([b_e[:, :, e] @ a_e[e] for e in range(E)])


def test_gate_up_of_one_layer_decides_for_a_square_down_of_another(tmp_path: Path) -> None:
    down = _flat(INNER, H)
    for name, gate_up, expected in (
        ("natural", _flat(H, 2 * INNER), _natural(*down)),
        ("swapped", _flat(2 * INNER, H), _natural(*down).transpose(1, 2)),
    ):
        tensors = _pair(f"{X}.gate_up_proj", *gate_up)
        tensors |= _pair("model.layers.1.mlp.experts.down_proj", *down)
        weights = load_adapter(_write(tmp_path / name, tensors, peft_version="0.19.0"), TARGETS)
        torch.testing.assert_close(_delta(weights, _experts(1)[1]), expected)
        assert weights.manifest.warnings == ()


def test_contradicting_layouts_are_refused(tmp_path: Path) -> None:
    tensors = _pair(f"{X}.gate_up_proj", *_flat(H, 2 * INNER))
    tensors |= _pair("model.layers.1.mlp.experts.gate_up_proj", *_flat(2 * INNER, H))
    _refused(_write(tmp_path / "a", tensors), "ambiguous_layout", "gate_up_proj")


@pytest.mark.parametrize(
    ("storage", "version", "transformers", "swapped"),
    [
        ("gpt_oss", "0.18.1", None, False),
        ("gpt_oss", "0.19.0", None, True),
        ("gpt_oss", "0.19.0", 4, False),
        ("gpt_oss", "0.21.2", None, False),
        ("gpt_oss", "0.21.2", 5, False),
        ("gpt_oss", "0.21.2", 4, True),
        ("qwen3_moe", "0.18.1", None, True),
        ("qwen3_moe", "0.19.0", None, True),
        ("qwen3_moe", "0.19.1", None, False),
        ("llama4", "0.18.1", None, False),
        ("llama4", "0.19.0", None, False),
        ("llama4", "0.21.2", None, True),
        ("llama4", "0.21.2", 4, True),
    ],
)
def test_a_lone_square_down_is_read_by_the_versions(
    tmp_path: Path, storage: str, version: str, transformers: int | None, swapped: bool
) -> None:
    in_out = storage != "qwen3_moe"
    targets = _experts(weight_is_in_out=in_out, interleaved=storage == "gpt_oss")
    a, b = _flat(INNER, H)
    folder = _write(
        tmp_path / "a",
        _pair(X, a, b),
        peft_version=version,
        target_parameters=["experts.down_proj"],
    )
    weights = load_adapter(folder, assuming(targets, transformers or 0))
    expected = _natural(a, b).transpose(1, 2) if swapped else _natural(a, b)
    torch.testing.assert_close(_delta(weights, targets[1]), expected)
    (warning,) = weights.manifest.warnings
    assert version in warning
    assert ("does not record" in warning) == (transformers is None)


@pytest.mark.parametrize("version", [None, "0.19.1.dev0", "newest"])
def test_a_lone_square_down_without_a_release_is_refused(
    tmp_path: Path, version: str | None
) -> None:
    fields = {"peft_version": version, "target_parameters": ["down_proj"]}
    _refused(_write(tmp_path / "a", _pair(X, *_flat(INNER, H)), **fields), "ambiguous_layout", X)


def test_transformers_4_wrote_no_flat_experts_for_split_families(tmp_path: Path) -> None:
    fields = {"peft_version": "0.21.2", "target_parameters": ["down_proj"]}
    folder = _write(tmp_path / "a", _pair(X, *_flat(INNER, H)), **fields)
    _refused(folder, "ambiguous_layout", X, targets=assuming(TARGETS, 4))


@pytest.mark.parametrize("entries", [None, ["gate_up_proj", "down_proj"], ["layers.1.down_proj"]])
def test_one_pair_needs_one_target_parameter(tmp_path: Path, entries: list[str] | None) -> None:
    folder = _write(tmp_path / "a", _pair(X, *_flat(H, 2 * INNER)), target_parameters=entries)
    _refused(folder, "ambiguous_layout", X)


# ---- gate and up apart


def test_gate_and_up_of_their_own_become_one_factor_of_both_ranks(tmp_path: Path) -> None:
    gate, up = (_random(R, H), _random(INNER, R)), (_random(3, H), _random(INNER, 3))
    tensors = _pair(f"{X}.1.gate_proj", *gate) | _pair(f"{X}.1.up_proj", *up)
    folder = _write(tmp_path / "a", tensors, rank_pattern={"up_proj": 3}, lora_alpha=6)
    weights = load_adapter(folder, TARGETS)
    target = _experts()[0]
    assert weights.factors[target.name].lora_rank == R + 3
    delta = _delta(weights, target)
    torch.testing.assert_close(delta[1, :INNER], 3.0 * gate[1] @ gate[0])
    torch.testing.assert_close(delta[1, INNER:], 2.0 * up[1] @ up[0])
    assert not delta[0].any() and not delta[2].any()
    _refused(folder, "rank_limit", target.name, max_rank=4)


def test_equal_as_of_gate_and_up_are_joined(tmp_path: Path) -> None:
    a, gate, up = _random(1, R, H), _random(E, INNER, R), _random(E, INNER, R, seed=1)
    tensors = _pair(f"{X}.w1", a, gate) | _pair(f"{X}.w3", a.clone(), up)
    weights = load_adapter(_write(tmp_path / "a", tensors), TARGETS)
    factors = weights.factors[f"{X}.gate_up_proj"]
    assert factors.a.shape == (1, R, H) and factors.b.shape == (E, R, 2 * INNER)
    torch.testing.assert_close(_delta(weights, _experts()[0]), torch.cat([gate, up], 1) @ a)


def test_shared_a_of_gate_alone_stays_shared(tmp_path: Path) -> None:
    a, b = _random(1, R, H), _random(E, INNER, R)
    weights = load_adapter(_write(tmp_path / "a", _pair(f"{X}.gate_proj", a, b)), TARGETS)
    assert weights.factors[f"{X}.gate_up_proj"].a.shape == (1, R, H)
    delta = _delta(weights, _experts()[0])
    torch.testing.assert_close(delta[:, :INNER], b @ a)
    assert not delta[:, INNER:].any()


def test_unsloth_rows_are_interleaved_and_ranks_padded(tmp_path: Path) -> None:
    targets = _experts(interleaved=True, weight_is_in_out=True)
    a0, b0, a2, b2 = _random(R, H), _random(2 * INNER, R), _random(4, H), _random(2 * INNER, 4)
    tensors = _pair(f"{X}.gate_up_projs.0", a0, b0) | _pair(f"{X}.gate_up_projs.2", a2, b2)
    folder = _write(tmp_path / "a", tensors, rank_pattern={r"gate_up_projs\.2": 4})
    delta = _delta(load_adapter(folder, targets), targets[0])
    torch.testing.assert_close(delta[0, :INNER], (b0 @ a0)[0::2])
    torch.testing.assert_close(delta[2, INNER:], 0.5 * (b2 @ a2)[1::2])
    assert not delta[1].any()


def test_an_alias_may_name_the_experts_module(tmp_path: Path) -> None:
    old = "model.layers.0.block_sparse_moe.experts"
    targets = _experts(aliases=(old,))
    a, b = _random(R, INNER), _random(H, R)
    folder = _write(tmp_path / "a", _pair(f"{old}.2.w2", a, b))
    torch.testing.assert_close(_delta(load_adapter(folder, targets), targets[1])[2], b @ a)


# ---- names


@pytest.mark.parametrize("prefix", ["", "base_model.model."])
@pytest.mark.parametrize("wrapper", ["model.", "model.language_model.", "language_model.model."])
def test_prefixes(tmp_path: Path, prefix: str, wrapper: str) -> None:
    path = prefix + LINEAR.name.replace("model.", wrapper, 1)
    weights = load_adapter(_write(tmp_path / "a", _linear(path)), TARGETS)
    assert list(weights.factors) == [LINEAR.name]


@pytest.mark.parametrize(
    "path",
    [
        "layers.0.self_attn.q_proj",  # no full match
        "base_model.model.base_model.model.model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.q_proj.base_layer",
        f"{X}.3.down_proj",  # experts are 0, 1, 2
        f"{X}.01.down_proj",
        f"{X}.\u0661.down_proj",
        f"{X}.1.gate_up_proj",
        f"{X}.down_proj.1",
        f"{X}.base_layer.base_layer",
        "model.layers.0.mlp.experts.1.extra.down_proj",
    ],
)
def test_names_that_belong_to_nothing(tmp_path: Path, path: str) -> None:
    folder = _write(tmp_path / "a", _linear() | _linear(path))
    _refused(folder, "unbound_tensor", ascii(path.rpartition(".")[2])[1:-1])


def test_one_factor_under_two_names_is_refused(tmp_path: Path) -> None:
    folder = _write(tmp_path / "a", _linear() | _linear("base_model.model." + LINEAR.name))
    _refused(folder, "unbound_tensor", "same factor")
    tensors = _pair(f"{X}.down_proj", _random(E, R, INNER), _random(E, H, R))
    tensors |= _pair(f"{X}.0.down_proj", _random(R, INNER), _random(H, R))
    _refused(_write(tmp_path / "b", tensors), "unbound_tensor", "two ways")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (f"{LINEAR.name}.lora_magnitude_vector", "dora"),
        (f"{LINEAR.name}.lora_B.bias", "bias"),
        (f"{LINEAR.name}.bias", "bias"),
        ("lm_head.weight", "modules_to_save"),
        ("model.embed_tokens.weight", "modules_to_save"),
        (f"{LINEAR.name}.base_layer.weight", "modules_to_save"),
        ("lm_head.modules_to_save.weight", "modules_to_save"),
        ("model.embed_tokens.token_adapter.trainable_tokens_delta", "trainable_tokens"),
        ("model.embed_tokens.lora_A.weight", "unsupported_parameter"),
        (f"{LINEAR.name}.lora_embedding_A", "unbound_tensor"),
        ("rotary.inv_freq", "unbound_tensor"),
    ],
)
def test_tensors_that_are_no_lora_factors(tmp_path: Path, name: str, reason: str) -> None:
    folder = _write(tmp_path / "a", _linear() | {name: _random(4)})
    _refused(folder, reason, name)


def test_copies_of_the_vocabulary_are_skipped_and_said(tmp_path: Path) -> None:
    copies = {f"{t}.base_layer.weight": _random(9, H) for t in ("lm_head", "model.embed_tokens")}
    weights = load_adapter(_write(tmp_path / "a", _linear() | copies), TARGETS)
    assert set(weights.manifest.skipped) == set(copies)
    changed = {"lm_head.base_layer.weight": _random(10, H)}
    _refused(_write(tmp_path / "b", _linear() | changed), "shape", "lm_head.base_layer.weight")


@pytest.mark.parametrize(
    "case", [c for c in load_cases("logits") if c.adapter], ids=lambda case: case.id
)
def test_every_golden_tensor_is_bound_or_skipped(case: Any) -> None:
    from safetensors import safe_open

    weights = load_adapter(case.adapter, golden_targets(case.model), base_name=case.model.name)
    with safe_open(case.adapter / "adapter_model.safetensors", "pt") as file:
        names = set(file.keys())
    manifest = weights.manifest
    assert set(manifest.bound) | set(manifest.skipped) == names
    assert len(manifest.bound) + len(manifest.skipped) == len(names)


ONE_OF_EACH = (
    "llama-embed_head_copies_r4",
    "gpt_oss-all_r4_peft021",
    "qwen3_moe-experts_r4_peft018",
    "qwen3_moe-synth_shared_outer_w123",
    "mixtral-per_expert_up_only_r4_tf4",
    "gpt_oss-synth_gate_up_projs_subset",
    "llama4_text-synth_3d",
)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_each_bound_tensor_is_felt_and_each_misspelled_one_refused(
    name: str, tmp_path: Path
) -> None:
    """No tensor is reported as bound and then lost, and no name that is nearly right is dropped."""
    (case,) = (c for c in load_cases("logits") if c.id == name)
    assert case.adapter is not None
    targets = golden_targets(case.model)
    tensors = load_file(case.adapter / "adapter_model.safetensors")
    fields = json.loads((case.adapter / "adapter_config.json").read_text())
    plain = load_adapter(case.adapter, targets)

    def load(changed: dict[str, Tensor]) -> AdapterWeights:
        return load_adapter(_write(tmp_path, changed, **fields), targets)

    for pair in plain.manifest.pairs:
        for tensor in (pair.a, pair.b):
            found = load(tensors | {tensor: tensors[tensor] * 2}).factors
            differ = {
                target
                for target, factors in plain.factors.items()
                if not torch.equal(factors.a, found[target].a)
                or not torch.equal(factors.b, found[target].b)
            }
            assert differ == {pair.target}, tensor
    for tensor in plain.manifest.skipped:
        found = load(tensors | {tensor: tensors[tensor] * 2}).factors
        assert all(torch.equal(found[t].b, f.b) for t, f in plain.factors.items())
    for tensor in tensors:
        for wrong in (f"x.{tensor}", f"{tensor}.x", tensor.replace("lora_", "Lora_"),
                      tensor.replace("model.layers.", "model.layers.9")):  # fmt: skip
            if wrong != tensor:
                with pytest.raises(AdapterInvalid):
                    load(tensors | {wrong: tensors[tensor].clone()})


# ---- ranks, scales, dtypes


def test_patterns_choose_rank_and_alpha_by_the_first_key(tmp_path: Path) -> None:
    tensors = _linear(r=4)
    fields = {"rank_pattern": {"proj": 9, "q_proj": 4}, "alpha_pattern": {r"^model\..*q_proj$": 12}}
    weights = load_adapter(_write(tmp_path / "a", tensors, **fields), TARGETS)
    a, b = tensors.values()
    torch.testing.assert_close(_delta(weights, LINEAR)[0], 3.0 * b @ a)


def test_rslora_divides_by_the_root(tmp_path: Path) -> None:
    tensors = _linear(r=4)
    folder = _write(tmp_path / "a", tensors, r=4, lora_alpha=6, use_rslora=True)
    a, b = tensors.values()
    torch.testing.assert_close(_delta(load_adapter(folder, TARGETS), LINEAR)[0], 3.0 * b @ a)


@pytest.mark.parametrize(
    ("dtype", "alpha", "b_dtype"),
    [
        (torch.bfloat16, 2 * R, torch.bfloat16),  # a power of two is exact
        (torch.bfloat16, 3 * R, torch.float32),
        (torch.float16, R, torch.float16),
        (torch.float16, R * 2.0**-20, torch.float32),  # would be subnormal
        (torch.float64, R, torch.float32),
    ],
)
def test_the_scale_is_folded_without_rounding(
    tmp_path: Path, dtype: torch.dtype, alpha: float, b_dtype: torch.dtype
) -> None:
    tensors = {k: v.to(dtype) for k, v in _linear().items()}
    weights = load_adapter(_write(tmp_path / "a", tensors, lora_alpha=alpha), TARGETS)
    factors = weights.factors[LINEAR.name]
    assert factors.b.dtype is b_dtype
    b = tensors[f"{LINEAR.name}.lora_B.weight"]
    assert torch.equal(factors.b[0].T.float(), b.float() * (alpha / R))


@pytest.mark.parametrize(
    ("b_shape", "r", "reason"),
    [((4, 3), 2, "rank_mismatch"), ((4, 2), 3, "rank_mismatch"), ((4, 2, 1), 2, "shape")],
)
def test_ranks_must_agree(tmp_path: Path, b_shape: tuple[int, ...], r: int, reason: str) -> None:
    tensors = _pair(LINEAR.name, _random(R, H), _random(*b_shape))
    _refused(_write(tmp_path / "a", tensors, r=r), reason, LINEAR.name)


@pytest.mark.parametrize("a_shape", [(2, R, H), (E, R, H + 1), (E + 1, R, H), (R, H)])
def test_three_dimensions_must_fit(tmp_path: Path, a_shape: tuple[int, ...]) -> None:
    tensors = _pair(f"{X}.gate_up_proj", _random(*a_shape), _random(E, 2 * INNER, R))
    _refused(_write(tmp_path / "a", tensors), "shape", "gate_up_proj")


def test_a_scale_that_overflows_is_refused(tmp_path: Path) -> None:
    tensors = _pair(LINEAR.name, _random(R, H), torch.full((4, R), 1e30))
    _refused(_write(tmp_path / "a", tensors, lora_alpha=1e20), "not_finite", "lora_B")


# ---- config


@pytest.mark.parametrize(
    ("fields", "reason", "named"),
    [
        ({"use_qalora": True}, "config", "use_qalora"),
        ({"kasa_config": {"x": 1}}, "config", "kasa_config"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes_base", "pissa_niter_4"),
        ({"init_lora_weights": "lora_ga"}, "changes_base", "lora_ga"),
        ({"init_lora_weights": "unheard_of"}, "changes_base", "unheard_of"),
        ({"bias": "lora_only"}, "bias", "lora_only"),
        ({"peft_type": None}, "peft_type", "peft_type"),
        ({"lora_alpha": None}, "config", "lora_alpha"),
        ({"lora_alpha": True}, "config", "lora_alpha"),
        ({"lora_alpha": 10**400}, "config", "lora_alpha"),
        ({"r": 2.0}, "config", "r is"),
        ({"r": True}, "config", "r is"),
        ({"use_rslora": "yes"}, "config", "use_rslora"),
        ({"rank_pattern": {"q_proj": 0}}, "config", "rank_pattern"),
        ({"alpha_pattern": [1]}, "config", "alpha_pattern"),
        ({"alpha_pattern": {"(?i)Q": 1}}, "config", "alpha_pattern"),
        ({"target_parameters": "experts"}, "config", "target_parameters"),
        ({"target_parameters": ["x.bias"]}, "unsupported_parameter", "x.bias"),
        ({"peft_version": 19}, "config", "peft_version"),
    ],
)
def test_config_fields_that_are_refused(
    tmp_path: Path, fields: dict[str, Any], reason: str, named: str
) -> None:
    _refused(_write(tmp_path / "a", _linear(), **fields), reason, named)


def test_harmless_fields_are_accepted_and_unknown_ones_said(tmp_path: Path) -> None:
    fields = {"use_dora": None, "kasa_config": None, "init_lora_weights": "gaussian", "novel": "x"}
    weights = load_adapter(_write(tmp_path / "a", _linear(), **fields), TARGETS)
    (warning,) = weights.manifest.warnings
    assert "novel" in warning


def test_tied_weights_need_both_sides(tmp_path: Path) -> None:
    head = _pair("lm_head", _random(R, H), _random(9, R))
    embedding = {
        "model.embed_tokens.lora_embedding_A": _random(R, 9),
        "model.embed_tokens.lora_embedding_B": _random(H, R),
    }
    _refused(
        _write(tmp_path / "a", head, ensure_weight_tying=True), "config", "ensure_weight_tying"
    )
    both = _write(tmp_path / "b", head | embedding, ensure_weight_tying=True)
    assert len(load_adapter(both, TARGETS).factors) == 2


# ---- what is said, and files


def test_what_a_load_warns_of(tmp_path: Path) -> None:
    a, b = _linear().values()
    folder = _write(
        tmp_path / "a",
        _pair(LINEAR.name, a, torch.zeros_like(b)),
        base_model_name_or_path="org/other-model",
        target_parameters=["layers.0.mlp.experts.down_proj", "layers.9.mlp.experts.down_proj"],
    )
    (folder / "adapter_model-00002.safetensors").write_bytes(b"")
    warnings = load_adapter(folder, TARGETS, base_name="org/this-model").manifest.warnings
    for said in ("other-model", "layers.0.mlp", "layers.9.mlp", "00002", "zero"):
        assert any(said in warning for warning in warnings), (said, warnings)


def test_the_same_base_under_another_path_is_no_warning(tmp_path: Path) -> None:
    folder = _write(tmp_path / "a", _linear(), base_model_name_or_path="org/model")
    assert load_adapter(folder, TARGETS, base_name="/models/model/").manifest.warnings == ()


def test_a_folder_without_an_adapter_is_not_found(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(AdapterNotFound):
            load_adapter(folder, TARGETS)


def test_a_pickle_loads_if_allowed() -> None:
    folder = GOLDEN / "adapters/llama/refuse_pickle_only"
    targets = golden_targets(GOLDEN / "models/llama")
    weights = load_adapter(folder, targets, allow_pickle=True)
    assert set(weights.factors) == {f"model.layers.0.self_attn.{p}_proj" for p in "qv"}


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    import pickle

    _write(tmp_path / "a", _linear())
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    mark = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(mark),)

    (tmp_path / "a" / "adapter_model.bin").write_bytes(pickle.dumps({"x": Evil()}, protocol=2))
    _refused(tmp_path / "a", "file", "adapter_model.bin", allow_pickle=True)
    assert not mark.exists()
