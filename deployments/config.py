"""`ServiceConfig`: one YAML file, typed and checked at the door.

What it says is never changed later. No Ray here.
"""

import os
import posixpath
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from adapter_store.ref import AdapterRef
from deployments.placement.registry import POLICIES
from deployments.tenants import TenantConfig, TenantLimits, key_digest
from model_runner.config import EngineConfig

DEFAULT_CONFIG = Path(__file__).with_name("default.yaml")
_ENGINE_KEYS = {field.name for field in fields(EngineConfig)} - {"model", "load_format"}
_DIGEST = "sha256:"
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._/@-]{0,127}$"
_ID = r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$"


class ConfigError(ValueError):
    """The configuration is wrong; the message names the file and the key."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelSettings(_Section):
    """One base model and the replicas that serve it. `engine` holds fields of `EngineConfig`."""

    name: str = Field(pattern=_NAME)
    path: str
    load_format: str = "safetensors"
    engine: dict[str, Any] = {}
    num_replicas: Annotated[int, Field(ge=1)] = 1
    num_cpus: Annotated[float, Field(ge=0)] = 0.1
    num_gpus: Annotated[float, Field(ge=0)] = 0
    max_ongoing_requests: Annotated[int, Field(ge=1)] = 128
    max_queued_requests: Annotated[int, Field(ge=0)] = 256
    default_max_tokens: Annotated[int, Field(ge=1)] = 256
    spill_after_s: Annotated[float, Field(ge=0)] = 0.25
    graceful_shutdown_timeout_s: Annotated[float, Field(gt=0)] = 20

    @field_validator("engine")
    @classmethod
    def _known_keys(cls, value: dict[str, Any]) -> dict[str, Any]:
        unknown = sorted(set(value) - _ENGINE_KEYS)
        if unknown:
            raise ValueError(f"unknown engine setting {unknown[0]!r}")
        return value

    @model_validator(mode="after")
    def _engine_is_valid(self) -> Self:
        self.engine_config()
        return self

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
            raise ConfigError(f"adapters.s3.{field}: the environment has no {variable}")
        return os.environ.get(variable, "")


class AdapterSettings(_Section):
    """Where adapters lie.

    root            `s3://bucket/prefix` or a folder; uris without a scheme are below it
    host_cache_dir  the host tier of each node ("" = a folder in /dev/shm that goes with us)
    """

    root: str = ""
    s3: S3Settings = S3Settings()
    host_cache_dir: str = ""


class AdapterEntry(_Section):
    """One adapter of a tenant; in the file a plain uri will do. `base` "" = the first model."""

    uri: str = Field(min_length=1)
    base: str = ""
    revision: str = ""


class LimitSettings(_Section):
    """Limits of one tenant, in one ingress."""

    max_concurrent_requests: Annotated[int, Field(ge=1)] = 64


class TenantSettings(_Section):
    """One tenant. `api_keys` are plain or `sha256:<hex>`; only digests stay in memory."""

    tenant_id: str = Field(pattern=_ID)
    api_keys: tuple[str, ...] = ()
    adapters: dict[str, AdapterEntry] = {}
    weight: Annotated[float, Field(gt=0)] = 1.0
    limits: LimitSettings = LimitSettings()
    allowed_uris: tuple[str, ...] = ()
    base_model_access: bool | None = None

    @field_validator("api_keys", mode="before")
    @classmethod
    def _digest_keys(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            raise ValueError("must be a list of strings")
        return tuple(_key_digest(number, key) for number, key in enumerate(value))

    @field_validator("adapters", mode="before")
    @classmethod
    def _plain_uris(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError("must map an adapter's name to its uri")
        return {k: {"uri": v} if isinstance(v, str) else v for k, v in value.items()}


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
    max_bodies_bytes       of all large bodies being read at once; one tenant may hold a quarter
    """

    num_replicas: Annotated[int, Field(ge=1)] = 1
    num_cpus: Annotated[float, Field(ge=0)] = 0.1
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

    base_model_access  may a tenant use a base without an adapter, if it does not say itself
    cache_secret_env   variable with the secret of the cache salts ("" = random at every start)
    """

    models: tuple[ModelSettings, ...] = Field(min_length=1)
    adapters: AdapterSettings = AdapterSettings()
    tenants: tuple[TenantSettings, ...] = ()
    base_model_access: bool = True
    placement_policy: str = "hash_ring"
    cache_secret_env: str = ""
    max_metric_tenants: Annotated[int, Field(ge=0)] = 200
    ingress: IngressSettings = IngressSettings()
    http: HttpSettings = HttpSettings()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for problem in _problems(self):
            raise ValueError(problem)
        return self

    def tenant_configs(self) -> tuple[TenantConfig, ...]:
        """The tenants in the form that the directory keeps."""
        return tuple(self._tenant_config(tenant) for tenant in self.tenants)

    def _tenant_config(self, tenant: TenantSettings) -> TenantConfig:
        access = tenant.base_model_access
        return TenantConfig(
            tenant_id=tenant.tenant_id,
            api_key_digests=tuple(key.removeprefix(_DIGEST) for key in tenant.api_keys),
            adapters={
                name: AdapterRef(
                    adapter_id=f"{tenant.tenant_id}/{name}",
                    uri=join_uri(self.adapters.root, entry.uri),
                    revision=entry.revision,
                    base=entry.base or self.models[0].name,
                )
                for name, entry in tenant.adapters.items()
            },
            weight=tenant.weight,
            limits=TenantLimits(tenant.limits.max_concurrent_requests),
            base_model_access=self.base_model_access if access is None else access,
        )


_ENGINE = TypeAdapter(EngineConfig)


def load_config(path: str | Path = DEFAULT_CONFIG) -> ServiceConfig:
    """Read a YAML file. Relative folders in it are meant from the file's own folder.

    Errors: ConfigError, which names the file and every key at fault.
    """
    path = Path(path).expanduser().resolve()
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
        raise ConfigError(f"{path}: {exc}") from exc
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must be a mapping of settings")
    try:
        config = ServiceConfig.model_validate(values)
    except ValidationError as exc:
        raise ConfigError(f"{path}: {_words(exc)}") from None
    return _with_absolute_folders(config, path.parent)


def join_uri(root: str, uri: str) -> str:
    """A uri as the store reads it: below `root`, unless it has a scheme or is absolute."""
    if "://" in uri or uri.startswith("/") or not root:
        return uri
    return f"{root.rstrip('/')}/{uri}"


def _problems(config: ServiceConfig) -> Iterator[str]:
    models = [model.name for model in config.models]
    # Seats and deployments are named after models, with a dash for a slash.
    plain = [name.replace("/", "-") for name in models]
    yield from (f"models: {name!r} is there twice" for name in _doubles(plain))
    tenants = [tenant.tenant_id for tenant in config.tenants]
    yield from (f"tenants: {name!r} is there twice" for name in _doubles(tenants))
    keys = [key for tenant in config.tenants for key in tenant.api_keys]
    if _doubles(keys):
        yield "tenants: two API keys are equal"
    if config.placement_policy not in POLICIES:
        yield f"placement_policy: {config.placement_policy!r} is not one of {sorted(POLICIES)}"
    anonymous = config.ingress.anonymous_tenant
    if anonymous and anonymous not in tenants:
        yield f"ingress.anonymous_tenant: there is no tenant {anonymous!r}"
    for tenant in config.tenants:
        for name, entry in tenant.adapters.items():
            where = f"tenants: {tenant.tenant_id}: adapter {name!r}"
            if name in models or ":" in name or not name:
                yield f"{where}: a name must not be a base model's, be empty or hold a colon"
            if entry.base and entry.base not in models:
                yield f"{where}: there is no base model {entry.base!r}"
            uri = join_uri(config.adapters.root, entry.uri)
            if not any(_inside(uri, p) for p in tenant.allowed_uris or (config.adapters.root,)):
                yield f"{where}: {uri} is outside of what this tenant is allowed"


def _inside(uri: str, prefix: str) -> bool:
    """Whether a uri lies at or below a prefix, folder by folder; dots do not lead out of it."""
    if not prefix:
        return False
    plain_uri, plain_prefix = (posixpath.normpath(value) for value in (uri, prefix))
    return plain_uri == plain_prefix or plain_uri.startswith(plain_prefix.rstrip("/") + "/")


def _doubles(values: list[str]) -> list[str]:
    return sorted({value for value in values if values.count(value) > 1})


def _key_digest(number: int, key: str) -> str:
    if key.startswith(_DIGEST):
        digest = key.removeprefix(_DIGEST).lower()
        if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
            raise ValueError(f"key {number}: {_DIGEST} must be followed by 64 hex digits")
        return _DIGEST + digest
    if len(key) < 8:
        raise ValueError(f"key {number} is shorter than 8 characters")
    return _DIGEST + key_digest(key)


def _with_absolute_folders(config: ServiceConfig, folder: Path) -> ServiceConfig:
    def absolute(value: str) -> str:
        return value if not value or "://" in value else str((folder / value).resolve())

    given = config.adapters
    folders = {"root": absolute(given.root), "host_cache_dir": absolute(given.host_cache_dir)}
    adapters = given.model_copy(update=folders)
    models = tuple(
        model.model_copy(update={"path": absolute(model.path)}) for model in config.models
    )
    tenants = tuple(
        tenant.model_copy(
            update={"allowed_uris": tuple(absolute(uri) for uri in tenant.allowed_uris)}
        )
        for tenant in config.tenants
    )
    update = {"adapters": adapters, "models": models, "tenants": tenants}
    return config.model_copy(update=update)


def _words(error: ValidationError) -> str:
    """Every problem in one line, with its key; values are left out, for they may be secrets."""
    lines = []
    for problem in error.errors(include_input=False, include_url=False):
        key = ".".join(str(part) for part in problem["loc"]) or "the file"
        words = problem["msg"].removeprefix("Value error, ")
        lines.append(f"{key}: {'unknown key' if problem['type'] == 'extra_forbidden' else words}")
    return "; ".join(lines)
