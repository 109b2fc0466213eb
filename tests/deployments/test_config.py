"""The configuration file: what it means, and that each mistake is refused by its name."""

import pickle
import traceback
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.config import DEFAULT_CONFIG, ConfigError, ServiceConfig, load_config
from deployments.tenant_settings import join_uri
from deployments.tenants import key_digest

GOOD: dict[str, Any] = {
    "models": [{"name": "base", "path": "models/base", "engine": {"max_loras": 2}}],
    "adapters": {"root": "s3://bucket/adapters"},
    "tenants": [
        {
            "tenant_id": "a",
            "api_keys": ["plain-key-of-a"],
            "adapters": {"one": "a/one", "two": {"uri": "s3://bucket/adapters/a/two"}},
        },
        {"tenant_id": "b", "api_keys": ["sha256:" + key_digest("plain-key-of-b")]},
    ],
}


def load(tmp_path: Path, changed: dict[str, Any]) -> ServiceConfig:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(GOOD | changed))
    return load_config(path)


def test_good_file(tmp_path: Path) -> None:
    config = load(tmp_path, {})
    assert config.models[0].path == str(tmp_path / "models/base")
    assert config.models[0].engine_config("/somewhere").max_loras == 2
    assert config.models[0].engine_config("/somewhere").host_cache_dir == "/somewhere"
    a, b = config.tenant_configs()
    assert a.adapters["one"].uri == "s3://bucket/adapters/a/one"
    assert a.adapters["one"].adapter_id == "a/one" and a.adapters["one"].base == "base"
    assert a.api_key_digests == (key_digest("plain-key-of-a"),)
    assert b.api_key_digests == (key_digest("plain-key-of-b"),)
    assert a.base_model_access


def test_no_plain_key_stays_anywhere(tmp_path: Path) -> None:
    config = load(tmp_path, {})
    assert "plain-key-of-a" not in repr(config)
    assert b"plain-key-of-a" not in pickle.dumps(config)
    again = ServiceConfig.model_validate(config.model_dump())
    assert again.tenant_configs() == config.tenant_configs()


def test_default_is_the_demo() -> None:
    config = load_config(DEFAULT_CONFIG)
    assert Path(config.models[0].path).joinpath("config.json").is_file()
    for tenant in config.tenant_configs():
        for ref in tenant.adapters.values():
            assert Path(ref.uri).joinpath("adapter_config.json").is_file()


def tenant(**fields: Any) -> dict[str, Any]:
    return {"tenants": [{"tenant_id": "a"} | fields]}


