"""A real Prometheus for tests (Debian's package), with the project's own config and rules.

Loopback only, a free port, everything below one private folder, and nothing left when it stops. Not
for use outside tests.
"""

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from deployments.local_s3 import free_ports
from tests.lacking import lack

INFRA = Path(__file__).resolve().parent.parent / "infra"
CONFIG = INFRA / "prometheus" / "prometheus.yml"
RULES = INFRA / "prometheus" / "rules.yml"
DASHBOARDS = sorted((INFRA / "grafana" / "dashboards").glob("*.json"))


def need_prometheus() -> None:
    """Skip where Prometheus is not installed; in CI that is a failure: .ci/run installs it."""
    missing = [name for name in ("prometheus", "promtool") if shutil.which(name) is None]
    if missing:
        lack(f"needs {missing} (Debian: apt-get install prometheus)")


class PrometheusServer:
    """A running Prometheus that scrapes one target every second."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=30)

    def ask(self, path: str, **params: str) -> Any:
        """The data of an answer of its HTTP API. Errors: AssertionError with its own words."""
        answer = self._client.get(f"/api/v1/{path}", params=params)
        assert answer.status_code == 200, f"{params}: {answer.text}"
        return answer.json()["data"]

    def is_ready(self) -> bool:
        try:
            return self._client.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def series(self, expression: str) -> list[dict[str, str]]:
        """The labels of what an expression gives now."""
        return [entry["metric"] for entry in self.ask("query", query=expression)["result"]]

    def value(self, expression: str) -> float:
        """The one number that an expression gives now; 0 if it gives none."""
        result = self.ask("query", query=expression)["result"]
        assert len(result) <= 1, f"{expression}: {result}"
        return float(result[0]["value"][1]) if result else 0.0

    def increase(self, selector: str, since: float) -> float:
        """What counters grew by since a time, exactly, as Prometheus understands their resets."""
        seconds = int(time.time() - since) + 1
        total = 0.0
        for entry in self.ask("query", query=f"{selector}[{seconds}s]")["result"]:
            values = [float(value) for at, value in entry["values"] if at >= since]
            for before, after in zip(values, values[1:], strict=False):
                total += after - before if after >= before else after
        return total


@contextmanager
def start_prometheus(target: str) -> Iterator[PrometheusServer]:
    """Prometheus with the project's config, but for the target and the pace."""
    need_prometheus()
    config = yaml.safe_load(CONFIG.read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(CONFIG.parent / name) for name in config["rule_files"]]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
    with tempfile.TemporaryDirectory(prefix="prometheus-") as folder:
        path = Path(folder) / "prometheus.yml"
        path.write_text(yaml.safe_dump(config))
        address = f"127.0.0.1:{free_ports(1)[0]}"
        command = ["prometheus", f"--config.file={path}", f"--storage.tsdb.path={folder}/data"]
        command += [f"--web.listen-address={address}", "--log.level=error"]
        process = subprocess.Popen(command)
        try:
            server = PrometheusServer(f"http://{address}")
            deadline = time.monotonic() + 60
            while not server.is_ready():
                assert process.poll() is None and time.monotonic() < deadline, "it does not start"
                time.sleep(0.05)
            yield server
        finally:
            process.terminate()
            process.wait(20)


def dashboard_queries() -> list[tuple[str, str]]:
    """(panel, expression) of every dashboard, its variables set to all there is."""
    found = []
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                expression = target["expr"]
                for name, value in (("__rate_interval", "1h"), ("model", ".*"), ("tenant", ".*")):
                    expression = expression.replace(f"${name}", value)
                found.append((f"{path.stem}: {panel['title']}", expression))
    return found


def rule_expressions() -> list[tuple[str, str]]:
    """(alert, expression) of every rule."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [(rule["alert"], rule["expr"]) for group in groups for rule in group["rules"]]
