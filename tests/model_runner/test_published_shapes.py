"""Every family at its published widths, in steps of every size: no launch is refused, none is
larger than a grid allows, and what its tiles hold fits shared memory and registers.

Tensors are torch's `meta` ones, which hold no values; kernels are stood in for. Not here: whole
configurations (test_gpt_oss_120b.py), and what is computed (test_families_at_speed.py).
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.fused_moe import ExpertWeights
from kernels.lora_tables import LoraTables
from kernels.mxfp4_packed import CHUNK, NUM_COUNTERS, TAIL, PackedMxfp4
from kernels.op import interpreting
from kernels.tiling import MAX_LORA_RANK, SHARED_BYTES, Tiles
from kernels.tune.ops import MAX_VALUES
from model_runner.config import MAX_STEP_TOKENS
from model_runner.execution.inputs import HostBuffer, StepShape
from model_runner.execution.kv_cache import allocate_kv, plan_kv
from model_runner.execution.runner import ModelRunner
from model_runner.models.registry import find_family
from tests.bench.shapes import GPT_OSS_20B, GPT_OSS_120B, QWEN3_30B_A3B, QWEN3_32B, cut_layers
from tests.kernels.launches import Launch, recording
from tests.model_runner.test_gpt_oss_120b import MetaReader

META = torch.device("meta")
MAX_SIDE, MAX_BLOCKS = 65535, 2**31 - 1  # of a grid's second and third side, of its first
MAX_LEN, NUM_SEQS, NUM_SLOTS = 131072, 256, 8
DECODE_ROWS, MIXED_TOKENS = (1, 16, 64, NUM_SEQS), (64, 2048, MAX_STEP_TOKENS)


def published(family: str, hidden: int, inner: int, heads: int, kv_heads: int, vocab: int,
              **more: Any) -> dict[str, Any]:  # fmt: skip
    return {
        "architectures": [f"{family}ForCausalLM"], "dtype": "bfloat16", "hidden_act": "silu",
        "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocab, "num_hidden_layers": 4,
        "max_position_embeddings": MAX_LEN, "rms_norm_eps": 1e-6, **more,
    }  # fmt: skip


_LATENT = {
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "first_k_dense_replace": 1,
}  # fmt: skip
SHAPES = {
    "gpt-oss-20b": GPT_OSS_20B,
    "gpt-oss-120b": GPT_OSS_120B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "qwen3-32b": QWEN3_32B,
    "llama-3.3-70b": published("Llama", 8192, 28672, 64, 8, 128256),
    "mixtral-8x7b": published(
        "Mixtral", 4096, 14336, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2
    ),
    "olmoe": published("Olmoe", 2048, 1024, 16, 16, 50304, num_experts=64, num_experts_per_tok=8),
    "llama4-scout": published(
        "Llama4", 5120, 8192, 40, 8, 202048, head_dim=128, intermediate_size_mlp=16384,
        num_local_experts=16, num_experts_per_tok=1, attention_chunk_size=8192,
    ),
    "deepseek-v2-lite": published(
        "DeepseekV2", 2048, 10944, 16, 16, 102400, **_LATENT, moe_intermediate_size=1408,
        n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, topk_method="greedy",
    ),
    "deepseek-v3": published(
        "DeepseekV3", 7168, 18432, 128, 128, 129280, **_LATENT, moe_intermediate_size=2048,
        n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, q_lora_rank=1536,
        topk_method="noaux_tc", scoring_func="sigmoid", n_group=8, topk_group=4,
    ),
}  # fmt: skip


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def pack_nothing(w: ExpertWeights) -> ExpertWeights:
    """As a GPU keeps MXFP4 experts; from no values."""
    if w.blocks is None:
        return w
    experts, out, in_ = w.num_experts, w.out_features, w.in_features
    chunks = in_ // CHUNK
    tails = -(-(in_ - chunks * CHUNK) // TAIL)
    packed = PackedMxfp4(
        empty(experts, chunks, out, CHUNK // 8, dtype=torch.int32),
        empty(experts, chunks, out, dtype=torch.int64),
        empty(experts, tails, out, TAIL // 4, dtype=torch.int16),
        empty(experts, tails, out, dtype=torch.int16),
        empty(NUM_COUNTERS, dtype=torch.int32), in_,
    )  # fmt: skip
    return ExpertWeights(bias=w.bias, packed=packed)


def act_as(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without values take the host code that such a GPU's take."""
    answers = {
        "gpu_name": gpu, "can_overlap": True, "use_triton": True, "_num_sms": 132,
        "slot_groups": (),
    }  # fmt: skip
    monkeypatch.setattr("model_runner.models.gpt_oss._for_device", pack_nothing)
    for module in [
        m for n, m in sys.modules.items() if n.startswith(("kernels.", "model_runner."))
    ]:
        for name, answer in answers.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda *_, answer=answer: answer)


