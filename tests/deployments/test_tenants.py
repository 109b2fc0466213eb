"""Who may use what. A foreign name and an unknown one must be the same thing."""

import hmac

import pytest

from adapter_store.ref import AdapterRef
from deployments.tenants import Target, TenantConfig, TenantDirectory, key_digest

A = TenantConfig("a", (key_digest("key-a"),), {"style": AdapterRef("a/style", "u", base="base")})
B = TenantConfig(
    "b",
    (key_digest("key-b1"), key_digest("key-b2")),
    {"other": AdapterRef("b/other", "v", base="second")},
    base_model_access=False,
)
DIRECTORY = TenantDirectory([A, B], ["base", "second"], b"salt")


def test_keys() -> None:
    assert DIRECTORY.tenant_of_key("key-a") is A
    assert DIRECTORY.tenant_of_key("key-b1") is DIRECTORY.tenant_of_key("key-b2") is B
    for wrong in ("", "key-A", "key-a ", key_digest("key-a"), "\udcff"):
        assert DIRECTORY.tenant_of_key(wrong) is None


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found is the key's only if `hmac.compare_digest` says so."""
    asked = []

    def differ(known: str, computed: str) -> bool:
        asked.append((known, computed))
        return False

    monkeypatch.setattr(hmac, "compare_digest", differ)
    assert DIRECTORY.tenant_of_key("key-a") is DIRECTORY.tenant_of_key("wrong") is None
    assert asked == [(key_digest("key-a"),) * 2, ("", key_digest("wrong"))]


def test_names() -> None:
    ref = A.adapters["style"]
    assert DIRECTORY.resolve(A, "style") == Target("base", ref)
    assert DIRECTORY.resolve(A, "base:style") == Target("base", ref)
    assert DIRECTORY.resolve(A, "base") == Target("base")
    assert DIRECTORY.resolve(B, "second:other") == Target("second", B.adapters["other"])
    for name in ("other", "second:other", "second:style", ":style", "base:", "", "x:base:style"):
        assert DIRECTORY.resolve(A, name) is None, name
    for name in ("base", "second", "style", "base:style"):
        assert DIRECTORY.resolve(B, name) is None, name
    assert DIRECTORY.names(A) == ["base", "second", "style"]
    assert DIRECTORY.names(B) == ["other"]


def test_one_name_under_two_bases() -> None:
    refs = {f"{base}:tone": AdapterRef(f"c/{base}", "u", base=base) for base in ("base", "second")}
    tenant = TenantConfig("c", (), refs | {"hue": AdapterRef("c/hue", "w", base="second")})
    directory = TenantDirectory([tenant], ["base", "second"], b"salt")
    for name in directory.names(tenant):
        assert directory.resolve(tenant, name) is not None, name
    assert directory.names(tenant) == ["base", "second", "base:tone", "hue", "second:tone"]
    assert directory.resolve(tenant, "second:tone") == Target("second", refs["second:tone"])
    assert directory.resolve(tenant, "tone") is None
    assert directory.full_names(tenant, "tone") == ["base:tone", "second:tone"]
    for name in ("hue", "one", "", ":tone", "absent", "third:tone"):
        assert directory.full_names(tenant, name) == [], name


def test_acting_for_others() -> None:
    two = {f"{base}:tone": AdapterRef(f"b/{base}", "u", base=base) for base in ("base", "second")}
    b = TenantConfig("b", (), two)
    gate = TenantConfig(
        "gate", (), {"own": AdapterRef("gate/own", "u", base="base")}, acts_for=("a", "b")
    )
    directory = TenantDirectory([A, b, gate], ["base", "second"], b"salt")
    style = A.adapters["style"]
    for name in ("style", "base:style"):
        assert directory.resolve(gate, name) == Target("base", style, A)
    assert directory.resolve(gate, "second:tone") == Target("second", two["second:tone"], b)
    assert directory.resolve(gate, "own") == Target("base", gate.adapters["own"])
    assert directory.resolve(gate, "base") == Target("base")
    assert directory.full_names(gate, "tone") == ["base:tone", "second:tone"]
    assert directory.names(gate)[2:] == ["base:tone", "own", "second:tone", "style"]
    for name in ("tone", "second:style", "absent"):
        assert directory.resolve(gate, name) is None, name
    # Not the other way round, and not from tenant to tenant.
    for other, name in ((A, "own"), (A, "base:tone"), (b, "style")):
        assert directory.resolve(other, name) is None
        assert directory.full_names(other, name) == []


def test_salts() -> None:
    again = TenantDirectory([A, B], ["base"], b"salt")
    other = TenantDirectory([A, B], ["base"], b"pepper")
    assert DIRECTORY.cache_salt(A) == again.cache_salt(A)
    assert len({d.cache_salt(t) for d in (DIRECTORY, other) for t in (A, B)}) == 4
