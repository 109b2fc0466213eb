"""A Ray of this machine alone, for one module of tests: a folder, a port, an environment.

Not for several nodes (ray_cluster.py).
"""

import atexit
import functools
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray
from ray import serve

from deployments.local_s3 import free_ports

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class RayWorld:
    """private  a folder that goes at the end;  port  of 127.0.0.1, for the service"""

    private: Path
    port: int


@contextmanager
def ray_world(environment: Mapping[str, str]) -> Iterator[RayWorld]:
    """What Ray's processes are to find set; at the end they are gone, and so is all of it."""
    # Short: the path of a Unix socket, which Ray puts below it, has at most 107 characters.
    private = Path(tempfile.mkdtemp(prefix="rw-", dir="/tmp"))
    (port,) = free_ports(1)
    ours = {
        "RAY_TMPDIR": str(private),
        "RAY_AUTH_TOKEN_PATH": str(_token()),
        "PYTHONPATH": str(ROOT),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (ours | dict(environment)).items():
            patch.setenv(name, value)
        try:
            yield RayWorld(private, port)
        finally:
            end_ray()
            shutil.rmtree(private, ignore_errors=True)


def start_ray() -> None:
    """One node, in the world around this."""
    ray.init(
        address="local",
        include_dashboard=False,
        num_cpus=2,
        object_store_memory=80 << 20,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )


def end_ray() -> None:
    """The service first; nothing happens where there is no Ray."""
    if ray.is_initialized():
        serve.shutdown()
        ray.shutdown()


@functools.cache
def _token() -> Path:
    """One for all worlds of a process: Ray keeps the first that it has read."""
    folder = Path(tempfile.mkdtemp(prefix="rt-", dir="/tmp"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    return token
