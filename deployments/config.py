"""`ServiceConfig`: one YAML file, typed and checked at the door.

What it says is never changed later. No Ray here.
"""

import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from deployments.generation_defaults import read_generation_defaults
from deployments.placement.registry import POLICIES
from deployments.tenant_settings import (
    STRICT,
    TenantSettings,
    digest_keys,
    doubles,
    tenant_problems,
)
from deployments.tenants import TenantConfig
from model_runner.config import EngineConfig

DEFAULT_CONFIG = Path(__file__).with_name("default.yaml")
ENGINE_KEYS = {field.name for field in fields(EngineConfig)} - {"model", "load_format"}
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._/@-]{0,127}$"


class ConfigError(ValueError):
    """The configuration is wrong; the message names the file and the key."""


def _countable(amount: float) -> float:
    if 0 < amount < 1e-4:
        raise ValueError("Ray counts in steps of 0.0001: 0, or at least that much")
    return amount


def _whole_above_one(amount: float) -> float:
    if amount > 1 and amount % 1:
        raise ValueError("Ray parts one GPU and no more: above 1 it must be a whole number")
    return amount


_Resource = Annotated[float, Field(ge=0), AfterValidator(_countable)]


class _Section(BaseModel):
    model_config = STRICT


class ModelSettings(_Section):
    """One base model and the replicas that serve it. `engine` holds fields of `EngineConfig`.

    min_replicas, max_replicas  0 = always num_replicas; else that many to begin with, then as many
                                as the load wants (autoscaling.py), one more after scale_up_after_s
                                of too much of it, one less after scale_down_after_s of too little
    generation_defaults  what a request leaves open is sampled as the model's generation_config.json
                         says: temperature, top_p, top_k, min_p, repetition_penalty, do_sample;
                         an adapter's own file comes before that
    engine_process  the engine in a child process of its replica, not in one of its threads
    """

    name: str = Field(pattern=_NAME)
    path: str
    load_format: str = "safetensors"
    engine: dict[str, Any] = {}
    engine_process: bool = False
    num_replicas: Annotated[int, Field(ge=1)] = 1
    min_replicas: Annotated[int, Field(ge=0)] = 0
    max_replicas: Annotated[int, Field(ge=0)] = 0
    scale_up_after_s: Annotated[float, Field(ge=0)] = 3
    scale_down_after_s: Annotated[float, Field(ge=0)] = 300
    num_cpus: _Resource = 0.1
    num_gpus: Annotated[_Resource, AfterValidator(_whole_above_one)] = 0
    max_ongoing_requests: Annotated[int, Field(ge=1)] = 128
    max_queued_requests: Annotated[int, Field(ge=1)] = 256
    default_max_tokens: Annotated[int, Field(ge=1)] = 256
    generation_defaults: bool = True
    spill_after_s: Annotated[float, Field(ge=0)] = 0.25
    graceful_shutdown_timeout_s: Annotated[float, Field(gt=0)] = 20

    @field_validator("engine")
    @classmethod
    def _known_keys(cls, value: dict[str, Any]) -> dict[str, Any]:
        unknown = sorted(set(value) - ENGINE_KEYS)
        if unknown:
            raise ValueError(f"unknown engine setting {unknown[0]!r}")
        typed = _ENGINE.validate_python({"model": ""} | value)
        return {key: getattr(typed, key) for key in value}

    @model_validator(mode="after")
    def _replicas_are_in_order(self) -> Self:
        bounds = self.min_replicas or self.num_replicas, self.max_replicas or self.num_replicas
        if not bounds[0] <= self.num_replicas <= bounds[1]:
            raise ValueError(
                f"num_replicas ({self.num_replicas}) is not within min_replicas "
                f"({self.min_replicas}) and max_replicas ({self.max_replicas})"
            )
        return self

    @property
    def scales(self) -> bool:
        """Whether the number of replicas follows the load."""
        return bool(self.min_replicas or self.max_replicas)

    @model_validator(mode="after")
    def _engine_is_valid(self) -> Self:
        self.engine_config()
        return self

    def sampling_defaults(self) -> dict[str, float]:
        """Fields of a request -> their defaults. Errors: ConfigError."""
        try:
            return read_generation_defaults(self.path) if self.generation_defaults else {}
        except ValueError as exc:
            raise ConfigError(f"models: {self.name}: {exc}") from None

    def engine_config(self, host_cache_dir: str = "") -> EngineConfig:
        """The engine's own settings; `host_cache_dir` stands in where the file names none."""
        values = {"host_cache_dir": host_cache_dir} | self.engine
        values |= {"model": self.path, "load_format": self.load_format}
        return _ENGINE.validate_python(values)


