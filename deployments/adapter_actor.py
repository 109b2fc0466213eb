"""The AdapterStore actor of a node: brings adapters from their source into the node's host tier
ahead of the engines.

It is the loader that every engine has, over the same folder: whoever comes first fetches, the
others find the file. So
nothing is lost with it but a head start. No slot and no device here.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from adapter_store.errors import AdapterError
from adapter_store.ref import AdapterRef

_THREADS = 4
_log = logging.getLogger("ray.serve")


class AdapterStoreActor:
    """One a node, with a loader for each base model whose replicas live there."""

    def __init__(self) -> None:
        self._loaders: dict[str, Any] = {}

    def register(
        self,
        model: str,
        targets: Sequence[Any],
        dtype: Any,
        max_rank: int,
        folder: str,
        max_bytes: int,
        s3: Any,
    ) -> None:
        """A replica of `model` says what its adapters must fit: LoraTargets, torch dtype,
        S3Options. Again does nothing."""
        if model in self._loaders:
            return
        # Torch is imported here and not above: whoever only calls the actor does without.
        from adapter_store.formats.registry import load_adapter
        from adapter_store.host_cache import HostCache
        from adapter_store.loader import AdapterLoader

        cache = HostCache(Path(folder), max_bytes)
        self._loaders[model] = AdapterLoader(targets, dtype, cache, max_rank, s3, load_adapter)

    def prefetch(self, model: str, ref: AdapterRef) -> str:
        """Have the adapter in the host tier; its content's digest, "" if it cannot be had (a
        request will say why)."""
        try:
            digest: str = self._loaders[model].load(ref).digest
            return digest
        except AdapterError as exc:
            _log.warning("adapter %s is not in the host tier: %s", ref, exc)
            return ""


def adapter_store_actor(name: str, node_id: str) -> ActorHandle:
    """The actor of this node, made if there is none. It ends with the replica that made it; the
    next one is made anew."""
    return (
        ray.remote(AdapterStoreActor)
        .options(
            name=f"{name}-{node_id}",
            namespace="adapter-store",
            get_if_exists=True,
            num_cpus=0,
            max_concurrency=_THREADS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        .remote()
    )
