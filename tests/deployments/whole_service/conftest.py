"""The service of world.py, started once for all tests of this folder, and a Prometheus beside it.

The tests leave traces in it: they run in the order of their files.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest
import yaml

from deployments.application import start
from deployments.catalog_link import catalog_name
from deployments.config import load_config
from tests.deployments.whole_service.world import (
    DEMO,
    STYLES,
    Service,
    extras_in_s3,
    settings,
    swap_two_tokens,
    wait_until,
)
from tests.prometheus_server import PrometheusServer, start_prometheus
from tests.ray_world import ray_world, start_ray
from tests.s3_server import READER_KEY, READER_SECRET, Relay, start_s3_server


@pytest.fixture(scope="package")
def service() -> Iterator[Service]:
    environment = {
        "TEST_S3_KEY": READER_KEY,
        "TEST_S3_SECRET": READER_SECRET,
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deployments.edge:guards",
    }
    stalled: set[str] = set()
    with ExitStack() as until_end:
        s3 = until_end.enter_context(start_s3_server())
        environment |= {"TEST_USAGE_KEY": s3.access_key, "TEST_USAGE_SECRET": s3.secret_key}
        world = until_end.enter_context(ray_world(environment))
        for bucket in ("open", "closed", "usage"):
            s3.client().create_bucket(Bucket=bucket)
        for style in STYLES:
            s3.put_folder("open", style, DEMO / "adapters" / style)
        s3.put_folder("closed", "pirate", DEMO / "adapters" / "pirate")
        s3.put_folder("open", "restless", DEMO / "adapters" / "pirate")
        broken = dict(json.loads((DEMO / "adapters/pirate/adapter_config.json").read_text()), r=3)
        s3.put_folder("open", "broken", DEMO / "adapters" / "pirate")
        s3.client().put_object(
            Bucket="open", Key="broken/adapter_config.json", Body=json.dumps(broken).encode()
        )
        for name, extra, text in extras_in_s3():
            s3.put_folder("open", name, DEMO / "adapters" / "pirate")
            s3.client().put_object(Bucket="open", Key=f"{name}/{extra}", Body=text.encode())
        path = world.private / "config.yaml"
        relay = Relay(s3.port, lambda method, url, number: 0 if url in stalled else None, True)
        until_end.callback(relay.close)
        path.write_text(yaml.safe_dump(settings(relay.endpoint_url, world.port, world.private)))
        swap_two_tokens(world.private / "small")
        start_ray()
        config = load_config(path)
        start(config)
        url, options = f"http://127.0.0.1:{world.port}", config.usage_s3().options()
        name = catalog_name(relay.endpoint_url, "us-east-1", READER_KEY)
        found = Service(url, config.usage.root, options, world.private, stalled, s3, name)
        wait_until(lambda: httpx.get(f"{found.url}/ready").status_code == 200, 60)
        yield found


@pytest.fixture(scope="package")
def prometheus(service: Service) -> Iterator[PrometheusServer]:
    with start_prometheus(service.url.removeprefix("http://")) as server:
        wait_until(lambda: server.value("sum(moe_replicas)") == 3, 60)
        yield server
