"""The arguments of `serve run deployments:app`: a configuration file, or one model in short.

They become a `ServiceConfig` here, and nothing more: no Ray.
"""

import os
import re
import shlex
from collections.abc import Mapping
from difflib import get_close_matches
from glob import glob
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from deployments.config import (
    DEFAULT_CONFIG,
    ENGINE_KEYS,
    ConfigError,
    IngressSettings,
    ModelSettings,
    ServiceConfig,
    in_words,
    load_config,
    make_config,
)
from deployments.tenant_settings import ID_PATTERN

EVERYONE = "everyone"
"""The tenant of whoever asks in the short form; it acts for the tenants of all modules."""

_MODEL_KEYS = set(ModelSettings.model_fields) - {"name", "path", "engine"}
_SETTINGS = _MODEL_KEYS | ENGINE_KEYS


class AppArgs(BaseModel):
    """What `serve run deployments:app KEY=VALUE ...` takes. Without any: the demo (default.yaml).

    config             a file with everything, see default.yaml; it stands alone. Or in short:
    model              one base model: a folder in Hugging Face format
    served_model_name  its name in requests (default: the folder's)
    lora_modules       'NAME=URI NAME=URI ...', a folder or s3://bucket/prefix each (S3 by the
                       usual AWS variables). `"model": "NAME"` in a request uses it. Each is a
                       tenant NAME of its own: own counts, share, place and prefix cache; whoever
                       may ask may name them all
    api_key            what requests must bring as bearer token, as it is or as sha256:<hex>
                       (default: none is asked for)
    Any other key is a setting of the model (num_replicas, num_gpus, load_format, ...) or of its
    engine (max_loras, max_lora_rank, max_model_len, dtype, device, ...), as default.yaml has them.
    num_gpus is 1 on a machine with NVIDIA GPUs, unless it or `device` says otherwise.
    Errors: ValidationError for a key that nobody knows, or `config` beside others (`parse_args`).
    """

    model_config = ConfigDict(extra="allow", frozen=True, hide_input_in_errors=True)
    config: str = ""
    model: str = ""
    served_model_name: str = ""
    lora_modules: str = ""
    api_key: str = ""

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        given = self.model_fields_set | set(self._settings())
        known = set(AppArgs.model_fields) | _SETTINGS
        for key in sorted(given - known):
            near = get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"unknown argument {key!r}{hint}")
        others = sorted(given - {"config"})
        if self.config and others:
            raise ValueError(f"config: the file says everything; {others[0]!r} belongs into it")
        if others and not self.model:
            raise ValueError(f"model: {others[0]!r} needs a model to be said of")
        return self

    def _settings(self) -> dict[str, Any]:
        return self.model_extra or {}

    def service_config(self) -> ServiceConfig:
        """The configuration meant. Errors: ConfigError, which names the argument at fault."""
        if not self.model:
            return load_config(self.config or DEFAULT_CONFIG)
        path = Path(self.model).expanduser().resolve()
        if not (path / "config.json").is_file():
            raise ConfigError(f"model: {path} is no folder with a model (there is no config.json)")
        settings = self._settings()
        model = {key: settings[key] for key in settings.keys() & _MODEL_KEYS}
        engine = {key: settings[key] for key in settings.keys() & ENGINE_KEYS}
        if not str(engine.get("device", "")).startswith("cpu"):
            model.setdefault("num_gpus", int(bool(glob("/dev/nvidia[0-9]*"))))
        modules = _modules(self.lora_modules)
        tenants = [
            {"tenant_id": name, "adapters": {name: uri}, "allowed_uris": [uri]}
            for name, uri in modules.items()
        ]
        limit = IngressSettings().max_concurrent_requests
        everyone = {
            "tenant_id": EVERYONE,
            "acts_for": list(modules),
            "api_keys": [self.api_key] if self.api_key else [],
            "limits": {"max_concurrent_requests": limit},
        }
        variables = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
        endpoint_url = next(filter(None, map(os.environ.get, variables)), "")
        name = self.served_model_name or path.name
        values = {
            "models": [model | {"name": name, "path": str(path), "engine": engine}],
            "adapters": {"s3": {"endpoint_url": endpoint_url}},
            "tenants": [*tenants, everyone],
            "ingress": {"anonymous_tenant": "" if self.api_key else EVERYONE},
        }
        return make_config(values, "arguments", Path.cwd())


def parse_args(values: Mapping[str, Any]) -> AppArgs:
    """Arguments as `serve run` gives them. Errors: ConfigError, which names the one at fault."""
    try:
        return AppArgs.model_validate(dict(values))
    except ValidationError as exc:
        raise ConfigError(in_words(exc, "arguments")) from None


def _modules(words: str) -> dict[str, str]:
    """Names and uris of 'NAME=URI NAME=URI'; folders become absolute. Errors: ConfigError."""
    modules: dict[str, str] = {}
    try:
        pairs = shlex.split(words)
    except ValueError as exc:
        raise ConfigError(f"lora_modules: {exc}") from None
    for pair in pairs:
        name, _, uri = pair.partition("=")
        if not uri:
            raise ConfigError(f"lora_modules: {pair!r} is not NAME=URI")
        if not re.match(ID_PATTERN, name) or name == EVERYONE:
            raise ConfigError(f"lora_modules: {name!r} cannot be the name of a module")
        if name in modules:
            raise ConfigError(f"lora_modules: {name!r} is there twice")
        if "://" not in uri:
            folder = Path(uri).expanduser().resolve()
            if not (folder / "adapter_config.json").is_file():
                problem = f"{folder} is no folder with an adapter (there is no adapter_config.json)"
                raise ConfigError(f"lora_modules: {name}: {problem}")
            uri = str(folder)
        modules[name] = uri
    return modules
