"""Adapters in folders of this machine. The files are copied, so that nobody can change them while
they are read.

Links are refused: a folder is a tenant's, and what its links point to need not be. So are pipes and
devices. From the ref's root on the way is gone step by step, and the files are asked for in the
folder that was found, whatever its name leads to meanwhile. But a snapshot in a cache of Hugging
Face's hub is nothing but links to the blobs beside it: these are read. As much is copied as the
file had at first, however it grows meanwhile.
"""

import hashlib
import os
import re
import stat
from contextlib import ExitStack, suppress
from pathlib import Path, PurePath
from types import TracebackType
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
    cannot_keep,
    check_files,
    check_sizes,
    head_end,
    take_room,
)

_STEP_BYTES = 16 << 20
_BLOB = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")  # a git or SHA-256 digest
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


class LocalSource:
    """`/folder`, `folder` or `file:///folder`.

    The revision is made of name, size, inode and times of each file.
    """

    def __init__(self, s3: S3Options | None = None, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._max_bytes = max_bytes

    def revision(self, ref: AdapterRef) -> str:
        """See `Source`. A file that is rewritten gets other times, hence another revision."""
        with _Folder(ref) as folder:
            return _name(self._list(ref, folder))

    def fetch(self, ref: AdapterRef, into: Path, revision: str, judge: Judge | None = None) -> None:
        """See `Source`. Folders keep no older versions."""
        with _Folder(ref) as folder:
            listed = self._list(ref, folder)
            if _name(listed) != revision:
                raise AdapterChanged(f"{ref.uri} no longer holds {revision}")
            for name, info in listed.items():
                what = f"{ref.uri}/{name}"
                try:
                    fd = folder.open(name)
                except AdapterNotFound as e:
                    raise AdapterChanged(f"{what} vanished while it was read") from e
                try:
                    is_judged = name == WEIGHTS_FILE and info.st_size > JUDGED_FROM_BYTES
                    with open(into / name, "w+b") as copy:
                        if judge is not None and is_judged:
                            _copy_head(fd, copy.fileno(), info.st_size)
                            judge(into)
                        take_room(copy.fileno(), info.st_size, what)
                        copied = _copy(fd, copy.fileno(), info.st_size)
                    if copied != info.st_size or os.fstat(fd).st_size != info.st_size:
                        raise AdapterChanged(f"{what} changed while it was read")
                except OSError as e:
                    raise cannot_keep(what, info.st_size, e) from e
                finally:
                    os.close(fd)

    def _list(self, ref: AdapterRef, folder: "_Folder") -> dict[str, os.stat_result]:
        """Known files -> stat, in the order of reading."""
        infos: dict[str, os.stat_result] = {}
        try:
            for name in (*FILES, *OPTIONAL_FILES, *PICKLE_FILES):
                with suppress(FileNotFoundError):
                    infos[name] = folder.stat(name)
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


class _Folder:
    """An adapter's folder, open for as long as the context.

    Errors:  AdapterNotFound if it is not there, AdapterUnavailable if it may not be read,
             AdapterInvalid("file") if the way to it leads out of the ref's root or over a link.
    """

    def __init__(self, ref: AdapterRef) -> None:
        self._open = ExitStack()
        top, way = _way(ref)
        try:
            with ExitStack() as opened:
                fd = _enter(opened, top)
                for name in way:
                    try:
                        fd = _enter(opened, name, fd)
                    except NotADirectoryError:
                        if not stat.S_ISLNK(os.lstat(name, dir_fd=fd).st_mode):
                            raise
                        what = f"{name} is a symbolic link, and below {ref.root} none is followed"
                        raise AdapterInvalid("file", f"{ref.uri}: {what}") from None
                self._fd, self._parts = fd, (*PurePath(os.path.realpath(top)).parts, *way)
                self._open = opened.pop_all()
        except (FileNotFoundError, NotADirectoryError) as e:
            raise AdapterNotFound(f"{ref.uri} is no folder") from e
        except OSError as e:
            raise AdapterUnavailable(f"cannot read {ref.uri}: {e.strerror}") from e

    def __enter__(self) -> "_Folder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._open.close()

    def stat(self, name: str) -> os.stat_result:
        """Of a file; of a link, if it leads to no blob beside the folder. Errors: OSError."""
        fd, name = self._place(name)
        return os.lstat(name, dir_fd=fd)

    def open(self, name: str) -> int:
        """A file's descriptor. Errors: those of `open_regular`."""
        fd, name = self._place(name)
        return open_regular(Path(name), fd)

    def _place(self, name: str) -> tuple[int, str]:
        """Where a file lies: in its folder, or with the blobs of the cached repository that the
        folder is a snapshot of. Links to any other place stay what they are.

        Source: https://huggingface.co/docs/huggingface_hub/guides/manage-cache
        """
        itself = self._fd, name
        if "snapshots" not in self._parts[:-1]:
            return itself
        up = self._parts[::-1].index("snapshots", 1) + 1
        try:
            *way, blob = os.readlink(name, dir_fd=self._fd).split("/")
            if way != [".."] * up + ["blobs"] or not _BLOB.fullmatch(blob):
                return itself
            return _enter(self._open, "/".join(way), self._fd), blob
        except OSError:  # no link, or no folder of blobs
            return itself


def _enter(opened: ExitStack, path: str, parent_fd: int | None = None) -> int:
    """Descriptor of a folder. A link is followed only if the path starts from nowhere else."""
    flags = _FOLDER if parent_fd is None else _FOLDER | os.O_NOFOLLOW
    fd = os.open(path, flags, dir_fd=parent_fd)
    opened.callback(os.close, fd)
    return fd


def _copy_head(source: int, copy: int, num_bytes: int) -> None:
    """The head of a safetensors file, the rest a hole."""
    os.ftruncate(copy, num_bytes)
    _copy(source, copy, head_end(os.pread(source, 8, 0), num_bytes))


def _copy(source: int, copy: int, num_bytes: int) -> int:
    """The first bytes of a file, from the start, and how many; less if it ends early."""
    os.lseek(copy, 0, os.SEEK_SET)
    done = 0
    while done < num_bytes:
        sent = os.sendfile(copy, source, done, min(_STEP_BYTES, num_bytes - done))
        if sent == 0:
            break
        done += sent
    return done


def _name(files: dict[str, os.stat_result]) -> str:
    digest = hashlib.sha256()
    for name, info in files.items():
        times = f"{info.st_mtime_ns} {info.st_ctime_ns}"
        digest.update(f"{name} {info.st_size} {info.st_ino} {times}\n".encode())
    return f"local-{digest.hexdigest()[:40]}"


def _way(ref: AdapterRef) -> tuple[str, tuple[str, ...]]:
    """The folder that is the operator's own, and the names from there to the adapter's.

    Errors:  AdapterInvalid("file") if it does not lie below the ref's root, read without its dots.
    """
    folder = _folder(ref, ref.uri)
    if not ref.root:
        return folder, ()
    top = _folder(ref, ref.root)
    way = os.path.relpath(folder, top)
    parts = PurePath(way).parts
    if ".." in parts:
        raise AdapterInvalid("file", f"{ref.uri} does not lie below {ref.root}")
    return top, parts


def _folder(ref: AdapterRef, uri: str) -> str:
    path = uri
    if uri.startswith("file://"):
        parts = urlsplit(uri)
        if parts.netloc not in ("", "localhost"):
            raise AdapterNotFound(f"{uri} names another machine: {parts.netloc}")
        path = unquote(parts.path)
    if not _is_path(path):
        raise AdapterNotFound(f"{ref.adapter_id} has no usable uri: {uri!r}")
    return path


def _is_path(text: str) -> bool:
    try:
        return bool(text) and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:  # half a character
        return False