def model(**fields: Any) -> dict[str, Any]:
    return {"models": [{"name": "base", "path": "p"} | fields]}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"modles": []}, "modles"),
        ({"models": []}, "models"),
        (model(nam="x"), "models.0.nam"),
        (model(num_replicas=0), "models.0.num_replicas"),
        (model(max_queued_requests=0), "models.0.max_queued_requests"),
        (model(num_cpus=0.00001), "models.0.num_cpus: Ray counts in steps of 0.0001"),
        (model(num_gpus=1.5), "models.0.num_gpus: Ray parts one GPU and no more"),
        ({"ingress": {"num_cpus": 0.00001}}, "ingress.num_cpus"),
        (model(engine={"max_lora": 1}), "unknown engine setting 'max_lora'"),
        (model(engine={"max_loras": "many"}), "max_loras"),
        (model(engine={"page_tokens": 0}), "page_tokens must be at least 1"),
        (model(engine={"model": "x"}), "unknown engine setting 'model'"),
        (model(load_format="gguf"), "load_format must be"),
        (model(name="a:b"), "models.0.name"),
        ({"models": [{"name": "x", "path": "p"}] * 2}, "'x' is there twice"),
        ({"tenants": [{"tenant_id": "a"}] * 2}, "'a' is there twice"),
        (
            {"tenants": [{"tenant_id": t, "api_keys": ["same-key-1"]} for t in "ab"]},
            "two API keys are equal",
        ),
        (tenant(api_keys=["short"]), "key 0 is shorter than 8"),
        (tenant(api_keys=["sha256:xyz"]), "64 hex digits"),
        (tenant(api_keys="one-string"), "must be a list of strings"),
        (tenant(weight=0), "tenants.0.weight"),
        (tenant(limits={"max_concurrent": 1}), "max_concurrent"),
        (tenant(adapters={"base": "a/one"}), "adapter 'base'"),
        (tenant(adapters={"x:y": "a/one"}), "adapter 'x:y'"),
        (tenant(adapters={"x": {"uri": "a/one", "base": "other"}}), "no base model 'other'"),
        (tenant(adapters={"x": "s3://other/one"}), "outside of what this tenant is allowed"),
        (tenant(adapters={"x": "s3://bucket/adapters-2/one"}), "outside"),
        (tenant(adapters={"x": "../secrets"}), "outside"),
        (tenant(adapters={"x": "/etc"}), "outside"),
        (tenant(adapters={"x": "b/one"}, allowed_uris=["s3://bucket/adapters/a"]), "outside"),
        (tenant(adapters={"base:x": {"uri": "a/one", "base": "base"}}), "in its name already"),
        (tenant(adapters={"x": "a/one", "base:x": "a/two"}), "adapter 'base:x' is there twice"),
        (tenant(adapters={"base:base": "a/one"}), "must not be a base model's"),
        (tenant(adapters={"base:": "a/one"}), "or be empty"),
        (tenant(acts_for=["nobody"]), "acts_for: there is no other tenant 'nobody'"),
        (tenant(acts_for=["a"]), "acts_for: there is no other tenant 'a'"),
        (
            {
                "tenants": [
                    {"tenant_id": "gate", "acts_for": ["a", "b"]},
                    {"tenant_id": "a", "adapters": {"x": "a/one"}},
                    {"tenant_id": "b", "adapters": {"x": "b/one"}},
                ]
            },
            "tenants: gate: acts_for: adapter 'x' is there twice",
        ),
        ({"ingress": {"anonymous_tenant": "nobody"}}, "no tenant 'nobody'"),
        ({"ingress": {"max_body_bytes": 1}}, "ingress.max_body_bytes"),
        ({"placement_policy": "random"}, "'random' is not one of"),
        ({"http": {"port": 70000}}, "http.port"),
    ],
)
def test_refused(tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, changed)
    assert words in str(caught.value) and "config.yaml" in str(caught.value)


def test_refusals_repeat_no_secret(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, tenant(api_keys=["hidden-word-2"], weight="hidden-word", bad=1))
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("text", ["api_keys: [hidden-word\nb: 1", "api_keys: 'hidden-word' x"])
def test_what_is_no_yaml_is_not_repeated(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"config.yaml: line \d, column \d+: expected ") as caught:
        load_config(path)
    told = "".join(traceback.format_exception(caught.value))
    assert "hidden" not in told


