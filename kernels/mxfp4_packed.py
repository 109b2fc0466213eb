"""MXFP4 experts re-arranged once at load: unpacking then costs Hopper about two operations a value.

Here: the arrangement (`pack_mxfp4`, `unpack_mxfp4`) and the grouped product that reads it. Not
here: which experts take it, and the product with weights as a checkpoint has them (fused_moe.py).

The plain form spends more time on unpacking than on reading. Here a 32-bit word holds eight codes
such that a shift and a mask leave two of them where two bf16 have sign, exponent and first mantissa
bit: 2^-126 times their value, subnormal codes too. One packed product with the scale's bf16 pair
finishes them, in the very register that the tensor core reads. Columns stand in chunks of 256,
eight groups of 32 under one scale each, so a chunk feeds eight dots of depth 32. Words 2t and
2t + 1 of a row's chunk belong to columns 2t (low halves) and 2t + 1 (high halves) of every group:
the first word to groups 0..3, the second to 4..7.

Weights stand on the M side (Y^T = W X^T): a tile of few tokens wastes none of the tensor core.
"""

from collections.abc import Iterator
from dataclasses import dataclass

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
WORDS = CHUNK // 8
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

    Shapes:  words [E, in' / 256, out, 32] int32;  scales [E, in' / 256, out] int64, a byte a group,
             biased by 189;  in' is `in_features` rounded up to 256 (zeros);  counters [C] int32,
             all 0 between launches (so one stream at a time)
    """

    words: Tensor
    scales: Tensor
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
        return PackedMxfp4(self.words[one], self.scales[one], self.counters, self.in_features)


def pack_mxfp4(blocks: Tensor, scales: Tensor) -> PackedMxfp4:
    """Re-arrange MXFP4 weights, one expert after the other, so that little memory is needed beside.

    Shapes:  blocks [E, out, in / 2] uint8, scales [E, out, in / 32] uint8
    Errors:  ValueError for a scale above 2^65, which bf16 times a code could not hold.
    """
    experts, out, half = blocks.shape
    in_ = 2 * half
    chunks = -(-in_ // CHUNK)
    if int(scales.max()) + KEPT_BIAS - SCALE_BIAS > 254:
        raise ValueError(f"an MXFP4 scale of 2^{int(scales.max()) - SCALE_BIAS} is above 2^65")
    device = blocks.device
    words = torch.empty(experts, chunks, out, WORDS, dtype=torch.int32, device=device)
    kept = torch.empty(experts, chunks, out, dtype=torch.int64, device=device)
    # Where a code's four bits stand in a bf16, for all sixteen.
    code = torch.arange(16, dtype=torch.int32, device=device)
    pattern = ((code & 8) << 12) | ((code & 7) << 6)  # [16]
    for e in range(experts):
        codes = torch.stack([blocks[e] & 15, blocks[e] >> 4], -1).flatten(1)  # [out, in]
        codes = torch.nn.functional.pad(codes, (0, chunks * CHUNK - in_))  # [out, in']
        # [chunks, group, out, column pair, column of the pair]
        codes = codes.view(out, chunks, 8, GROUP // 2, 2).permute(1, 2, 0, 3, 4)
        bits = pattern[codes.int()]
        pairs = bits[..., 0] | (bits[..., 1] << 16)  # [chunks, 8, out, 16]
        for second in (0, 1):
            words[e, :, :, second::2] = _join(pairs[:, 4 * second : 4 * second + 4])
        pad = (0, chunks * 8 - scales.shape[2])
        biased = torch.nn.functional.pad(scales[e] + (KEPT_BIAS - SCALE_BIAS), pad)
        biased = biased.view(out, chunks, 8).transpose(0, 1).contiguous()  # [chunks, out, 8]
        kept[e] = biased.view(torch.int64)[..., 0]
    counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)
    return PackedMxfp4(words, kept, counters, in_)


def unpack_mxfp4(packed: PackedMxfp4, dtype: torch.dtype) -> Tensor:
    """What `dequantize_mxfp4` makes of the weights before packing, bit by bit.

    Result:  [E, out, in] in `dtype`
    """
    shape = (packed.num_experts, packed.out_features, packed.in_features)
    dense = torch.empty(shape, dtype=dtype, device=packed.words.device)
    table = torch.tensor([*CODES, *(-c for c in CODES)], device=dense.device)  # [16] fp32
    for e in range(len(dense)):
        groups = []
        for group in range(8):
            word = packed.words[e, :, :, group // 4 :: 2]  # [chunks, out, 16]
            if group % 4 < 3:
                pair = _rotate_right(word, TURNS[group % 4]) & _signed(MASK)
            else:
                pair = ((word << LEFT) ^ _shift_right(word, RIGHT)) & _signed(MASK)
            halves = torch.stack([pair, pair >> 16], -1)  # [chunks, out, 16, 2]
            code = ((halves >> 12) & 8) | ((halves >> 6) & 7)
            exponent = ((packed.scales[e] >> (8 * group)) & 255).int() - KEPT_BIAS  # [chunks, out]
            factor = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)
            groups.append(table[code].flatten(2) * factor[..., None])  # [chunks, out, 32]
        whole = torch.stack(groups, 2).permute(1, 0, 2, 3).flatten(1)  # [out, in']
        dense[e] = whole[:, : packed.in_features]
    return dense


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
        x, packed.words, packed.scales, bias if bias is not None else x, y,
        weights if weights is not None else x, work.rows, work.segments, partial, packed.counters,
        num_segments, num_rows, x.stride(0), out, packed.in_features,
        X_DIV=x_div, HAS_BIAS=bias is not None, WEIGHTED=weights is not None,
        TAIL_GROUPS=packed.in_features % CHUNK // GROUP, SPLIT_K=split, BLOCK_M=block_m,
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


def _write_unpack() -> str:
    """PTX: words $8 and $9, and each pair of scales twice from $10 on -> bf16 pairs $0..$7.

    A word of scales serves a group with its low half and the group after next with its high half:
    the multiplication itself can repeat a half.
    """
    lines = ["{", ".reg .b32 a, b;", ".reg .b16 l, h;"]
    for group in range(8):
        word, place = f"${8 + group // 4}", group % 4
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
        lines.append(f"mov.b32 {{l, h}}, ${10 + 2 * (2 * (group // 4) + group % 2)};")
        half = "l" if place < 2 else "h"
        lines += [f"mov.b32 b, {{{half}, {half}}};", f"mul.bf16x2 ${group}, a, b;"]
    return "\n".join([*lines, "}"])


_UNPACK = tl.constexpr(_write_unpack())
# Early clobber: a result is written while operands of later groups are still to be read.
_OPERANDS = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 10))
_EIGHT_BF16 = tl.constexpr((tl.bfloat16,) * 8)
_TURN_OF = tl.constexpr(TURNS)
_MASK = tl.constexpr(MASK)
_LEFT = tl.constexpr(LEFT)
_RIGHT = tl.constexpr(RIGHT)
_KEPT_BIAS = tl.constexpr(KEPT_BIAS)
_CODE_FACTOR = tl.constexpr(2.0**126)


@triton.jit
def _unpack_bf16(words, scales):
    """Words [N, 32] int32, scales [N] int64 -> a chunk's eight groups, each [N, 32], times 2^-64.

    The assembly takes two neighbouring words at a time: it relies on a thread that holds word 2t to
    hold 2t + 1 next, as every layout of a bf16 operand does (pairs are its unit).
    """
    low = scales.to(tl.int32)[:, None]
    high = (scales >> 32).to(tl.int32)[:, None]
    # Two scales as bf16 in a word: of groups 0 and 2, 1 and 3, 4 and 6, 5 and 7.
    return tl.inline_asm_elementwise(
        _UNPACK, _OPERANDS,
        [words, (low & 0x00FF00FF) << 7, (low >> 1) & 0x7F807F80,
         (high & 0x00FF00FF) << 7, (high >> 1) & 0x7F807F80],
        dtype=_EIGHT_BF16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _unpack_group(word, scales, GROUP_IDX: tl.constexpr, DTYPE: tl.constexpr):
    """One group in plain arithmetic, [N, 16] words -> [N, 32]: other dtypes, the interpreter."""
    P: tl.constexpr = GROUP_IDX % 4
    bits = word.to(tl.uint32, bitcast=True)
    if P == 0:
        turned = bits
    elif P == 3:
        turned = (bits << _LEFT) ^ (bits >> _RIGHT)
    else:
        turned = (bits >> _TURN_OF[P]) | (bits << (32 - _TURN_OF[P]))
    pair = turned & _MASK
    low = (pair << 16).to(tl.float32, bitcast=True)
    high = (pair & 0xFFFF0000).to(tl.float32, bitcast=True)
    value = tl.reshape(tl.join(low, high), [low.shape[0], 32]) * _CODE_FACTOR
    exponent = ((scales >> (8 * GROUP_IDX)) & 255).to(tl.int32) - _KEPT_BIAS
    return (value * tl.exp2(exponent.to(tl.float32))[:, None]).to(DTYPE)


@triton.jit
def _unpack_any(words, scales, DTYPE: tl.constexpr):
    first, second = tl.split(tl.reshape(words, [words.shape[0], 16, 2]))
    return (
        _unpack_group(first, scales, 0, DTYPE), _unpack_group(first, scales, 1, DTYPE),
        _unpack_group(first, scales, 2, DTYPE), _unpack_group(first, scales, 3, DTYPE),
        _unpack_group(second, scales, 4, DTYPE), _unpack_group(second, scales, 5, DTYPE),
        _unpack_group(second, scales, 6, DTYPE), _unpack_group(second, scales, 7, DTYPE),
    )  # fmt: skip


@triton.jit
def _load_group(x_ptrs, whole, GROUP_IDX: tl.constexpr, TAIL_GROUPS: tl.constexpr):
    """Only groups that the last chunk lacks need a mask. Dead rows read a live one, unstored."""
    if TAIL_GROUPS == 0 or GROUP_IDX < TAIL_GROUPS:
        return tl.load(x_ptrs + GROUP_IDX * 32)
    else:
        return tl.load(x_ptrs + GROUP_IDX * 32, mask=whole, other=0.0)


@triton.jit(do_not_specialize=["num_segments", "num_rows"])
def _packed_kernel(
    x_ptr, w_ptr, scale_ptr, bias_ptr, y_ptr, weights_ptr, rows_ptr, segments_ptr, partial_ptr,
    counters_ptr, num_segments, num_rows, x_stride, out_features, in_features,
    X_DIV: tl.constexpr, HAS_BIAS: tl.constexpr, WEIGHTED: tl.constexpr, TAIL_GROUPS: tl.constexpr,
    SPLIT_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr,
    EVEN_N: tl.constexpr, OVERLAP: tl.constexpr,
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
    segment = pid_m % num_segments
    part = pid_m // num_segments * BLOCK_M
    count = tl.load(segments_ptr + segment * 4 + 3) - part
    if count <= 0:
        return
    expert = tl.load(segments_ptr + segment * 4 + 1).to(tl.int64)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    n_live = n < out_features
    # Rows of weights past the end read one that exists; their result is not stored. Without a
    # choice the compiler sees that a thread's rows stand at fixed distances.
    n_read = n if EVEN_N else tl.where(n_live, n, out_features - 1)
    num_chunks = tl.cdiv(in_features, 256)
    chunk, end = 0, num_chunks
    if SPLIT_K > 1:
        per_split = tl.cdiv(num_chunks, SPLIT_K)
        chunk = tl.program_id(2) * per_split
        end = tl.minimum(chunk + per_split, num_chunks)
    tile = (expert * num_chunks + chunk) * out_features
    first = tl.load(segments_ptr + segment * 4 + 2) + part
    m = tl.arange(0, BLOCK_M)
    live = m < count
    row = tl.load(rows_ptr + first + tl.where(live, m, 0)).to(tl.int64)
    k = tl.arange(0, 32)
    w_ptrs = w_ptr + (tile + n_read)[:, None] * 32 + k[None, :]
    s_ptrs = scale_ptr + tile + n_read
    x_ptrs = x_ptr + (row // X_DIV)[None, :] * x_stride + chunk * 256 + k[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for c in range(chunk, end):
        words = tl.load(w_ptrs)
        scales = tl.load(s_ptrs)
        if x_ptr.dtype.element_ty == tl.bfloat16:
            w0, w1, w2, w3, w4, w5, w6, w7 = _unpack_bf16(words, scales)
        else:
            w0, w1, w2, w3, w4, w5, w6, w7 = _unpack_any(words, scales, x_ptr.dtype.element_ty)
        # True everywhere, or nowhere in a last chunk that has TAIL_GROUPS groups alone.
        whole = (k < in_features - c * 256 - TAIL_GROUPS * 32)[:, None]
        x0 = _load_group(x_ptrs, whole, 0, TAIL_GROUPS)
        x1 = _load_group(x_ptrs, whole, 1, TAIL_GROUPS)
        x2 = _load_group(x_ptrs, whole, 2, TAIL_GROUPS)
        x3 = _load_group(x_ptrs, whole, 3, TAIL_GROUPS)
        x4 = _load_group(x_ptrs, whole, 4, TAIL_GROUPS)
        x5 = _load_group(x_ptrs, whole, 5, TAIL_GROUPS)
        x6 = _load_group(x_ptrs, whole, 6, TAIL_GROUPS)
        x7 = _load_group(x_ptrs, whole, 7, TAIL_GROUPS)
        acc = tl.dot(w0, x0, acc, input_precision="ieee")
        acc = tl.dot(w1, x1, acc, input_precision="ieee")
        acc = tl.dot(w2, x2, acc, input_precision="ieee")
        acc = tl.dot(w3, x3, acc, input_precision="ieee")
        acc = tl.dot(w4, x4, acc, input_precision="ieee")
        acc = tl.dot(w5, x5, acc, input_precision="ieee")
        acc = tl.dot(w6, x6, acc, input_precision="ieee")
        acc = tl.dot(w7, x7, acc, input_precision="ieee")
        x_ptrs += 256
        w_ptrs += out_features * 32
        s_ptrs += out_features
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
        for part in tl.static_range(SPLIT_K):
            # From L2: this multiprocessor's L1 knows nothing of other programs' parts.
            ptrs = part_ptrs + part * part_size
            acc += tl.load(ptrs, mask=stored, other=0.0, cache_modifier=".cg")
        tl.store(counter, 0)
    if x_ptr.dtype.element_ty == tl.bfloat16:
        acc *= 18446744073709551616.0  # 2^64
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * out_features + n_read)
        acc += bias.to(tl.float32)[:, None]
    if WEIGHTED:
        acc *= tl.load(weights_ptr + row)[None, :]
    y_ptrs = y_ptr + row[None, :] * out_features + n[:, None]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=stored)


def packed_specs(down: bool, out: int) -> Iterator[AotSpec]:
    """As GPT-OSS uses it: `out` rows of 2880 columns, 32 experts, four a token."""
    signature = {
        "x_ptr": "*bf16", "w_ptr": "*i32", "scale_ptr": "*i64", "bias_ptr": "*bf16",
        "y_ptr": "*bf16", "weights_ptr": "*fp32" if down else "*bf16", "rows_ptr": "*i32",
        "segments_ptr": "*i32", "counters_ptr": "*i32", "num_segments": "i32", "num_rows": "i32",
        "x_stride": "i32:16", "out_features": "i32:16", "in_features": "i32:16",
    }  # fmt: skip
    for tokens in (1, 8, 16, 32, 256, 512, 1600):
        shape = {"rows": 4 * tokens, "out": out, "in": 2880}
        tiles = tiles_for("moe_gemm_packed", shape, "NVIDIA H200")
        constants = {
            "X_DIV": 1 if down else 4, "HAS_BIAS": True, "WEIGHTED": down, "TAIL_GROUPS": 2,
            "SPLIT_K": tiles.split_k, "BLOCK_N": tiles.block_n, "GROUP_M": tiles.group_m,
            "BLOCK_M": min(tiles.block_m, narrow_block_m(moe_block_m(tokens, 4, 32), tokens)),
            "EVEN_N": out % tiles.block_n == 0, "OVERLAP": True,
        }  # fmt: skip
        yield AotSpec(
            f"moe_{'down' if down else 'gate_up'}_packed_{tokens}", _packed_kernel,
            signature | {"partial_ptr": "*fp32" if tiles.split_k > 1 else "*bf16"}, constants,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
            max_registers=tiles.max_registers,
        )  # fmt: skip
