"""MXFP4 experts re-arranged once at load: unpacking then costs Hopper about two operations a value.

Here: the arrangement (`pack_mxfp4`, `unpack_mxfp4`) and the grouped product that reads it. Not
here: which experts take it, and the product with weights as a checkpoint has them (fused_moe.py).

The plain form spends more time on unpacking than on reading. Here a 32-bit word holds eight codes
such that a shift and a mask leave two of them where two bf16 have sign, exponent and first mantissa
bit: 2^-126 times their value, subnormal codes too. One packed product with the scale's bf16 pair
finishes them, in the very register that the tensor core reads. Columns stand in chunks of 256,
eight groups of 32 under one scale each. Words 2t and 2t + 1 of a row's chunk belong to columns 2t
(low halves) and 2t + 1 (high halves) of every group: the first word to groups 0..3, the second to
4..7. What 256 does not divide stands in tails of 64 columns, four pieces of 16: word t of a row's
tail belongs to columns 2t and 2t + 1 of every piece. So 2880 columns cost no byte more than theirs.

Weights stand on the M side (Y^T = W X^T): a tile of few tokens wastes none of the tensor core.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.lora_tables import Worklist
from kernels.mxfp4 import CODES, GROUP, SCALE_BIAS
from kernels.op import AotSpec
from kernels.overlap import can_overlap, follow
from kernels.tiling import Tiles, moe_block_m, narrow_block_m, tiles_for

CHUNK = 256
TAIL = 64
# Scales are kept under this bias, not 127: the sum of both exponents must fit into a bf16. The
# epilogue brings the 2^64 that is then missing.
KEPT_BIAS = SCALE_BIAS + 62
# Where a pair of codes stands in a word once it is unpacked: sign, two bits of exponent, mantissa.
MASK = 0x81C081C0
# Groups 0, 1, 2 (or 4, 5, 6) of a word: rotate right by so much, then mask.
TURNS = (0, 26, 4)
# Groups 3 and 7: (word << LEFT ^ word >> RIGHT), then mask. Three bits of four come from the left
# shift, the exponent's upper one from the right shift; what the other shift adds, packing undoes.
LEFT, RIGHT = 2, 6
# Tiles that split K count their finished parts here; more are never needed where splitting pays.
NUM_COUNTERS = 1 << 14


@dataclass(frozen=True)
class PackedMxfp4:
    """One projection of all experts, in the arrangement above.

    Shapes:  words [E, in // 256, out, 32] int32;  scales [E, in // 256, out] int64, a byte a group,
             biased by 189;  tails [E, V, out, 16] int16, the halves of words;  tail_scales [E, V,
             out] int16, a byte a group; V tails cover the other columns (zeros past the end);
             counters [C] int32, all 0 between launches (so one stream at a time)
    """

    words: Tensor
    scales: Tensor
    tails: Tensor
    tail_scales: Tensor
    counters: Tensor
    in_features: int

    @property
    def num_experts(self) -> int:
        return self.words.shape[0]

    @property
    def out_features(self) -> int:
        return self.words.shape[2]

    def of_expert(self, expert: int) -> "PackedMxfp4":
        """A view of one expert, E = 1."""
        one = slice(expert, expert + 1)
        return replace(
            self, words=self.words[one], scales=self.scales[one], tails=self.tails[one],
            tail_scales=self.tail_scales[one],
        )  # fmt: skip


def pack_mxfp4(blocks: Tensor, scales: Tensor) -> PackedMxfp4:
    """Re-arrange MXFP4 weights, one expert after the other, so that little memory is needed beside.

    Shapes:  blocks [E, out, in / 2] uint8, scales [E, out, in / 32] uint8
    Errors:  ValueError for a scale above 2^65, which bf16 times a code could not hold.
    """
    experts, out, half = blocks.shape
    in_ = 2 * half
    chunks = in_ // CHUNK
    tails = -(-(in_ - chunks * CHUNK) // TAIL)
    if int(scales.max()) + KEPT_BIAS - SCALE_BIAS > 254:
        raise ValueError(f"an MXFP4 scale of 2^{int(scales.max()) - SCALE_BIAS} is above 2^65")

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(experts, *shape, dtype=dtype, device=blocks.device)

    packed = PackedMxfp4(
        empty(chunks, out, CHUNK // 8, dtype=torch.int32), empty(chunks, out, dtype=torch.int64),
        empty(tails, out, TAIL // 4, dtype=torch.int16), empty(tails, out, dtype=torch.int16),
        torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=blocks.device), in_,
    )  # fmt: skip
    # Where a code's four bits stand in a bf16, for all sixteen.
    code = torch.arange(16, dtype=torch.int32, device=blocks.device)
    pattern = ((code & 8) << 12) | ((code & 7) << 6)  # [16]
    pad = chunks * CHUNK + tails * TAIL - in_
    for e in range(experts):
        codes = torch.stack([blocks[e] & 15, blocks[e] >> 4], -1).flatten(1)  # [out, in]
        bits = pattern[torch.nn.functional.pad(codes, (0, pad)).int()]  # [out, in']
        bits = bits[:, ::2] | (bits[:, 1::2] << 16)  # [out, in' / 2]: pairs of columns
        whole, rest = bits.split([chunks * CHUNK // 2, tails * TAIL // 2], 1)
        # [chunks, group, out, column pair]
        pairs = whole.reshape(out, chunks, 8, GROUP // 2).permute(1, 2, 0, 3)
        for second in (0, 1):
            packed.words[e, :, :, second::2] = _join(pairs[:, 4 * second : 4 * second + 4])
        pairs = rest.reshape(out, tails, 4, TAIL // 8).permute(1, 2, 0, 3)
        packed.tails[e] = _join(pairs).view(torch.int16)
        biased = scales[e] + (KEPT_BIAS - SCALE_BIAS)
        biased = torch.nn.functional.pad(biased, (0, pad // GROUP))
        first, last = biased.split([chunks * CHUNK // GROUP, tails * TAIL // GROUP], 1)
        by_chunk = first.reshape(out, chunks, 8).transpose(0, 1).contiguous()  # [chunks, out, 8]
        packed.scales[e] = by_chunk.view(torch.int64)[..., 0]
        by_tail = last.reshape(out, tails, 2).transpose(0, 1).contiguous()  # [tails, out, 2]
        packed.tail_scales[e] = by_tail.view(torch.int16)[..., 0]
    return packed


def unpack_mxfp4(packed: PackedMxfp4, dtype: torch.dtype) -> Tensor:
    """What `dequantize_mxfp4` makes of the weights before packing, bit by bit.

    Result:  [E, out, in] in `dtype`
    """
    shape = (packed.num_experts, packed.out_features, packed.in_features)
    dense = torch.empty(shape, dtype=dtype, device=packed.words.device)
    table = torch.tensor([*CODES, *(-c for c in CODES)], device=dense.device)  # [16] fp32
    for e in range(len(dense)):
        words, tails = packed.words[e], packed.tails[e].view(torch.int32)
        parts = []
        for group in range(8):
            pieces = _piece(words[..., group // 4 :: 2], group % 4)  # [chunks, out, 32]
            parts.append((pieces, packed.scales[e] >> (8 * group)))
        whole = _columns(parts, table)
        parts = [(_piece(tails, p), packed.tail_scales[e] >> (8 * (p // 2))) for p in range(4)]
        dense[e] = torch.cat([whole, _columns(parts, table)], 1)[:, : packed.in_features]
    return dense


def _piece(words: Tensor, place: int) -> Tensor:
    """The codes of a word's piece: [chunks, out, C] int32 -> [chunks, out, 2 C]."""
    if place < 3:
        turned = _rotate_right(words, TURNS[place])
    else:
        turned = (words << LEFT) ^ _shift_right(words, RIGHT)
    halves = torch.stack([turned, turned >> 16], -1).flatten(2) & MASK
    return ((halves >> 12) & 8) | ((halves >> 6) & 7)


def _columns(parts: list[tuple[Tensor, Tensor]], table: Tensor) -> Tensor:
    """P pieces' codes [chunks, out, C] and exponents [chunks, out] (in low bytes) -> [out, P C]."""
    values = []
    for codes, exponents in parts:
        exponent = (exponents & 255).int() - KEPT_BIAS
        factor = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)
        values.append(table[codes] * factor[..., None])
    return torch.stack(values, 2).permute(1, 0, 2, 3).flatten(1)  # [out, chunks · P · C]