def test_unreadable_files(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [")
    text = tmp_path / "text.yaml"
    text.write_text("just words")
    for path in (broken, text, tmp_path / "absent.yaml"):
        with pytest.raises(ConfigError, match=path.name):
            load_config(path)


def test_allowed_uris_open_what_the_root_does_not(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        tenant(adapters={"x": "s3://theirs/a/x"}, allowed_uris=["s3://theirs/a"]),
    )
    assert config.tenant_configs()[0].adapters["x"].uri == "s3://theirs/a/x"


def test_an_adapter_says_from_where_on_it_is_its_tenants(tmp_path: Path) -> None:
    """The innermost of the places that the operator allows: links before it are the operator's."""
    for uri, allowed, root in (
        ("a/one", [], "s3://bucket/adapters"),
        ("/far/a/one", ["/far", "/far/a", "/far/a/one/more", "s3://x"], "/far/a"),
        ("file:///far/a", ["file:///far/"], "file:///far/"),
    ):
        config = load(tmp_path, tenant(adapters={"x": uri}, allowed_uris=allowed))
        assert config.tenant_configs()[0].adapters["x"].root == root


def test_an_allowed_place_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real" / "a").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    link = f"{tmp_path}/link"
    for root, uri, allowed, place in (
        (link, "a/x", [], link),
        (link, "a/x", [f"{link}/a"], f"{link}/a"),
        (link, f"{link}/a/x", [], link),
        ("link", "a/x", ["link/a"], f"{link}/a"),
    ):
        changed = tenant(adapters={"x": uri}, allowed_uris=allowed)
        config = load(tmp_path, {"adapters": {"root": root}, **changed})
        ref = config.tenant_configs()[0].adapters["x"]
        assert (ref.uri, ref.root) == (f"{link}/a/x", place)


def test_without_a_root_uris_are_meant_from_the_files_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not from where the service happens to be started."""
    monkeypatch.chdir("/")
    uris = {"x": "mine/x", "y": {"uri": "./mine/y", "revision": "2"}, "z": "/far/z"}
    uris |= {"s": "s3://bucket/s"}
    allowed = ["mine", "/far", "s3://bucket"]
    for root in ({}, {"root": ""}):
        config = load(tmp_path, tenant(adapters=uris, allowed_uris=allowed) | {"adapters": root})
        found = config.tenant_configs()[0].adapters
        assert {name: ref.uri for name, ref in found.items()} == {
            "x": f"{tmp_path}/mine/x", "y": f"{tmp_path}/mine/y", "z": "/far/z",
            "s": "s3://bucket/s",
        }  # fmt: skip
        assert found["y"].revision == "2"
        assert config.tenants[0].allowed_uris == (f"{tmp_path}/mine", "/far", "s3://bucket")
    with pytest.raises(ConfigError, match="outside"):
        load(
            tmp_path, tenant(adapters={"x": "mine/../x"}, allowed_uris=["mine"]) | {"adapters": {}}
        )


def test_one_name_for_several_bases(tmp_path: Path) -> None:
    changed = {
        "models": [{"name": "base", "path": "p"}, {"name": "org/second", "path": "q"}],
        **tenant(
            adapters={
                "tone": "a/one",
                "org/second:tone": "a/two",
                "base:only": "a/three",
                "long": {"uri": "a/four", "base": "org/second"},
            }
        ),
    }
    config = load(tmp_path, changed)
    adapters = config.tenant_configs()[0].adapters
    assert {name: (ref.base, ref.uri[-7:], ref.adapter_id) for name, ref in adapters.items()} == {
        "base:tone": ("base", "s/a/one", "a/base:tone"),
        "org/second:tone": ("org/second", "s/a/two", "a/org/second:tone"),
        "only": ("base", "a/three", "a/only"),
        "long": ("org/second", "/a/four", "a/long"),
    }
    assert (
        config.tenant_configs()
        == ServiceConfig.model_validate(config.model_dump()).tenant_configs()
    )


def test_s3_keys_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s3 = {"endpoint_url": "http://127.0.0.1:1", "access_key_env": "OUR_KEY"}
    config = load(tmp_path, {"adapters": {"root": "s3://bucket/adapters", "s3": s3}})
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    monkeypatch.delenv("OUR_KEY", raising=False)
    with pytest.raises(ConfigError, match="OUR_KEY"):
        config.adapters.s3.options()
    monkeypatch.setenv("OUR_KEY", "k")
    assert config.adapters.s3.options() == ("http://127.0.0.1:1", "", "k", "")


def test_join_uri() -> None:
    assert join_uri("s3://b/p/", "x") == "s3://b/p/x"
    assert join_uri("s3://b/p", "s3://c/x") == "s3://c/x"
    assert join_uri("/folder", "/other") == "/other"
