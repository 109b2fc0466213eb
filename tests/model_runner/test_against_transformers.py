"""Every family against the installed transformers: random tiny checkpoints as it writes them, long
enough for windows, chunks and groups of experts to matter; the same logits, as one prefill, in
chunks and beside others.

Not here: adapters, and the recorded cases (test_golden.py).
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from model_runner.config import EngineConfig
from model_runner.engine import Engine
from model_runner.execution.checkpoint import FP8_BLOCK, CheckpointError
from tests.golden import MAX_ABS_DIFF

COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
DEEPSEEK = {
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0,
        "mscale_all_dim": 0.7, "original_max_position_embeddings": 64}  # fmt: skip
# Name -> (configuration class, fields beside COMMON).
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek v2, groups, q latent": ("DeepseekV2", DEEPSEEK | {
        "n_routed_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3,
        "topk_method": "group_limited_greedy", "q_lora_rank": 12, "n_shared_experts": 2,
        "routed_scaling_factor": 4.0, "rope_parameters": YARN}),
    "deepseek v2, greedy": ("DeepseekV2", DEEPSEEK | {
        "n_routed_experts": 6, "num_experts_per_tok": 2, "topk_method": "greedy",
        "q_lora_rank": None, "n_shared_experts": 1}),
    "deepseek v3": ("DeepseekV3", DEEPSEEK | {
        "n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4,
        "q_lora_rank": 12, "rope_parameters": YARN, "num_hidden_layers": 3}),
    "gpt-oss": ("GptOss", {
        "num_hidden_layers": 4, "head_dim": 16, "intermediate_size": 32, "num_local_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": 16}),
    "llama": ("Llama", {"num_hidden_layers": 2, "intermediate_size": 48, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 32}}),
    "llama4, two chunks and more": ("Llama4Text", {
        "num_hidden_layers": 4, "head_dim": 16, "intermediate_size": 24,
        "intermediate_size_mlp": 48, "num_local_experts": 4, "attention_chunk_size": 24,
        "floor_scale": 10, "attn_scale": 0.3, "interleave_moe_layer_step": 2}),
    "llama4, every layer routed, no norm": ("Llama4Text", {
        "num_hidden_layers": 4, "head_dim": 16, "intermediate_size": 24,
        "intermediate_size_mlp": 48, "num_local_experts": 3, "attention_chunk_size": 7,
        "interleave_moe_layer_step": 1, "use_qk_norm": False, "attn_temperature_tuning": False}),
    "mixtral": ("Mixtral", {
        "num_hidden_layers": 2, "intermediate_size": 40, "num_local_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": 20}),
    "olmoe": ("Olmoe", {
        "num_hidden_layers": 2, "intermediate_size": 24, "num_experts": 6,
        "num_experts_per_tok": 3, "num_key_value_heads": 4}),
    "olmoe, renormalized": ("Olmoe", {
        "num_hidden_layers": 2, "intermediate_size": 24, "num_experts": 4,
        "num_experts_per_tok": 2, "norm_topk_prob": True}),
    "qwen3": ("Qwen3", {"num_hidden_layers": 2, "intermediate_size": 48, "head_dim": 16}),
    "qwen3-moe, a dense layer": ("Qwen3Moe", {
        "num_hidden_layers": 3, "intermediate_size": 48, "moe_intermediate_size": 24,
        "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "mlp_only_layers": [1],
        "norm_topk_prob": True}),
}  # fmt: skip
PROMPT_TOKENS = 75


def save_model(name: str, folder: Path, seed: int, **changed: Any) -> torch.nn.Module:
    """A random model of this shape, saved as transformers saves it. changed: other fields."""
    kind, fields = MODELS[name]
    config_class = getattr(transformers, f"{kind}Config")
    kind = kind.removesuffix("Text")
    model_class = getattr(transformers, f"{kind}ForCausalLM")
    torch.manual_seed(seed)
    model = model_class(config_class(**(COMMON | fields | changed))).eval().float()
    with torch.no_grad():
        for path, weight in (*model.named_parameters(), *model.named_buffers()):
            if path.endswith("correction_bias"):
                weight.normal_(0, 0.1)
            elif weight.is_floating_point() and "inv_freq" not in path:
                # Far from uniform: routing, sinks and norms must all be felt.
                weight.normal_(1 if "norm" in path else 0, 0.2)
    model.save_pretrained(folder)
    return model


def logits_of(folder: Path, prompts: list[list[int]], **fields: Any) -> list[torch.Tensor]:
    """Logits [T, V] of each prompt, all in one engine."""
    config = {
        "model": str(folder),
        "max_model_len": 128,
        "kv_bytes": 4 << 20,
        "prefix_cache": False,
    }
    engine = Engine(EngineConfig(**(config | fields)))
    parts: list[dict[int, torch.Tensor]] = [{} for _ in prompts]

    def keep(number: int):
        return lambda first, x: parts[number].update({first: x.clone()})

    def done(number: int, why: str) -> None:
        assert not why, why

    try:
        engine.score([(tuple(p), None, keep(i)) for i, p in enumerate(prompts)], done)
        engine.check()
    finally:
        engine.close()
    return [torch.cat([x for _, x in sorted(part.items())]) for part in parts]


SLOW = ("deepseek v2, greedy", "llama4, every layer routed, no norm", "olmoe, renormalized")
PARAMS = [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in MODELS]


@pytest.mark.parametrize("name", PARAMS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = save_model(name, tmp_path, seed=len(name))
    draw = torch.Generator().manual_seed(1)
    sizes = (PROMPT_TOKENS, 9, 40)
    prompts = [torch.randint(96, (n,), generator=draw).tolist() for n in sizes]
    with torch.no_grad():
        want = [model(torch.tensor([prompt])).logits[0] for prompt in prompts]
    for fields in ({"max_num_seqs": 1}, {"max_num_seqs": 4, "max_step_tokens": 16}):
        found = logits_of(tmp_path, prompts, **fields)
        for got, right in zip(found, want, strict=True):
            assert right.std() > 0.1
            assert (got - right).abs().max() < MAX_ABS_DIFF, (name, fields)


def test_a_text_model_inside_a_vision_model_loads(tmp_path: Path) -> None:
    """As Llama 4 is published: the text model's tensors below `language_model.`."""
    name = "llama4, two chunks and more"
    model = save_model(name, tmp_path / "text", seed=3)
    whole = tmp_path / "whole"
    whole.mkdir()
    tensors = load_file(tmp_path / "text" / "model.safetensors")
    renamed = {f"language_model.{path}": tensor for path, tensor in tensors.items()}
    save_file(renamed | {"vision_model.x": torch.zeros(2)}, whole / "model.safetensors")
    text = transformers.Llama4TextConfig.from_pretrained(tmp_path / "text").to_dict()
    config = transformers.Llama4Config(text_config=text).to_dict()
    config["architectures"] = ["Llama4ForConditionalGeneration"]
    (whole / "config.json").write_text(json.dumps(config, default=str))
    prompt = list(range(30))
    with torch.no_grad():
        want = model(torch.tensor([prompt])).logits[0]
    assert (logits_of(whole, [prompt])[0] - want).abs().max() < MAX_ABS_DIFF


