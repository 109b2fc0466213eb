"""What every model family shares: its description (`ModelConfig`), and how it reads weights
(`WeightReader`).

Not here: the modules themselves (layers, decoder.py) and any one family's spelling of things.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.moe_gate_groups import GateRule
from model_runner.context_length import count_positions


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
class LatentConfig:
    """DeepSeek's latent attention: what is cached a token is one latent and one rotated key.

    q_rank      width of the queries' own latent, 0 = queries come straight from the hidden state
    kv_rank     R, the cached latent;  dim_nope, dim_rope  Dn, Dr of a query or key;  dim_v  Dv
    scale       of the scores;  interleaved  the rotated pairs are (2 i, 2 i + 1)
    """

    q_rank: int
    kv_rank: int
    dim_nope: int
    dim_rope: int
    dim_v: int
    scale: float
    interleaved: bool


@dataclass(frozen=True)
class MixedRotation:
    """Llama 4's positions: some layers rotate, the others scale their queries by position.

    rotating     by layer;  l2_norm  those norm each head of q and k, without weights
    scale_floor, scale_slope   elsewhere a query is scaled by 1 + slope log(1 + floor((position + 1)
                 / scale_floor)); scale_floor 0 = not at all
    """

    rotating: tuple[bool, ...]
    l2_norm: bool
    scale_floor: float
    scale_slope: float


@dataclass(frozen=True)
class ModelConfig:
    """One model's shape, in this project's words. Built by a family's `read_config`.

    windows            by layer: keys that a query sees, itself included; 0 = all
    chunked            windows begin at multiples of their length instead of sliding
    experts_of_layer   by layer: number of experts, 0 = a dense MLP
    gate_rule          how experts are chosen, None = by a softmax over all;  gate_correction  a
                       bias for the order alone;  scale_input  weights go on the experts' inputs
    shared_intermediate_size  inner size of the expert that every token has, 0 = none
    qk_norm            RMS norm of each head of q and k;  qk_norm_full  of all heads together
    sinks              one extra logit a head in the softmax
    latent             latent attention; head_dim is then that of the rotated part
    rotation           layers that do not rotate, None = all do
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
    chunked: bool = False
    experts_of_layer: tuple[int, ...] = ()
    top_k: int = 0
    expert_intermediate_size: int = 0
    shared_intermediate_size: int = 0
    renormalize: bool = True
    gate_rule: GateRule | None = None
    gate_correction: bool = False
    scale_input: bool = False
    activation: str = "silu"
    attention_bias: bool = False
    output_bias: bool = False
    gate_bias: bool = False
    qk_norm: bool = False
    qk_norm_full: bool = False
    latent: LatentConfig | None = None
    rotation: MixedRotation | None = None
    sinks: bool = False
    tied_embeddings: bool = False
    mxfp4: bool = False
    dtype: str = "bfloat16"
    eos_ids: tuple[int, ...] = ()

    @property
    def num_experts(self) -> int:
        return max(self.experts_of_layer, default=0)

    @property
    def kv_values(self) -> int:
        """Values that a layer keeps of one token."""
        if self.latent is not None:
            return self.latent.kv_rank + self.latent.dim_rope
        return 2 * self.num_kv_heads * self.head_dim


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


class RenamedReader:
    """Another reader, asked for a name's other spelling where it does not hold the first."""

    def __init__(self, inner: WeightReader, spell: Callable[[str], str]) -> None:
        self._inner, self._spell = inner, spell

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """As WeightReader."""
        return self._inner.read(self._name(name), shape, dtype)

    def has(self, name: str) -> bool:
        """As WeightReader."""
        return self._inner.has(self._name(name))

    def _name(self, name: str) -> str:
        return name if self._inner.has(name) else self._spell(name)


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


def read_rope(raw: Mapping[str, Any]) -> RopeConfig:
    """`rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4).

    Errors:  ModelUnsupported for other kinds, and where both are there and do not say the same.
    """
    new, former = raw.get("rope_parameters"), raw.get("rope_scaling")
    found = _rope_of(new or former or {}, raw)
    if new and former:
        other = _rope_of({"rope_theta": found.theta, **former}, raw)
        if other != found:
            raise ModelUnsupported(
                f"config.json: rope_scaling {former!r} and rope_parameters {new!r} differ"
            )
    return found


def _rope_of(given: Mapping[str, Any], raw: Mapping[str, Any]) -> RopeConfig:
    fields = dict(given)
    theta = float(fields.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0)
    old = fields.pop("type", None)
    kind = fields.pop("rope_type", None) or old or "default"
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


def read_common(raw: Mapping[str, Any], folder: Path, **unsaid: Any) -> dict[str, Any]:
    """The fields of `ModelConfig` that every family spells alike.

    unsaid  what this family's file means where it leaves a field out, as transformers has it
    Errors:  ModelUnsupported naming what is missing, or a quantization other than fp8 in blocks.
    """
    raw = {**unsaid, **raw}
    quantization = raw.get("quantization_config") or {}
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    if quantization and (method != "fp8" or block != [128, 128]):
        raise ModelUnsupported(f"quant_method {method!r} (blocks {block}) is not supported")
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
            max_positions=count_positions(raw),
            intermediate_size=int(raw["intermediate_size"]),
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            dtype=_read_dtype(raw),
            eos_ids=read_eos_ids(raw, folder),
        )
    except (KeyError, IndexError, TypeError) as error:
        raise ModelUnsupported(f"{folder}/config.json: {type(error).__name__} {error}") from None


def _read_dtype(raw: Mapping[str, Any]) -> str:
    """What the checkpoint was saved in. Errors: ModelUnsupported for what is no dtype of ours."""
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in ("bfloat16", "float16", "float32"):
        raise ModelUnsupported(f"config.json: dtype {dtype!r} is not supported")
    return dtype


def require(raw: Mapping[str, Any], name: str, *allowed: Any) -> None:
    """Refuse a config whose field `name` is set to something that would change the arithmetic."""
    if name in raw and raw[name] not in allowed and raw[name] is not None:
        raise ModelUnsupported(
            f"config.json: {name} = {raw[name]!r} is not supported (only {allowed})"
        )
