"""Adapters in folders of this machine. The files are copied, so that nobody can change them while
they are read."""

import hashlib
import os
import shutil
from pathlib import Path
from urllib.parse import unquote, urlsplit

from adapter_store.errors import AdapterChanged, AdapterNotFound, AdapterUnavailable
from adapter_store.ref import AdapterRef
from adapter_store.sources.source import (
    DEFAULT_MAX_BYTES,
    FILES,
    OPTIONAL_FILES,
    S3Options,
    check_files,
    check_sizes,
)


class LocalSource:
    """`/folder`, `folder` or `file:///folder`.

    The revision is made of name, size, inode and times of each file.
    """

    def __init__(self, s3: S3Options | None = None, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._max_bytes = max_bytes

    def revision(self, ref: AdapterRef) -> str:
        """See `Source`. A file that is rewritten gets other times, hence another revision."""
        return _name(self._list(ref))

    def fetch(self, ref: AdapterRef, into: Path, revision: str) -> None:
        """See `Source`. Folders keep no older versions."""
        folder = _folder(ref)
        listed = self._list(ref)
        if _name(listed) != revision:
            raise AdapterChanged(f"{ref.uri} no longer holds {revision}")
        for name, info in listed.items():
            try:
                shutil.copyfile(folder / name, into / name)
            except FileNotFoundError as e:
                raise AdapterChanged(f"{folder / name} vanished while it was read") from e
            except OSError as e:
                raise AdapterUnavailable(f"cannot copy {folder / name}: {e.strerror}") from e
            size = (into / name).stat().st_size
            if size != info.st_size:
                raise AdapterChanged(f"{folder / name} changed while it was read")

    def _list(self, ref: AdapterRef) -> dict[str, os.stat_result]:
        """Known files -> stat, in the order of reading."""
        folder = _folder(ref)
        try:
            with os.scandir(folder) as entries:
                infos = {entry.name: entry.stat() for entry in entries if entry.is_file()}
        except (FileNotFoundError, NotADirectoryError) as e:
            raise AdapterNotFound(f"{ref.uri} is no folder") from e
        except OSError as e:
            raise AdapterUnavailable(f"cannot read {ref.uri}: {e.strerror}") from e
        check_files(ref, infos)
        chosen = {name: infos[name] for name in (*FILES, *OPTIONAL_FILES) if name in infos}
        check_sizes(ref, {name: info.st_size for name, info in chosen.items()}, self._max_bytes)
        return chosen


def _name(files: dict[str, os.stat_result]) -> str:
    digest = hashlib.sha256()
    for name, info in files.items():
        times = f"{info.st_mtime_ns} {info.st_ctime_ns}"
        digest.update(f"{name} {info.st_size} {info.st_ino} {times}\n".encode())
    return f"local-{digest.hexdigest()[:40]}"


def _folder(ref: AdapterRef) -> Path:
    if ref.uri.startswith("file://"):
        parts = urlsplit(ref.uri)
        if parts.netloc not in ("", "localhost"):
            raise AdapterNotFound(f"{ref.uri} names another machine: {parts.netloc}")
        return Path(unquote(parts.path))
    if not ref.uri or "\0" in ref.uri:
        raise AdapterNotFound(f"{ref.adapter_id} has no usable uri: {ref.uri!r}")
    return Path(ref.uri)
