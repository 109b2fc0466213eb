"""The service as the path's benchmark runs it: models with an engine and one without, behind one
ingress, on a Ray of this machine alone.

Not here: what is asked and measured (path_legs.py). Importing this imports Ray.
"""

import os
import string
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import ray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from deployments import application
from deployments.config import ServiceConfig
from deployments.replica import Replica
from tests.ready_engine import ReadyEngine

API_KEY = "sk-path-bench"
NULL = "null"
WAYS = ("thread", "process")  # where an engine steps; also the names of the models that do


class PathReplica(Replica):
    """The product's replica, whose engine under one model's name is none."""

    def _engine_maker(self) -> Any:
        if self._model == NULL:
            return partial(ReadyEngine, self._config)
        return super()._engine_maker()


def service_config(
    model: Path, adapters: dict[str, Path], engine: dict[str, Any], load_format: str,
    ways: tuple[str, ...], port: int, gap_ms: float | None,
) -> ServiceConfig:  # fmt: skip
    """One tenant, with every adapter under each model that has an engine (`way-name`)."""
    common = {"path": str(model), "load_format": load_format, "max_ongoing_requests": 512}
    ingress = {} if gap_ms is None else {"min_chunk_gap_ms": gap_ms}
    return ServiceConfig.model_validate(
        {
            "models": [{"name": NULL, **common}]
            + [
                {"name": way, **common, "engine": engine, "engine_process": way == "process"}
                for way in ways
            ],
            "adapters": {"root": str(model.parent), "host_cache_dir": engine["host_cache_dir"]},
            "tenants": [
                {
                    "tenant_id": "bench",
                    "api_keys": [API_KEY],
                    "allowed_uris": [str(folder.parent) for folder in adapters.values()],
                    "adapters": {
                        f"{way}-{name}": {"uri": str(folder), "base": way}
                        for way in ways
                        for name, folder in adapters.items()
                    },
                    "limits": {"max_concurrent_requests": 512},
                }
            ],
            "ingress": ingress,
            "http": {"port": port},
        }
    )


def start_service(config: ServiceConfig, private: Path) -> None:
    """Start Ray and the application; returns when it serves."""
    ray.init(
        address="local",
        include_dashboard=False,
        num_cpus=max(4, os.cpu_count() or 1),
        object_store_memory=100 << 20,
        log_to_driver=False,
        logging_level="warning",
        _node_ip_address="127.0.0.1",
        _temp_dir=str(private / "r"),
    )
    with mock.patch.object(application, "Replica", PathReplica):
        application.start(config)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level tokenizer of made-up words for a model of random weights, if it has none."""
    path = folder / "tokenizer.json"
    if path.exists():
        return
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ("Ġ" + "".join(w) for n in (3, 4) for w in product(string.ascii_lowercase, repeat=n))
    vocab = dict(zip([*alphabet, *words], range(vocab_size), strict=False))
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))
