"""What every model family shares: its description (`ModelConfig`), and how it reads weights
(`WeightReader`).

Not here: the modules themselves (layers, decoder.py) and any one family's spelling of things.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor


class ModelUnsupported(ValueError):
    """The checkpoint asks for something that this project does not compute; the message names the
    field."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions. `kind` is default, linear, llama3 or yarn; `fields` are that kind's
    parameters as the config spells them."""

    theta: float
    kind: str = "default"
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelConfig:
    """One model's shape, in this project's words. Built by a family's `read_config`.

    windows            by layer: keys that a query sees, itself included; 0 = all
    experts_of_layer   by layer: number of experts, 0 = a dense MLP
    qk_norm            RMS norm of each head of q and k;  sinks  one extra logit a head in the
                       softmax
    activation         as kernels.gated_act names it
    mxfp4              experts are stored as MXFP4 blocks and scales
    """

    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope: RopeConfig
    max_positions: int
    intermediate_size: int = 0
    windows: tuple[int, ...] = ()
    experts_of_layer: tuple[int, ...] = ()
    top_k: int = 0
    expert_intermediate_size: int = 0
    renormalize: bool = True
    activation: str = "silu"
    attention_bias: bool = False
    output_bias: bool = False
    gate_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    tied_embeddings: bool = False
    mxfp4: bool = False
    dtype: str = "bfloat16"
    eos_ids: tuple[int, ...] = ()

    @property
    def num_experts(self) -> int:
        return max(self.experts_of_layer, default=0)


class WeightReader(Protocol):
    """Where weights come from: a checkpoint or a seed. The same calls load both, so a family writes
    its name map once."""

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """The tensor called `name`, on the engine's device; dtype None = the model's.

        Errors: CheckpointError if it is missing or has another shape.
        """
        ...

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds this name (a seed holds every name)."""
        ...


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Errors: ModelUnsupported naming the file."""
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelUnsupported(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise ModelUnsupported(f"{path} is not readable JSON: {error}") from None
    if not isinstance(data, dict):
        raise ModelUnsupported(f"{path} is not a JSON object")
    return data


def read_rope(raw: Mapping[str, Any], default_theta: float = 10000.0) -> RopeConfig:
    """`rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4). Errors:
    ModelUnsupported for other kinds."""
    fields = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = float(fields.pop("rope_theta", None) or raw.get("rope_theta") or default_theta)
    kind = fields.pop("rope_type", None) or fields.pop("type", None) or "default"
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ModelUnsupported(f"rope_type {kind!r} is not supported")
    if kind == "yarn":
        fields.setdefault("original_max_position_embeddings", raw.get("max_position_embeddings"))
    return RopeConfig(theta, kind, fields)


def read_eos_ids(raw: Mapping[str, Any], folder: Path) -> tuple[int, ...]:
    """End-of-text ids of generation_config.json if it is there, else of config.json."""
    path = folder / "generation_config.json"
    value = (read_json(path).get("eos_token_id") if path.exists() else None) or raw.get(
        "eos_token_id"
    )
    ids = value if isinstance(value, list) else [value] if value is not None else []
    return tuple(int(i) for i in ids)


def read_common(raw: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The fields of `ModelConfig` that every family spells alike. Errors: ModelUnsupported naming
    what is missing."""
    try:
        hidden, heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
        return dict(
            architecture=raw["architectures"][0],
            num_layers=int(raw["num_hidden_layers"]),
            hidden_size=hidden,
            vocab_size=int(raw["vocab_size"]),
            num_heads=heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or hidden // heads),
            rms_eps=float(raw["rms_norm_eps"]),
            rope=read_rope(raw),
            max_positions=int(raw["max_position_embeddings"]),
            intermediate_size=int(raw.get("intermediate_size") or 0),
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"),
            eos_ids=read_eos_ids(raw, folder),
        )
    except (KeyError, IndexError, TypeError) as error:
        raise ModelUnsupported(f"{folder}/config.json: {type(error).__name__} {error}") from None


def require(raw: Mapping[str, Any], name: str, *allowed: Any) -> None:
    """Refuse a config whose field `name` is set to something that would change the arithmetic."""
    if name in raw and raw[name] not in allowed and raw[name] is not None:
        raise ModelUnsupported(
            f"config.json: {name} = {raw[name]!r} is not supported (only {allowed})"
        )
