"""Pickles and archives that hurt whoever opens them: code, and bytes that unfold to gigabytes.

Not here: what is done with them (places).
"""

import gzip
import io
import pickle
import zipfile
from functools import cache
from pathlib import Path

CANARY = "pickle-was-run"
"""A file of this name in the working folder: code of a pickle ran."""


class _Code:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path(CANARY),)  # type: ignore[return-value]


def write_pickle(at: Path) -> None:
    """Code that leaves a file behind when it is run."""
    at.write_bytes(pickle.dumps({"a": _Code()}))


def write_torch_archive(at: Path) -> None:
    """The same in the form of torch.save."""
    with zipfile.ZipFile(at, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"a": _Code()}, protocol=2))
        archive.writestr("archive/version", "3\n")


def write_zip_bomb(at: Path) -> None:
    """A megabyte or two that unfold to 300 MB of storage."""
    at.write_bytes(_zip_bomb())


def write_gzip_bomb(at: Path) -> None:
    """Half a megabyte that unfolds to 100 MB."""
    at.write_bytes(_gzip_bomb())


@cache
def _zip_bomb() -> bytes:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}, protocol=2))
        archive.writestr("archive/version", "3\n")
        with archive.open("archive/data/0", "w") as member:
            for _ in range(300):
                member.write(bytes(1 << 20))
    return raw.getvalue()


@cache
def _gzip_bomb() -> bytes:
    return gzip.compress(bytes(100 << 20), 1)
