"""All files of an adapter in one input, for those that change bytes, and what may come of one.

Not here: whole ways through the loader (run), who changes the bytes (fuzz_atheris).
"""

import json
from functools import cache
from pathlib import Path

import torch
from safetensors import safe_open

from adapter_store.errors import AdapterError, AdapterUnavailable
from adapter_store.formats.extras_files import BaseTokens, read_extras
from adapter_store.formats.registry import load_adapter
from adapter_store.sources.source import OPTIONAL_FILES
from adapter_store.weights import AdapterWeights
from tests.adapter_store.hostile.draft import CONFIG, WEIGHTS, Draft
from tests.adapter_store.hostile.oracle import ExtrasOracle
from tests.adapter_store.tiny_adapters import TARGETS

MAX_RANK = 256
MAX_MESSAGE_CHARS = 1500
MAX_WARNINGS = 40
_NAMES = (CONFIG, *OPTIONAL_FILES)


def load_bytes(folder: Path, data: bytes, base: Path) -> AdapterError | None:
    """The formats alone on all files in one: of each but the weights four bytes of its length and
    its content, empty = it is not there; the weights.

    base  as good_files.write_base makes it
    Errors: AssertionError if the load or the refusal is not as it must be."""
    for name in _NAMES:
        length = int.from_bytes(data[:4], "little")
        (folder / name).write_bytes(data[4 : 4 + length])
        if name != CONFIG and not data[4 : 4 + length]:
            (folder / name).unlink()
        data = data[4 + length :]
    (folder / WEIGHTS).write_bytes(data)
    tokens, oracle = _readers(base)
    try:
        oracle.check(folder, read_extras(folder, tokens))
        check_values(folder, load_adapter(folder, TARGETS, max_rank=MAX_RANK))
    except AdapterError as error:
        message = str(error)
        assert message.isprintable() and len(message) < MAX_MESSAGE_CHARS, message
        assert not isinstance(error, AdapterUnavailable), message
        return error.with_traceback(None)
    return None


def as_bytes(draft: Draft) -> bytes:
    """A draft's files as `load_bytes` takes them."""
    files = {CONFIG: draft.config_bytes()} | draft.beside
    parts = (files.get(name, b"") for name in _NAMES)
    heads = (len(part).to_bytes(4, "little") + part for part in parts)
    return b"".join(heads) + draft.weights_bytes()


@cache
def _readers(base: Path) -> tuple[BaseTokens, ExtrasOracle]:
    return BaseTokens(base), ExtrasOracle(base)


def check_values(folder: Path, weights: AdapterWeights) -> None:
    """What was loaded is what another reader finds in the same file. AssertionError if not."""
    by_name = {target.name: target for target in TARGETS}
    for name, factors in weights.factors.items():
        target, r = by_name[name], factors.lora_rank
        assert factors.a.shape[1:] == (r, target.in_features), name
        assert factors.b.shape[1:] == (r, target.out_features), name
        assert torch.isfinite(factors.a).all() and torch.isfinite(factors.b).all(), name
    manifest = weights.manifest
    assert len(manifest.warnings) <= MAX_WARNINGS, len(manifest.warnings)
    assert all(w.isprintable() and len(w) < MAX_MESSAGE_CHARS for w in manifest.warnings)
    config = json.loads((folder / CONFIG).read_text())
    with safe_open(folder / WEIGHTS, "pt") as file:
        assert {*manifest.bound, *manifest.skipped} == set(file.keys())
        for pair in manifest.pairs:
            if not config.get("alpha_pattern"):
                r = pair.lora_rank
                divisor = r**0.5 if config.get("use_rslora") else r
                assert abs(pair.scale * divisor - config["lora_alpha"]) <= 1e-6 * abs(
                    config["lora_alpha"]
                ), pair
            if pair.layout == "plain":
                factors = weights.factors[pair.target]
                b = file.get_tensor(pair.b).float() * pair.scale
                assert torch.equal(factors.a[0].float(), file.get_tensor(pair.a).float()), pair
                assert torch.allclose(factors.b[0].T.float(), b, rtol=1e-6, atol=0), pair
