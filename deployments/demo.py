"""The demo: three tenants over one small base model, all on this machine, no trace left at the end.

It starts what production has elsewhere (S3, Ray), and then the application that production runs.
Not for production: there Ray and the bucket exist already.
"""

import argparse
import json
import logging
import os
import secrets
import shlex
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from deployments.config import DEFAULT_CONFIG, load_config
from deployments.keeper import run_kept
from deployments.local_s3 import REGION, LocalS3, free_ports, is_free, weed_binary
from deployments.serve_flags import SERVE_FLAGS

REPOSITORY = Path(__file__).resolve().parent.parent
BUCKET = "adapters"
QUESTION = "What is the capital of Japan?"
GRACE_S = 12.0
_READY_S = 120.0
_PREFERRED_PORT = 8000


def main() -> int:
    """Parse the command line, run the demo below a keeper, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m deployments.demo", description=__doc__)
    parser.add_argument(
        "--port", type=int, default=0, help="HTTP port (default 8000 if it is free)"
    )
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help="models and tenants")
    parser.add_argument(
        "--adapters",
        choices=("s3", "folder"),
        default="s3",
        help="read adapters from a local S3 server (default) or straight from their folder",
    )
    parser.add_argument("--dashboard", action="store_true", help="start Ray's dashboard too")
    options = parser.parse_args()
    load_config(options.config)  # errors in it are told here, before anything starts
    settings = yaml.safe_load(options.config.read_text(encoding="utf-8"))

    # Short: the path of a Unix socket, which Ray puts below it, has at most 107 characters.
    private = Path(tempfile.mkdtemp(prefix="demo-", dir="/tmp"))
    memory = Path("/dev/shm")
    cache = (memory / private.name) if memory.is_dir() else private / "cache"
    cache.mkdir(mode=0o700)
    server = LocalS3(private / "s3") if options.adapters == "s3" and weed_binary() else None
    if options.adapters == "s3" and server is None:
        say("no SeaweedFS for this machine: adapters come straight from their folder, without S3")
    port = options.port or (_PREFERRED_PORT if is_free(_PREFERRED_PORT) else free_ports(1)[0])
    demo = Demo(options.config, settings, private, cache, server, port, options.dashboard)
    leftovers = [private, cache, *(server.leftovers if server else ())]
    return run_kept(demo.run, leftovers, GRACE_S)


class Demo:
    """One run of the demo. Made in the front process, which starts nothing; run in the worker."""

    def __init__(
        self,
        config_file: Path,
        settings: dict[str, Any],
        private: Path,
        cache: Path,
        server: LocalS3 | None,
        port: int,
        dashboard: bool,
    ) -> None:
        self._folder = config_file.resolve().parent
        self._settings = settings
        self._private = private
        self._cache = cache
        self._server = server
        self._port = port
        self._dashboard = dashboard
        self._url = f"http://127.0.0.1:{port}"

    def run(self) -> int:
        """Start everything, say how to use it, and wait to be stopped."""
        begin = time.monotonic()
        self._set_environment()
        if self._server is not None:
            say("starting S3 ...")
            self._server.start()
            self._fill_bucket(self._server)
        config_file = self._private / "config.yaml"
        config_file.write_text(yaml.safe_dump(self._service_settings(), sort_keys=False))
        say("starting Ray and the service: half a minute, more on a busy machine ...")
        try:
            self._start_service(config_file)
            say(f"ready after {time.monotonic() - begin:.0f} s")
            print("\n".join(self._instructions()), flush=True)
            while True:
                signal.pause()
        finally:
            say("stopping ...")
            self._stop_service()
            say("stopped")

    def _set_environment(self) -> None:
        """What Ray and its workers read when they start; they inherit it from this process."""
        token = self._private / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        os.environ |= {
            "PYTHONPATH": os.pathsep.join(
                filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH")))
            ),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "TOKENIZERS_PARALLELISM": "false",
            "RAY_TMPDIR": str(self._private),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            # Despite its name: a node that stays on 127.0.0.1, on Linux as well.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            # Ray runs its workers at nice 15, which on a busy machine is a start of minutes.
            "RAY_worker_niceness": "0",
            **SERVE_FLAGS,
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
        }
        os.environ.pop("RAY_ADDRESS", None)
        if self._server is not None:
            os.environ |= {
                "AWS_ACCESS_KEY_ID": self._server.access_key,
                "AWS_SECRET_ACCESS_KEY": self._server.secret_key,
            }

    def _fill_bucket(self, server: LocalS3) -> None:
        server.client().create_bucket(Bucket=BUCKET)
        folder = self._folder / self._settings["adapters"]["root"]
        count = server.upload(folder, BUCKET)
        say(f"{count} files of adapters are in s3://{BUCKET} at {server.endpoint_url}")

    def _service_settings(self) -> dict[str, Any]:
        """The config file's settings, with absolute folders, our port and the bucket."""
        settings = dict(self._settings)
        settings["models"] = [
            model | {"path": str((self._folder / model["path"]).resolve())}
            for model in settings["models"]
        ]
        adapters = dict(settings["adapters"])
        adapters["root"] = str((self._folder / adapters["root"]).resolve())
        adapters["host_cache_dir"] = str(self._cache)
        if self._server is not None:
            adapters["root"] = f"s3://{BUCKET}"
            adapters["s3"] = {"endpoint_url": self._server.endpoint_url, "region": REGION}
        settings["adapters"] = adapters
        settings["http"] = {"host": "127.0.0.1", "port": self._port}
        return settings

    def _start_service(self, config_file: Path) -> None:
        import ray

        from deployments.application import start

        ray.init(
            address="local",
            include_dashboard=self._dashboard,
            num_cpus=max(2, os.cpu_count() or 1),
            object_store_memory=100 << 20,
            log_to_driver=False,
            logging_level="warning",
            _node_ip_address="127.0.0.1",
            _temp_dir=str(self._private / "r"),
        )
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        start(load_config(config_file))
        deadline = time.monotonic() + _READY_S
        while not self._is_ready():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self._url}/ready did not answer in {_READY_S:.0f} s")
            time.sleep(0.2)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/ready", timeout=5) as answer:
                return answer.status == 200
        except (OSError, urllib.error.URLError):
            return False

    def _stop_service(self) -> None:
        """End Ray in order, where there is time for it; the keeper ends whatever is left."""
        import ray

        ray.shutdown()
        if self._server is not None:
            self._server.stop()

    def _instructions(self) -> list[str]:
        base = self._settings["models"][0]["name"]
        tenants = [tenant for tenant in self._settings["tenants"] if tenant.get("adapters")]
        lines = ["", f"The service answers at {self._url}. In another shell:", ""]
        for tenant in tenants:
            adapter = next(iter(tenant["adapters"]))
            lines += [f"# tenant {tenant['tenant_id']}, its adapter {adapter}"]
            lines += [self._curl(tenant["api_keys"][0], adapter), ""]
        key = tenants[0]["api_keys"][0]
        lines += ["# the base model alone", self._curl(key, base), ""]
        lines += ["# the same as a stream", self._curl(key, base, stream=True), ""]
        return [*lines, "Ctrl-C ends it."]

    def _curl(self, api_key: str, model: str, stream: bool = False) -> str:
        message = {"role": "user", "content": QUESTION}
        # Greedy: what a newcomer reads, and what a test asserts, does not hang on a draw.
        body = {"model": model, "messages": [message], "temperature": 0}
        body |= {"stream": True} if stream else {}
        words = ["curl", "-sN" if stream else "-s", f"{self._url}/v1/chat/completions"]
        words += ["-H", f"Authorization: Bearer {api_key}"]
        words += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
        return shlex.join(words)


def say(words: str) -> None:
    print(f"demo: {words}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