def test_a_checkpoint_in_fp8_blocks_loads_as_its_values_say(tmp_path: Path) -> None:
    name = "qwen3-moe, a dense layer"
    save_model(name, tmp_path / "plain", seed=4)
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    blocks, values = {}, {}
    for path, tensor in plain.items():
        values[path] = blocks[path] = tensor
        if not path.endswith("_proj.weight"):
            continue
        wide = torch.nn.functional.pad(
            tensor, (0, -tensor.shape[1] % FP8_BLOCK, 0, -tensor.shape[0] % FP8_BLOCK)
        )
        tiled = wide.unflatten(0, (-1, FP8_BLOCK)).unflatten(2, (-1, FP8_BLOCK))  # [a, B, b, B]
        scale = tiled.abs().amax((1, 3)) / 448  # [a, b]
        whole = scale.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
        whole = whole[: tensor.shape[0], : tensor.shape[1]]
        blocks[path] = (tensor / whole).to(torch.float8_e4m3fn)
        blocks[f"{path}_scale_inv"] = scale
        values[path] = blocks[path].float() * whole
    for folder, tensors in (("blocks", blocks), ("values", values)):
        (tmp_path / folder).mkdir()
        save_file(tensors, tmp_path / folder / "model.safetensors")
        text = (tmp_path / "plain" / "config.json").read_text()
        if folder == "blocks":
            quantization = '{"quant_method": "fp8", "weight_block_size": [128, 128]}'
            text = text.replace("{", '{"quantization_config": ' + quantization + ",", 1)
        (tmp_path / folder / "config.json").write_text(text)
    prompt = [list(range(20))]
    got, want = (logits_of(tmp_path / folder, prompt)[0] for folder in ("blocks", "values"))
    assert torch.equal(got, want)
    assert not torch.equal(got, logits_of(tmp_path / "plain", prompt)[0])
    missing = "model.layers.0.self_attn.q_proj.weight_scale_inv"
    del blocks[missing]
    save_file(blocks, tmp_path / "blocks" / "model.safetensors")
    with pytest.raises(CheckpointError, match=missing):
        logits_of(tmp_path / "blocks", prompt)
