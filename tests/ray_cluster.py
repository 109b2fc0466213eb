"""The service on three Ray nodes of this machine, and the means to kill its parts.

    head            proxy, controller, an ingress          no replica
    first, second   a replica each; the second also an ingress

Ray Serve has the flags of deployments/serve_flags.py, as with `make serve`. Nodes are told apart by
their resources: a replica needs a GPU that nobody uses. All on 127.0.0.1.
Not for judging what the kills did.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import ray
import yaml
from ray import serve
from ray.cluster_utils import Cluster

from deployments.local_s3 import REGION
from deployments.placement.view import ReplicaView
from deployments.serve_flags import SERVE_FLAGS
from tests.ray_world import end_ray, ray_world
from tests.s3_server import READER_KEY, READER_SECRET, start_s3_server

DEMO = Path(__file__).resolve().parent / "data" / "demo"
STYLES = ("pirate", "formal", "spanish")
# One proxy: three on one machine would share the port, and clients would meet any of them.
_DEPLOY = """
import sys, ray
from ray import serve
from deployments.application import start
from deployments.config import load_config
address, config, port = sys.argv[1:]
ray.init(address=address, log_to_driver=False)
options = {"host": "127.0.0.1", "port": int(port)}
serve.start(proxy_location="HeadOnly", http_options=options)
start(load_config(config))
"""
_NODE = {"node_ip_address": "127.0.0.1", "object_store_memory": 80 << 20}


def wait_until(condition: Callable[[], Any], timeout_s: float, what: str = "") -> float:
    """Until it holds; what it raises counts as no. Seconds that it took. Errors: AssertionError."""
    begin = time.monotonic()
    why: object = None
    while time.monotonic() - begin < timeout_s:
        try:
            if condition():
                return time.monotonic() - begin
        except Exception as error:  # Ray raises many things while its parts die
            why = error
        time.sleep(0.02)
    raise AssertionError(f"not within {timeout_s} s: {what} {why or ''}")


class Nodes:
    """The cluster, and the service in it."""

    def __init__(self, cluster: Cluster, url: str) -> None:
        self.cluster = cluster
        self.url = url
        self.second = self.add_second()

    def add_second(self) -> Any:
        """The node with a replica and an ingress. Only in the main thread: Ray sets signals."""
        return self.cluster.add_node(num_cpus=1, num_gpus=1, **_NODE)

    def views(self) -> list[ReplicaView]:
        """The replicas, as they are now."""
        handle = serve.get_deployment_handle("Replica-demo", "default")
        found: list[ReplicaView] = handle.broadcast("view").results(timeout_s=5)
        return found

    def busy(self) -> ReplicaView:
        """The replica with the most work."""
        return max(self.views(), key=lambda view: view.stats.running)

    def busy_replica(self) -> str:
        """The name of its actor."""
        return f"SERVE_REPLICA::default#Replica-demo#{self.busy().replica_id}"

    def busy_ingress(self) -> str:
        """The name of the ingress with the most requests."""
        handles = [ray.get_actor(*found) for found in self.actors("#Ingress#")]
        loads = ray.get([h.get_num_ongoing_requests.remote() for h in handles], timeout=30)
        names = [name for name, _ in self.actors("#Ingress#")]
        return max(zip(loads, names, strict=True))[1]

    def actors(self, part: str) -> list[tuple[str, str]]:
        """(name, namespace) of the living actors with `part` in their names."""
        every = ray.util.list_named_actors(all_namespaces=True)
        return [(a["name"], a["namespace"]) for a in every if part in a["name"]]

    def kill(self, part: str) -> list[str]:
        """Kill the actors whose names hold `part`; at least one."""
        victims = self.actors(part)
        assert victims, f"no actor is called {part}"
        for name, namespace in victims:
            ray.kill(ray.get_actor(name, namespace=namespace))
        return [name for name, _ in victims]

    def stop(self, name: str) -> int:
        """Have one of Serve's actors stand still: it neither answers nor dies. Its pid."""
        actor_id = ray.get_actor(name, namespace="serve")._actor_id.hex()
        pid: int = ray._private.state.actors(actor_id)["Pid"]
        os.kill(pid, signal.SIGSTOP)
        return pid

    def kill_second(self) -> None:
        """The second node dies as by a power cut."""
        self.cluster.remove_node(self.second, allow_graceful=False)

    def wait_whole(self, timeout_s: float = 120) -> float:
        """Until every part runs: two replicas with seats, two ingresses, a router. Serve counts
        one that was killed as running until it looks, so the actors themselves are asked too."""
        wanted = {"Replica-demo": 2, "Ingress": 2, "Router": 1}

        def is_whole() -> bool:
            found = serve.status().applications["default"].deployments
            running = {name: found[name].replica_states.get("RUNNING", 0) for name in wanted}
            living = {name: self.actors(f"#{name}#") for name in wanted}
            handles = [ray.get_actor(*actor) for actors in living.values() for actor in actors]
            ray.get([handle.get_num_ongoing_requests.remote() for handle in handles], timeout=10)
            seats = {view.seat for view in self.views()}
            ready = httpx.get(f"{self.url}/ready", timeout=10).status_code
            counts = {name: len(actors) for name, actors in living.items()}
            return running == counts == wanted and len(seats) == 2 and ready == 200

        return wait_until(is_whole, timeout_s, "the service is whole")


