"""A ref -> its packed file in the host tier: source, format and cache put together.

Blocks: for the store's threads. Not here: who waits for it and where it goes on the device (store).
"""

import logging
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from adapter_store.contents import KnownContents
from adapter_store.errors import (
    AdapterChanged,
    AdapterError,
    AdapterInvalid,
    AdapterNotFound,
    AdapterUnavailable,
    DiskFull,
)
from adapter_store.extras import NO_EXTRAS, AdapterExtras
from adapter_store.formats.extras_files import BaseTokens, brings_extras
from adapter_store.formats.extras_process import read_extras_apart
from adapter_store.formats.registry import check_adapter
from adapter_store.host_cache import HostCache, hash_text
from adapter_store.packed import (
    PackedAdapter,
    content_digest,
    packed_bytes,
    write_packed,
)
from adapter_store.packed_layout import PackedLayout, padded_rank
from adapter_store.ref import AdapterRef, is_digest
from adapter_store.sources.registry import open_source, scheme_of
from adapter_store.sources.source import S3Options, Source
from adapter_store.weights import AdapterWeights, LoraTarget

_MAX_REFUSED = 1024
_TELL_WAIT_S = 2.0
"""How long to wait for others to say which version a digest was, where the source has moved on."""

_log = logging.getLogger(__name__)

LoadAdapter = Callable[..., AdapterWeights]


@dataclass(frozen=True)
class HostAdapter:
    """An adapter that lies in the host tier (and may leave it again at any time).

    revision       the source's own name for the content
    fetched_bytes  read from the source for it just now; 0 = it was there
    extras         what it brings besides weights
    """

    digest: str
    revision: str
    layout: PackedLayout
    fetched_bytes: int = 0
    extras: AdapterExtras = NO_EXTRAS


@dataclass(frozen=True)
class AbsentAdapter:
    """An adapter that the host tier has not: the revision to fetch, and its digest if that is
    known."""

    revision: str
    digest: str = ""


