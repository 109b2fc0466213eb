"""Files that were made to hurt, or were hurt on their way: only an AdapterError may come of them.

Not here: adapters that are whole and do not fit (test_formats, test_formats_golden).
"""

import json
import math
import os
import shutil
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from adapter_store.errors import AdapterError, AdapterInvalid
from adapter_store.formats.registry import load_adapter
from tests.golden import GOLDEN, golden_targets

SOURCE = GOLDEN / "adapters/qwen3_moe/per_expert_subset_r4_tf4"
FLAT = GOLDEN / "adapters/gpt_oss/layers_r4"
TARGETS = golden_targets(GOLDEN / "models/qwen3_moe")
FLAT_TARGETS = golden_targets(GOLDEN / "models/gpt_oss")
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
NAME = "model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(SOURCE, tmp_path / "adapter")
    return tmp_path / "adapter"


def _file(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def _entry(shape: Any, offsets: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def _refused(folder: Path, content: bytes, reason: str = "file") -> None:
    (folder / WEIGHTS).write_bytes(content)
    with pytest.raises(AdapterInvalid) as refusal:
        load_adapter(folder, TARGETS)
    assert refusal.value.reason == reason, str(refusal.value)
    assert len(str(refusal.value)) < 1000 and str(refusal.value).isprintable()


HUGE = 1 << 40
BAD_FILES = {
    "nothing": b"",
    "seven bytes": b"\0" * 7,
    "no header": _file(b""),
    "length past the end": _file({}, length=HUGE),
    "length with the top bit": _file({}, length=(1 << 64) - 1),
    "not json": _file(b"{nope}"),
    "not utf-8": _file(b'{"\xff\xfe": 1}'),
    "a list": _file([]),
    "nested deep": _file(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "many lists": _file(b'{"a":[' + b"[]," * 700_000 + b"[]]}"),
    "a key twice": _file(b'{"a":1,"a":2}'),
    "not a number": _file(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,0]}}'),
    "a long number": _file(b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b"]}}"),
    "metadata of numbers": _file({"__metadata__": {"format": 1}}),
    "metadata is a list": _file({"__metadata__": []}),
    "entry is a text": _file({NAME: "x"}),
    "entry has more": _file({NAME: _entry([1], [0, 4]) | {"x": 1}}, b"\0" * 4),
    "entry has less": _file({NAME: {"dtype": "F32", "shape": []}}),
    "negative size": _file({NAME: _entry([-1], [0, 4])}, b"\0" * 4),
    "size is true": _file({NAME: _entry([True], [0, 4])}, b"\0" * 4),
    "size is a fraction": _file({NAME: _entry([1.0], [0, 4])}, b"\0" * 4),
    "shape is a text": _file({NAME: _entry("1", [0, 4])}, b"\0" * 4),
    "too many sizes": _file({NAME: _entry([1] * 9, [0, 4])}, b"\0" * 4),
    "huge shape": _file({NAME: _entry([HUGE, HUGE], [0, 4])}, b"\0" * 4),
    "huge shape and offsets": _file({NAME: _entry([HUGE], [0, 4 * HUGE])}, b"\0" * 4),
    "shape that overflows to four": _file({NAME: _entry([1 << 32] * 2 + [1], [0, 4])}, b"\0" * 4),
    "offsets backwards": _file({NAME: _entry([1], [4, 0])}, b"\0" * 4),
    "three offsets": _file({NAME: _entry([1], [0, 2, 4])}, b"\0" * 4),
    "a hole before": _file({NAME: _entry([1], [4, 8])}, b"\0" * 8),
    "overlap": _file({"a": _entry([1], [0, 4]), "b": _entry([1], [0, 4])}, b"\0" * 4),
    "bytes after": _file({NAME: _entry([1], [0, 4])}, b"\0" * 5),
    "bytes missing": _file({NAME: _entry([2], [0, 8])}, b"\0" * 4),
    "a long name": _file({"a" * 600: _entry([1], [0, 4])}, b"\0" * 4),
    "a name with a newline": _file({"a\nERROR": _entry([1], [0, 4])}, b"\0" * 4),
    "a name with half a character": _file(b'{"\\ud800":{}}'),
    "an empty name": _file({"": 1}),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_bad_files_are_refused_in_little_memory(folder: Path, kind: str) -> None:
    content = BAD_FILES[kind]
    _refused(folder, content)  # what a first call imports and keeps is not the file's
    tracemalloc.start()
    try:
        _refused(folder, content)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < (1 << 20) + 16 * len(content)


@pytest.mark.parametrize("dtype", ["F128", 32, None, ["F32"]])
def test_an_unknown_dtype_is_refused(folder: Path, dtype: Any) -> None:
    _refused(folder, _file({NAME: _entry([1], [0, 4], dtype)}, b"\0" * 4), "dtype")


@pytest.mark.parametrize("dtype", ["I32", "BOOL", "F8_E4M3", "C64"])
def test_a_known_dtype_that_is_no_factor_is_refused(folder: Path, dtype: str) -> None:
    item_bytes = {"I32": 4, "C64": 8}.get(dtype, 1)
    a_end = 4 * 64 * item_bytes
    b_end = a_end + 128 * 4 * item_bytes
    header = {
        NAME: _entry([4, 64], [0, a_end], dtype),
        NAME.replace("lora_A", "lora_B"): _entry([128, 4], [a_end, b_end], dtype),
    }
    _refused(folder, _file(header, b"\0" * b_end), "dtype")


@pytest.mark.parametrize(
    ("shape", "reason"),
    [([0, 64], "rank_mismatch"), ([4, 0], "shape"), ([], "shape"), ([256], "shape")],
)
def test_odd_shapes_are_refused(folder: Path, shape: list[int], reason: str) -> None:
    b_name = NAME.replace("lora_A", "lora_B")
    _refused(folder, save({NAME: torch.zeros(shape), b_name: torch.zeros(128, 4)}), reason)


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG])
def test_links_pipes_and_folders_are_refused(folder: Path, tmp_path: Path, name: str) -> None:
    shutil.move(folder / name, tmp_path / name)
    for make in (
        lambda at: at.symlink_to(tmp_path / name),
        lambda at: at.symlink_to("/nowhere"),
        lambda at: os.mkfifo(at),
        lambda at: at.mkdir(),
    ):
        make(folder / name)
        with pytest.raises(AdapterInvalid) as refusal:
            load_adapter(folder, TARGETS)
        assert refusal.value.reason == "file" and name in str(refusal.value)
        (folder / name).rmdir() if (folder / name).is_dir() else (folder / name).unlink()


