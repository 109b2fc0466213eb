"""Who is asking, and what may they use:

API key and model name -> tenant, base model, adapter. No HTTP here.
"""

import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256

from adapter_store.ref import AdapterRef


@dataclass(frozen=True)
class TenantLimits:
    """max_concurrent_requests  of this tenant in one ingress at a time."""

    max_concurrent_requests: int = 64


@dataclass(frozen=True)
class TenantConfig:
    """One customer.

    api_key_digests  SHA-256 in hex;  adapters  the tenant's own name -> AdapterRef;
    weight  share of the engine when tenants compete;  base_model_access  may use a base without an
    adapter
    """

    tenant_id: str
    api_key_digests: tuple[str, ...] = field(default=(), repr=False)
    adapters: dict[str, AdapterRef] = field(default_factory=dict)
    weight: float = 1.0
    limits: TenantLimits = TenantLimits()
    base_model_access: bool = True


@dataclass(frozen=True)
class Target:
    """What a model name means for one tenant: a base, and an adapter of it or None."""

    model: str
    adapter: AdapterRef | None = None


class TenantDirectory:
    """All tenants.

    A lookup costs a dictionary access, and its answer for a foreign name is that for an unknown
    one.
    """

    def __init__(
        self, tenants: Iterable[TenantConfig], models: Iterable[str], salt_key: bytes
    ) -> None:
        """salt_key  the deployment's secret, the same in every ingress: it seeds cache salts."""
        self._models = tuple(models)
        self._salt_key = salt_key
        self._tenants = {tenant.tenant_id: tenant for tenant in tenants}
        self._by_digest = {
            digest: tenant for tenant in self._tenants.values() for digest in tenant.api_key_digests
        }

    def tenant_of_key(self, api_key: str) -> TenantConfig | None:
        """The owner of an API key.

        Only its digest is looked up. How long that takes depends on the digest, which nobody can
        steer towards another one: timing tells nothing of the keys.
        """
        return self._by_digest.get(key_digest(api_key))

    def tenant(self, tenant_id: str) -> TenantConfig | None:
        return self._tenants.get(tenant_id)

    def resolve(self, tenant: TenantConfig, name: str) -> Target | None:
        """What `name` is for this tenant: a base, one of its adapters, or `base:adapter`.

        None: nothing.
        """
        if name in self._models:
            return Target(name) if tenant.base_model_access else None
        base, colon, adapter_name = name.rpartition(":")
        adapter = tenant.adapters.get(adapter_name)
        if adapter is None or (colon and base != adapter.base):
            return None
        return Target(adapter.base, adapter)

    def names(self, tenant: TenantConfig) -> list[str]:
        """The model names that this tenant may use, bases first."""
        bases = list(self._models) if tenant.base_model_access else []
        return bases + sorted(tenant.adapters)

    def cache_salt(self, tenant: TenantConfig) -> str:
        """Seed of the tenant's prefix hashes: unguessable, and no other tenant's."""
        return hmac.new(self._salt_key, tenant.tenant_id.encode(), sha256).hexdigest()


def key_digest(api_key: str) -> str:
    """SHA-256 of an API key in hex: the only form in which keys are kept."""
    return sha256(api_key.encode("utf-8", "surrogateescape")).hexdigest()