def packed_product(
    x: Tensor, packed: PackedMxfp4, bias: Tensor | None, num_tokens: int, num_rows: int,
    work: Worklist, x_div: int, weights: Tensor | None, tiles: Tiles,
) -> Tensor:  # fmt: skip
    """The grouped product of fused_moe.py, on packed weights.

    Shapes:  x [rows, in];  bias [E, out];  weights [N] fp32  ->  y [N, out], row = worklist row
    A token's experts differ from each other, so no expert has more rows than there are tokens.
    The order of summation depends on the tiles alone.
    """
    y = x.new_empty(num_rows, packed.out_features)  # [N, out]
    if not num_rows:
        return y
    num_segments, out = work.segments.shape[0], packed.out_features
    block_m = min(tiles.block_m, narrow_block_m(work.block_m, num_tokens))
    num_m = num_segments * triton.cdiv(min(work.block_m, num_tokens), block_m)
    num_n = triton.cdiv(out, tiles.block_n)
    split = tiles.split_k
    assert split == 1 or num_m * num_n <= packed.counters.numel(), (num_m, split)
    partial = y.new_empty(split, num_rows, out, dtype=torch.float32) if split > 1 else x
    overlap = can_overlap(x.device)
    limit = {"maxnreg": tiles.max_registers} if tiles.max_registers else {}
    _packed_kernel[(num_n, num_m, split)](
        x, packed.words, packed.scales, packed.tails, packed.tail_scales,
        bias if bias is not None else x, y, weights if weights is not None else x,
        work.rows, work.segments, partial, packed.counters,
        num_segments, num_rows, x.stride(0), out, packed.in_features,
        X_DIV=x_div, HAS_BIAS=bias is not None, WEIGHTED=weights is not None,
        NUM_TAILS=packed.tails.shape[1], SPLIT_K=split, BLOCK_M=block_m,
        BLOCK_N=tiles.block_n, GROUP_M=tiles.group_m, EVEN_N=out % tiles.block_n == 0,
        OVERLAP=overlap, num_warps=tiles.num_warps, num_stages=tiles.num_stages, **limit,
        **follow(overlap),
    )  # fmt: skip
    return y


