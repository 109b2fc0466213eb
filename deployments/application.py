"""Wires ingress, router, replicas and adapter actors into one Ray Serve application.

Nothing else wires. Ray's processes read Serve's flags when they start: `app` sets them for a Ray
that `serve run` starts after it; serve_flags.py says which are to be set before `ray start`, and
why.
"""

import logging
import os
import secrets
import time
import warnings
from hashlib import sha256
from typing import Any

import ray
from click import ClickException
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.deployment import Application, Deployment

from deployments.config import (
    ConfigError,
    HttpSettings,
    ModelSettings,
    ServiceConfig,
)
from deployments.ingress import Ingress
from deployments.replica import Replica
from deployments.request_router import PlacementRequestRouter
from deployments.router import Router
from deployments.serve_flags import set_unset
from deployments.short_form import parse_args

ROUTING_STATS_PERIOD_S = 1.0
_LOAD_PERIOD_S = 1.0
CONTROL_PLACES = 64
"""So many calls that are no request (recall, abort, and others of a moment) a replica takes beside
those that fill it: when an ingress dies, its requests go on until somebody recalls them."""

_log = logging.getLogger("ray.serve")
_APP = "default"
_STATUS_PERIOD_S = 0.2
_QUIET = {"enable_access_log": False}


def app(args: dict[str, Any]) -> Application:
    """The application that the arguments of `serve run` describe (`AppArgs`); Ray Serve calls this.

    Errors: ClickException, which `serve run` prints as one line, for whatever is a ConfigError;
    also for an `http` address: `serve run` opens its own.
    """
    if not ray.is_initialized():
        set_unset()
    try:
        given = parse_args(args)
        config = given.service_config()
        if config.http != HttpSettings():
            raise ConfigError(
                f"{given.config}: http: `serve run` listens on 127.0.0.1:8000 whatever this says; "
                "leave it out, or start the service through deployments.application.start"
            )
        return build(config)
    except ConfigError as exc:
        raise ClickException(str(exc)) from None


def build(config: ServiceConfig) -> Application:
    """The application of a configuration.

    Errors: ConfigError for what is missing on this machine.
    """
    for model in config.models:
        if not os.path.isfile(os.path.join(model.path, "config.json")):
            raise ConfigError(f"models: {model.name}: {model.path} holds no config.json")
        model.sampling_defaults()  # told of now, not by an ingress that cannot start
    router = _router(config)
    replicas = {model.name: _replica(config, model, router) for model in config.models}
    settings = config.ingress
    ingress: Deployment = serve.deployment(Ingress).options(
        name="Ingress",
        num_replicas=settings.num_replicas,
        ray_actor_options={"num_cpus": settings.num_cpus},
        # The ingress refuses what is too much itself, in OpenAI's words: Serve's own bounds lie
        # above.
        max_ongoing_requests=settings.max_concurrent_requests + 64,
        max_queued_requests=settings.max_concurrent_requests,
        graceful_shutdown_wait_loop_s=0.2,
        logging_config=_QUIET,
        graceful_shutdown_timeout_s=max(m.graceful_shutdown_timeout_s for m in config.models),
    )
    return ingress.bind(config, _salt_key(config), router, replicas)


def start(config: ServiceConfig) -> None:
    """Start Serve where the configuration says, with its application;

    Ray must be running. Returns when it is ready. A model that cannot be started does not end
    those that could: they are served, and /ready names it.
    Errors: RuntimeError if no model could be started.
    """
    serve.start(http_options={"host": config.http.host, "port": config.http.port})
    try:
        serve.run(build(config), name=_APP, route_prefix="/")
    except RuntimeError as exc:
        models = {_replica_name(model) for model in config.models}
        if not _failed_deployments() < models:
            raise
        _log.error("%s The other base models are served.", exc)


