"""`adapter_config.json` -> `PeftConfig`, or the reason why such an adapter cannot be served.

PEFT's configs carry fields of many methods: null, false and empty mean absent. A field that nobody
here knows and that turns something on is refused: it may change the arithmetic. Not here: tensors.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapter_store.errors import AdapterInvalid, AdapterNotFound
from adapter_store.formats.bounded_files import parse_json, read_small, shown
from adapter_store.formats.patterns import PatternTable
from adapter_store.sources.source import CONFIG_FILE, MAX_CONFIG_BYTES

MAX_CONFIG_ITEMS = 400_000
MAX_TARGET_PARAMETERS = 100_000

# Read below, or known to leave the arithmetic of a finished adapter alone.
_KNOWN_FIELDS = frozenset({
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "peft_version",
    "target_parameters", "base_model_name_or_path", "ensure_weight_tying", "init_lora_weights",
    "auto_mapping", "corda_config", "eva_config", "exclude_modules", "fan_in_fan_out",
    "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout",
    "lora_ga_config", "megatron_core", "qalora_group_size", "revision", "runtime_config",
    "target_modules", "task_type", "bias",
})  # fmt: skip
_REFUSED_FIELDS = {
    "use_dora": "dora",
    "lora_bias": "bias",
    "modules_to_save": "modules_to_save",
    "alora_invocation_tokens": "alora",
    "layer_replication": "layer_replication",
    "trainable_token_indices": "trainable_tokens",
}
# Starts that leave the base weights as they are; pissa, olora, corda, loftq and lora_ga do not.
_HARMLESS_STARTS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True)
class PeftConfig:
    """What the loader needs of the config; everything is checked."""

    lora_rank: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: PatternTable
    alpha_pattern: PatternTable
    target_parameters: tuple[str, ...]
    peft_version: str | None
    base_model: str | None
    ensure_weight_tying: bool
    warnings: tuple[str, ...]

    def rank_of(self, name: str) -> int:
        """The rank that a module or parameter of this full name must have."""
        found = self.rank_pattern.lookup(name)
        return self.lora_rank if found is None else int(found)

    def scale_of(self, name: str, lora_rank: int) -> float:
        """alpha / r, or alpha / sqrt(r) with rsLoRA, for a module or parameter of this name."""
        found = self.alpha_pattern.lookup(name)
        alpha = self.lora_alpha if found is None else found
        return alpha / (math.sqrt(lora_rank) if self.use_rslora else lora_rank)


def read_config(folder: Path) -> PeftConfig:
    """Read and judge the folder's config.

    Errors:  AdapterInvalid with a reason of REFUSALS, naming the field.
    """
    try:
        raw = read_small(folder / CONFIG_FILE, MAX_CONFIG_BYTES)
    except AdapterNotFound:
        raise AdapterInvalid("config", f"{CONFIG_FILE} is missing") from None
    fields = parse_json(raw, "config", CONFIG_FILE, max_items=MAX_CONFIG_ITEMS)
    warnings = _refuse_methods(fields)
    return PeftConfig(
        lora_rank=_positive(fields.get("r"), "r"),
        lora_alpha=_finite(fields.get("lora_alpha"), "lora_alpha"),
        use_rslora=_flag(fields, "use_rslora"),
        rank_pattern=_pattern(fields, "rank_pattern"),
        alpha_pattern=_pattern(fields, "alpha_pattern"),
        target_parameters=_target_parameters(fields.get("target_parameters")),
        peft_version=_text(fields, "peft_version"),
        base_model=_text(fields, "base_model_name_or_path"),
        ensure_weight_tying=_flag(fields, "ensure_weight_tying"),
        warnings=warnings,
    )


def parse_release(version: str) -> tuple[int, int, int] | None:
    """`0.19.1` -> (0, 19, 1). None for a development version: between releases."""
    match = re.fullmatch(r"(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?", version, re.ASCII)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


def _refuse_methods(fields: dict[str, Any]) -> tuple[str, ...]:
    """Refuse what is not plain LoRA on an unchanged base; returns warnings."""
    if fields.get("peft_type") != "LORA":
        what = f"peft_type is {shown(fields.get('peft_type'))}; only 'LORA' can be served"
        raise AdapterInvalid("peft_type", what)
    for name, reason in _REFUSED_FIELDS.items():
        if _is_set(fields.get(name)):
            raise AdapterInvalid(reason, f"{name} is {shown(fields[name])}")
    if fields.get("bias") not in (None, "none"):
        raise AdapterInvalid("bias", f"bias is {shown(fields['bias'])}; only 'none' can be served")
    start = fields.get("init_lora_weights")
    plain = start.lower() if isinstance(start, str) else start
    if not isinstance(plain, str | bool | None) or plain not in _HARMLESS_STARTS:
        what = f"init_lora_weights is {shown(start)}: the base that it was trained on is another"
        raise AdapterInvalid("changes_base", what)
    warnings = []
    for name, value in fields.items():
        if name in _KNOWN_FIELDS or not _is_set(value):
            continue
        if value is True or isinstance(value, dict) or name.startswith("use_"):
            what = f"{shown(name)} is {shown(value)}: a method that is not known here"
            raise AdapterInvalid("config", what)
        warnings.append(f"{CONFIG_FILE}: the field {shown(name)} is not known and was not used")
    return tuple(warnings)


def _is_set(value: Any) -> bool:
    return value not in (None, False, "", [], {})


def _positive(value: Any, field: str) -> int:
    if type(value) is not int or not 0 < value < 1 << 31:
        raise AdapterInvalid("config", f"{field} is {shown(value)}, not a positive integer")
    return value


def _finite(value: Any, field: str) -> float:
    if type(value) not in (int, float) or not -1e30 < value < 1e30:
        raise AdapterInvalid("config", f"{field} is {shown(value)}, not a number")
    return float(value)


def _flag(fields: dict[str, Any], field: str) -> bool:
    value = fields.get(field)
    if value not in (None, True, False):
        raise AdapterInvalid("config", f"{field} is {shown(value)}, not true or false")
    return bool(value)


def _text(fields: dict[str, Any], field: str) -> str | None:
    value = fields.get(field)
    if value is not None and not isinstance(value, str):
        raise AdapterInvalid("config", f"{field} is {shown(value)}, not a text")
    return value or None


def _pattern(fields: dict[str, Any], field: str) -> PatternTable:
    table = fields.get(field)
    if table is None:
        table = {}
    if not isinstance(table, dict):
        raise AdapterInvalid("config", f"{field} is {shown(table)}, not a table")
    check = _positive if field == "rank_pattern" else _finite
    return PatternTable(field, {k: check(v, f"{field}[{shown(k)}]") for k, v in table.items()})


def _target_parameters(value: Any) -> tuple[str, ...]:
    names = [] if value is None else value
    if (
        not isinstance(names, list)
        or len(names) > MAX_TARGET_PARAMETERS
        or not all(isinstance(name, str) and name for name in names)
    ):
        raise AdapterInvalid("config", f"target_parameters is {shown(value)}, not a list of names")
    return tuple(names)
