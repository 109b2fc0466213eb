"""The AdapterStore actor of a node: has adapters in the node's host tier before an engine asks, and
looks whether sources hold newer ones, so that no engine's process does.

It is the engines' own store without a device, over the same folder: whoever comes first fetches,
the others find the file. So nothing is lost with it but a head start. No slots here.
"""

import asyncio
import json
import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from adapter_store.ref import AdapterRef

PATIENCE_S = 600.0
_POLL_S = 0.02
_LOOK_WAIT_S = 1.0
_log = logging.getLogger("ray.serve")


@dataclass(frozen=True)
class ServedModel:
    """For which engine an adapter is judged. name: registered;  path: the model's folder;
    pool_bytes: its adapter memory, 0 = it serves no adapters;  gpus: as ServingLimits has them"""

    name: str
    path: str
    pool_bytes: int
    gpus: int


class AdapterStoreActor:
    """One a node, with a store for each base model whose replicas live there.

    An asyncio actor: one thread owns the stores, and their own threads do the work.
    """

    def __init__(self) -> None:
        self._stores: dict[str, Any] = {}
        self._told: dict[str, Any] = {}
        self._watches: dict[str, Any] = {}
        self._registered: dict[str, tuple[Sequence[Any], Any, int, int, Any]] = {}
        self._judge_thread = ThreadPoolExecutor(1, "judge")
        self._judging: Future[dict[str, Any]] | None = None

    async def register(
        self,
        model: str,
        targets: Sequence[Any],
        dtype: Any,
        max_rank: int,
        folder: str,
        max_bytes: int,
        s3: Any,
        base_folder: str,
    ) -> None:
        """A replica of `model` says what its adapters must fit. Saying it again does nothing.

        targets  LoraTargets;  dtype  of torch;  folder, max_bytes  the host tier;  s3  S3Options
        base_folder  of the base model
        """
        if model in self._stores:
            return
        # Imported here and not above: torch comes with them, and who calls the actor needs none.
        from adapter_store.host_cache import HostCache
        from adapter_store.store import AdapterStore
        from adapter_store.watch import Watch

        store = self._stores[model] = AdapterStore(
            targets,
            None,
            HostCache(Path(folder), max_bytes),
            max_rank=max_rank,
            dtype=dtype,
            s3=s3,
            base_folder=Path(base_folder),
        )
        self._watches[model] = Watch(store.loader.look)
        self._registered[model] = targets, dtype, max_rank, max_bytes, s3

    async def look(self, model: str, uris: Sequence[str]) -> dict[str, str]:
        """What uris hold now, see `Watch.look`; in a second, however slow a source is."""
        found: dict[str, str] = await asyncio.to_thread(
            self._watches[model].look, uris, _LOOK_WAIT_S
        )
        return found

    async def validate(
        self, uri: str, served: ServedModel, root: str = ""
    ) -> dict[str, Any] | None:
        """Read an adapter as a store would, and say what comes of it; nothing of it stays.

        One at a time, in a thread: None while another one is read. A thread runs to its end, also
        if nobody waits for it any more.
        """
        if self._judging is not None and not self._judging.done():
            return None
        self._judging = self._judge_thread.submit(self._judge, uri, served, root)
        return await asyncio.wrap_future(self._judging)

    def _judge(self, uri: str, served: ServedModel, root: str) -> dict[str, Any]:
        from adapter_store.validation import ServingLimits, as_values, validate

        targets, dtype, max_rank, max_bytes, s3 = self._registered[served.name]
        limits = ServingLimits(dtype, served.pool_bytes, max_bytes, max_rank, served.gpus)
        folder = Path(served.path)
        shape = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        name = folder.resolve().name
        report = validate(
            uri, targets, limits, base_name=name, base_folder=folder, s3=s3, root=root
        )
        return as_values(report, limits, served.name, shape["architectures"][0])

    async def prefetch(self, model: str, refs: Sequence[AdapterRef]) -> dict[AdapterRef, str]:
        """Have adapters in the host tier; the digests of those that are there now.

        What cannot be had is told to the log only: a request for it will say so to its client.
        """
        store = self._stores[model]
        for ref in refs:
            store.prefetch(ref)
        missing, digests = set(refs), {}
        async with asyncio.timeout(PATIENCE_S):
            while missing:
                await asyncio.sleep(_POLL_S)
                store.poll()
                for ref in list(missing):
                    if (error := store.error_of(ref)) is not None:
                        _log.warning("%s is not in the host tier: %s", ref, error)
                        missing.discard(ref)
                    elif (digest := store.digest_of(ref)) is not None:
                        digests[ref] = digest
                        missing.discard(ref)
        for ref in digests:
            store.forget(ref)
        return digests

    async def take_loads(self, model: str) -> tuple[dict[str, dict[str, float]], int]:
        """Counters by tier as `StoreStats` names them, and failures, since somebody last asked:
        told once."""
        now, before = self._stores[model].stats(), self._told.get(model)
        self._told[model] = now
        growth = {}
        for name in ("loads", "load_seconds", "load_bytes"):
            was = getattr(before, name, {})
            growth[name] = {t: n - was.get(t, 0) for t, n in getattr(now, name).items()}
        return growth, now.failures - (before.failures if before else 0)


def adapter_store_actor(name: str, node_id: str) -> ActorHandle:
    """The actor of this node, made if there is none.

    It ends with the replica that made it; the next to need one makes another.
    """
    return (
        ray.remote(AdapterStoreActor)
        .options(
            name=f"{name}-{node_id}",
            namespace="adapter-store",
            get_if_exists=True,
            num_cpus=0,
            max_concurrency=100,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        .remote()
    )
