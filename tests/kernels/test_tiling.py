"""Tile sizes: what ships is valid, the nearest key is taken, bad files are refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from kernels.lora_decode import decode_tiles
from kernels.tiling import (
    FOLDER,
    MAX_LORA_RANK,
    OPS,
    SHARED_BYTES,
    Tiles,
    check_start,
    force_tiles,
    load_tiles,
    moe_block_m,
    narrow_block_m,
    parse_tiles,
    slot_block_m,
    tiles_for,
)

FILES = sorted(FOLDER.glob("*.json"))


def test_the_h200_and_a_default_ship() -> None:
    assert {"NVIDIA_H200.json", "default.json"} <= {path.name for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_files_are_valid_and_fit(path: Path) -> None:
    for op, entries in parse_tiles(json.loads(path.read_text()), path.name).items():
        for (rows, _, _), tiles in entries:
            # The rows of a tile at this key, whatever the number of experts from 8 up.
            block_m = max(moe_block_m(rows, 1, 8), slot_block_m(rows))
            if op in ("lora_expand", "decode_expand"):
                continue  # its reduction is the rank, not block_k
            if op in ("lora_shrink", "decode_shrink"):
                tiles = Tiles(64, tiles.block_k, num_stages=tiles.num_stages)
            assert tiles.shared_bytes(block_m) <= SHARED_BYTES, (op, rows)


def test_a_gpu_without_a_file_gets_the_default() -> None:
    assert load_tiles("NVIDIA H100 PCIe") == load_tiles("")
    assert load_tiles("NVIDIA H200") != load_tiles("")


def entry(rows: int, out: int, in_: int, **tiles: Any) -> dict[str, Any]:
    return {"rows": rows, "out": out, "in": in_, **tiles}


def test_the_nearest_key_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entries = [
        entry(4, 1024, 1024, block_n=32),
        entry(64, 1024, 1024),
        entry(64, 8192, 1024, block_n=128),
    ]
    (tmp_path / "default.json").write_text(json.dumps(dict.fromkeys(OPS, entries)))
    monkeypatch.setattr("kernels.tiling.FOLDER", tmp_path)
    # A name that no other test looks up: both functions remember.
    gpu = "test GPU"
    wanted = {(1, 1024): 32, (15, 1024): 32, (17, 1024): 64, (500, 2000): 64, (64, 4000): 128}
    for (rows, out), block_n in wanted.items():
        shape = {"rows": rows, "out": out, "in": 1024}
        assert tiles_for("moe_gemm", shape, gpu).block_n == block_n, shape
    with pytest.raises(KeyError):
        tiles_for("softmax", {"rows": 1, "out": 1, "in": 1}, gpu)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (entry(1, 1, 1, block_n=48), "block_n must be a power of two"),
        (entry(1, 1, 1, block_k=16), "block_k must be at least 32"),
        (entry(1, 1, 1, block_n=8), "block_n must be at least 16, not 8"),
        (entry(1, 1, 1, split_k=0), "split_k must be in 1..64"),
        (entry(1, 1, 1, num_warps="4"), "num_warps must be a power of two"),
        (entry(1, 1, 1, num_warps=True), "num_warps must be a power of two"),
        (entry(1, 1, 1, block_m=12), "block_m must be a power of two"),
        (entry(1, 1, 1, max_registers=100), "max_registers: 0 or 64..248 in eights, not 100"),
        (entry(1, 1, 1, BLOCK_N=64), "BLOCK_N"),
        (entry(0, 1, 1), "positive integers"),
        ({"rows": 1, "out": 1}, "'in'"),
        (entry(1, 1, 1, block_n=512, block_k=512), "shared memory"),
    ],
)
def test_bad_entries_are_refused_by_name(bad: dict[str, Any], words: str) -> None:
    raw = dict.fromkeys(OPS, [entry(1, 1, 1)]) | {"moe_gemm": [entry(1, 1, 1), bad]}
    with pytest.raises(ValueError, match="my.json: moe_gemm") as error:
        parse_tiles(raw, "my.json")
    assert "[1]" in str(error.value) and words in str(error.value)


def test_bad_files_are_refused_by_name() -> None:
    good = dict.fromkeys(OPS, [entry(1, 1, 1)])
    with pytest.raises(ValueError, match=r"missing ops \['lora_expand'\]"):
        parse_tiles({k: v for k, v in good.items() if k != "lora_expand"}, "my.json")
    with pytest.raises(ValueError, match=r"unknown \['conv'\]"):
        parse_tiles(good | {"conv": []}, "my.json")
    with pytest.raises(ValueError, match="my.json: moe_gemm must be a list"):
        parse_tiles(good | {"moe_gemm": []}, "my.json")


def test_a_start_refuses_what_would_fail_at_a_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """GPU names that nobody else asks for: files are remembered."""
    check_start("NVIDIA H200", MAX_LORA_RANK)
    with pytest.raises(ValueError, match="max_lora_rank 264 is above 256"):
        check_start("NVIDIA H200", 264)
    monkeypatch.setattr("kernels.tiling.FOLDER", tmp_path)
    good = dict.fromkeys(OPS, [entry(1, 1, 1)])
    cases = {
        "text": ("{", r"one_text\.json: Expecting"),
        "list": ("[]", r"one_list\.json: must hold an object of ops, not list"),
        "op": (json.dumps({"moe_gemm": good["moe_gemm"]}), r"one_op\.json: missing ops"),
        "entry": (json.dumps(good | {"decode_shrink": [entry(1, 1, 1), entry(1, 1, 1, warps=4)]}),
                  r"one_entry\.json: decode_shrink\[1\]: .*warps"),
        "number": (json.dumps(good | {"moe_gemm": [7]}), r"one_number\.json: moe_gemm\[0\]"),
    }  # fmt: skip
    for name, (text, words) in cases.items():
        (tmp_path / f"one_{name}.json").write_text(text)
        with pytest.raises(ValueError, match=words):
            check_start(f"one {name}", 8)


def test_forced_tiles_hold_within_alone() -> None:
    shape = {"rows": 4, "out": 2880, "in": 2880}
    before = tiles_for("lora_shrink", shape, "")
    forced = Tiles(16, 32)
    with pytest.raises(RuntimeError), force_tiles({"lora_shrink": forced}):
        assert tiles_for("lora_shrink", shape, "") == forced
        with force_tiles({"moe_gemm": forced}):
            assert tiles_for("lora_shrink", shape, "") == tiles_for("moe_gemm", shape, "") == forced
        assert tiles_for("moe_gemm", shape, "") != forced
        raise RuntimeError
    assert tiles_for("lora_shrink", shape, "") == before


def test_block_m_follows_the_rows_of_an_expert() -> None:
    assert [moe_block_m(t, 4, 32) for t in (1, 32, 128, 129, 512, 513, 1600)] == [
        16, 16, 16, 32, 64, 128, 128,
    ]  # fmt: skip
    assert moe_block_m(0, 4, 32) == 16


@pytest.mark.parametrize(("top_k", "num_experts"), [(4, 32), (8, 128), (6, 64), (1, 16)])
def test_powers_of_two_warm_every_choice(top_k: int, num_experts: int) -> None:
    """What is compiled follows from these: no token count may need something new."""

    def choice(num_tokens: int) -> tuple[object, ...]:
        pairs = {"rows": num_tokens * top_k, "out": 5760, "in": 2880}
        tokens = {"rows": num_tokens, "out": 4096, "in": 2880}
        expert_ops = (
            tiles_for("moe_gemm", pairs, "NVIDIA H200"),
            tiles_for("moe_gemm_mxfp4", pairs, "NVIDIA H200"),
            tiles_for("moe_gemm_packed", pairs, "NVIDIA H200"),
            narrow_block_m(moe_block_m(num_tokens, top_k, num_experts), num_tokens),
            tiles_for("lora_shrink", pairs, "NVIDIA H200"),
            moe_block_m(num_tokens, top_k, num_experts),
        )
        plain_ops = (tiles_for("lora_shrink", tokens, "NVIDIA H200"), slot_block_m(num_tokens))
        # Each a kernel of its own: what is compiled for one does not hang on the other.
        decode_ops = (
            decode_tiles(rows["rows"], 2880, 4096, 32, "NVIDIA H200") for rows in (pairs, tokens)
        )
        return expert_ops, plain_ops, *decode_ops

    for which in range(4):
        warm = {choice(1 << i)[which] for i in range(12)}
        assert {choice(n)[which] for n in range(1, 2049)} == warm


@pytest.mark.parametrize("gpu", ["NVIDIA H200", ""])
def test_packed_decode_reads_eight_rows_a_tile(gpu: str) -> None:
    """Up to 32 tokens of 4 experts each: few of 32 experts have more rows than that."""
    for tokens in (1, 8, 32, 64, 2048):
        for out in (5760, 2880):
            shape = {"rows": 4 * tokens, "out": out, "in": 2880}
            block_m = tiles_for("moe_gemm_packed", shape, gpu).block_m
            assert block_m == 8 if tokens <= 32 else block_m >= 64


def test_plain_lora_has_larger_tiles_in_a_prefill() -> None:
    assert slot_block_m(32) < slot_block_m(1600)


def test_gpt_oss_needs_no_masks_in_the_reduction() -> None:
    """2880 = 45 · 64: a block_k of 128 would leave half of its last step masked."""
    for rows in (4, 32, 64, 128, 6400):
        for out in (2880, 5760):
            shape = {"rows": rows, "out": out, "in": 2880}
            assert 2880 % tiles_for("moe_gemm_mxfp4", shape, "NVIDIA H200").block_k == 0
        tiles = tiles_for("lora_shrink", {"rows": rows, "out": 32, "in": 2880}, "NVIDIA H200")
        assert 2880 % (tiles.block_k * tiles.split_k) == 0
