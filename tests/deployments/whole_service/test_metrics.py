"""What is counted: /metrics, records of usage, a Prometheus with our dashboards and alerts."""

import re
import time
from typing import Any

import pytest

from tests.deployments.whole_service.world import (
    QUESTIONS,
    Service,
    ask,
    wait_until,
)
from tests.prometheus_server import (
    PrometheusServer,
    dashboard_queries,
    rule_expressions,
)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]


def test_metrics_are_one_story(service: Service) -> None:
    name, labels = "moe_requests_total", {"model": "demo", "tenant": "spanish", "status": "200"}
    before = service.metrics()
    for _ in range(3):
        ask(service.client("spanish"), "spanish", "Hi")
    after = service.metrics()
    assert after(name, **labels) == before(name, **labels) + 3
    assert after("moe_replicas", model="demo") == 2
    assert after("moe_adapter_slots", model="small") == 2
    steps, loads = "moe_engine_steps_total", "moe_adapter_loads_total"
    stats = service.stats()
    assert after(steps, model="demo") == sum(s.num_steps for s in stats)
    device = {"model": "demo", "tier": "device"}
    assert after(loads, **device) == sum(s.loads["device"] for s in stats) > 0
    assert after("moe_adapter_load_seconds_total", **device) > 0
    # Who fetched from S3, an engine or the node's actor ahead of it, does not matter.
    assert after(loads, tier="remote") >= 3
    assert after("moe_host_tier_adapters") >= 3 and after("moe_host_tier_used_bytes") > 0
    idle = [s.delivered_tokens + s.discarded_tokens - s.sampled_tokens for s in stats]
    assert idle == [0, 0]
    assert after("moe_time_to_first_token_seconds_count", tenant="spanish") >= 3


def test_a_record_of_every_request_is_kept(service: Service) -> None:
    """As the client was told, stop strings and streams included; nobody else's are billed."""
    client, line = service.client("formal"), QUESTIONS[2]
    made = [ask(client, "formal", line["question"]) for _ in range(2)]
    made.append(ask(client, "demo", line["question"], stop=[line["base"][3:6]], n=2))
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    made.append(list(ask(client, "formal-small", line["question"], **options))[-1])
    wanted = {answer.id: answer.usage for answer in made}
    wait_until(lambda: wanted.keys() <= service.usage().keys(), 20)
    found = {name: service.usage()[name] for name in wanted}
    for name, usage in wanted.items():
        record = found[name]
        assert (record.status, record.attempt, record.tenant) == ("200", 1, "formal")
        assert (record.prompt, record.billed) == (usage.prompt_tokens, usage.completion_tokens)
    assert [record.adapter for record in found.values()] == [
        "formal/formal", "formal/formal", "", "formal/formal-small",
    ]  # fmt: skip
    refused = [record for record in service.usage().values() if record.tenant == "unlucky"]
    assert all(record.billed == 0 for record in refused if record.status != "200")


def test_prometheus_sees_what_was_done(service: Service, prometheus: PrometheusServer) -> None:
    begin = time.time() - 2
    labels = '{model="demo", tenant="pirate"}'
    before = {name: prometheus.value(f"sum(moe_{name}{labels})") for name in SEEN}
    asked = [ask(service.client(), "pirate", line["question"]) for line in QUESTIONS[:4]]
    grown = [
        sum(answer.usage.prompt_tokens for answer in asked),
        sum(answer.usage.completion_tokens for answer in asked),
        *[len(asked)] * 3,
    ]
    wanted = {name: before[name] + more for name, more in zip(SEEN, grown, strict=True)}

    def seen() -> bool:
        return wanted == {name: prometheus.value(f"sum(moe_{name}{labels})") for name in SEEN}

    wait_until(seen, 30)
    assert prometheus.increase(f"moe_output_tokens_total{labels}", begin) == grown[1]
    quantile = "histogram_quantile(0.99, sum by (le) (moe_queue_seconds_bucket))"
    assert 0 < prometheus.value(quantile) < 160


SEEN = (
    "prompt_tokens_total",
    "output_tokens_total",
    "requests_total",
    "queue_seconds_count",
    "time_to_first_token_seconds_count",
)


def test_dashboards_and_alerts_have_something_to_show(
    service: Service, prometheus: PrometheusServer
) -> None:
    """Every expression is one that Prometheus understands, and matches series that are there once
    there was a single answer: what has not happened yet is shown as 0."""
    for _ in ask(service.client(), "pirate", QUESTIONS[0]["question"], stream=True):
        pass

    def finds(expression: str) -> bool:
        # An alert compares: without the comparison there is always a value.
        return bool(prometheus.series(re.sub(r" (==|>|<) [\d.]+", "", expression)))

    missing = dashboard_queries() + rule_expressions()
    deadline = time.monotonic() + 20
    while missing and time.monotonic() < deadline:
        time.sleep(0.5)
        missing = [(where, query) for where, query in missing if not finds(query)]
    assert not missing
    rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in rules} == {name for name, _ in rule_expressions()}
    assert {rule["health"] for rule in rules} == {"ok"}