def _join(pairs: Tensor) -> Tensor:
    """Pairs of a word's four groups, [chunks, 4, out, 16] int32 -> words [chunks, out, 16]."""
    word = torch.zeros_like(pairs[:, 0])  # [chunks, out, 16]
    for group, turn in enumerate(TURNS):
        word |= _rotate_right(pairs[:, group], 32 - turn)
    # From the top down: what the right shift adds to a bit is then already in its place.
    for bit in (31, 24, 23, 22, 15, 8, 7, 6):
        from_left = bit % 16 != 8
        own = bit - LEFT if from_left else bit + RIGHT
        other = bit + RIGHT if from_left else bit - LEFT
        value = _shift_right(pairs[:, 3], bit)
        if other < 32:
            value = value ^ _shift_right(word, other)
        word |= (value & 1) << own
    return word


def _shift_right(x: Tensor, by: int) -> Tensor:
    """Of 32-bit words kept as int32, zeros coming in."""
    return (x >> by) & ((1 << (32 - by)) - 1) if by else x


def _rotate_right(x: Tensor, turn: int) -> Tensor:
    """Of 32-bit words kept as int32."""
    turn %= 32
    return _shift_right(x, turn) | (x << (32 - turn)) if turn else x


def _signed(mask: int) -> int:
    """The same 32 bits as an int32."""
    return mask - (1 << 32) if mask >> 31 else mask


