"""Where usage records are kept: immutable objects in S3 or, on one machine, files in a folder.

Not here: what is in them (usage.py). One of the files that know boto3.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import boto3
from botocore.client import Config
from botocore.exceptions import BotoCoreError, ClientError


class StoreError(Exception):
    """The store cannot be used just now, or not at all; the message says why."""


class UsageStore(Protocol):
    """Objects that are written once. Every method blocks. Errors: StoreError."""

    def put_new(self, name: str, body: bytes) -> None:
        """Keep an object, whole or not at all; one of that name stays as it is."""
        ...

    def names(self, prefix: str) -> Iterator[str]:
        """Names of all objects that begin so."""
        ...

    def read(self, name: str) -> bytes: ...


class FolderStore:
    """A folder; every object is a file that appears at once, on disk before it has its name."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def put_new(self, name: str, body: bytes) -> None:
        path = self._folder / name
        part = path.with_name(f".{path.name}.{uuid4().hex}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with open(part, "xb") as file:
                    file.write(body)
                    file.flush()
                    os.fsync(file.fileno())
                os.link(part, path)
            except FileExistsError:
                return
            finally:
                part.unlink(missing_ok=True)
        except OSError as exc:
            raise StoreError(f"{path}: {exc.strerror}") from exc

    def names(self, prefix: str) -> Iterator[str]:
        for path in sorted(self._folder.glob("*/[!.]*.jsonl")):
            name = path.relative_to(self._folder).as_posix()
            if name.startswith(prefix):
                yield name

    def read(self, name: str) -> bytes:
        try:
            return (self._folder / name).read_bytes()
        except OSError as exc:
            raise StoreError(f"{self._folder / name}: {exc.strerror}") from exc


class S3Store:
    """`s3://bucket/prefix`, written with conditional puts.

    endpoint_url, region, access_key, secret_key  "" = what boto3's own environment says
    """

    def __init__(
        self, root: str, endpoint_url: str, region: str, access_key: str, secret_key: str
    ) -> None:
        self._root = root
        self._bucket, _, prefix = root.removeprefix("s3://").partition("/")
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        config = Config(
            connect_timeout=3,
            read_timeout=5,
            retries={"mode": "standard", "total_max_attempts": 2},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": "path" if endpoint_url else "auto"},
        )
        self._client: Any = boto3.session.Session(
            aws_access_key_id=access_key or None,
            aws_secret_access_key=secret_key or None,
            region_name=region or None,
        ).client("s3", endpoint_url=endpoint_url or None, config=config)

    def put_new(self, name: str, body: bytes) -> None:
        key = self._prefix + name
        try:
            self._client.put_object(Bucket=self._bucket, Key=key, Body=body, IfNoneMatch="*")
        except ClientError as exc:
            if exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode") != 412:
                raise self._error(name, exc) from exc
        except BotoCoreError as exc:
            raise self._error(name, exc) from exc

    def names(self, prefix: str) -> Iterator[str]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._prefix + prefix
        )
        try:
            for page in pages:
                for entry in page.get("Contents", ()):
                    yield str(entry["Key"]).removeprefix(self._prefix)
        except (BotoCoreError, ClientError) as exc:
            raise self._error(prefix, exc) from exc

    def read(self, name: str) -> bytes:
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)
            return bytes(answer["Body"].read())
        except (BotoCoreError, ClientError) as exc:
            raise self._error(name, exc) from exc

    def _error(self, name: str, exc: Exception) -> StoreError:
        return StoreError(f"{self._root.rstrip('/')}/{name}: {' '.join(str(exc).split())[:200]}")


def open_store(root: str, s3: tuple[str, str, str, str]) -> UsageStore:
    """The store at `s3://bucket/prefix` or in a folder. s3  the rest of what `S3Store` takes."""
    return S3Store(root, *s3) if root.startswith("s3://") else FolderStore(root)
