"""A ref -> its packed file in the host tier: source, format and cache put together.

Blocks: for the store's threads. Not here: who waits for it and where it goes on the device (store).
"""

import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from adapter_store.errors import AdapterError, AdapterInvalid, AdapterNotFound, AdapterUnavailable
from adapter_store.host_cache import HostCache
from adapter_store.packed import (
    PackedAdapter,
    content_digest,
    packed_bytes,
    write_packed,
)
from adapter_store.packed_layout import PackedLayout, padded_rank
from adapter_store.ref import AdapterRef
from adapter_store.sources.registry import open_source, scheme_of
from adapter_store.sources.source import S3Options, Source
from adapter_store.weights import AdapterWeights, LoraTarget

_MAX_REFUSED = 1024
_log = logging.getLogger(__name__)

LoadAdapter = Callable[..., AdapterWeights]


@dataclass(frozen=True)
class HostAdapter:
    """An adapter that lies in the host tier (and may leave it again at any time).

    revision  the source's own name for the content
    """

    digest: str
    revision: str
    layout: PackedLayout


class AdapterLoader:
    """Fetches and converts adapters, each content once over all threads and processes that share
    the cache.

    load_adapter  (folder, targets, max_rank=) -> AdapterWeights, as formats.registry has it
    """

    def __init__(
        self,
        targets: Sequence[LoraTarget],
        dtype: torch.dtype,
        cache: HostCache,
        max_rank: int,
        s3: S3Options | None,
        load_adapter: LoadAdapter,
    ) -> None:
        self._targets = tuple(targets)
        self._dtype = dtype
        self._cache = cache
        self._max_rank = max_rank
        self._s3 = s3
        self._load_adapter = load_adapter
        self._sources: dict[str, Source] = {}
        self._refused: OrderedDict[tuple[str, str], AdapterInvalid] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, ref: AdapterRef) -> HostAdapter | str:
        """The adapter if the host tier has it; else the revision that the source holds now.

        A digest that this uri is known to have held is taken from the cache without asking the
        source.
        Errors:  an AdapterError, whatever went wrong.
        """
        with _only_adapter_errors(ref):
            if is_digest(ref.revision) and self._cache.has_seen(ref.uri, ref.revision):
                packed = self.open(ref.revision)
                if packed is not None:
                    return self._describe(ref, packed, ref.revision)
            revision = self._source(ref).revision(ref)
            digest = self._cache.lookup(ref.uri, revision)
            if not is_digest(ref.revision) or digest is not None:
                check_revision(ref, revision, digest or "")
            packed = self.open(digest) if digest is not None else None
            return revision if packed is None else self._describe(ref, packed, revision)

    def fetch(self, ref: AdapterRef, revision: str) -> HostAdapter:
        """Bring what the uri holds now into the host tier, whatever revision the ref names.

        revision  as `find` gave it; if the source has moved on since, so does this
        Errors:  an AdapterError, whatever went wrong.
        """
        with _only_adapter_errors(ref):
            for _ in range(3):
                with self._lock:
                    refused = self._refused.get((ref.uri, revision))
                if refused is not None:  # the same bytes would be refused again
                    raise AdapterInvalid(refused.reason, str(refused).partition(": ")[2])
                # One fetch at a time over all processes; the others find it done.
                with self._cache.lock(f"fetch-{_short_hash(f'{ref.uri} {revision}')}"):
                    digest = self._cache.lookup(ref.uri, revision)
                    packed = self.open(digest) if digest is not None else None
                    if packed is None:
                        packed = self._fetch_once(ref, revision)
                if packed is not None:
                    return self._describe(ref, packed, revision)
                revision = self._source(ref).revision(ref)
            raise AdapterUnavailable(f"{ref.uri} changes faster than it can be read")

    def load(self, ref: AdapterRef) -> HostAdapter:
        """Have the adapter in the host tier: `find`, else `fetch`. For a thread that may wait."""
        found = self.find(ref)
        if isinstance(found, str):
            found = self.fetch(ref, found)
            check_revision(ref, found.revision, found.digest)
        return found

    def open(self, digest: str) -> PackedAdapter | None:
        """The packed adapter, if the host tier has it."""
        return self._cache.open(digest, self._targets, self._dtype)

    def _fetch_once(self, ref: AdapterRef, revision: str) -> PackedAdapter | None:
        """Read, convert and keep; None if the uri got other content meanwhile."""
        source = self._source(ref)
        with self._cache.scratch() as folder:
            source.fetch(ref, folder)
            if source.revision(ref) != revision:
                return None
            digest = content_digest(folder)
            with self._cache.lock(f"pack-{digest}"):
                packed = self.open(digest)
                if packed is None:
                    try:
                        packed = self._pack(folder, digest, ref)
                    except AdapterInvalid as e:
                        self._refuse(ref.uri, revision, e)
                        raise
        self._cache.remember(ref.uri, revision, digest)
        return packed

    def _pack(self, folder: Path, digest: str, ref: AdapterRef) -> PackedAdapter | None:
        weights = self._load_adapter(folder, self._targets, max_rank=self._max_rank)
        for warning in weights.manifest.warnings:
            _log.warning("adapter %s: %s", ref, warning)
        for tensor, why in weights.manifest.skipped.items():
            _log.info("adapter %s: %s was left out: %s", ref, tensor, why)
        size = packed_bytes(weights, self._targets, self._dtype, digest)

        def fill(path: Path) -> None:
            write_packed(path, weights, self._targets, self._dtype, digest)

        self._cache.write(digest, self._targets, self._dtype, size, fill)
        return self.open(digest)

    def _refuse(self, uri: str, revision: str, error: AdapterInvalid) -> None:
        with self._lock:
            self._refused[uri, revision] = error
            while len(self._refused) > _MAX_REFUSED:
                self._refused.popitem(last=False)

    def _describe(self, ref: AdapterRef, packed: PackedAdapter, revision: str) -> HostAdapter:
        with packed:
            # Another engine with a higher limit may have packed it.
            rank = packed.layout.max_rank
            if rank > padded_rank(self._max_rank):
                raise AdapterInvalid("rank_limit", f"{ref} has rank {rank} > {self._max_rank}")
            return HostAdapter(packed.digest, revision, packed.layout)

    def _source(self, ref: AdapterRef) -> Source:
        scheme = scheme_of(ref.uri)
        with self._lock:
            if scheme not in self._sources:
                self._sources[scheme] = open_source(ref.uri, self._s3, self._cache.max_bytes)
            return self._sources[scheme]


def is_digest(text: str) -> bool:
    """Whether a revision is a content digest (sha256 in hex), not a source's own name."""
    return len(text) == 64 and not set(text) - set("0123456789abcdef")


def check_revision(ref: AdapterRef, revision: str, digest: str) -> None:
    """AdapterNotFound if the ref asks for another content than the one of these names."""
    if ref.revision not in ("", revision, digest):
        raise AdapterNotFound(f"{ref.uri} does not hold revision {ref.revision}")


@contextmanager
def _only_adapter_errors(ref: AdapterRef) -> Iterator[None]:
    try:
        yield
    except AdapterError:
        raise
    except Exception as e:  # a fault of one load must not become everyone's
        raise AdapterUnavailable(f"loading {ref} failed: {type(e).__name__}: {e}") from e


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
