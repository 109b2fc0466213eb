"""Packed MXFP4: the arrangement bit by bit, the assembly that undoes it, split-K, machine code."""

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import kernels.fused_moe as fused_moe
from kernels.fused_moe import ExpertWeights, moe_down, moe_gate_up, moe_gate_up_reference
from kernels.mxfp4 import dequantize_mxfp4
from kernels.mxfp4_packed import (
    KEPT_BIAS,
    _packed_kernel,
    _write_unpack,
    pack_mxfp4,
    packed_specs,
    unpack_mxfp4,
)
from kernels.op import interpreting
from kernels.tiling import Tiles
from kernels.worklist import build_worklist
from tests.kernels.aot import disassemble


def random_mxfp4(
    experts: int, out: int, in_: int, scales: tuple[int, int] = (119, 121), seed: int = 0
) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (experts, out, in_ // 2), generator=g, dtype=torch.uint8)
    return blocks, torch.randint(*scales, (experts, out, in_ // 32), generator=g, dtype=torch.uint8)


@pytest.mark.parametrize("in_", [32, 256, 320, 480, 2880])
def test_packing_loses_no_bit(in_: int) -> None:
    blocks, scales = random_mxfp4(2, 12, in_, (0, 193))
    packed = pack_mxfp4(blocks, scales)
    assert packed.words.shape == (2, in_ // 256, 12, 32) and packed.in_features == in_
    assert packed.tails.shape == (2, -(-(in_ % 256) // 64), 12, 16)
    for dtype, bits in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)):
        want = dequantize_mxfp4(blocks, scales, dtype)
        assert torch.equal(unpack_mxfp4(packed, dtype).view(bits), want.view(bits))


def test_columns_past_the_end_are_zero() -> None:
    packed = pack_mxfp4(*random_mxfp4(1, 4, 96))
    whole = unpack_mxfp4(replace(packed, in_features=128), torch.float32)
    assert whole.shape == (1, 4, 128) and not whole[..., 96:].any()


def test_gpt_oss_costs_no_byte_more_than_a_checkpoint() -> None:
    blocks, scales = random_mxfp4(1, 4, 2880)
    packed = pack_mxfp4(blocks, scales)
    parts = (packed.words, packed.scales, packed.tails, packed.tail_scales)
    assert sum(part.nbytes for part in parts) == blocks.nbytes + scales.nbytes


def test_a_scale_that_bf16_cannot_hold_is_refused() -> None:
    blocks, scales = random_mxfp4(1, 4, 32)
    pack_mxfp4(blocks, scales.fill_(192))
    with pytest.raises(ValueError, match=r"2\^66 is above 2\^65"):
        pack_mxfp4(blocks, scales.fill_(193))


def run_ptx(text: str, operands: dict[str, int]) -> dict[str, int]:
    """The few instructions that `_write_unpack` uses, on 32-bit words."""

    def halves(word: int) -> Tensor:
        pair = torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32)
        return pair.to(torch.uint16).view(torch.bfloat16)

    known = dict(operands)
    for op, args in re.findall(r"^([a-z][\w.]+) (.+);$", text, re.MULTILINE):
        if args.startswith("{"):  # a word into its halves
            low, high, source = re.findall(r"[$\w]+", args)
            known[low], known[high] = known[source] & 0xFFFF, known[source] >> 16
            continue
        to, *sources = re.findall(r"[$\w]+", args)
        a = [known[s] if s in known else int(s, 0) for s in sources]
        match op:
            case "and.b32":
                result = a[0] & a[1]
            case "xor.b32":
                result = a[0] ^ a[1]
            case "mov.b32":
                result = a[1] << 16 | a[0]
            case "shl.b32":
                result = a[0] << a[1]
            case "shr.u32":
                result = a[0] >> a[1]
            case "shf.r.wrap.b32":
                result = ((a[1] << 32) | a[0]) >> a[2]
            case "mul.bf16x2":
                low, high = (halves(a[0]) * halves(a[1])).view(torch.uint16).tolist()
                result = high << 16 | low
            case _:
                raise AssertionError(op)
        known[to] = result & 0xFFFFFFFF
    return known


def test_the_assembly_unpacks_a_pair_of_words() -> None:
    blocks, scales = random_mxfp4(1, 1, 256, (100, 150))
    packed = pack_mxfp4(blocks, scales)
    words = [word & 0xFFFFFFFF for word in packed.words.flatten().tolist()]
    kept = [int(packed.scales) >> 8 * group & 255 for group in range(8)]
    assert [byte - KEPT_BIAS + 127 for byte in kept] == scales.flatten().tolist()
    want = dequantize_mxfp4(blocks, scales, torch.bfloat16).view(8, 16, 2)
    for t in range(16):
        given = {"$8": words[2 * t], "$9": words[2 * t + 1]}
        for place, (low, high) in enumerate(((0, 2), (1, 3), (4, 6), (5, 7))):
            given[f"${10 + 2 * place}"] = kept[high] << 23 | kept[low] << 7
        got = run_ptx(_write_unpack(2), given)
        for group in range(8):
            pair = torch.tensor([got[f"${group}"] & 0xFFFF, got[f"${group}"] >> 16])
            value = pair.to(torch.uint16).view(torch.bfloat16).float() * 2.0**64
            assert torch.equal(value, want[group, t].float()), (t, group)


def test_the_assembly_unpacks_a_word_of_a_tail() -> None:
    blocks, scales = random_mxfp4(1, 1, 64, (100, 150))
    packed = pack_mxfp4(blocks, scales)
    words = [word & 0xFFFFFFFF for word in packed.tails.view(torch.int32).flatten().tolist()]
    low, high = (int(packed.tail_scales) >> by & 255 for by in (0, 8))
    want = dequantize_mxfp4(blocks, scales, torch.bfloat16).view(4, 8, 2)
    for t, word in enumerate(words):
        got = run_ptx(_write_unpack(1), {"$4": word, "$5": high << 23 | low << 7})
        for piece in range(4):
            pair = torch.tensor([got[f"${piece}"] & 0xFFFF, got[f"${piece}"] >> 16])
            value = pair.to(torch.uint16).view(torch.bfloat16).float() * 2.0**64
            assert torch.equal(value, want[piece, t].float()), (t, piece)


def products(
    monkeypatch: pytest.MonkeyPatch, split: int, seed: int, num_tokens: int = 5
) -> tuple[Tensor, Tensor, ExpertWeights]:
    """Token 1 as ever, all others by seed; seed 2 makes them NaN. Its rows of both products."""
    tiles = Tiles(block_n=16, split_k=split, group_m=3 if split == 2 else 1)
    monkeypatch.setattr(fused_moe, "tiles_for", lambda *_: tiles)
    g = torch.Generator().manual_seed(9)
    mine, weights = torch.randn(608, generator=g), torch.rand(num_tokens, 2, generator=g)
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, 608, generator=g) * 10**seed
    ids = torch.rand(num_tokens, 6, generator=g).argsort(-1)[:, :2].int()
    if seed == 2:
        x[:] = float("nan")
        ids[:] = torch.tensor([3, 0])
    x[1], ids[1] = mine, torch.tensor([3, 0])
    experts = ExpertWeights(*(None, *random_mxfp4(6, 40, 608))).pack()
    work = build_worklist(ids, None, 6, 0, 16)
    y = moe_gate_up(x, experts, ids, work)  # [T K, out]
    if seed != 2:
        want = moe_gate_up_reference(x, experts, ids, None)
        assert torch.allclose(y, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))
    z = moe_down(x.repeat_interleave(2, 0), experts, ids, work, weights)
    assert experts.packed is not None and not experts.packed.counters.any()
    return y.view(num_tokens, 2, -1)[1], z.view(num_tokens, 2, -1)[1], experts


@pytest.mark.interp
@pytest.mark.slow
def test_more_rows_than_a_tile_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """12 rows of one expert: a tile of 8 and one of 4, and none in other experts' second tiles."""
    *want, _ = products(monkeypatch, 1, 0, num_tokens=12)
    for seed in (1, 2):
        *got, _ = products(monkeypatch, 1, seed, num_tokens=12)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.interp
@pytest.mark.parametrize("split", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_split_sums_depend_on_no_other_row(split: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three chunks in four parts leave one part empty; counters are 0 after every launch."""
    *want, _ = products(monkeypatch, split, 0)
    assert torch.isfinite(want[0]).all()
    for seed in (1, 2):
        *got, _ = products(monkeypatch, split, seed)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.skipif(interpreting(), reason="reads the compiled function's settings")
def test_lengths_do_not_compile_anew() -> None:
    assert {"num_segments", "num_rows"} <= set(_packed_kernel.do_not_specialize)


@pytest.mark.skipif(interpreting(), reason="an interpreted function cannot be compiled")
@pytest.mark.parametrize("tokens", [1, 32, 1600])
def test_machine_code_is_what_was_meant(tokens: int) -> None:
    """Weights come by 16 bytes, two a product, and go into the tensor core from registers.

    Tiles of 8 rows take mma.sync: with 16 rows ptxas waits after every single wgmma. A scale's half
    of a word is repeated by the product itself, and a thread's rows share a pointer. With many rows
    a chunk's wgmma wait once, at its end, and nothing writes what one that runs still reads.
    """
    (spec,) = [s for s in packed_specs(False, 5760) if s.name.endswith(f"_{tokens}")]
    code = disassemble(spec)
    assert "LDGSTS.E.BYPASS.128" in code
    assert "HMUL2.BF16_V2" in code
    # Nothing goes through shared memory on its way from the unpacking to the product.
    loop = longest_loop(code)
    assert not re.search(r"\bSTS\b", loop)
    if tokens <= 32:
        assert "HMMA.16816.F32.BF16" in loop and "HGMMA." not in loop
        assert re.search(r"HMUL2\.BF16_V2 .*H0_H0", loop) and "H1_H1" in loop
        assert re.search(r"LDGSTS\.E\.BYPASS\.128 .*\.64\+0x400\]", loop)
        return
    found = len(re.findall(r"HGMMA\.64x\d+x16\.F32\.BF16 R\d+, R\d+, gdesc", loop))
    assert found == loop.count("HGMMA.") >= 16
    assert loop.count("WARPGROUP.DEPBAR.LE gsb0, 0x0") == 1
    assert not overwritten(loop)


def longest_loop(code: str) -> str:
    """The lines from a label to the farthest branch back to it."""
    lines = code.splitlines()
    labels = {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"\s*(\.L_x_\d+):", line))}
    back = [
        (i - labels[m[1]], labels[m[1]], i)
        for i, line in enumerate(lines)
        if (m := re.search(r"BRA.*`\((\.L_x_\d+)\)", line)) and labels[m[1]] < i
    ]
    _, first, last = max(back)
    return "\n".join(lines[first : last + 1])


def overwritten(loop: str) -> list[str]:
    """Lines that write a register which a wgmma issued before may still read, over two turns."""
    running: list[set[int]] = []
    found = []
    for line in 2 * loop.splitlines():
        if product := re.search(r"HGMMA\.\S+ R\d+, R(\d+), gdesc", line):
            first = int(product[1])
            running.append(set(range(first, first + 4)))
        elif waited := re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\w+)", line):
            left = int(waited[1], 16)
            running = running[-left:] if left else []
        elif written := re.search(r"\*/\s+(?:@!?U?P\d+ )?([A-Z][\w.]*) R(\d+),", line):
            width = 4 if ".128" in written[1] else 2 if re.search("64|WIDE", written[1]) else 1
            registers = set(range(int(written[2]), int(written[2]) + width))
            if any(registers & read for read in running):
                found.append(line)
    return found
