"""Adapters in S3 and what speaks its language. The only file that knows boto3.

boto3 retries requests but never a broken body, so bodies are read here: ranged parts bound to one
ETag, each resumed where it broke, a checksum over the whole file where the server keeps one.
"""

import base64
import hashlib
import os
import random
import re
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import boto3
from botocore.client import Config
from botocore.exceptions import BotoCoreError, ClientError, ParamValidationError

from adapter_store.errors import AdapterChanged, AdapterNotFound, AdapterUnavailable
from adapter_store.ref import AdapterRef
from adapter_store.sources.source import (
    CONFIG_FILE,
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

_CHUNK_BYTES = 1 << 18
_MISSING = {"NoSuchKey", "NoSuchBucket", "404", "NotFound", "NoSuchVersion"}
_NO_VERSION = ("", "null")
"""What an object's version is called that was put while its bucket kept none."""

_REVISION = "s3-"
_session_lock = threading.Lock()


@dataclass(frozen=True)
class _Object:
    """One object as HEAD or GET described it: what a later GET is bound to.

    version  as the revision spells it;  asked  the version that a request must name, "" = none: an
             object that is the current one and has no version of its own needs fewer rights so
    """

    key: str
    size: int
    etag: str
    version: str
    checks: tuple[tuple[str, str], ...]
    asked: str = ""


class _Changed(Exception):
    """The object is another one than at the start."""


class S3Source:
    """`s3://bucket/prefix`. The revision spells size, ETag and version of each file, so an older
    one can still be read where the bucket keeps versions; files that need not be there by name."""

    def __init__(self, s3: S3Options | None = None, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._options = s3 or S3Options()
        self._max_bytes = max_bytes
        self._made: Any = None

    def revision(self, ref: AdapterRef) -> str:
        """See `Source`. A request for each file that an adapter may have."""
        files = []
        for name, obj in self._describe(ref).items():
            parts = str(obj.size), obj.etag.strip('"'), obj.version
            words = "/".join(quote(part, safe="") for part in parts)
            files.append(words if name in FILES else f"{name}:{words}")
        return _REVISION + "+".join(files)

    def fetch(self, ref: AdapterRef, into: Path, revision: str, judge: Judge | None = None) -> None:
        """See `Source`. Every read is bound to the ETag and, where there is one, the version."""
        bucket, _ = _split(ref)
        try:
            for name, obj in self._describe_at(ref, revision).items():
                if judge is not None and name == WEIGHTS_FILE and obj.size > JUDGED_FROM_BYTES:
                    self._download_head(ref, bucket, obj, into / name)
                    judge(into)
                self._download(ref, bucket, obj, into / name)
        except _Changed as e:
            raise AdapterChanged(f"{ref.uri} no longer holds {revision}") from e

    def _client(self) -> Any:
        """The boto3 client, made at the first request: slow to make, and not by two threads."""
        with _session_lock:
            if self._made is None:
                o = self._options
                session = boto3.session.Session(
                    aws_access_key_id=o.access_key or None,
                    aws_secret_access_key=o.secret_key or None,
                    aws_session_token=o.session_token or None,
                    region_name=o.region or None,
                )
                config = Config(
                    connect_timeout=o.connect_timeout_s,
                    read_timeout=o.read_timeout_s,
                    retries={"mode": "standard", "total_max_attempts": o.attempts},
                    max_pool_connections=64,
                    request_checksum_calculation="when_required",
                    response_checksum_validation="when_required",
                    s3={"addressing_style": "path" if o.endpoint_url else "auto"},
                )
                endpoint = o.endpoint_url or None
                self._made = session.client("s3", endpoint_url=endpoint, config=config)
            return self._made

    def _describe(self, ref: AdapterRef) -> dict[str, _Object]:
        """File name -> object, in the order of reading."""
        bucket, prefix = _split(ref)
        found: dict[str, _Object] = {}

        def look(names: tuple[str, ...]) -> None:
            for name in names:
                obj = self._head(bucket, f"{prefix}{name}")
                if obj is not None:
                    found[name] = obj

        with _errors(ref):
            look(FILES)
            if WEIGHTS_FILE not in found:
                look(PICKLE_FILES)
            if not found:  # no bucket, or an empty prefix: only a GET tells
                key = f"{prefix}{CONFIG_FILE}"
                self._client().get_object(Bucket=bucket, Key=key)["Body"].close()
        check_files(ref, found)
        with _errors(ref), ThreadPoolExecutor(len(OPTIONAL_FILES), "s3-look") as pool:
            keys = [f"{prefix}{name}" for name in OPTIONAL_FILES]
            heads = pool.map(partial(self._head_if_allowed, bucket), keys)
            optional = {name: obj for name, obj in zip(OPTIONAL_FILES, heads, strict=True) if obj}
        chosen = {name: found[name] for name in FILES} | optional
        check_sizes(ref, {name: obj.size for name, obj in chosen.items()}, self._max_bytes)
        return chosen

    def _describe_at(self, ref: AdapterRef, revision: str) -> dict[str, _Object]:
        """The same for a revision that was named before; `_Changed` if it cannot be had."""
        bucket, prefix = _split(ref)
        files = revision.removeprefix(_REVISION).split("+")
        found: dict[str, _Object] = {}
        for number, file in enumerate(files):
            named, _, words = file.rpartition(":")
            name = named or FILES[number]
            size, etag, version = (unquote(value) for value in words.split("/"))
            key = f"{prefix}{name}"
            with _errors(ref):
                obj = self._head(bucket, key, "" if version in _NO_VERSION else version)
                if version in _NO_VERSION and not _is_of(obj, size, etag):
                    obj = self._head_unversioned(bucket, key)
            if obj is None or not _is_of(obj, size, etag):
                raise _Changed
            found[name] = obj
        check_sizes(ref, {name: obj.size for name, obj in found.items()}, self._max_bytes)
        return found

    def _head_if_allowed(self, bucket: str, key: str) -> _Object | None:
        """`_head` of what need not be there: whoever may not list a bucket is told 403 instead of
        404 for it."""
        try:
            return self._head(bucket, key)
        except ClientError as e:
            if e.response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 403:
                return None
            raise

    def _head_unversioned(self, bucket: str, key: str) -> _Object | None:
        """What the object was before its bucket began to keep versions, if it was kept; None also
        where such a question is refused."""
        try:
            return self._head(bucket, key, "null")
        except ClientError as e:
            if 400 <= e.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) < 500:
                return None
            raise

    def _head(self, bucket: str, key: str, version: str = "") -> _Object | None:
        """What the object is now, or was at a version; None if there is none."""
        client = self._client()
        which = {"VersionId": version} if version else {}
        try:
            answer = client.head_object(Bucket=bucket, Key=key, ChecksumMode="ENABLED", **which)
        except ClientError as e:
            if _code(e) in _MISSING:
                return None
            # A refused HEAD is a bare status; the same GET says in words what is wrong.
            client.get_object(Bucket=bucket, Key=key, Range="bytes=0-0", **which)["Body"].close()
            raise
        found = str(answer.get("VersionId", ""))
        return _Object(
            key=key,
            size=int(answer["ContentLength"]),
            etag=str(answer["ETag"]),
            version=found,
            checks=tuple(_checks(bucket, answer)),
            asked=version or ("" if found in _NO_VERSION else found),
        )

    def _download_head(self, ref: AdapterRef, bucket: str, obj: _Object, path: Path) -> None:
        """The head of a safetensors file, the rest a hole."""
        with open(path, "w+b") as file:
            file.truncate(obj.size)
            fd, first = file.fileno(), min(_CHUNK_BYTES, obj.size)
            self._read_part(ref, bucket, obj, fd, 0, first)
            end = head_end(os.pread(fd, 8, 0), obj.size)
            if end > first:
                self._read_part(ref, bucket, obj, fd, first, end)

    def _download(self, ref: AdapterRef, bucket: str, obj: _Object, path: Path) -> None:
        """One object into one file: parts side by side, then the checksum; twice if it fails."""
        for attempt in range(2):
            with open(path, "w+b") as file:
                take_room(file.fileno(), obj.size, f"s3://{bucket}/{obj.key}")
                step = self._options.part_bytes
                parts = [(i, min(i + step, obj.size)) for i in range(0, obj.size, step)]

                def read(part: tuple[int, int], fd: int = file.fileno()) -> None:
                    self._read_part(ref, bucket, obj, fd, *part)

                if len(parts) <= 1:
                    for part in parts:
                        read(part)
                else:
                    workers = min(len(parts), self._options.parts_at_once)
                    with ThreadPoolExecutor(workers, "s3-part") as pool:
                        try:
                            for done in [pool.submit(read, part) for part in parts]:
                                done.result()
                        except BaseException:
                            pool.shutdown(wait=True, cancel_futures=True)
                            raise
            wrong = _failed_check(path, obj)
            if wrong is None:
                return
            if attempt:
                raise AdapterUnavailable(f"s3://{bucket}/{obj.key}: broken body, {wrong}")

    def _read_part(
        self, ref: AdapterRef, bucket: str, obj: _Object, fd: int, start: int, end: int
    ) -> None:
        """Bytes [start, end) into their place, resumed where the body broke."""
        pos, o = start, self._options
        deadline = time.monotonic() + o.part_timeout_s
        wrong = ""
        for attempt in range(o.attempts):
            if attempt:
                time.sleep(min(2.0, 0.1 * 2**attempt) * random.uniform(0.5, 1.0))
            with _errors(ref):
                body = self._get(bucket, obj, pos, end)
            try:
                while pos < end and time.monotonic() < deadline:
                    data = body.read(min(_CHUNK_BYTES, end - pos))
                    if not data:
                        break
                    _write(fd, data, pos)
                    pos += len(data)
                wrong = f"ends {end - pos} bytes early"
            except (BotoCoreError, OSError) as e:
                wrong = f"breaks with {type(e).__name__} ({_short(e)})"
            finally:
                body.close()
            if pos == end:
                return
            if time.monotonic() >= deadline:
                wrong = f"part slower than {o.part_timeout_s} s"
                break
        where = f"s3://{bucket}/{obj.key} at byte {pos} of {obj.size}"
        raise AdapterUnavailable(f"{where}: broken body, {wrong}; tried {attempt + 1} times")

    def _get(self, bucket: str, obj: _Object, start: int, end: int) -> Any:
        """The body of a ranged GET bound to the object's ETag; `_Changed` if it has another."""
        kwargs = {"VersionId": obj.asked} if obj.asked else {}
        try:
            answer = self._client().get_object(
                Bucket=bucket,
                Key=obj.key,
                Range=f"bytes={start}-{end - 1}",
                IfMatch=obj.etag,
                **kwargs,
            )
        except ClientError as e:
            if _code(e) in _MISSING | {"PreconditionFailed", "412", "InvalidRange", "416"}:
                raise _Changed from e
            raise
        if answer["ETag"] != obj.etag or answer["ContentLength"] != end - start:
            answer["Body"].close()
            raise _Changed
        return answer["Body"]


@contextmanager
def _errors(ref: AdapterRef) -> Iterator[None]:
    """Turn boto's errors into ours: what is missing apart from what cannot be reached."""
    try:
        yield
    except ClientError as e:
        code = _code(e)
        status = e.response.get("ResponseMetadata", {}).get("HTTPStatusCode", "no status")
        text = f"{ref.uri}: {code} ({status}): {e.response.get('Error', {}).get('Message', '')}"
        if code in _MISSING:
            raise AdapterNotFound(text) from e
        if code in ("PermanentRedirect", "301", "AuthorizationHeaderMalformed"):
            text += "; the region or the endpoint is wrong"
        raise AdapterUnavailable(text) from e
    except ParamValidationError as e:
        raise AdapterNotFound(f"{ref.uri}: {_short(e)}") from e
    except BotoCoreError as e:
        raise AdapterUnavailable(f"{ref.uri}: {type(e).__name__}: {_short(e)}") from e
    except ValueError as e:  # boto: an endpoint that is no URL
        raise AdapterUnavailable(f"{ref.uri}: {_short(e)}") from e


def _split(ref: AdapterRef) -> tuple[str, str]:
    """(bucket, prefix that ends with / or is empty)."""
    bucket, _, prefix = ref.uri.removeprefix("s3://").partition("/")
    prefix = prefix.strip("/")
    if not bucket or any(part in ("", ".", "..") for part in prefix.split("/") if prefix):
        raise AdapterNotFound(f"{ref.uri!r} is not s3://bucket/prefix")
    return bucket, f"{prefix}/" if prefix else ""


def _write(fd: int, data: bytes, pos: int) -> None:
    left = memoryview(data)
    try:
        while left:  # a write that meets the end of space gives what it wrote, and no error
            done = os.pwrite(fd, left, pos)
            left, pos = left[done:], pos + done
    except OSError as e:  # no space: another try would not help
        raise cannot_keep("what was read", len(left), e) from e


def _is_of(obj: _Object | None, size: str, etag: str) -> bool:
    return obj is not None and (str(obj.size), obj.etag.strip('"')) == (size, etag)


def _code(e: ClientError) -> str:
    return str(e.response.get("Error", {}).get("Code", ""))


def _short(e: Exception) -> str:
    return " ".join(str(e).split())[:200]


def _checks(bucket: str, answer: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(algorithm, expected hex) of whole-object checksums that the server keeps."""
    if answer.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT":
        for name in ("SHA256", "CRC32"):
            value = str(answer.get(f"Checksum{name}", ""))
            if value and "-" not in value:
                yield name.lower(), base64.b64decode(value).hex()
    # An ETag is the MD5 of the body only for one-part objects that no customer or KMS key encrypts,
    # and never in directory buckets.
    plain = answer.get("ServerSideEncryption", "AES256") == "AES256"
    etag = str(answer["ETag"]).strip('"')
    ours = plain and "SSECustomerAlgorithm" not in answer and not bucket.endswith("--x-s3")
    if ours and re.fullmatch(r"[0-9a-f]{32}", etag):
        yield "md5", etag


def _failed_check(path: Path, obj: _Object) -> str | None:
    """What is wrong with the file, or None. The first checksum that is known decides."""
    if not obj.checks:
        return None
    name, want = obj.checks[0]
    if name == "crc32":
        crc = 0
        with open(path, "rb") as file:
            while chunk := file.read(1 << 20):
                crc = zlib.crc32(chunk, crc)
        got = f"{crc:08x}"
    else:
        with open(path, "rb") as file:
            got = hashlib.file_digest(file, name).hexdigest()
    return None if got == want else f"{name} is {got}, not {want}"
