"""The golden cases of tests/data/golden as values: which adapter on which model gives which logits.

Used by the tests of the formats and of the engine. Not here: loading models or adapters.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from safetensors.torch import load_file
from torch import Tensor

from adapter_store.weights import LoraTarget

GOLDEN = Path(__file__).parent / "data" / "golden"
MAX_ABS_DIFF = 5e-4  # of logits, float32 weights and arithmetic, any position

# Refused cases -> what the message must name: the tensor or the field at fault.
NAMED_IN_REFUSAL = {
    "llama-refuse_unbound_tensor": "qkv_proj",
    "gpt_oss-refuse_unbound_layer": "layers.",
    "qwen3_moe-refuse_unbound_segment": "mlp.moe.experts",
    "llama-refuse_wrong_hidden": "q_proj",
    "gpt_oss-refuse_wrong_hidden_experts": "experts.base_layer.lora_A",
    "llama-refuse_nan": "lora_B",
    "gpt_oss-refuse_nan_experts": "mlp.experts.lora_A",
    "qwen3-refuse_inf": "lora_A",
    "llama-refuse_half_pair": "q_proj.lora_A",
    "llama-refuse_rank_mismatch": "lora_A",
    "gpt_oss-refuse_expert_count": "experts.base_layer.lora_A",
    "llama-refuse_int_dtype": "I32",
    "llama-refuse_empty": "no tensor",
    "llama-refuse_dora": "use_dora",
    "llama-refuse_modules_to_save": "modules_to_save",
    "gpt_oss-refuse_bias_all": "bias",
    "gpt_oss-refuse_lora_bias": "lora_bias",
    "llama-refuse_pissa": "init_lora_weights",
    "qwen3-refuse_olora": "init_lora_weights",
    "llama-refuse_ia3": "peft_type",
    "gpt_oss-refuse_bias_parameter": "gate_up_proj_bias",
    "llama-refuse_rank_over_limit": "q_proj",
    "llama-refuse_alora": "alora_invocation_tokens",
    "qwen3-refuse_layer_replication": "layer_replication",
    "llama-refuse_trainable_tokens": "trainable_token_indices",
    "llama-refuse_truncated": "self_attn",
    "llama-refuse_truncated_header": "header",
    "llama-refuse_huge_header": "header",
    "llama-refuse_bad_offsets": "self_attn",
    "llama-refuse_pickle_only": "adapter_model.bin",
    "llama-refuse_config_malformed": "adapter_config.json",
    "qwen3-refuse_config_missing": "adapter_config.json",
    "qwen3-refuse_config_types": "r is",
    "qwen3-refuse_r_zero": "r is 0",
    "gpt_oss-refuse_other_architecture": "block_sparse_moe",
    "qwen3_moe-refuse_other_architecture_experts": "experts.base_layer.lora_A",
    "llama-refuse_other_architecture_mla": "kv_a_proj_with_mqa",
    "gpt_oss_square-refuse_ambiguous_down": "mlp.experts.lora_A",
}

Expect = Literal["logits", "refuse"]


@dataclass(frozen=True)
class GoldenCase:
    """One line of cases.jsonl.

    model, adapter  folders (adapter None: the base model alone);  input_ids  empty for refusals
    reason, detail  refusals only: class of the error, and what is wrong
    base_max_abs_diff  what an adapter that does nothing would show (0 where it was not recorded)
    """

    id: str
    family: str
    model: Path
    adapter: Path | None
    expect: Expect
    input_ids: tuple[int, ...]
    logits_file: Path | None
    reason: str
    detail: str
    layout: str
    base_max_abs_diff: float

    def logits(self) -> Tensor:
        """The expected logits of every position: [T, V] float32."""
        assert self.logits_file is not None, self.id
        return load_file(self.logits_file)["logits"]


def load_cases(expect: Expect | None = None, family: str | None = None) -> list[GoldenCase]:
    """All cases, or those that must give logits, or those that must be refused."""
    lines = (GOLDEN / "cases.jsonl").read_text().splitlines()
    cases = [_case(json.loads(line)) for line in lines]
    return [c for c in cases if expect in (None, c.expect) and family in (None, c.family)]


def golden_targets(model: Path) -> tuple[LoraTarget, ...]:
    """What a golden model can take, from its config alone."""
    c = json.loads((model / "config.json").read_text())
    hidden, vocab, kind = c["hidden_size"], c["vocab_size"], c["model_type"]
    experts = c.get("n_routed_experts") or c.get("num_local_experts") or c.get("num_experts") or 0
    mlp = "feed_forward" if kind == "llama4_text" else "mlp"
    gate = {"gpt_oss": "router", "llama4_text": "router"}.get(kind, "gate")
    first_dense = c.get("first_k_dense_replace", 0)
    moe_layers = c.get("moe_layers") or range(first_dense, c["num_hidden_layers"])
    wide = c.get("intermediate_size_mlp", c["intermediate_size"])
    inner = c.get("moe_intermediate_size", c["intermediate_size"])
    shared = {"deepseek_v2": ("shared_experts", c.get("n_shared_experts", 0) * inner)}
    shared["deepseek_v3"], shared["llama4_text"] = shared["deepseek_v2"], ("shared_expert", inner)

    def dense(at: str, size: int) -> list[LoraTarget]:
        return [
            LoraTarget(at + "gate_proj", hidden, size),
            LoraTarget(at + "up_proj", hidden, size),
            LoraTarget(at + "down_proj", size, hidden),
        ]

    found = [LoraTarget("model.embed_tokens", vocab, hidden, "embedding")]
    for n in range(c["num_hidden_layers"]):
        at = f"model.layers.{n}."
        found += [LoraTarget(f"{at}self_attn.{name}", i, o) for name, i, o in _attention(c)]
        if not experts or n not in moe_layers:
            found += dense(f"{at}{mlp}.", wide)
            continue
        old = f"{at}block_sparse_moe." if kind == "mixtral" else ""
        parts = (("w1", "w3"), ("w2",)) if old else (("gate_proj", "up_proj"), ("down_proj",))
        in_out = kind in ("gpt_oss", "llama4_text")
        found.append(
            LoraTarget(f"{at}{mlp}.{gate}", hidden, experts, aliases=(f"{old}gate",) if old else ())
        )
        for name, i, o, part in (
            ("gate_up_proj", hidden, 2 * inner, parts[0]),
            ("down_proj", inner, hidden, parts[1]),
        ):
            found.append(
                LoraTarget(
                    f"{at}{mlp}.experts.{name}",
                    i,
                    o,
                    "experts",
                    experts,
                    part,
                    interleaved=kind == "gpt_oss" and len(part) == 2,
                    weight_is_in_out=in_out,
                    aliases=(f"{old}experts",) if old else (),
                )
            )
        if kind in shared:
            found += dense(f"{at}{mlp}.{shared[kind][0]}.", shared[kind][1])
    return (*found, LoraTarget("lm_head", hidden, vocab))


def _attention(c: dict) -> list[tuple[str, int, int]]:
    """(name, in, out) of one layer's projections."""
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    if "kv_lora_rank" not in c:
        head = c.get("head_dim") or hidden // heads
        q, kv = heads * head, c["num_key_value_heads"] * head
        inputs = [("q_proj", hidden, q), ("k_proj", hidden, kv), ("v_proj", hidden, kv)]
        return [*inputs, ("o_proj", q, hidden)]
    rope, nope, latent = c["qk_rope_head_dim"], c["qk_nope_head_dim"], c["kv_lora_rank"]
    q = heads * (rope + nope)
    queries = [("q_proj", hidden, q)]
    if c["q_lora_rank"]:
        queries = [("q_a_proj", hidden, c["q_lora_rank"]), ("q_b_proj", c["q_lora_rank"], q)]
    return [
        *queries,
        ("kv_a_proj_with_mqa", hidden, latent + rope),
        ("kv_b_proj", latent, heads * (nope + c["v_head_dim"])),
        ("o_proj", heads * c["v_head_dim"], hidden),
    ]


def _case(row: dict) -> GoldenCase:
    return GoldenCase(
        id=row["id"],
        family=row["family"],
        model=GOLDEN / row["model"],
        adapter=GOLDEN / row["adapter"] if row["adapter"] else None,
        expect=row["expect"],
        input_ids=tuple(row.get("input_ids") or ()),
        logits_file=GOLDEN / row["logits_file"] if row.get("logits_file") else None,
        reason=row.get("reason") or "",
        detail=row.get("detail") or "",
        layout=row.get("layout") or "",
        base_max_abs_diff=row.get("base_max_abs_diff") or 0.0,
    )
