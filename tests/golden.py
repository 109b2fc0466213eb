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
    hidden, vocab, head = c["hidden_size"], c["vocab_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    experts = c.get("num_local_experts", 0)
    is_gpt_oss = c["model_type"] == "gpt_oss"
    inner = c.get("moe_intermediate_size", c["intermediate_size"])
    found = [LoraTarget("model.embed_tokens", vocab, hidden, "embedding")]
    for n in range(c["num_hidden_layers"]):
        at = f"model.layers.{n}."
        found += [
            LoraTarget(at + "self_attn.q_proj", hidden, q),
            LoraTarget(at + "self_attn.k_proj", hidden, kv),
            LoraTarget(at + "self_attn.v_proj", hidden, kv),
            LoraTarget(at + "self_attn.o_proj", q, hidden),
        ]
        if not experts:
            found += [
                LoraTarget(at + "mlp.gate_proj", hidden, inner),
                LoraTarget(at + "mlp.up_proj", hidden, inner),
                LoraTarget(at + "mlp.down_proj", inner, hidden),
            ]
            continue
        found += [
            LoraTarget(at + ("mlp.router" if is_gpt_oss else "mlp.gate"), hidden, experts),
            LoraTarget(
                at + "mlp.experts.gate_up_proj",
                hidden,
                2 * inner,
                "experts",
                experts,
                ("gate_proj", "up_proj"),
                interleaved=is_gpt_oss,
                weight_is_in_out=is_gpt_oss,
            ),
            LoraTarget(
                at + "mlp.experts.down_proj",
                inner,
                hidden,
                "experts",
                experts,
                ("down_proj",),
                weight_is_in_out=is_gpt_oss,
            ),
        ]
    return (*found, LoraTarget("lm_head", hidden, vocab))


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