def _write_unpack(num_words: int) -> str:
    """PTX: words, then pairs of scales, each pair twice -> bf16 pairs $0..$3 of the first word, ...

    A pair of scales serves the first half of a word's pieces with its low half, the second with its
    high half: the multiplication itself can repeat a half. Two words alternate between two pairs.
    """
    lines = ["{", ".reg .b32 a, b;", ".reg .b16 l, h;"]
    for piece in range(4 * num_words):
        word, place = f"${4 * num_words + piece // 4}", piece % 4
        if place == 3:
            lines += [f"shl.b32 a, {word}, {LEFT};", f"shr.u32 b, {word}, {RIGHT};"]
            lines.append("xor.b32 a, a, b;")
            source = "a"
        elif place == 0:
            source = word
        else:
            turn = TURNS[place]
            # Nothing that the mask keeps comes round the end of the word in a left turn.
            if all(bit + turn >= 32 for bit in range(32) if MASK >> bit & 1):
                lines.append(f"shl.b32 a, {word}, {32 - turn};")
            else:
                lines.append(f"shf.r.wrap.b32 a, {word}, {word}, {turn};")
            source = "a"
        lines.append(f"and.b32 a, {source}, {MASK:#x};")
        pair = 2 * (piece // 4) + piece % 2 if num_words == 2 else 0
        lines.append(f"mov.b32 {{l, h}}, ${5 * num_words + 2 * pair};")
        half = "l" if place < 2 else "h"
        lines += [f"mov.b32 b, {{{half}, {half}}};", f"mul.bf16x2 ${piece}, a, b;"]
    return "\n".join([*lines, "}"])


_UNPACK = tl.constexpr(_write_unpack(2))
_UNPACK_TAIL = tl.constexpr(_write_unpack(1))
# Early clobber: a result is written while operands of later pieces are still to be read.
_OPERANDS = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 10))
_TAIL_OPERANDS = tl.constexpr(",".join(["=&r"] * 4 + ["r"] * 3))
_EIGHT_BF16 = tl.constexpr((tl.bfloat16,) * 8)
_FOUR_BF16 = tl.constexpr((tl.bfloat16,) * 4)
_WAIT = tl.constexpr("wgmma.wait_group.sync.aligned 0; mov.u32 $0, $1;")
_TURN_OF = tl.constexpr(TURNS)
_MASK = tl.constexpr(MASK)
_LEFT = tl.constexpr(LEFT)
_RIGHT = tl.constexpr(RIGHT)
_KEPT_BIAS = tl.constexpr(KEPT_BIAS)
_CODE_FACTOR = tl.constexpr(2.0**126)


