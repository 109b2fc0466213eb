"""The kernels of a decode step by what they are for, and the least time their bytes take.

A floor counts each weight in use once a step, and keys and values; activations are left out. Not
here: measuring (profile_step.py).
"""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.bench.judging import expected_experts
from tests.bench.shapes import adapted_weights

COPY_BYTES_PER_S = 4.3e12  # what a copy reaches on an H200
MXFP4_BYTES = 17 / 32  # of a value: four bits, and a byte of scale for 32 of them
SMALL = "norms, rope, routing, KV write, activation, sum"
DENSE = "plain products"
# Whatever plain products there are.
ROLES = (
    "qkv", "q_up", "key_up", "value_up", "o", "router", "shared_gate_up", "shared_down", "gate_up",
    "down", "head",
)  # fmt: skip

# First match wins. Names are those of this project's kernels, of cuBLAS and of torch.
_GROUPS = (
    ("lora", r"shrink|expand|lora"),
    ("experts", r"_packed_kernel|_grouped_kernel"),
    ("attention", r"^(_?decode|_?combine|_?prefill|attention)\w*kernel"),
    ("sampler", r"^(_block|_choose)_kernel|sample"),
    ("reduce", r"splitKreduce"),
    ("dense", r"nvjet|gemm|gemv|cutlass|cublas|_linear_"),
    (
        "small",
        r"norm|rope|_gate(_groups)?_kernel|_sort|_count|_scatter|kv_write|mla_kv|gated_act"
        r"|_sum_kernel|route",
    ),
)
_PATTERNS = tuple((group, re.compile(pattern)) for group, pattern in _GROUPS)


@dataclass(frozen=True)
class GroupTime:
    """One group's kernels in a step: microseconds (their own times added up) and launches."""

    us: float
    launches: float


def group_of(name: str) -> str:
    """The group of a kernel by its name; "" = none of them."""
    if name.startswith("void at::") or name.startswith("Mem"):
        return ""
    return next((group for group, pattern in _PATTERNS if pattern.search(name)), "")


def dense_roles(config: dict[str, Any]) -> list[str]:
    """The plain products of a step in the order of their launches."""
    moe = config.get("num_local_experts") or config.get("num_experts")
    layer = ["qkv", "o", "router"] if moe else ["qkv", "o", "gate_up", "down"]
    return layer * config["num_hidden_layers"] + ["head"]


def group_kernels(
    kernels: Sequence[tuple[str, float]], roles: Sequence[str], steps: int
) -> dict[str, GroupTime]:
    """Kernels (name, us) of `steps` whole steps, in the order of their start -> group -> a step's
    share. roles: of a step's plain products, in the order of their launches.

    cuBLAS gives its products the names of tiles, so they are told apart by their place: if there
    are as many as the model has plain products they are named one by one, else all together. A
    split-K reduction belongs to the product before it.
    """
    count = sum(group_of(name) == "dense" for name, _ in kernels)
    ordered = count == steps * len(roles)
    spent, launches = Counter[str](), Counter[str]()
    at, role = 0, DENSE
    for name, us in kernels:
        group = group_of(name)
        if group == "dense":
            role = roles[at % len(roles)] if ordered else DENSE
            at += 1
        label = {"dense": role, "reduce": role, "small": SMALL, "": "torch and copies"}
        key = label.get(group, group)
        spent[key] += us / steps
        launches[key] += 1 / steps
    return {key: GroupTime(spent[key], launches[key]) for key in spent}


def weight_bytes(config: dict[str, Any]) -> dict[str, float]:
    """Bytes of one layer's parts, of one expert, and of the head."""
    hidden, dim = config["hidden_size"], config["head_dim"]
    q, kv = (config[n] * dim for n in ("num_attention_heads", "num_key_value_heads"))
    experts = config.get("num_local_experts") or config.get("num_experts") or 0
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    value = MXFP4_BYTES if config.get("quantization_config") else 2.0
    return {
        "qkv": 2.0 * hidden * (q + 2 * kv),
        "o": 2.0 * hidden * q,
        "router": 2.0 * hidden * experts,
        "expert": value * 3 * hidden * inner if experts else 0.0,
        "gate_up": 0.0 if experts else 4.0 * hidden * inner,
        "down": 0.0 if experts else 2.0 * hidden * inner,
        "head": 2.0 * hidden * config["vocab_size"],
    }


def step_bytes(
    config: dict[str, Any],
    tokens: int,
    context: int,
    adapters: int,
    lora_rank: int,
    distinct: float = 0.0,
) -> dict[str, float]:
    """Group -> bytes of one decode step.

    tokens    sequences in the step, each with `context` keys
    adapters  requests are dealt over so many in turn; 0 = base rows alone
    distinct  experts hit in a layer; 0 = as uniform routing would
    """
    weights, layers = weight_bytes(config), config["num_hidden_layers"]
    experts = config.get("num_local_experts") or config.get("num_experts") or 0
    top_k = config.get("num_experts_per_tok") or 0
    found = {role: weights[role] * layers for role in dict.fromkeys(dense_roles(config)[:-1])}
    found["head"] = weights["head"]
    if experts:
        hit = distinct or expected_experts(experts, top_k, tokens)
        found["experts"] = layers * hit * weights["expert"]
    row = 2 * 2 * config["num_key_value_heads"] * config["head_dim"]
    window = int(config.get("sliding_window") or 0)
    kinds = config.get("layer_types") or ["full_attention"] * layers
    spans = [min(context, window) if k == "sliding_attention" else context for k in kinds]
    found["attention"] = float(row * tokens * sum(spans))
    if adapters:
        found["lora"] = layers * _lora_layer_bytes(config, tokens, adapters, lora_rank)
    return found


def _lora_layer_bytes(config: dict[str, Any], tokens: int, adapters: int, lora_rank: int) -> float:
    """Factors of one layer that a step reads: of each adapter in use, and of each expert that its
    rows hit."""
    rows = defaultdict[int, int](int)
    for token in range(tokens):
        rows[token % adapters] += 1
    top_k = config.get("num_experts_per_tok") or 0
    total = 0.0
    for _, fan_in, fan_out, experts in adapted_weights(config):
        size = 2.0 * lora_rank * (fan_in + fan_out)
        for count in rows.values():
            total += size * (expected_experts(experts, top_k, count) if experts else 1)
    return total


def table_rows(
    measured: dict[str, GroupTime], floors: dict[str, float]
) -> list[dict[str, float | str]]:
    """One row a group, the slowest first: us, launches, bytes, their time, and the share of the
    floor in what was measured."""
    bytes_of = dict(floors)
    if DENSE in measured:
        bytes_of[DENSE] = sum(bytes_of.pop(role, 0.0) for role in ROLES)
    rows: list[dict[str, float | str]] = []
    names = sorted({*measured, *bytes_of}, key=lambda k: -measured.get(k, GroupTime(0, 0)).us)
    for name in names:
        found = measured.get(name, GroupTime(0.0, 0.0))
        floor_us = 1e6 * bytes_of.get(name, 0.0) / COPY_BYTES_PER_S
        rows.append(
            {
                "kernels": name,
                "us": round(found.us, 1),
                "launches": round(found.launches, 1),
                "floor_bytes": round(bytes_of.get(name, 0.0)),
                "floor_us": round(floor_us, 1),
                "floor_share": round(floor_us / found.us, 3) if found.us else "",
            }
        )
    return rows
