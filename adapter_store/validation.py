"""What a store would say of an adapter, without an engine: `validate` -> `AdapterReport`.

It runs the loader that a store runs, into a host tier of its own that is gone afterwards, so that
its verdict is the one that serving would give. Not here: what a model can take and how much memory
an engine has (arguments), and a report in words (model_runner/validate_command.py).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from adapter_store.contents import KnownContents
from adapter_store.errors import (
    AdapterError,
    AdapterInvalid,
    AdapterNotFound,
    AdapterUnavailable,
    StoreFull,
)
from adapter_store.extras import NO_EXTRAS, AdapterExtras
from adapter_store.formats.registry import load_adapter
from adapter_store.host_cache import HostCache
from adapter_store.loader import AdapterLoader
from adapter_store.packed_layout import (
    check_share,
    dtype_name,
    largest_adapter,
    layout_of,
    padded_rank,
)
from adapter_store.ref import AdapterRef
from adapter_store.sources.source import S3Options
from adapter_store.weights import AdapterManifest, AdapterWeights, BoundPair, LoraTarget

_REASONS = {
    AdapterNotFound: "not_found",
    AdapterUnavailable: "unavailable",
    StoreFull: "too_large",
}


@dataclass(frozen=True)
class ServingLimits:
    """What the engine has that would serve an adapter.

    dtype       of the adapter memory;  pool_bytes  its size, 0 = the engine serves no adapters
    host_bytes  the host tier;  max_rank  the largest rank, rounded up to what memory holds
    gpus        of an engine: an adapter lies on each of them whole; 0 = it runs on a CPU
    """

    dtype: torch.dtype
    pool_bytes: int
    host_bytes: int
    max_rank: int
    gpus: int = 1


@dataclass(frozen=True)
class Refusal:
    """Why it would be refused.

    reason  one of errors.REFUSALS, or not_found, unavailable, too_large
    message names the tensor, the field or the sizes at fault
    """

    reason: str
    message: str


@dataclass(frozen=True)
class TargetReport:
    """What changes of one weight, over all layers.

    name      below its layer: `self_attn.q_proj`;  kind  of the LoraTarget
    num_adapted, num_there  weights of this name that the adapter changes, and that the model has
    layouts, ranks, scales  all that occur, in order
    """

    name: str
    kind: str
    num_adapted: int
    num_there: int
    layouts: tuple[str, ...]
    ranks: tuple[int, ...]
    scales: tuple[float, ...]


@dataclass(frozen=True)
class AdapterReport:
    """Everything that is known of one adapter for one model.

    refusals   empty = it would be served
    manifest   what each tensor became; empty if the load was refused
    num_bytes  in the adapter memory, padded as it lies there; None if the load was refused
    digest     of the content; empty if it was refused
    extras     what it brings besides weights; none if it was refused
    """

    uri: str
    refusals: tuple[Refusal, ...]
    manifest: AdapterManifest = field(default_factory=AdapterManifest)
    targets: tuple[TargetReport, ...] = ()
    num_bytes: int | None = None
    digest: str = ""
    extras: AdapterExtras = NO_EXTRAS

    @property
    def layouts(self) -> Mapping[str, int]:
        """Layout -> pairs of tensors that lie so."""
        counts: dict[str, int] = {}
        for pair in self.manifest.pairs:
            counts[pair.layout] = counts.get(pair.layout, 0) + 1
        return counts


def validate(
    uri: str,
    targets: Sequence[LoraTarget],
    limits: ServingLimits,
    *,
    base_name: str | None = None,
    base_folder: Path | None = None,
    s3: S3Options | None = None,
    root: str = "",
) -> AdapterReport:
    """Fetch the adapter, read all of it as a store would, and say what comes of it.

    uri        a folder or s3://bucket/prefix;  s3  None = what the environment says
    root       as an AdapterRef has it
    base_name  the served model's name: another one in the adapter's config is a warning
    base_folder  its files: the adapter's own tokenizer, if it has one, must be the one there
    Blocks. Whatever is wrong with the adapter or its source is a refusal in the report, and no
    exception.
    Cost:  its files and its packed form, in shared memory where that is large enough.
    """
    read: list[tuple[AdapterManifest, int]] = []

    def load(folder: Path, to: Sequence[LoraTarget], **options: Any) -> AdapterWeights:
        weights = load_adapter(folder, to, base_name=base_name, **options)
        read.append((weights.manifest, layout_of(weights, to, limits.dtype).num_bytes))
        return weights

    ref = AdapterRef(uri, uri, root=root)
    refusals: list[Refusal] = []
    digest, extras = "", NO_EXTRAS
    cache = HostCache(None, limits.host_bytes)
    try:
        max_rank = padded_rank(limits.max_rank)
        loader = AdapterLoader(
            targets, limits.dtype, cache, max_rank, s3, load, KnownContents(), base_folder
        )
        found = loader.load(ref)
        digest, extras = found.digest, found.extras
    except AdapterError as error:
        refusals.append(_refusal(error))
    finally:
        cache.close()
    if not read:
        return AdapterReport(uri, tuple(refusals))
    manifest, num_bytes = read[-1]
    try:
        check_share(uri, num_bytes, limits.pool_bytes)
    except AdapterError as error:
        refusals.append(_refusal(error))
    by_target = tuple(_group(manifest.pairs, targets))
    return AdapterReport(uri, tuple(refusals), manifest, by_target, num_bytes, digest, extras)


def as_values(
    report: AdapterReport, limits: ServingLimits, model: str, architecture: str
) -> dict[str, Any]:
    """The report as JSON has it. Bytes are null where the load was refused.

    model, architecture  what the served base is called
    """
    share = None
    if report.num_bytes is not None and limits.pool_bytes:
        share = round(report.num_bytes / limits.pool_bytes, 6)
    return {
        "uri": report.uri,
        "model": model,
        "architecture": architecture,
        "served": not report.refusals,
        "refused": [{"reason": r.reason, "message": r.message} for r in report.refusals],
        "layouts": dict(report.layouts),
        "targets": [
            {
                "name": target.name,
                "adapted": target.num_adapted,
                "of": target.num_there,
                "ranks": list(target.ranks),
                "scales": list(target.scales),
                "layouts": list(target.layouts),
            }
            for target in report.targets
        ],
        "gpus": limits.gpus,
        "bytes_per_gpu": report.num_bytes,
        "adapter_memory_bytes": limits.pool_bytes,
        "largest_adapter_bytes": largest_adapter(limits.pool_bytes),
        "share_of_memory": share,
        "dtype": dtype_name(limits.dtype),
        "max_lora_rank": limits.max_rank,
        "bound": list(report.manifest.bound),
        "skipped": dict(report.manifest.skipped),
        "warnings": list(report.manifest.warnings),
        "digest": report.digest,
        "chat_template": bool(report.extras.chat_template),
        "generation_defaults": dict(report.extras.sampling),
        "eos_ids": list(report.extras.eos_ids),
    }


def _refusal(error: AdapterError) -> Refusal:
    if isinstance(error, AdapterInvalid):
        return Refusal(error.reason, error.message)
    reason = next(reason for kind, reason in _REASONS.items() if isinstance(error, kind))
    return Refusal(reason, str(error))


def _group(pairs: Sequence[BoundPair], targets: Sequence[LoraTarget]) -> list[TargetReport]:
    """Pairs by the name below the layer, in the model's order."""
    by_name: dict[str, list[BoundPair]] = {}
    for pair in pairs:
        by_name.setdefault(_below_layer(pair.target), []).append(pair)
    there: dict[str, list[LoraTarget]] = {}
    for target in targets:
        there.setdefault(_below_layer(target.name), []).append(target)
    return [
        TargetReport(
            name=name,
            kind=there[name][0].kind,
            num_adapted=len({pair.target for pair in by_name[name]}),
            num_there=len(there[name]),
            layouts=tuple(sorted({pair.layout for pair in by_name[name]})),
            ranks=tuple(sorted({pair.lora_rank for pair in by_name[name]})),
            scales=tuple(sorted({pair.scale for pair in by_name[name]})),
        )
        for name in there
        if name in by_name
    ]


def _below_layer(name: str) -> str:
    """`model.layers.3.self_attn.q_proj` -> `self_attn.q_proj`."""
    return re.sub(r"^.*?\.\d+\.", "", name)