class S3Settings(_Section):
    """How to reach the bucket. Keys stay in the environment: the file only names the variables."""

    endpoint_url: str = ""
    region: str = ""
    access_key_env: str = "AWS_ACCESS_KEY_ID"
    secret_key_env: str = "AWS_SECRET_ACCESS_KEY"

    def options(self) -> tuple[str, str, str, str]:
        """Endpoint, region, access key and secret key, the keys from this process' environment.

        Errors: ConfigError where the file names a variable that is not there.
        """
        keys = [self._key("access_key_env"), self._key("secret_key_env")]
        return self.endpoint_url, self.region, keys[0], keys[1]

    def _key(self, field: str) -> str:
        variable: str = getattr(self, field)
        if field in self.model_fields_set and variable not in os.environ:
            raise ConfigError(f"s3.{field}: the environment has no {variable}")
        return os.environ.get(variable, "")


class AdapterSettings(_Section):
    """Where adapters lie.

    root            `s3://bucket/prefix` or a folder; uris without a scheme are below it
                    ("" = below the folder that relative folders are meant from; operators
                    then name them in full)
    host_cache_dir  the host tier of each node ("" = a folder in /dev/shm that goes with us)
    """

    root: str = ""
    s3: S3Settings = S3Settings()
    host_cache_dir: str = ""


class UsageSettings(_Section):
    """Where records of what each request used are kept.

    root  `s3://bucket/prefix` or a folder ("" = nowhere);  s3  None = as `adapters.s3` says
    """

    root: str = ""
    s3: S3Settings | None = None

    @field_validator("root")
    @classmethod
    def _known_kind(cls, value: str) -> str:
        scheme, has_scheme, rest = value.partition("://")
        if has_scheme and (scheme != "s3" or not rest.partition("/")[0]):
            raise ValueError(f"{value!r} is neither s3://bucket/prefix nor a folder")
        return value