def make_runner(raw: dict[str, Any], lora_rank: int) -> ModelRunner:
    raw = cut_layers(raw, 4)
    family = find_family(raw["architectures"])
    config = family.read_config(raw, Path("nowhere"))
    model = family(config, MetaReader(), min(MAX_LEN, config.max_positions))
    shape = len(model.lora_targets), NUM_SLOTS
    tables = [empty(*shape, dtype=torch.int64) for _ in range(4)]
    memory = empty(4 << 30, dtype=torch.bfloat16)
    lora = LoraTables(memory, *tables, empty(*shape, dtype=torch.int32), lora_rank)
    layout = plan_kv(config)
    caches = allocate_kv(config, layout, 150_000, 16, torch.bfloat16, META)
    return ModelRunner(
        model, layout, caches, lora, device=META, page_tokens=16, max_num_seqs=NUM_SEQS,
        max_step_tokens=MAX_STEP_TOKENS, max_len=MAX_LEN, use_graphs=False,
    )  # fmt: skip


def launches_of(runner: ModelRunner, tokens: int, decode: bool) -> list[Launch]:
    """Of one step."""
    rows = tokens if decode else NUM_SEQS
    shape = StepShape(rows, tokens, rows, MAX_LEN // 16, len(runner._layout.groups))
    buffer = HostBuffer(shape, pinned=False)
    step = runner._decode_step if decode else runner._mixed_step
    with recording(overlap=True) as told, torch.inference_mode():
        step(buffer.device_views(buffer.memory.to(META)), shape)
    return told


def shared_bytes(launch: Launch) -> int:
    """Of the operands that a product's loop has in flight; 0 for kernels without such a loop."""
    given = launch.given
    if not {"BLOCK_K", "num_stages"} <= set(given):
        return 0
    rows = given.get("BLOCK_M", given.get("BLOCK_T"))
    columns = given["BLOCK_R"] if "BLOCK_R" in given else given["BLOCK_N"]
    return Tiles(columns, given["BLOCK_K"], num_stages=given["num_stages"]).shared_bytes(rows)


def values_of_thread(launch: Launch) -> int:
    """Of a factor that one thread of a decode step's LoRA holds; 0 for other kernels."""
    given = launch.given
    widths = {
        "kernels.lora_decode._shrink_kernel": ("BLOCK_K", 1),
        "kernels.lora_decode._expand_kernel": ("BLOCK_N", 2),  # the next tile's too
        "kernels.lora_gated_act._expand_act_kernel": ("BLOCK_N", 4),  # of gate and of up
    }
    name, times = widths.get(launch.kernel, ("", 0))
    return times * given[name] * given["BLOCK_R"] // (32 * given["num_warps"]) if name else 0


@pytest.mark.skipif(interpreting(), reason="an interpreted function is no JITFunction")
@pytest.mark.parametrize(
    ("gpu", "lora_rank"),
    [("NVIDIA H200", 24), ("NVIDIA H200", MAX_LORA_RANK), ("another", 64)],
)
@pytest.mark.parametrize("name", SHAPES)
def test_steps_of_every_size_fit(
    name: str, gpu: str, lora_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    act_as(gpu, monkeypatch)
    runner = make_runner(SHAPES[name], lora_rank)
    sizes = [(n, True) for n in DECODE_ROWS] + [(n, False) for n in MIXED_TOKENS]
    pipelined = 0
    for tokens, decode in sizes:
        for launch in launches_of(runner, tokens, decode):
            kernel, given, grid = launch
            assert 0 < grid[0] <= MAX_BLOCKS, (tokens, kernel, grid)
            assert all(0 < side <= MAX_SIDE for side in grid[1:]), (tokens, kernel, grid)
            needed = shared_bytes(launch)
            pipelined += needed > 0
            assert needed <= SHARED_BYTES, (tokens, kernel, needed)
            assert values_of_thread(launch) <= MAX_VALUES, (tokens, kernel)
            if kernel == "kernels.fused_moe_lora._expand_kernel" and given["BLOCK_M"] > 16:
                assert given["num_warps"] >= 4, (tokens, given["BLOCK_M"])
    assert pipelined
