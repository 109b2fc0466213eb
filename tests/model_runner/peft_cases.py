"""What releases of PEFT write over transformers 4 and 5, as cases: for each family what is adapted,
and what its tensors must then be.

Not here: writing them (peft_writer.py), and reading them (test_peft_versions.py).
"""

import functools
from dataclasses import dataclass, field
from typing import Any

from tests.model_runner.test_against_transformers import COMMON, MODELS
from tests.model_runner.test_every_target import FAMILIES

# (PEFT, transformers) -> how experts lie in their files: gpt-oss, the families that transformers 4
# has one by one, llama4. The first release with target_parameters does not load beside 5.
LAYOUTS = {
    ("0.17.1", 4): ("natural", "one by one", "natural"),
    ("0.18.1", 4): ("natural", "one by one", "natural"),
    ("0.18.1", 5): ("natural", "swapped", "natural"),
    ("0.19.0", 4): ("natural", "one by one", "natural"),
    ("0.19.0", 5): ("swapped", "swapped", "natural"),
    ("0.19.1", 5): ("natural", "natural", "swapped"),
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
    """

    fields: dict[str, Any]
    parts: frozenset[str] = frozenset()
    save: dict[str, Any] = field(default_factory=dict)
    kind: str = "Lora"
    reason: str = ""


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
    rewritten = writer[0] >= "0.19" and writer[1] == 5 and routed
    rewritten = rewritten and family not in ("gpt-oss", "llama4")
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