class HttpSettings(_Section):
    """Where the launcher makes Serve listen (`serve run` has its own default, the same one)."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000


class IngressSettings(_Section):
    """The HTTP side.

    trusted_tenant_header  a header that names the tenant and beats the key: only behind a gateway
    anonymous_tenant       tenant of requests without any credential ("" = refuse them)
    max_waiting_s          a client is told 503 after this long without its first token
    keep_alive_s           a stream that is silent this long gets an SSE comment; from the first one
                           on its status is 200 and errors are events
    max_stalled_s          how long a body may lag behind min_body_bytes_per_s, and how long a
                           client may leave what it was sent unread
    max_bodies_bytes       of all large bodies at once, while they are read; those of adapters'
                           chats until they are answered. One tenant may hold a quarter
    """

    num_replicas: Annotated[int, Field(ge=1)] = 1
    num_cpus: _Resource = 0.1
    trusted_tenant_header: str = ""
    anonymous_tenant: str = ""
    max_body_bytes: Annotated[int, Field(ge=1024, le=64 << 20)] = 8 << 20
    max_bodies_bytes: Annotated[int, Field(ge=1 << 20)] = 256 << 20
    min_body_bytes_per_s: Annotated[float, Field(gt=0)] = 16384
    max_stalled_s: Annotated[float, Field(gt=0)] = 30
    max_prompts: Annotated[int, Field(ge=1)] = 64
    max_concurrent_requests: Annotated[int, Field(ge=1)] = 512
    max_waiting_s: Annotated[float, Field(gt=0)] = 300
    keep_alive_s: Annotated[float, Field(gt=0)] = 15
    min_chunk_gap_ms: Annotated[float, Field(ge=0)] = 20


class ServiceConfig(_Section):
    """The whole service, see default.yaml for a commented example.

    operator_keys      of those who may ask what the service would do with an adapter, in the form
                       of tenants' keys; none = nobody may
    base_model_access  may a tenant use a base without an adapter, if it does not say itself
    cache_secret_env   variable with the secret of the cache salts ("" = random at every start)
    max_metric_tenants  so many have series of their own in /metrics, the busiest
    """

    models: tuple[ModelSettings, ...] = Field(min_length=1)
    adapters: AdapterSettings = AdapterSettings()
    tenants: tuple[TenantSettings, ...] = ()
    operator_keys: tuple[str, ...] = ()
    base_model_access: bool = True
    placement_policy: str = "bin_pack"
    cache_secret_env: str = ""
    max_metric_tenants: Annotated[int, Field(ge=1)] = 50
    usage: UsageSettings = UsageSettings()
    ingress: IngressSettings = IngressSettings()
    http: HttpSettings = HttpSettings()

    @field_validator("operator_keys", mode="before")
    @classmethod
    def _digest_keys(cls, value: Any) -> Any:
        return digest_keys(value)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for problem in _problems(self):
            raise ValueError(problem)
        return self

    def usage_s3(self) -> S3Settings:
        """How the bucket of the usage records is reached."""
        return self.usage.s3 or self.adapters.s3

    def tenant_configs(self) -> tuple[TenantConfig, ...]:
        """The tenants in the form that the directory keeps."""
        first, root, access = self.models[0].name, self.adapters.root, self.base_model_access
        return tuple(tenant.tenant_config(first, root, access) for tenant in self.tenants)


_ENGINE = TypeAdapter(EngineConfig)


def load_config(path: str | Path = DEFAULT_CONFIG) -> ServiceConfig:
    """Read a YAML file. Relative folders in it are meant from the file's own folder.

    Errors: ConfigError, which names the file and every key at fault.
    """
    path = Path(path).expanduser().resolve()
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as exc:  # its own words repeat the line, which may hold a key
        mark = exc.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{path}: {where}{exc.problem}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
        raise ConfigError(f"{path}: {exc}") from exc
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must be a mapping of settings")
    return make_config(values, str(path), path.parent)


def make_config(values: dict[str, Any], source: str, folder: Path) -> ServiceConfig:
    """The configuration that these settings are; relative folders are meant from `folder`.

    Errors: ConfigError, which names the source and every key at fault.
    """
    try:
        config = ServiceConfig.model_validate(values)
    except ValidationError as exc:
        raise ConfigError(f"{source}: {in_words(exc)}") from None
    return _with_absolute_folders(config, folder)


def _problems(config: ServiceConfig) -> Iterator[str]:
    models = [model.name for model in config.models]
    # Seats and deployments are named after models, with a dash for a slash.
    plain = [name.replace("/", "-") for name in models]
    yield from (f"models: {name!r} is there twice" for name in doubles(plain))
    if config.placement_policy not in POLICIES:
        yield f"placement_policy: {config.placement_policy!r} is not one of {sorted(POLICIES)}"
    anonymous = config.ingress.anonymous_tenant
    if anonymous and anonymous not in {tenant.tenant_id for tenant in config.tenants}:
        yield f"ingress.anonymous_tenant: there is no tenant {anonymous!r}"
    keys = {key for tenant in config.tenants for key in tenant.api_keys}
    if keys.intersection(config.operator_keys):
        yield "operator_keys: one of them is a tenant's"
    yield from tenant_problems(config.tenants, models, config.adapters.root)


def _with_absolute_folders(config: ServiceConfig, folder: Path) -> ServiceConfig:
    def absolute(value: str) -> str:
        return value if not value or "://" in value else str((folder / value).resolve())

    def as_written(value: str) -> str:
        # Adapters were found to lie below these by their names: links in them stay links.
        is_plain = value and "://" not in value
        return os.path.abspath(folder.resolve() / value) if is_plain else value

    given = config.adapters
    folders = {"root": as_written(given.root), "host_cache_dir": absolute(given.host_cache_dir)}
    adapters = given.model_copy(update=folders)
    models = tuple(
        model.model_copy(update={"path": absolute(model.path)}) for model in config.models
    )

    def placed(tenant: TenantSettings) -> TenantSettings:
        update: dict[str, Any] = {"allowed_uris": tuple(map(as_written, tenant.allowed_uris))}
        if not given.root:  # else they lie below that
            update["adapters"] = {
                name: entry.model_copy(update={"uri": as_written(entry.uri)})
                for name, entry in tenant.adapters.items()
            }
        return tenant.model_copy(update=update)

    tenants = tuple(map(placed, config.tenants))
    usage = config.usage.model_copy(update={"root": absolute(config.usage.root)})
    update = {"adapters": adapters, "models": models, "tenants": tenants, "usage": usage}
    return config.model_copy(update=update)


def in_words(error: ValidationError, whole: str = "the file") -> str:
    """Every problem in one line, with its key; values are left out, for they may be secrets.

    whole  what a problem without a key is one of
    """
    lines = []
    for problem in error.errors(include_input=False, include_url=False):
        key = ".".join(str(part) for part in problem["loc"]) or whole
        words = problem["msg"].removeprefix("Value error, ")
        lines.append(f"{key}: {'unknown key' if problem['type'] == 'extra_forbidden' else words}")
    return "; ".join(lines)
