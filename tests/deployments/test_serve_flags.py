"""Every flag is known to the Ray Serve that is installed, and read as we mean it."""

import os
import subprocess
import sys

from deployments.serve_flags import SERVE_FLAGS

PROGRAM = """
import ray.serve._private.constants as c
assert c.RAY_SERVE_THROUGHPUT_OPTIMIZED and c.RAY_SERVE_PROXY_USE_GRPC
assert c.RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH == 64 << 20
assert c.RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH == "deployments.edge:guards"
assert c.PROXY_READY_CHECK_TIMEOUT_S * c.PROXY_HEALTH_CHECK_UNHEALTHY_THRESHOLD == 60.0
assert c.HTTP_PROXY_TIMEOUT == 60
"""


def test_ray_reads_every_flag() -> None:
    assert len(SERVE_FLAGS) == 5
    words = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        words, env=os.environ | SERVE_FLAGS, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_shell_can_set_them_all() -> None:
    words = [sys.executable, "-m", "deployments.serve_flags"]
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert dict(line.split("=", 1) for line in printed.split()) == SERVE_FLAGS
