"""Which source reads which scheme. A new one is a new file and one line here."""

from importlib import import_module
from typing import cast

from adapter_store.errors import AdapterNotFound
from adapter_store.sources.source import DEFAULT_MAX_BYTES, S3Options, Source

SOURCES = {
    "file": "adapter_store.sources.local:LocalSource",
    "s3": "adapter_store.sources.s3:S3Source",
}


def scheme_of(uri: str) -> str:
    """The scheme of a uri; a plain path is a `file`."""
    scheme, mark, _ = uri.partition("://")
    return scheme if mark else "file"


def open_source(
    uri: str, s3: S3Options | None = None, max_bytes: int = DEFAULT_MAX_BYTES
) -> Source:
    """The source that reads this uri, and every uri of the same scheme. Asks nobody anything.

    max_bytes  files of one adapter together; a larger one is refused (StoreFull).
    Errors:  AdapterNotFound if no source knows the scheme.
    """
    scheme = scheme_of(uri)
    if scheme not in SOURCES:
        known = ", ".join(sorted(SOURCES))
        raise AdapterNotFound(
            f"no source for {scheme}:// in {uri!r}; known are {known} and folders"
        )
    module, _, name = SOURCES[scheme].partition(":")
    return cast(Source, getattr(import_module(module), name)(s3, max_bytes))