def settings(port: int, private: Path, endpoint_url: str) -> dict[str, Any]:
    model = {
        "name": "demo",
        "path": str(DEMO / "base"),
        "num_replicas": 2,
        "num_cpus": 0,
        "num_gpus": 1,
        "engine": {"device": "cpu", "dtype": "float32", "max_num_seqs": 16, "max_loras": 4},
        "graceful_shutdown_timeout_s": 1,
    }
    tenants = [
        {"tenant_id": style, "api_keys": [f"key-of-{style}"], "adapters": {style: style}}
        for style in STYLES
    ]
    return {
        "models": [model],
        "adapters": {
            "root": "s3://open",
            "host_cache_dir": str(private / "host-tier"),
            "s3": {
                "endpoint_url": endpoint_url,
                "region": REGION,
                "access_key_env": "TEST_S3_KEY",
                "secret_key_env": "TEST_S3_SECRET",
            },
        },
        "tenants": tenants,
        # With a comment every half second, a silent stream means a path that is dead.
        "ingress": {"num_replicas": 2, "num_cpus": 0.9, "keep_alive_s": 0.5},
        "http": {"port": port},
    }


@contextmanager
def three_nodes() -> Iterator[Nodes]:
    """The service, up and whole, over an S3 server; nothing of it is left afterwards."""
    with start_s3_server() as s3:
        s3.client().create_bucket(Bucket="open")
        for style in STYLES:
            s3.put_folder("open", style, DEMO / "adapters" / style)
        with _three_nodes(s3.endpoint_url) as nodes:
            yield nodes


@contextmanager
def _three_nodes(endpoint_url: str) -> Iterator[Nodes]:
    environment = SERVE_FLAGS | {
        "TEST_S3_KEY": READER_KEY,
        "TEST_S3_SECRET": READER_SECRET,
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
        "RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING": "0",  # both ingresses are to have streams
        # A node whose raylet refuses connections is dead after two seconds, not after fifteen.
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "5000",
        "RAY_health_check_failure_threshold": "2",
    }
    with ray_world(environment) as world, ExitStack() as until_end:
        head = {"num_cpus": 1, "include_dashboard": False, **_NODE}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        until_end.callback(cluster.shutdown)
        until_end.callback(end_ray)
        cluster.add_node(num_cpus=0, num_gpus=1, **_NODE)
        nodes = Nodes(cluster, f"http://127.0.0.1:{world.port}")
        ray.init(address=cluster.address, log_to_driver=False)
        path = world.private / "config.yaml"
        path.write_text(yaml.safe_dump(settings(world.port, world.private, endpoint_url)))
        # In a process of its own: Ray Serve is imported here already, without its flags.
        words = [sys.executable, "-c", _DEPLOY, cluster.address, str(path), str(world.port)]
        subprocess.run(words, check=True, timeout=180)
        nodes.wait_whole()
        yield nodes
