"""Prometheus' config scrapes what the service really serves; rules and dashboards name only metrics
that there are, and Prometheus' own tool accepts them and tries the rules. Not here: a live scrape
(tests/deployments/whole_service)."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from deployments.config import load_config
from deployments.metrics import SERIES, Kind
from tests.prometheus_server import (
    CONFIG,
    DASHBOARDS,
    INFRA,
    dashboard_queries,
    need_prometheus,
    rule_expressions,
)

EXPRESSIONS = dashboard_queries() + rule_expressions()


def test_scrapes_the_default_address_of_the_service() -> None:
    (job,) = yaml.safe_load(CONFIG.read_text())["scrape_configs"]
    http = load_config().http
    assert job["static_configs"] == [{"targets": [f"{http.host}:{http.port}"]}]
    assert job["metrics_path"] == "/metrics"


@pytest.mark.parametrize(
    "command",
    [
        ["check", "config", str(CONFIG)],
        ["test", "rules", str(Path(__file__).with_name("rules_test.yml"))],
    ],
    ids=lambda command: command[0],
)
def test_promtool_accepts(command: list[str]) -> None:
    need_prometheus()
    done = subprocess.run(
        ["promtool", *command], capture_output=True, text=True, timeout=60, cwd=INFRA.parent
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tried() -> None:
    groups = yaml.safe_load(Path(__file__).with_name("rules_test.yml").read_text())["tests"]
    tried = [case for group in groups for case in group["alert_rule_test"]]
    fires = {case["alertname"] for case in tried if case["exp_alerts"]}
    rests = {case["alertname"] for case in tried if not case["exp_alerts"]}
    assert fires == rests == {name for name, _ in rule_expressions()}


def suffixes(name: str) -> tuple[str, ...]:
    """The names under which a metric's samples are found."""
    histogram = SERIES[name].kind is Kind.HISTOGRAM
    return tuple(f"{name}{end}" for end in ("_bucket", "_sum", "_count")) if histogram else (name,)


def test_every_name_stands_in_the_one_list() -> None:
    known = {sample: name for name in SERIES for sample in suffixes(name)}
    assert len(EXPRESSIONS) > 50
    for where, expression in EXPRESSIONS:
        names = re.findall(r"\bmoe_\w+", expression)
        assert names or expression.startswith("up"), where
        for name in names:
            assert name in known, f"{where}: there is no metric {name}"
        labels = {label for name in names for label in SERIES[known[name]].labels} | {"le", "job"}
        for clause in re.findall(r"by \(([^)]*)\)|\{([^}]*)\}", expression):
            used = re.findall(r"(\w+)\s*(?==|!|,|$)", re.sub(r'"[^"]*"', "", " ".join(clause)))
            assert set(used) <= labels, f"{where}: {set(used) - labels} is no label of {names}"


def test_dashboards_are_as_grafana_reads_them() -> None:
    assert [path.stem for path in DASHBOARDS] == ["operators", "tenants"]
    boards = [json.loads(path.read_text()) for path in DASHBOARDS]
    assert len({board["uid"] for board in boards}) == len(boards)
    for board in boards:
        variables = {variable["name"] for variable in board["templating"]["list"]}
        used = set(re.findall(r"\$\{?(\w+)", json.dumps(board))) - {"__rate_interval", "__all"}
        assert used <= variables, used - variables
        panels = board["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        boxes = [panel["gridPos"] for panel in panels]
        cells = [
            (x, y)
            for box in boxes
            for x in range(box["x"], box["x"] + box["w"])
            for y in range(box["y"], box["y"] + box["h"])
        ]
        assert len(set(cells)) == len(cells), "two panels lie on each other"
        assert max(x for x, _ in cells) < 24
        for panel in panels:
            refs = [target["refId"] for target in panel.get("targets", ())]
            assert panel["type"] == "row" or (refs and len(set(refs)) == len(refs))


def test_grafana_finds_dashboards_and_prometheus() -> None:
    folder = INFRA / "grafana" / "provisioning"
    (provider,) = yaml.safe_load((folder / "dashboards" / "moe-lora-serving.yml").read_text())[
        "providers"
    ]
    assert provider["options"]["path"] == "${MOE_DASHBOARDS}"
    (source,) = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text())[
        "datasources"
    ]
    assert source["type"] == "prometheus"
    assert (
        source["jsonData"]["timeInterval"]
        == yaml.safe_load(CONFIG.read_text())["global"]["scrape_interval"]
    )