class AdapterLoader:
    """Fetches and converts adapters, each content once over all threads and processes that share
    the cache.

    load_adapter  (folder, targets, max_rank=, max_bytes=) -> AdapterWeights, as formats.registry
                  has it
    contents      what uris hold and held: asked before a source, told what was seen
    base_folder   of the base model: an adapter's own tokenizer must be the one there
    """

    def __init__(
        self,
        targets: Sequence[LoraTarget],
        dtype: torch.dtype,
        cache: HostCache,
        max_rank: int,
        s3: S3Options | None,
        load_adapter: LoadAdapter,
        contents: KnownContents,
        base_folder: Path | None = None,
    ) -> None:
        self._base_folder, self._base = base_folder, BaseTokens(base_folder)
        self._targets = tuple(targets)
        self._dtype = dtype
        self._cache = cache
        self._max_rank = max_rank
        self._s3 = s3
        self._load_adapter = load_adapter
        self._contents = contents
        self._sources: dict[str, Source] = {}
        self._refused: OrderedDict[tuple[str, str], tuple[str, str]] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, ref: AdapterRef) -> HostAdapter | AbsentAdapter:
        """The adapter if the host tier has it; else what to fetch: what the source holds now, or
        held when its content had the digest that the ref names.

        A digest that this uri is known to have held is taken from the cache without asking the
        source.
        Errors:  an AdapterError, whatever went wrong.
        """
        with _only_adapter_errors(ref):
            if is_digest(ref.revision):
                return self._find_digest(ref)
            revision = self._contents.current(ref.uri) or self._source(ref).revision(ref)
            digest = self._lookup(ref.uri, revision)
            check_revision(ref, revision, digest or "")
            packed = self.open(digest) if digest is not None else None
            if packed is None:
                return AbsentAdapter(revision, digest or "")
            return self._describe(ref, packed, revision)

    def look(self, uri: str) -> str:
        """The revision that a uri holds now; asks the source. Errors as for `find`."""
        ref = AdapterRef(uri, uri)
        with _only_adapter_errors(ref):
            return self._source(ref).revision(ref)

    def fetch(self, ref: AdapterRef, revision: str) -> HostAdapter:
        """Bring a revision into the host tier.

        revision  as `find` gave it; if the source has moved on since, so does this, unless the ref
                  names a digest
        Errors:  an AdapterError, whatever went wrong.
        """
        is_pinned = is_digest(ref.revision)
        with _only_adapter_errors(ref):
            for _ in range(3):
                with self._lock:
                    refused = self._refused.get((ref.uri, revision))
                    if refused is not None:
                        self._refused.move_to_end((ref.uri, revision))
                if refused is not None:  # the same bytes would be refused again
                    raise AdapterInvalid(*refused)
                # One fetch at a time over all processes; the others find it done.
                with self._cache.lock(f"fetch-{hash_text(f'{ref.uri} {revision}')[:32]}"):
                    digest = self._lookup(ref.uri, revision)
                    packed = self.open(digest) if digest is not None else None
                    num_bytes = 0
                    if packed is None:
                        try:
                            packed, num_bytes = self._fetch_once(ref, revision)
                        except AdapterChanged:
                            if is_pinned:
                                raise
                if packed is not None:
                    return self._describe(ref, packed, revision, num_bytes)
                revision = self._source(ref).revision(ref)
            raise AdapterUnavailable(f"{ref.uri} changes faster than it can be read")

    def load(self, ref: AdapterRef) -> HostAdapter:
        """Have the adapter in the host tier: `find`, else `fetch`. For a thread that may wait."""
        found = self.find(ref)
        if isinstance(found, AbsentAdapter):
            found = self.fetch(ref, found.revision)
            check_revision(ref, found.revision, found.digest)
        return found

    def open(self, digest: str) -> PackedAdapter | None:
        """The packed adapter, if the host tier has it, made for this base model."""
        return self._cache.open(digest, self._targets, self._dtype, self._base.digest)

    def _find_digest(self, ref: AdapterRef) -> HostAdapter | AbsentAdapter:
        """`find` for a ref that names a digest: what the uri holds now does not matter."""
        uri, digest = ref.uri, ref.revision
        revision = self._contents.revision_of(uri, digest)
        if revision is not None or self._cache.has_seen(uri, digest):
            packed = self.open(digest)
            if packed is not None:
                return self._describe(ref, packed, revision or digest)
        if revision is not None:
            return AbsentAdapter(revision, digest)
        now: str | None = None
        with suppress(AdapterNotFound):
            now = self._source(ref).revision(ref)
        known = None if now is None else self._lookup(uri, now)
        if now is not None and known == digest:
            return AbsentAdapter(now, digest)
        revision = self._contents.revision_of(uri, digest, _TELL_WAIT_S)
        if revision is not None:
            return AbsentAdapter(revision, digest)
        if now is None or known is not None:
            raise AdapterChanged(f"{uri} no longer holds the content with digest {digest}")
        return AbsentAdapter(now)  # unknown bytes: only reading them tells

    def _lookup(self, uri: str, revision: str) -> str | None:
        """The digest that the uri has at this revision, if anybody has seen it."""
        digest = self._cache.lookup(uri, revision)
        if digest is not None:
            self._contents.saw(uri, digest, revision)
        return digest

    def _fetch_once(self, ref: AdapterRef, revision: str) -> tuple[PackedAdapter, int]:
        """Read, convert and keep; with the bytes that were read.

        Errors:  AdapterChanged if the uri does not hold this revision, or not the ref's digest.
        """
        source = self._source(ref)
        is_pinned = is_digest(ref.revision)
        with self._cache.scratch() as folder:
            try:
                self._copy(source, ref, folder, revision)
            except AdapterInvalid as e:
                self._refuse(ref.uri, revision, e)
                raise
            # Two files are not replaced at once: they must still belong together.
            if not is_pinned and source.revision(ref) != revision:
                raise AdapterChanged(f"{ref.uri} was replaced while it was read")
            num_bytes = sum(path.stat().st_size for path in folder.iterdir())
            digest = content_digest(folder)
            if is_pinned and digest != ref.revision:
                self._remember(ref.uri, revision, digest)
                raise AdapterChanged(f"{ref.uri} holds other content than digest {ref.revision}")
            with self._cache.lock(f"pack-{digest}"):
                packed = self.open(digest)
                if packed is None:
                    try:
                        packed = self._pack(folder, digest, ref)
                    except AdapterInvalid as e:
                        self._refuse(ref.uri, revision, e)
                        raise
        self._remember(ref.uri, revision, digest)
        return packed, num_bytes

    def _copy(self, source: Source, ref: AdapterRef, folder: Path, revision: str) -> None:
        """Fetch it. Where the disk is full, other adapters of the host tier that nobody reads make
        way."""
        while True:
            try:
                return source.fetch(ref, folder, revision, self._judge)
            except DiskFull as e:
                if not self._cache.free_disk(e.num_bytes):
                    raise

    def _judge(self, folder: Path) -> None:
        """Refuse what its config and the head of its weights show to be of no use."""
        check_adapter(
            folder, self._targets, max_rank=self._max_rank, max_bytes=self._cache.max_bytes
        )

    def _remember(self, uri: str, revision: str, digest: str) -> None:
        self._cache.remember(uri, revision, digest)
        self._contents.saw(uri, digest, revision)

    def _pack(self, folder: Path, digest: str, ref: AdapterRef) -> PackedAdapter:
        extras = NO_EXTRAS
        if brings_extras(folder):
            extras = read_extras_apart(folder, self._base_folder)
        weights = self._load_adapter(
            folder, self._targets, max_rank=self._max_rank, max_bytes=self._cache.max_bytes
        )
        found = weights.manifest
        for warning in found.warnings:
            _log.warning("adapter %s: %s", ref, warning)
        counts = len(found.bound), len(found.skipped)
        _log.info("adapter %s: %d tensors bound, %d left out", ref, *counts)
        for tensor, why in found.skipped.items():
            _log.info("adapter %s: %s was left out: %s", ref, tensor, why)
        size = packed_bytes(weights, self._targets, self._dtype, digest, extras)

        def fill(path: Path) -> None:
            write_packed(path, weights, self._targets, self._dtype, digest, extras)

        base = self._base.digest
        return self._cache.write(digest, self._targets, self._dtype, size, fill, base)

    def _refuse(self, uri: str, revision: str, error: AdapterInvalid) -> None:
        with self._lock:
            self._refused[uri, revision] = error.reason, error.message
            while len(self._refused) > _MAX_REFUSED:
                self._refused.popitem(last=False)

    def _describe(
        self, ref: AdapterRef, packed: PackedAdapter, revision: str, fetched_bytes: int = 0
    ) -> HostAdapter:
        with packed:
            # Another engine with a higher limit may have packed it.
            rank = packed.layout.max_rank
            if rank > padded_rank(self._max_rank):
                raise AdapterInvalid("rank_limit", f"{ref} has rank {rank} > {self._max_rank}")
            return HostAdapter(packed.digest, revision, packed.layout, fetched_bytes, packed.extras)

    def _source(self, ref: AdapterRef) -> Source:
        scheme = scheme_of(ref.uri)
        with self._lock:
            if scheme not in self._sources:
                self._sources[scheme] = open_source(ref.uri, self._s3, self._cache.max_bytes)
            return self._sources[scheme]


def check_revision(ref: AdapterRef, revision: str, digest: str) -> None:
    """AdapterNotFound, for a digest AdapterChanged, if the ref asks for another content than the
    one of these names."""
    if ref.revision not in ("", revision, digest):
        error = AdapterChanged if is_digest(ref.revision) else AdapterNotFound
        raise error(f"{ref.uri} does not hold revision {ref.revision}")


@contextmanager
def _only_adapter_errors(ref: AdapterRef) -> Iterator[None]:
    """Errors are kept for a while, for others who ask: what was read before one (tensors, a header
    of many megabytes) must not be kept with it."""
    try:
        yield
    except AdapterError as e:
        _let_go(e)
        raise
    except Exception as e:  # a fault of one load must not become everyone's
        _let_go(e)
        raise AdapterUnavailable(f"loading {ref} failed: {type(e).__name__}: {e}") from e


def _let_go(error: BaseException) -> None:
    """Empty the variables of the frames that an error went through, and what it came of as well."""
    traceback.clear_frames(error.__traceback__)
    if error.__cause__ is None:
        error.__context__ = None  # not shown, or by chance
    else:
        _let_go(error.__cause__)