def _failed_deployments() -> set[str]:
    """What Serve gave up, once it has decided that of all deployments."""
    while True:
        states = {
            name: deployment.status.value
            for name, deployment in serve.status().applications[_APP].deployments.items()
        }
        if "UPDATING" not in states.values():
            return {name for name, state in states.items() if state != "HEALTHY"}
        time.sleep(_STATUS_PERIOD_S)


def _router(config: ServiceConfig) -> Application:
    router: Deployment = serve.deployment(Router).options(
        name="Router",
        num_replicas=1,
        ray_actor_options={"num_cpus": 0.1},
        max_ongoing_requests=1000,
        max_queued_requests=1000,
        graceful_shutdown_wait_loop_s=0.2,
        logging_config=_QUIET,
        graceful_shutdown_timeout_s=2,
    )
    return router.bind(config)


def _replica(config: ServiceConfig, model: ModelSettings, router: Application) -> Application:
    replica: Deployment = serve.deployment(Replica).options(
        name=_replica_name(model),
        **_number_of_replicas(model),
        ray_actor_options={"num_cpus": model.num_cpus, "num_gpus": model.num_gpus},
        max_ongoing_requests=model.max_ongoing_requests + CONTROL_PLACES,
        max_queued_requests=model.max_queued_requests,
        health_check_period_s=2,
        graceful_shutdown_wait_loop_s=0.2,
        logging_config=_QUIET,
        graceful_shutdown_timeout_s=model.graceful_shutdown_timeout_s,
        request_router_config=RequestRouterConfig(
            request_router_class=PlacementRequestRouter,
            request_router_kwargs={
                "spill_after_s": model.spill_after_s,
                "control_places": CONTROL_PLACES,
            },
            request_routing_stats_period_s=ROUTING_STATS_PERIOD_S,
            max_backoff_s=0.1,
        ),
    )
    gap_s = config.ingress.min_chunk_gap_ms / 1000
    return replica.bind(model, config.adapters, _host_cache_dir(config), gap_s, router)


def _number_of_replicas(model: ModelSettings) -> dict[str, Any]:
    if not model.scales:
        return {"num_replicas": model.num_replicas}
    side_by_side = min(model.engine_config().max_num_seqs, model.max_ongoing_requests)
    with warnings.catch_warnings():
        # Deprecated for variables that Ray's own processes read when they start, with 10 s if they
        # are not there: a queue is full by then.
        warnings.filterwarnings("ignore", "The `metrics_interval_s` field", DeprecationWarning)
        scaling = AutoscalingConfig(
            min_replicas=model.min_replicas or model.num_replicas,
            initial_replicas=model.num_replicas,
            max_replicas=model.max_replicas or model.num_replicas,
            metrics_interval_s=_LOAD_PERIOD_S,
            look_back_period_s=3 * _LOAD_PERIOD_S,
            upscale_delay_s=model.scale_up_after_s,
            downscale_delay_s=model.scale_down_after_s,
            policy=AutoscalingPolicy(
                policy_function="deployments.autoscaling:ReplicaCount",
                policy_kwargs={"sequences": side_by_side},
            ),
        )
    return {"autoscaling_config": scaling}


def _replica_name(model: ModelSettings) -> str:
    return f"Replica-{model.name.replace('/', '-')}"


def _host_cache_dir(config: ServiceConfig) -> str:
    """The host tier of a node: one folder for all replicas there, the same one after a restart."""
    if config.adapters.host_cache_dir:
        return config.adapters.host_cache_dir
    mark = sha256(config.model_dump_json(include={"models", "adapters"}).encode()).hexdigest()[:12]
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else "/tmp"
    return f"{folder}/adapter-host-tier-{os.getuid()}-{mark}"


def _salt_key(config: ServiceConfig) -> bytes:
    """The secret of all cache salts: from the environment, or made up for this start."""
    if not config.cache_secret_env:
        return secrets.token_bytes(32)
    secret = os.environ.get(config.cache_secret_env, "")
    if len(secret) < 16:
        name = config.cache_secret_env
        raise ConfigError(f"cache_secret_env: {name} must hold at least 16 characters")
    return secret.encode()
