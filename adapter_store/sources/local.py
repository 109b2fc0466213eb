"""Adapters in folders of this machine. The files are copied, so that nobody can change them while
they are read.

Links are refused: a folder is a tenant's, and what its links point to need not be. So are pipes and
devices. But a snapshot in a cache of Hugging Face's hub is nothing but links to the blobs beside
it: these are read. As much is copied as the file had at first, however it grows meanwhile.
"""

import hashlib
import os
import re
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from adapter_store.errors import (
    AdapterChanged,
    AdapterInvalid,
    AdapterNotFound,
    AdapterUnavailable,
)
from adapter_store.ref import AdapterRef
from adapter_store.regular_file import open_regular
from adapter_store.sources.source import (
    DEFAULT_MAX_BYTES,
    FILES,
    JUDGED_FROM_BYTES,
    OPTIONAL_FILES,
    PICKLE_FILES,
    WEIGHTS_FILE,
    Judge,
    S3Options,
    check_files,
    check_sizes,
    head_end,
)

_STEP_BYTES = 16 << 20
_BLOB = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")  # a git or SHA-256 digest


class LocalSource:
    """`/folder`, `folder` or `file:///folder`.

    The revision is made of name, size, inode and times of each file.
    """

    def __init__(self, s3: S3Options | None = None, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._max_bytes = max_bytes

    def revision(self, ref: AdapterRef) -> str:
        """See `Source`. A file that is rewritten gets other times, hence another revision."""
        return _name(self._list(ref))

    def fetch(self, ref: AdapterRef, into: Path, revision: str, judge: Judge | None = None) -> None:
        """See `Source`. Folders keep no older versions."""
        folder = _folder(ref)
        listed = self._list(ref)
        if _name(listed) != revision:
            raise AdapterChanged(f"{ref.uri} no longer holds {revision}")
        for name, info in listed.items():
            try:
                fd = open_regular(_place(folder, name))
            except AdapterNotFound as e:
                raise AdapterChanged(f"{folder / name} vanished while it was read") from e
            try:
                is_judged = name == WEIGHTS_FILE and info.st_size > JUDGED_FROM_BYTES
                with open(into / name, "wb") as copy:
                    if judge is not None and is_judged:
                        _copy_head(fd, copy.fileno(), info.st_size)
                        judge(into)
                    _copy(fd, copy.fileno(), info.st_size)
                if os.fstat(fd).st_size != info.st_size:
                    raise AdapterChanged(f"{folder / name} changed while it was read")
            except OSError as e:
                raise AdapterUnavailable(f"cannot copy {folder / name}: {e.strerror}") from e
            finally:
                os.close(fd)

    def _list(self, ref: AdapterRef) -> dict[str, os.stat_result]:
        """Known files -> stat, in the order of reading."""
        folder = _folder(ref)
        infos: dict[str, os.stat_result] = {}
        try:
            if not stat.S_ISDIR(os.stat(folder).st_mode):
                raise AdapterNotFound(f"{ref.uri} is no folder")
            for name in (*FILES, *OPTIONAL_FILES, *PICKLE_FILES):
                if os.path.lexists(folder / name):
                    infos[name] = os.lstat(_place(folder, name))
        except (FileNotFoundError, NotADirectoryError) as e:
            raise AdapterNotFound(f"{ref.uri} is no folder") from e
        except OSError as e:
            raise AdapterUnavailable(f"cannot read {ref.uri}: {e.strerror}") from e
        check_files(ref, infos)
        chosen = {name: infos[name] for name in (*FILES, *OPTIONAL_FILES) if name in infos}
        for name, info in chosen.items():
            if stat.S_ISLNK(info.st_mode):
                what = f"{name} is a symbolic link; put the file itself there"
                raise AdapterInvalid("file", what)
            if not stat.S_ISREG(info.st_mode):
                raise AdapterInvalid("file", f"{name} is not a regular file")
        check_sizes(ref, {name: info.st_size for name, info in chosen.items()}, self._max_bytes)
        return chosen


def _place(folder: Path, name: str) -> Path:
    """Where a file lies: in its folder, or with the blobs of the cached repository that the folder
    is a snapshot of. Links to any other place stay what they are.

    Source: https://huggingface.co/docs/huggingface_hub/guides/manage-cache
    """
    path = folder / name
    parts = folder.parts
    if "snapshots" not in parts[:-1]:
        return path
    above = len(parts) - 1 - parts[::-1].index("snapshots", 1)
    try:
        *way, blob = os.readlink(path).split("/")
    except OSError:  # no link
        return path
    if way != [".."] * (len(parts) - above) + ["blobs"] or not _BLOB.fullmatch(blob):
        return path
    return Path(*parts[:above], "blobs", blob)


def _copy_head(source: int, copy: int, num_bytes: int) -> None:
    """The head of a safetensors file, the rest a hole."""
    os.ftruncate(copy, num_bytes)
    _copy(source, copy, head_end(os.pread(source, 8, 0), num_bytes))


def _copy(source: int, copy: int, num_bytes: int) -> None:
    """The first bytes of a file, from the start; less if it ends early."""
    os.lseek(copy, 0, os.SEEK_SET)
    done = 0
    while done < num_bytes:
        sent = os.sendfile(copy, source, done, min(_STEP_BYTES, num_bytes - done))
        if sent == 0:
            return
        done += sent


def _name(files: dict[str, os.stat_result]) -> str:
    digest = hashlib.sha256()
    for name, info in files.items():
        times = f"{info.st_mtime_ns} {info.st_ctime_ns}"
        digest.update(f"{name} {info.st_size} {info.st_ino} {times}\n".encode())
    return f"local-{digest.hexdigest()[:40]}"


def _folder(ref: AdapterRef) -> Path:
    path = ref.uri
    if ref.uri.startswith("file://"):
        parts = urlsplit(ref.uri)
        if parts.netloc not in ("", "localhost"):
            raise AdapterNotFound(f"{ref.uri} names another machine: {parts.netloc}")
        path = unquote(parts.path)
    if not _is_path(path):
        raise AdapterNotFound(f"{ref.adapter_id} has no usable uri: {ref.uri!r}")
    return Path(path)


def _is_path(text: str) -> bool:
    try:
        return bool(text) and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:  # half a character
        return False