def test_a_refusal_leaves_no_file_open(folder: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for kind in ("bytes missing", "not json", "seven bytes"):
        _refused(folder, BAD_FILES[kind])
    (folder / WEIGHTS).unlink()
    with pytest.raises(AdapterInvalid):
        load_adapter(folder, TARGETS)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"null",
        b'{"r":',
        b'{"a":' * 50_000,
        b'{"r":1,"r":2}',
        b'{"r":NaN}',
        b"\xff",
        b"{}",
    ],
)
def test_bad_configs_are_refused(folder: Path, content: bytes) -> None:
    (folder / CONFIG).write_bytes(content)
    with pytest.raises(AdapterInvalid) as refusal:
        load_adapter(folder, TARGETS)
    assert refusal.value.reason in ("config", "peft_type")


@pytest.mark.parametrize("depth", [50, 500, 700, 800, 850, 900, 920, 940, 960, 980, 2000, 50_000])
@pytest.mark.parametrize("field", ["r", "bias", "novel", "init_lora_weights", "rank_pattern"])
def test_deep_values_are_refused_or_said(folder: Path, field: str, depth: int) -> None:
    config = json.loads((folder / CONFIG).read_text()) | {field: "HERE"}
    deep = "[" * depth + "1" + "]" * depth
    (folder / CONFIG).write_text(json.dumps(config).replace('"HERE"', deep))
    try:
        weights = load_adapter(folder, TARGETS)
    except AdapterInvalid as error:
        assert len(str(error)) < 400
    else:
        assert field == "novel" and weights.manifest.warnings


def test_an_oversized_config_is_refused(folder: Path) -> None:
    with (folder / CONFIG).open("r+b") as file:
        file.truncate(1 << 34)  # sparse
    with pytest.raises(AdapterInvalid) as refusal:
        load_adapter(folder, TARGETS)
    assert refusal.value.reason == "file"


def test_expressions_that_would_run_for_years(folder: Path) -> None:
    config = json.loads((folder / CONFIG).read_text())
    config["alpha_pattern"] = {"(a*)*b": 1, "(.*)*x": 2, "(.|.|.)+!": 3, ".*" * 60 + "!": 4}
    (folder / CONFIG).write_text(json.dumps(config))
    start = time.monotonic()
    load_adapter(folder, TARGETS)
    assert time.monotonic() - start < 10


# ---- anything at all