@triton.jit
def _unpack_chunk(words, scales, DTYPE: tl.constexpr):
    """Words [N, 32] int32, scales [N] int64 -> a chunk's eight groups, each [N, 32].

    In bf16 they are times 2^-64. The assembly takes two neighbouring words at a time: it relies on
    a thread that holds word 2t to hold 2t + 1 next, as every layout of a bf16 operand does (pairs
    are its unit).
    """
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        low = scales.to(tl.int32)[:, None]
        high = (scales >> 32).to(tl.int32)[:, None]
        # Two scales as bf16 in a word: of groups 0 and 2, 1 and 3, 4 and 6, 5 and 7.
        w0, w1, w2, w3, w4, w5, w6, w7 = tl.inline_asm_elementwise(
            _UNPACK, _OPERANDS,
            [words, (low & 0x00FF00FF) << 7, (low >> 1) & 0x7F807F80,
             (high & 0x00FF00FF) << 7, (high >> 1) & 0x7F807F80],
            dtype=_EIGHT_BF16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        first, second = tl.split(tl.reshape(words, [words.shape[0], 16, 2]))
        w0, w1, w2, w3 = _unpack_any(first, scales, 0, 1, 2, 3, DTYPE)
        w4, w5, w6, w7 = _unpack_any(second, scales, 4, 5, 6, 7, DTYPE)
    return w0, w1, w2, w3, w4, w5, w6, w7


@triton.jit
def _unpack_tail(halves, scales, DTYPE: tl.constexpr):
    """Halves of words [N, 16] int16, scales [N] int16 -> [N, 64], in bf16 times 2^-64."""
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        both = scales.to(tl.int32)[:, None]
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            _UNPACK_TAIL, _TAIL_OPERANDS, [halves, (both & 0xFF) << 7 | (both & 0xFF00) << 15],
            dtype=_FOUR_BF16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        low, high = tl.split(tl.reshape(halves.to(tl.int32), [halves.shape[0], 8, 2]))
        words = (low & 0xFFFF) | high << 16
        w0, w1, w2, w3 = _unpack_any(words, scales, 0, 0, 1, 1, DTYPE)
    return tl.reshape(tl.permute(_join_four(w0, w1, w2, w3), [0, 3, 2, 1]), [halves.shape[0], 64])


@triton.jit
def _join_four(w0, w1, w2, w3):
    """Four times [N, C] -> [N, C, 2, 2]."""
    return tl.join(tl.join(w0, w1), tl.join(w2, w3))


@triton.jit
def _unpack_any(
    word, scales, S0: tl.constexpr, S1: tl.constexpr, S2: tl.constexpr, S3: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Plain arithmetic for other dtypes and the interpreter: [N, C] words -> pieces [N, 2 C].

    S0..S3  which bytes of `scales` are the pieces' exponents
    """
    bits = word.to(tl.uint32, bitcast=True)
    one = (bits >> _TURN_OF[1]) | (bits << (32 - _TURN_OF[1]))
    two = (bits >> _TURN_OF[2]) | (bits << (32 - _TURN_OF[2]))
    three = (bits << _LEFT) ^ (bits >> _RIGHT)
    return (
        _value(bits, scales >> 8 * S0, DTYPE), _value(one, scales >> 8 * S1, DTYPE),
        _value(two, scales >> 8 * S2, DTYPE), _value(three, scales >> 8 * S3, DTYPE),
    )  # fmt: skip


@triton.jit
def _value(turned, scales, DTYPE: tl.constexpr):
    pair = turned & _MASK
    low = (pair << 16).to(tl.float32, bitcast=True)
    high = (pair & 0xFFFF0000).to(tl.float32, bitcast=True)
    value = tl.reshape(tl.join(low, high), [low.shape[0], 2 * low.shape[1]]) * _CODE_FACTOR
    exponent = (scales & 255).to(tl.int32) - _KEPT_BIAS
    return (value * tl.exp2(exponent.to(tl.float32))[:, None]).to(DTYPE)


@triton.jit(do_not_specialize=["num_segments", "num_rows"])
def _packed_kernel(
    x_ptr, w_ptr, scale_ptr, tail_ptr, tail_scale_ptr, bias_ptr, y_ptr, weights_ptr, rows_ptr,
    segments_ptr, partial_ptr, counters_ptr, num_segments, num_rows, x_stride, out_features,
    in_features, X_DIV: tl.constexpr, HAS_BIAS: tl.constexpr, WEIGHTED: tl.constexpr,
    NUM_TAILS: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr, EVEN_N: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()  # not before: LoRA behind reads x and ids early
    pid_n, pid_m = tl.program_id(0), tl.program_id(1)
    num_n = tl.num_programs(0)
    if GROUP_M > 1:
        # GROUP_M neighbouring segments (often one expert's) share a tile of weights in L2.
        num_m = tl.num_programs(1)
        pid = pid_m * num_n + pid_n
        group = pid // (GROUP_M * num_n)
        height = tl.minimum(num_m - group * GROUP_M, GROUP_M)
        in_group = pid - group * GROUP_M * num_n
        pid_m = group * GROUP_M + in_group % height
        pid_n = in_group // height
    # Later parts of all segments come last: few have any row, and those find the weights in L2.
    segment = segments_ptr + pid_m % num_segments * 4
    part = pid_m // num_segments * BLOCK_M
    # Volatile, or the compiler moves two of them behind the branch: two waits in place of one.
    count = tl.load(segment + 3, volatile=True) - part
    first = tl.load(segment + 2, volatile=True) + part
    expert = tl.load(segment + 1, volatile=True).to(tl.int64)
    if count <= 0:
        return
    m = tl.arange(0, BLOCK_M)
    live = m < count
    # Dead rows read a live one; their result is not stored.
    row = tl.load(rows_ptr + first + tl.where(live, m, 0)).to(tl.int64)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    n_live = n < out_features
    # Rows of weights past the end read one that exists; their result is not stored. Without a
    # choice the compiler sees that a thread's rows stand at fixed distances.
    n_read = n if EVEN_N else tl.where(n_live, n, out_features - 1)
    num_chunks = in_features // 256
    chunk, end = 0, num_chunks
    if SPLIT_K > 1:
        per_split = tl.cdiv(num_chunks, SPLIT_K)
        chunk = tl.minimum(tl.program_id(2) * per_split, num_chunks)
        end = tl.minimum(chunk + per_split, num_chunks)
    # What a program advances is one address; where its threads read from there stays as it is.
    w_base = w_ptr + (expert * num_chunks + chunk) * out_features * 32
    s_base = scale_ptr + (expert * num_chunks + chunk) * out_features
    w_offsets = n_read[:, None] * 32 + tl.arange(0, 32)[None, :]
    x_rows = x_ptr + (row // X_DIV)[None, :] * x_stride
    if NUM_TAILS > 0:
        # Of a divided K the last part has the tails; others multiply them by 0.
        left = in_features - num_chunks * 256
        if SPLIT_K > 1:
            left = tl.where(tl.program_id(2) == SPLIT_K - 1, left, 0)
        k = tl.arange(0, 64)[:, None]
        t_ptrs = tail_ptr + expert * NUM_TAILS * out_features * 16 + n_read[:, None] * 16
        t_ptrs += tl.arange(0, 16)[None, :]
        t_scales = tail_scale_ptr + expert * NUM_TAILS * out_features + n_read
    # Few rows: a product a group, and mma.sync. Many: one product a chunk, which Triton cuts into
    # wgmma that run while what later ones need is unpacked (between products it would wait).
    NARROW: tl.constexpr = BLOCK_M < 32
    x_ptrs = x_rows + chunk * 256 + tl.arange(0, 32 if NARROW else 256)[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * out_features + n_read)
    if NARROW and NUM_TAILS > 0:
        # What comes after the loop, asked for before it: few registers hold it all.
        halves, scales = tl.load(t_ptrs), tl.load(t_scales)
    for _ in range(chunk, end):
        words = tl.load(w_base + w_offsets)
        exponents = tl.load(s_base + n_read)
        w0, w1, w2, w3, w4, w5, w6, w7 = _unpack_chunk(words, exponents, x_ptr.dtype.element_ty)
        if NARROW:
            acc = tl.dot(w0, tl.load(x_ptrs), acc, input_precision="ieee")
            acc = tl.dot(w1, tl.load(x_ptrs + 32), acc, input_precision="ieee")
            acc = tl.dot(w2, tl.load(x_ptrs + 64), acc, input_precision="ieee")
            acc = tl.dot(w3, tl.load(x_ptrs + 96), acc, input_precision="ieee")
            acc = tl.dot(w4, tl.load(x_ptrs + 128), acc, input_precision="ieee")
            acc = tl.dot(w5, tl.load(x_ptrs + 160), acc, input_precision="ieee")
            acc = tl.dot(w6, tl.load(x_ptrs + 192), acc, input_precision="ieee")
            acc = tl.dot(w7, tl.load(x_ptrs + 224), acc, input_precision="ieee")
        else:
            w = tl.join(_join_four(w0, w1, w2, w3), _join_four(w4, w5, w6, w7))
            w = tl.reshape(tl.permute(w, [0, 4, 3, 2, 1]), [BLOCK_N, 256])
            acc = tl.dot(w, tl.load(x_ptrs), acc, input_precision="ieee")
        if BLOCK_M > 8 and x_ptr.dtype.element_ty == tl.bfloat16:
            # Triton lets products run on into the next turn, and ptxas (12.8) then writes into
            # registers that they still read.
            tl.inline_asm_elementwise(_WAIT, "=r,r", [in_features], tl.int32, False, 1)
        x_ptrs += 256
        w_base += out_features * 32
        s_base += out_features
    for tail in tl.static_range(NUM_TAILS):
        if not NARROW or tail > 0:
            halves = tl.load(t_ptrs + tail * out_features * 16)
            scales = tl.load(t_scales + tail * out_features)
        x = tl.load(x_rows + num_chunks * 256 + tail * 64 + k, mask=k < left - tail * 64, other=0.0)
        w = _unpack_tail(halves, scales, x.dtype)
        acc = tl.dot(w, x, acc, input_precision="ieee")
    stored = live[None, :] & n_live[:, None]
    if SPLIT_K > 1:
        # The last part to arrive adds all of them in their order, so who is last changes no bit.
        part_ptrs = partial_ptr + (first + m).to(tl.int64)[None, :] * out_features + n[:, None]
        part_size = num_rows.to(tl.int64) * out_features
        tl.store(part_ptrs + tl.program_id(2) * part_size, acc, mask=stored)
        # All threads' parts must be written before one thread tells so.
        tl.debug_barrier()
        counter = counters_ptr + pid_m * num_n + pid_n
        if tl.atomic_add(counter, 1, sem="acq_rel") != SPLIT_K - 1:
            return
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for split in tl.static_range(SPLIT_K):
            # From L2: this multiprocessor's L1 knows nothing of other programs' parts.
            ptrs = part_ptrs + split * part_size
            acc += tl.load(ptrs, mask=stored, other=0.0, cache_modifier=".cg")
        tl.store(counter, 0)
    if x_ptr.dtype.element_ty == tl.bfloat16:
        acc *= 18446744073709551616.0  # 2^64
    if HAS_BIAS:
        acc += bias.to(tl.float32)[:, None]
    if WEIGHTED:
        acc *= tl.load(weights_ptr + row)[None, :]
    y_ptrs = y_ptr + row[None, :] * out_features + n[:, None]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=stored)


def packed_specs(down: bool, out: int) -> Iterator[AotSpec]:
    """As GPT-OSS uses it: `out` rows of 2880 columns, 32 experts, four a token."""
    signature = {
        "x_ptr": "*bf16", "w_ptr": "*i32", "scale_ptr": "*i64", "tail_ptr": "*i16",
        "tail_scale_ptr": "*i16", "bias_ptr": "*bf16",
        "y_ptr": "*bf16", "weights_ptr": "*fp32" if down else "*bf16", "rows_ptr": "*i32",
        "segments_ptr": "*i32", "counters_ptr": "*i32", "num_segments": "i32", "num_rows": "i32",
        "x_stride": "i32:16", "out_features": "i32:16", "in_features": "i32:16",
    }  # fmt: skip
    for tokens in (1, 8, 16, 32, 256, 512, 1600):
        shape = {"rows": 4 * tokens, "out": out, "in": 2880}
        tiles = tiles_for("moe_gemm_packed", shape, "NVIDIA H200")
        constants = {
            "X_DIV": 1 if down else 4, "HAS_BIAS": True, "WEIGHTED": down, "NUM_TAILS": 1,
            "SPLIT_K": tiles.split_k, "BLOCK_N": tiles.block_n, "GROUP_M": tiles.group_m,
            "BLOCK_M": min(tiles.block_m, narrow_block_m(moe_block_m(tokens, 4, 32), tokens)),
            "EVEN_N": out % tiles.block_n == 0, "OVERLAP": True,
        }  # fmt: skip
        yield AotSpec(
            f"moe_{'down' if down else 'gate_up'}_packed_{tokens}", _packed_kernel,
            signature | {"partial_ptr": "*fp32" if tiles.split_k > 1 else "*bf16"}, constants,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
            max_registers=tiles.max_registers,
            # With many rows the fastest tiles of all spill a little (ptxas of triton 3.7).
            max_spills=0 if tokens <= 32 else 256,
        )  # fmt: skip
