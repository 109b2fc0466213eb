"""The flags that this service is run and measured with. Ray Serve reads them from the environment
when it is imported, in every process. No Ray here. A Ray that `serve run` starts gets them from
`set_unset`; where there is a Ray already, set them before `ray start`, on every node:

    export $(python -m deployments.serve_flags)

Without gRPC between deployments the loss of a node stops the streams of others as well: a replica
waits, and its whole event loop with it, until Ray knows that an ingress it streams to is dead.

THROUGHPUT_OPTIMIZED      user code on the main loop, gRPC between deployments
PROXY_USE_GRPC            gRPC from the HTTP proxy as well, which the first one forgets
MAX_MESSAGE_LENGTH        what gRPC lets pass: an answer that is not streamed is one message
PROXY_CALLBACK            the guards around the proxy, without which a client can take its memory
PROXY_READY_CHECK         seconds in which the proxy must be up, three times: with Ray's own 5, one
                          that starts on a busy machine is killed, and `serve run` fails
"""

import logging
import os
from collections.abc import MutableMapping
from logging.handlers import MemoryHandler
from pathlib import Path

SERVE_FLAGS = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_PROXY_USE_GRPC": "1",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(64 << 20),
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deployments.edge:guards",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "20",
}


def unset(environment: MutableMapping[str, str] = os.environ) -> list[str]:
    """The flags that nobody has set, to whatever value."""
    return [name for name in SERVE_FLAGS if name not in environment]


def set_unset(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set those that nobody has set, for a Ray that is started from here; its proxies find the
    module of the guards, installed or not. It has no load balancer in front: Serve need not wait
    half a minute for one when it stops."""
    for name in unset(environment):
        environment[name] = SERVE_FLAGS[name]
    environment.setdefault("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "0")
    root = str(Path(__file__).parents[1])
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    if root not in paths:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, *paths)))


def open_log(log: logging.Logger) -> None:
    """Let each line of this process be read at once, and tell the flags that this node's Ray was
    started without.

    With THROUGHPUT_OPTIMIZED Ray Serve writes lines by the thousand, to save requests the time;
    ours write none, and why an adapter moved must be there when somebody looks.
    """
    for handler in log.handlers:
        if isinstance(handler, MemoryHandler):
            handler.flushLevel = logging.NOTSET
            handler.flush()
    if missing := unset():
        log.warning("Ray runs here without %s: infra/README.md says how to set them", missing)


if __name__ == "__main__":
    print("\n".join(f"{name}={value}" for name, value in SERVE_FLAGS.items()))
