"""The Prometheus config scrapes what the service really serves. Not here: what the series mean."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from deployments.config import load_config

CONFIG = Path(__file__).resolve().parents[2] / "infra" / "prometheus" / "prometheus.yml"


def test_scrapes_the_default_address_of_the_service() -> None:
    (job,) = yaml.safe_load(CONFIG.read_text())["scrape_configs"]
    http = load_config().http
    assert job["static_configs"] == [{"targets": [f"{http.host}:{http.port}"]}]
    assert job["metrics_path"] == "/metrics"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian: prometheus)")
def test_prometheus_accepts_it() -> None:
    done = subprocess.run(
        ["promtool", "check", "config", str(CONFIG)], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stdout + done.stderr