RANDOM = settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def _load_or_refuse(folder: Path, targets: Any) -> None:
    """Whatever is loaded is whole: finite numbers in the shapes of the targets."""
    try:
        weights = load_adapter(folder, targets)
    except AdapterError as error:
        assert str(error).isprintable()
        return
    by_name = {target.name: target for target in targets}
    for name, factors in weights.factors.items():
        target, r = by_name[name], factors.lora_rank
        assert factors.a.shape[1:] == (r, target.in_features)
        assert factors.b.shape[1:] == (r, target.out_features)
        assert torch.isfinite(factors.a).all() and torch.isfinite(factors.b).all()


@given(data=st.data())
@RANDOM
def test_garbled_weights(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    source, targets = data.draw(st.sampled_from([(SOURCE, TARGETS), (FLAT, FLAT_TARGETS)]))
    content = bytearray((source / WEIGHTS).read_bytes())
    header_end = 8 + int.from_bytes(content[:8], "little")
    place = st.one_of(st.integers(0, header_end - 1), st.integers(0, len(content) - 1))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(place) % max(len(content), 1)
        kind = data.draw(st.sampled_from(["flip", "cut", "insert", "remove", "swap digits"]))
        if kind == "flip" and content:
            content[at] ^= data.draw(st.integers(1, 255))
        elif kind == "cut":
            del content[at:]
        elif kind == "insert":
            content[at:at] = data.draw(st.binary(min_size=1, max_size=9))
        elif kind == "remove":
            del content[at : at + data.draw(st.integers(1, 9))]
        else:
            old, new = data.draw(st.permutations(b"0123456789"))[:2]
            content[:header_end] = content[:header_end].replace(bytes([old]), bytes([new]))
    _write_and_try(tmp_path_factory, source, bytes(content), None, targets)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
_KEYS = st.text(alphabet="aq_proj.*+?()[]{}|^$\\d0-9,", max_size=12)


@given(data=st.data())
@RANDOM
def test_garbled_configs(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    source, targets = data.draw(st.sampled_from([(SOURCE, TARGETS), (FLAT, FLAT_TARGETS)]))
    config = json.loads((source / CONFIG).read_text())
    for _ in range(data.draw(st.integers(1, 3))):
        field = data.draw(st.sampled_from([*config, "novel", "use_novel"]))
        config[field] = data.draw(_JSON)
    pattern = data.draw(st.sampled_from(["rank_pattern", "alpha_pattern"]))
    config[pattern] = data.draw(st.dictionaries(_KEYS, st.integers(-1, 9), max_size=3))
    _write_and_try(tmp_path_factory, source, None, json.dumps(config).encode(), targets)


@given(data=st.data())
@RANDOM
def test_garbled_headers(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    source, targets = data.draw(st.sampled_from([(SOURCE, TARGETS), (FLAT, FLAT_TARGETS)]))
    content = (source / WEIGHTS).read_bytes()
    header_end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:header_end])
    names = [name for name in header if name != "__metadata__"]
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(names))
        entry = header.get(name, {})
        kind = data.draw(st.sampled_from(["drop", "rename", "reshape", "dtype", "anything"]))
        if kind == "drop":
            header.pop(name, None)
        elif kind == "rename":
            other = data.draw(st.sampled_from(names) | st.text(max_size=20))
            cut = data.draw(st.integers(0, len(name)))
            header[name[:cut] + other[cut:]] = header.pop(name, entry)
        elif kind == "reshape" and isinstance(entry, dict) and isinstance(entry.get("shape"), list):
            size = math.prod(entry["shape"])
            divisors = [d for d in range(1, 129) if size and size % d == 0] or [1]
            rows = data.draw(st.sampled_from(divisors))
            header[name] = entry | {"shape": [rows, size // rows]}
        elif kind == "dtype" and isinstance(entry, dict):
            dtype = data.draw(st.sampled_from(["I32", "F32", "BF16", "U8", "F64"]))
            header[name] = entry | {"dtype": dtype}
        else:
            header[name] = data.draw(_JSON)
    _write_and_try(tmp_path_factory, source, _file(header, content[header_end:]), None, targets)


def _write_and_try(
    factory: pytest.TempPathFactory,
    source: Path,
    weights: bytes | None,
    config: bytes | None,
    targets: Any,
) -> None:
    folder = factory.mktemp("garbled")
    (folder / WEIGHTS).write_bytes((source / WEIGHTS).read_bytes() if weights is None else weights)
    (folder / CONFIG).write_bytes((source / CONFIG).read_bytes() if config is None else config)
    try:
        _load_or_refuse(folder, targets)
    finally:
        shutil.rmtree(folder)
