"""Packed files: what goes in comes out, and nothing that the file says is trusted. Not here: the
cache and the arena."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from adapter_store.errors import AdapterInvalid
from adapter_store.packed import (
    PackedAdapter,
    PackedFileError,
    content_digest,
    packed_bytes,
    write_packed,
)
from adapter_store.packed_layout import fingerprint, plan_layout
from adapter_store.weights import LoraFactors, is_finite
from tests.adapter_store.tiny_adapters import TARGETS, make_weights, open_tiny, write_tiny

BAD_DIGEST = "0" * 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared_a", [False, True])
def test_round_trip(tmp_path: Path, dtype: torch.dtype, shared_a: bool) -> None:
    weights = make_weights(1, ranks=(4, 0, 8, 11), shared_a=shared_a)
    path = tmp_path / "a.lora"
    size = write_packed(path, weights, TARGETS, dtype, BAD_DIGEST)
    assert size == path.stat().st_size == packed_bytes(weights, TARGETS, dtype, BAD_DIGEST)
    with PackedAdapter.open(path, TARGETS, dtype) as packed:
        assert packed.digest == BAD_DIGEST
        assert [t.index for t in packed.layout.targets] == [0, 2, 3]
        assert [t.lora_rank for t in packed.layout.targets] == [8, 8, 16]
        assert all(end % 256 == 0 for end in packed.layout.ends)
        data = packed.data.view(dtype)
        for at, t in enumerate(packed.layout.targets):
            spec, factors = TARGETS[t.index], weights.factors[TARGETS[t.index].name]
            for f, offset, stride, experts, size, want in (
                (0, t.a_offset, t.a_stride, t.a_experts, spec.in_features, factors.a),
                (1, t.b_offset, t.b_stride, t.b_experts, spec.out_features, factors.b),
            ):
                count = experts * t.lora_rank * size
                assert offset * dtype.itemsize == packed.layout.ends[2 * at + f]
                got = data[offset : offset + count].view(experts, t.lora_rank, size)
                assert torch.equal(got[:, : want.shape[1]], want.to(dtype))
                assert not got[:, want.shape[1] :].any()
                assert stride == (t.lora_rank * size if experts > 1 else 0)


def test_layout_is_made_of_ranks_and_sizes_alone() -> None:
    layout = plan_layout(TARGETS, [(1, 8, 1, 3)], itemsize=2)
    a_bytes, b_bytes = 8 * 40 * 2, 3 * 8 * 48 * 2
    assert layout.ends == (0, 768, 768 + b_bytes) and a_bytes == 640 and b_bytes % 256 == 0
    assert layout.max_rank == 8


def test_shapes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    target = TARGETS[0]
    for a, b in (
        (torch.zeros(1, 4, 41), torch.zeros(1, 4, 56)),
        (torch.zeros(1, 4, 40), torch.zeros(1, 5, 56)),
        (torch.zeros(2, 4, 40), torch.zeros(1, 4, 56)),
        (torch.zeros(4, 40), torch.zeros(4, 56)),
    ):
        weights = make_weights(1, ranks=())
        object.__setattr__(weights, "factors", {target.name: LoraFactors(a, b)})
        with pytest.raises(AdapterInvalid, match=target.name):
            write_packed(tmp_path / "a", weights, TARGETS, torch.float32)


def test_unknown_target_is_refused(tmp_path: Path) -> None:
    weights = make_weights(1)
    with pytest.raises(AdapterInvalid, match=TARGETS[3].name):
        write_packed(tmp_path / "a", weights, TARGETS[:3], torch.float32)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.4e38])
def test_values_that_do_not_survive_the_cast_are_refused(tmp_path: Path, value: float) -> None:
    weights = make_weights(1)
    weights.factors[TARGETS[2].name].b[1, 2, 3] = value
    with pytest.raises(AdapterInvalid, match=f"not_finite: B of {TARGETS[2].name}"):
        write_packed(tmp_path / "a", weights, TARGETS, torch.bfloat16)


def _cut(data: bytearray) -> bytes:
    return bytes(data[:-1])


def _grow(data: bytearray) -> bytes:
    return bytes(data) + b"\0"


def _flip(data: bytearray) -> bytes:
    data[-300] ^= 1
    return bytes(data)


def _magic(data: bytearray) -> bytes:
    data[0] ^= 1
    return bytes(data)


def _huge_header(data: bytearray) -> bytes:
    data[8:16] = (1 << 62).to_bytes(8, "little")
    return bytes(data)


def _no_json(data: bytearray) -> bytes:
    data[16] = ord("]")
    return bytes(data)


@pytest.mark.parametrize("damage", [_cut, _grow, _flip, _magic, _huge_header, _no_json])
def test_damaged_file_is_refused(tmp_path: Path, damage: Callable[[bytearray], bytes]) -> None:
    path = tmp_path / "a.lora"
    write_tiny(path, 1)
    path.write_bytes(damage(bytearray(path.read_bytes())))
    with pytest.raises(PackedFileError, match=r"a\.lora"):
        open_tiny(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("index", 4),
        ("index", -1),
        ("index", 1),
        ("lora_rank", 12),
        ("lora_rank", 1 << 40),
        ("lora_rank", 0),
        ("lora_rank", True),
        ("a_experts", 2),
        ("a_offset", 1 << 40),
        ("b_offset", 0),
        ("b_stride", 8),
    ],
)
def test_header_that_lies_is_refused(tmp_path: Path, key: str, value: int) -> None:
    path = tmp_path / "a.lora"
    write_tiny(path, 1)
    raw = path.read_bytes()
    length = int.from_bytes(raw[8:16], "little")
    start = -(-(16 + length) // 256) * 256
    header = json.loads(raw[16 : 16 + length])
    header["targets"][0][key] = value
    text = json.dumps(header).encode()
    head = raw[:8] + len(text).to_bytes(8, "little") + text
    path.write_bytes(head + bytes(-len(head) % 256) + raw[start:])
    with pytest.raises(PackedFileError):
        open_tiny(path)


def test_file_of_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.lora"
    write_tiny(path, 1)
    with pytest.raises(PackedFileError, match="another model"):
        PackedAdapter.open(path, TARGETS[:3], torch.float32)
    with pytest.raises(PackedFileError, match="another model"):
        PackedAdapter.open(path, TARGETS, torch.bfloat16)
    assert fingerprint(TARGETS, torch.float32) != fingerprint(TARGETS[:3], torch.float32)


def test_mapped_data_outlive_the_file_and_never_change_it(tmp_path: Path) -> None:
    path = tmp_path / "a.lora"
    write_tiny(path, 1)
    before = path.read_bytes()
    packed = open_tiny(path)
    data = packed.data
    want = data.clone()
    packed.close()
    packed.close()
    assert packed.data.numel() == 0
    path.unlink()
    assert torch.equal(data, want)
    data.fill_(7)
    path.write_bytes(before)
    assert torch.equal(open_tiny(path).data, want)


def test_content_digest_sees_every_byte_and_name(tmp_path: Path) -> None:
    def digest(files: dict[str, bytes]) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for name, data in files.items():
            (folder / name).write_bytes(data)
        return content_digest(folder)

    base = digest({"a": b"12", "b": b"3"})
    assert base == digest({"b": b"3", "a": b"12"}) and len(base) == 64
    others = [{"a": b"12", "b": b"4"}, {"a": b"1", "b": b"23"}, {"a": b"12", "c": b"3"}]
    assert len({base, *map(digest, others)}) == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_value_that_is_not_finite_is_found_wherever_it_lies(
    dtype: torch.dtype, bad: float
) -> None:
    for size, at in ((1, 0), (7, 6), (1000, 0), (1000, 513), (100_003, 100_002)):
        tensor = torch.linspace(-3, 3, size).to(dtype)
        assert is_finite(tensor)
        tensor[at] = bad
        assert not is_finite(tensor), (size, at)
    assert is_finite(torch.empty(0, dtype=dtype))
