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

    api_key_digests  SHA-256 in hex;  adapters  the name that is listed -> AdapterRef: the tenant's
    own name, or `base:name` where it has that name under several bases;  weight  share of the
    engine when tenants compete;  base_model_access  may use a base without an adapter;
    acts_for  tenants whose adapters it may name: such a request is theirs, not its own
    """

    tenant_id: str
    api_key_digests: tuple[str, ...] = field(default=(), repr=False)
    adapters: dict[str, AdapterRef] = field(default_factory=dict)
    weight: float = 1.0
    limits: TenantLimits = TenantLimits()
    base_model_access: bool = True
    acts_for: tuple[str, ...] = ()


@dataclass(frozen=True)
class Target:
    """What a model name means for one tenant: a base, and an adapter of it or None.

    owner  the tenant whose request this is, where it is not the one who asks
    """

    model: str
    adapter: AdapterRef | None = None
    owner: TenantConfig | None = None


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
            digest: (digest, tenant)
            for tenant in self._tenants.values()
            for digest in tenant.api_key_digests
        }
        # tenant -> an adapter's own name -> the tenant of it for which the first one may act
        self._owners = {
            tenant.tenant_id: {
                _own_name(name): self._tenants[other]
                for other in tenant.acts_for
                for name in self._tenants[other].adapters
            }
            for tenant in self._tenants.values()
        }

    @property
    def has_keys(self) -> bool:
        """Whether any tenant has an API key."""
        return bool(self._by_digest)

    def tenant_of_key(self, api_key: str) -> TenantConfig | None:
        """The owner of an API key."""
        # Comparing with every digest there is takes a millisecond for 10,000 tenants. The lookup
        # meets only digests whose hash is that of the computed one, and nobody can choose a key
        # whose SHA-256 comes near a stored one: its time tells nothing that a key could be guessed
        # from. Whether what was found is the key's takes the same time wherever they differ.
        digest = key_digest(api_key)
        known, tenant = self._by_digest.get(digest, ("", None))
        return tenant if hmac.compare_digest(known, digest) else None

    def tenant(self, tenant_id: str) -> TenantConfig | None:
        return self._tenants.get(tenant_id)

    def resolve(self, tenant: TenantConfig, name: str) -> Target | None:
        """What `name` is for this tenant: a base, one of its adapters, or `base:adapter`.

        None: nothing, or not one thing alone (`full_names`).
        """
        if name in self._models:
            return Target(name) if tenant.base_model_access else None
        adapter = _find(tenant, name)
        if adapter is not None:
            return Target(adapter.base, adapter)
        owner = self._owners[tenant.tenant_id].get(_own_name(name))
        adapter = None if owner is None else _find(owner, name)
        return Target(adapter.base, adapter, owner) if adapter else None

    def full_names(self, tenant: TenantConfig, name: str) -> list[str]:
        """Names that this tenant may use instead of `name`, which alone could mean any of them."""
        owner = self._owners[tenant.tenant_id].get(name)
        known = [*tenant.adapters, *(owner.adapters if owner else ())]
        return sorted(full for full in known if full.endswith(f":{name}")) if name else []

    def names(self, tenant: TenantConfig) -> list[str]:
        """The model names that this tenant may use, bases first."""
        bases = list(self._models) if tenant.base_model_access else []
        others = (name for other in tenant.acts_for for name in self._tenants[other].adapters)
        return bases + sorted((*tenant.adapters, *others))

    def cache_salt(self, tenant: TenantConfig) -> str:
        """Seed of the tenant's prefix hashes: unguessable, and no other tenant's."""
        return hmac.new(self._salt_key, tenant.tenant_id.encode(), sha256).hexdigest()


def bearer_key(authorization: str) -> str | None:
    """The key of an Authorization header; None if it is of another scheme."""
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else None


def key_digest(api_key: str) -> str:
    """SHA-256 of an API key in hex: the only form in which keys are kept."""
    return sha256(api_key.encode("utf-8", "surrogateescape")).hexdigest()


def _own_name(name: str) -> str:
    """An adapter's name without its base."""
    return name.rpartition(":")[2]


def _find(tenant: TenantConfig, name: str) -> AdapterRef | None:
    adapter = tenant.adapters.get(name)
    if adapter is None and ":" in name:
        base, _, own_name = name.rpartition(":")
        adapter = tenant.adapters.get(own_name)
        if adapter is not None and adapter.base != base:
            return None
    return adapter
