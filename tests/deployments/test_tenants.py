"""Who may use what. A foreign name and an unknown one must be the same thing."""

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


def test_salts() -> None:
    again = TenantDirectory([A, B], ["base"], b"salt")
    other = TenantDirectory([A, B], ["base"], b"pepper")
    assert DIRECTORY.cache_salt(A) == again.cache_salt(A)
    assert len({d.cache_salt(t) for d in (DIRECTORY, other) for t in (A, B)}) == 4
