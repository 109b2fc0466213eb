"""Every golden adapter of four families: its deltas added to the base weights give the logits that
its writer computed, through transformers alone; what must be refused is refused by its reason.

Proves the formats without our engine. Not here: single rules of the formats (test_formats).
"""

import functools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.utils import import_utils

from adapter_store.errors import AdapterInvalid
from adapter_store.formats.registry import load_adapter
from adapter_store.weights import AdapterWeights, LoraTarget, merge_delta
from tests.golden import (
    MAX_ABS_DIFF,
    NAMED_IN_REFUSAL,
    GoldenCase,
    golden_targets,
    load_cases,
)

_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def _dequantised(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """MXFP4 `*_blocks` and `*_scales` -> float32 parameters (E, in, out); the rest in float32."""
    plain = {
        name: t.float() for name, t in state.items() if not name.endswith(("blocks", "scales"))
    }
    values = torch.cat([_FP4, -_FP4])
    for name, blocks in state.items():
        if name.endswith("_blocks"):
            codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)  # [E, out, groups, 32]
            scale = torch.exp2(state[name.replace("_blocks", "_scales")].float() - 127)
            weight = values[codes.long()] * scale[..., None]  # [E, out, groups, 32]
            plain[name.removesuffix("_blocks")] = weight.flatten(-2).transpose(1, 2).contiguous()
    return plain


@functools.cache
def _base_model(folder: Path) -> torch.nn.Module:
    # Our package `kernels` is not the one that transformers would look for.
    import_utils.is_kernels_available = lambda *_, **__: False
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    if folder.name != "gpt_oss_mxfp4":
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    del config.quantization_config
    config.dtype = torch.float32
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.load_state_dict(_dequantised(load_file(folder / "model.safetensors")))
    return model.float().eval()


def _as_stored(target: LoraTarget, delta: Tensor) -> Tensor:
    """A canonical delta [E, out, in] in the shape and order of transformers' own parameter."""
    if target.kind == "embedding":
        return delta[0].T  # [V, H]
    if target.kind == "linear":
        return delta[0]  # [out, in]
    if target.interleaved:
        gate, up = delta.chunk(2, dim=1)  # [E, I, H] each
        delta = torch.stack([gate, up], dim=2).flatten(1, 2)  # [E, 2I, H]
    return delta.transpose(1, 2) if target.weight_is_in_out else delta


def _logits(case: GoldenCase, weights: AdapterWeights | None) -> Tensor:
    """The base with the adapter's deltas added, run by transformers: [T, V]."""
    model = _base_model(case.model)
    params = dict(model.named_parameters())
    kept: dict[str, Tensor] = {}
    with torch.no_grad():
        for target in golden_targets(case.model):
            factors = weights.factors.get(target.name) if weights else None
            if factors is None:
                continue
            name = target.name if target.name in params else f"{target.name}.weight"
            kept[name] = params[name].detach().clone()
            params[name] += _as_stored(target, merge_delta(target, factors))
        try:
            return model(torch.tensor([case.input_ids]), use_cache=False).logits[0].float()
        finally:
            for name, before in kept.items():
                params[name].copy_(before)


@pytest.mark.parametrize("case", load_cases("logits"), ids=lambda case: case.id)
def test_golden_adapter_gives_its_logits(case: GoldenCase) -> None:
    weights = load_adapter(case.adapter, golden_targets(case.model)) if case.adapter else None
    difference = float((_logits(case, weights) - case.logits()).abs().max())
    assert difference < MAX_ABS_DIFF, difference
    if weights is not None:
        unmoved = float((_logits(case, None) - case.logits()).abs().max())
        assert unmoved > 100 * MAX_ABS_DIFF, "an adapter that does nothing would pass"


EITHER = {"llama-refuse_other_architecture_mla": {"unbound_tensor", "shape"}}


@pytest.mark.parametrize("case", load_cases("refuse"), ids=lambda case: case.id)
def test_golden_refusal_names_what_is_wrong(case: GoldenCase) -> None:
    assert case.adapter is not None
    before = sorted(case.adapter.iterdir())
    with pytest.raises(AdapterInvalid) as refusal:
        load_adapter(case.adapter, golden_targets(case.model))
    assert refusal.value.reason in EITHER.get(case.id, {case.reason}), str(refusal.value)
    assert NAMED_IN_REFUSAL[case.id] in str(refusal.value)
    assert sorted(case.adapter.iterdir()) == before
