"""The tenants of a configuration file: typed, checked against the rest of it.

Not here: the rest (config.py), and who may use what while the service runs (tenants.py).
"""

import posixpath
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from adapter_store.ref import AdapterRef
from deployments.tenants import TenantConfig, TenantLimits, key_digest

STRICT = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
"""Of every part of the file: unknown keys are refused, nothing changes later."""

ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$"
DIGEST = "sha256:"


class AdapterEntry(BaseModel):
    """One adapter of a tenant; in the file a plain uri will do.

    base  "" = the one that its name says (`base:name`), else the first model
    """

    model_config = STRICT
    uri: str = Field(min_length=1)
    base: str = ""
    revision: str = ""


class LimitSettings(BaseModel):
    """Limits of one tenant, in one ingress."""

    model_config = STRICT
    max_concurrent_requests: Annotated[int, Field(ge=1)] = 64


class TenantSettings(BaseModel):
    """One tenant. `api_keys` are plain or `sha256:<hex>`; only digests stay in memory.

    adapters  name -> where it lies; `base:name` where one name stands for several bases' adapters
    acts_for  tenants whose adapters it may name as its own (a gateway): the request is theirs, with
              their weight, placement and counts; the limits are those of the one who asks
    """

    model_config = STRICT
    tenant_id: str = Field(pattern=ID_PATTERN)
    api_keys: tuple[str, ...] = ()
    adapters: dict[str, AdapterEntry] = {}
    weight: Annotated[float, Field(gt=0)] = 1.0
    limits: LimitSettings = LimitSettings()
    allowed_uris: tuple[str, ...] = ()
    base_model_access: bool | None = None
    acts_for: tuple[str, ...] = ()

    @field_validator("api_keys", mode="before")
    @classmethod
    def _digest_keys(cls, value: Any) -> Any:
        return digest_keys(value)

    @field_validator("adapters", mode="before")
    @classmethod
    def _plain_uris(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError("must map an adapter's name to its uri")
        return {k: {"uri": v} if isinstance(v, str) else v for k, v in value.items()}

    def entries(self, first_base: str) -> list[tuple[str, str, AdapterEntry]]:
        """The adapters in the order of the file: own name, base, entry."""
        found = []
        for given, entry in self.adapters.items():
            base, _, name = given.rpartition(":")
            found.append((name, entry.base or base or first_base, entry))
        return found

    def tenant_config(self, first_base: str, root: str, base_model_access: bool) -> TenantConfig:
        """The tenant in the directory's form.

        first_base  base of adapters that name none;  root  of uris without a scheme;
        base_model_access  where the tenant does not say itself
        """
        access = self.base_model_access
        entries = self.entries(first_base)
        times = Counter(name for name, _, _ in entries)
        listed = [name if times[name] == 1 else f"{base}:{name}" for name, base, _ in entries]
        return TenantConfig(
            tenant_id=self.tenant_id,
            api_key_digests=tuple(key.removeprefix(DIGEST) for key in self.api_keys),
            adapters={
                name: AdapterRef(
                    adapter_id=f"{self.tenant_id}/{name}",
                    uri=join_uri(root, entry.uri),
                    revision=entry.revision,
                    base=base,
                    root=self._root_of(join_uri(root, entry.uri), root),
                )
                for name, (_, base, entry) in zip(listed, entries, strict=True)
            },
            weight=self.weight,
            limits=TenantLimits(self.limits.max_concurrent_requests),
            base_model_access=base_model_access if access is None else access,
            acts_for=self.acts_for,
        )

    def _root_of(self, uri: str, root: str) -> str:
        """The innermost place that this tenant is allowed, of those that the uri lies in."""
        places = self.allowed_uris or (root,)
        return innermost([place for place in places if inside(uri, place)]) or places[0]


def tenant_problems(
    tenants: Sequence[TenantSettings], models: Sequence[str], root: str
) -> Iterator[str]:
    """What is wrong with them, in words that name the tenant. models  the bases' names."""
    ids = [tenant.tenant_id for tenant in tenants]
    yield from (f"tenants: {name!r} is there twice" for name in doubles(ids))
    if doubles([key for tenant in tenants for key in tenant.api_keys]):
        yield "tenants: two API keys are equal"
    known = {tenant.tenant_id: tenant for tenant in tenants}
    for tenant in tenants:
        yield from _adapter_problems(tenant, models, root)
        yield from _acting_problems(tenant, known, models[0])


def _adapter_problems(tenant: TenantSettings, models: Sequence[str], root: str) -> Iterator[str]:
    who = f"tenants: {tenant.tenant_id}"
    entries = tenant.entries(models[0])
    for full_name in doubles([f"{base}:{name}" for name, base, _ in entries]):
        yield f"{who}: adapter {full_name!r} is there twice"
    for given, (name, base, entry) in zip(tenant.adapters, entries, strict=True):
        where = f"{who}: adapter {given!r}"
        if name in models or not name:
            yield f"{where}: a name must not be a base model's or be empty"
        if base not in models:
            yield f"{where}: there is no base model {base!r}"
        if ":" in given and entry.base:
            yield f"{where}: its base is in its name already"
        uri = join_uri(root, entry.uri)
        if not any(inside(uri, prefix) for prefix in tenant.allowed_uris or (root,)):
            yield f"{where}: {uri} is outside of what this tenant is allowed"


def _acting_problems(
    tenant: TenantSettings, known: dict[str, TenantSettings], first_base: str
) -> Iterator[str]:
    """An adapter's name must say whose it is."""
    where = f"tenants: {tenant.tenant_id}: acts_for"
    for name in tenant.acts_for:
        if name not in known or name == tenant.tenant_id:
            yield f"{where}: there is no other tenant {name!r}"
            return
    if not tenant.acts_for:
        return
    together = [tenant, *(known[name] for name in tenant.acts_for)]
    names = [name for one in together for name in {n for n, _, _ in one.entries(first_base)}]
    yield from (f"{where}: adapter {name!r} is there twice" for name in doubles(names))


def join_uri(root: str, uri: str) -> str:
    """A uri as the store reads it: below `root`, unless it has a scheme or is absolute."""
    if "://" in uri or uri.startswith("/") or not root:
        return uri
    return f"{root.rstrip('/')}/{uri}"


def doubles(values: Sequence[str]) -> list[str]:
    """The values that are there more than once, sorted."""
    return sorted(value for value, times in Counter(values).items() if times > 1)


def inside(uri: str, prefix: str) -> bool:
    """Whether a uri lies at or below a prefix, folder by folder; dots do not lead out of it."""
    if not prefix:
        return False
    plain_uri, plain_prefix = (posixpath.normpath(value) for value in (uri, prefix))
    return plain_uri == plain_prefix or plain_uri.startswith(plain_prefix.rstrip("/") + "/")


def innermost(places: Sequence[str]) -> str:
    """Of places that one uri lies in; "" = there is none."""
    return max(places, key=lambda place: len(posixpath.normpath(place)), default="")


def digest_keys(value: Any) -> tuple[str, ...]:
    """Keys as a file has them -> `sha256:<hex>`. Errors: ValueError, without the key itself."""
    if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
        raise ValueError("must be a list of strings")
    return tuple(_key_digest(number, key) for number, key in enumerate(value))


def _key_digest(number: int, key: str) -> str:
    if key.startswith(DIGEST):
        digest = key.removeprefix(DIGEST).lower()
        if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
            raise ValueError(f"key {number}: {DIGEST} must be followed by 64 hex digits")
        return DIGEST + digest
    if len(key) < 8:
        raise ValueError(f"key {number} is shorter than 8 characters")
    return DIGEST + key_digest(key)
