"""The two grouped products of a mixture of experts.

Weights are bf16 (or fp32), MXFP4 as a checkpoint has them, or MXFP4 re-arranged for Hopper
(mxfp4_packed.py: how a GPU serves them, prefill and decode alike). Not here: the choice of experts
(moe_gate.py), the activation between the products (gated_act.py), adapters (fused_moe_lora.py), the
sum over a token's experts (norm.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.lora_tables import Worklist
from kernels.mxfp4 import GROUP, dequantize_mxfp4, quantize_mxfp4
from kernels.mxfp4_packed import (
    PackedMxfp4,
    pack_mxfp4,
    packed_product,
    packed_specs,
    unpack_mxfp4,
)
from kernels.op import AotSpec, Case, Inputs, Op, require_contiguous, use_triton
from kernels.tiling import gpu_name, moe_block_m, tiles_for
from kernels.worklist import build_worklist

# CPU: rows of one product. Fixed, so that no bits depend on how many rows an expert has.
CPU_BLOCK_ROWS = 16


@dataclass(frozen=True)
class ExpertWeights:
    """One projection of all experts.

    Shapes:  weight [E, out, in] in x's dtype, or blocks [E, out, in / 2] and scales [E, out, in /
             32] uint8 (MXFP4, low nibble first), or those two packed;  bias [E, out] or None. Rows
             of a fused gate_up: gate, then up. All contiguous.
    Errors:  ValueError unless there is exactly one kind of weight.
    """

    weight: Tensor | None = None
    blocks: Tensor | None = None
    scales: Tensor | None = None
    bias: Tensor | None = None
    packed: PackedMxfp4 | None = None

    def __post_init__(self) -> None:
        kinds = (self.weight, self.blocks, self.packed)
        if sum(x is not None for x in kinds) != 1 or (self.blocks is None) != (self.scales is None):
            raise ValueError(
                "experts need either a weight, or MXFP4 blocks and scales, or both of these packed"
            )

    def pack(self) -> "ExpertWeights":
        """The same with MXFP4 weights packed; drop this one, or they lie in memory twice."""
        if self.blocks is None or self.scales is None:
            return self
        return ExpertWeights(bias=self.bias, packed=pack_mxfp4(self.blocks, self.scales))

    @property
    def num_experts(self) -> int:
        return self.packed.num_experts if self.packed is not None else self._rows.shape[0]

    @property
    def out_features(self) -> int:
        return self.packed.out_features if self.packed is not None else self._rows.shape[1]

    @property
    def in_features(self) -> int:
        if self.packed is not None:
            return self.packed.in_features
        return self._rows.shape[2] * (1 if self.weight is not None else 2)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """[E, out, in] in `dtype`. On a CPU MXFP4 weights are unpacked once and kept."""
        if self.weight is not None:
            return self.weight.to(dtype)
        if self.packed is not None:
            if self.packed.words.is_cuda:
                return unpack_mxfp4(self.packed, dtype)
            if dtype not in self._unpacked:
                self._unpacked[dtype] = unpack_mxfp4(self.packed, dtype)
            return self._unpacked[dtype]
        assert self.blocks is not None and self.scales is not None
        if self.blocks.is_cuda:
            return dequantize_mxfp4(self.blocks, self.scales, dtype)
        if dtype not in self._unpacked:
            self._unpacked[dtype] = dequantize_mxfp4(self.blocks, self.scales, dtype)
        return self._unpacked[dtype]

    def dense_expert(self, expert: int, dtype: torch.dtype) -> Tensor:
        """[out, in] of one expert in `dtype`, unpacked anew at every call."""
        if self.weight is not None:
            return self.weight[expert].to(dtype)
        if self.packed is not None:
            return unpack_mxfp4(self.packed.of_expert(expert), dtype)[0]
        assert self.blocks is not None and self.scales is not None
        return dequantize_mxfp4(self.blocks[expert], self.scales[expert], dtype)

    @cached_property
    def _unpacked(self) -> dict[torch.dtype, Tensor]:
        return {}

    @property
    def _rows(self) -> Tensor:
        rows = self.weight if self.weight is not None else self.blocks
        assert rows is not None
        return rows


def moe_gate_up(x: Tensor, experts: ExpertWeights, ids: Tensor, work: Worklist | None) -> Tensor:
    """Each token through the gate_up projection of each of its experts, bias added.

    Shapes:  x [T, H];  ids [T, K] int32 in 0..E - 1, a token's all different  ->  [T·K, 2I], row
             t·K + k
    work     pairs by expert alone (None on a CPU, where it is not read)
    The order of summation depends on the shapes alone: other rows do not change a row's bits.
    Cost:    reads each chosen expert once per block_m rows.
    """
    if not use_triton(x):
        return moe_gate_up_reference(x, experts, ids, work)
    return _grouped_product(x, experts, ids, work, ids.shape[1], None)


def moe_gate_up_reference(
    x: Tensor, experts: ExpertWeights, ids: Tensor, work: Worklist | None
) -> Tensor:
    """The same in torch; works from ids."""
    return _grouped_reference(x, experts, ids, x_div=ids.shape[1])


def moe_down(
    h: Tensor, experts: ExpertWeights, ids: Tensor, work: Worklist | None, weights: Tensor
) -> Tensor:
    """Each pair through its expert's down projection, bias added, then times its weight.

    Shapes:  h [T·K, I];  ids [T, K] as in moe_gate_up;  weights [T, K] fp32  ->  [T·K, H]
    work and the order of summation as in moe_gate_up.
    """
    if not use_triton(h):
        return moe_down_reference(h, experts, ids, work, weights)
    return _grouped_product(h, experts, ids, work, 1, weights)


def moe_down_reference(
    h: Tensor, experts: ExpertWeights, ids: Tensor, work: Worklist | None, weights: Tensor
) -> Tensor:
    """The same in torch; works from ids."""
    y = _grouped_reference(h, experts, ids, x_div=1)  # [T·K, H]
    return y.mul_(weights.reshape(-1, 1).to(y.dtype))


def _grouped_product(
    x: Tensor, experts: ExpertWeights, ids: Tensor, work: Worklist | None, x_div: int,
    weights: Tensor | None,
) -> Tensor:  # fmt: skip
    assert work is not None, "the Triton products need a worklist"
    assert x.stride(1) == 1 and x.shape[1] == experts.in_features, (x.shape, experts.in_features)
    require_contiguous(
        weight=experts.weight, blocks=experts.blocks, scales=experts.scales, bias=experts.bias,
        weights=weights,
    )  # fmt: skip
    mxfp4 = experts.blocks is not None
    out, in_ = experts.out_features, experts.in_features
    shape = {"rows": ids.numel(), "out": out, "in": in_}
    if experts.packed is not None:
        tiles = tiles_for("moe_gemm_packed", shape, gpu_name(x.device))
        return packed_product(
            x, experts.packed, experts.bias, ids.shape[0], ids.numel(), work, x_div, weights, tiles
        )
    y = x.new_empty(ids.numel(), out)  # [N, out]
    tiles = tiles_for("moe_gemm_mxfp4" if mxfp4 else "moe_gemm", shape, gpu_name(x.device))
    num_segments = work.segments.shape[0]
    if not ids.numel():
        return y
    _grouped_kernel[(num_segments * triton.cdiv(out, tiles.block_n),)](
        x, experts.blocks if mxfp4 else experts.weight, experts.scales if mxfp4 else x,
        experts.bias if experts.bias is not None else x, y, weights if weights is not None else x,
        work.rows, work.segments, num_segments, x.stride(0), in_ // 2 if mxfp4 else in_, out, in_,
        X_DIV=x_div, MXFP4=mxfp4, HAS_BIAS=experts.bias is not None, WEIGHTED=weights is not None,
        BLOCK_M=work.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, GROUP_M=tiles.group_m,
        EVEN_K=in_ % tiles.block_k == 0, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return y


@triton.jit
def _mxfp4_scales(exponents, DTYPE: tl.constexpr):
    """Biased exponents -> factors.

    For bf16 they also undo the 2^-126 that `_mxfp4_values` leaves, all but 2^-64, which the
    epilogue brings: so large ones fit into the type.
    """
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        bits = tl.minimum(tl.maximum(exponents.to(tl.int32) + 62, 0), 254) << 7
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return tl.exp2((exponents.to(tl.int32) - 127).to(tl.float32))


@triton.jit
def _mxfp4_values(codes, scales, DTYPE: tl.constexpr):
    """Four-bit codes times their factors, in DTYPE."""
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        # Sign, exponent and mantissa where bf16 has them: 2^-126 times the value, subnormals too.
        bits = ((codes & 8) << 12) | ((codes & 7) << 6)
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True) * scales
    else:
        e = (codes >> 1) & 3
        twice = tl.where(e == 0, codes & 1, (2 + (codes & 1)) << tl.maximum(e - 1, 0))
        value = twice.to(tl.float32) * tl.where(codes >= 8, -0.5, 0.5)
        return (value * scales).to(DTYPE)


@triton.jit(do_not_specialize=["num_segments"])
def _grouped_kernel(
    x_ptr, w_ptr, scale_ptr, bias_ptr, y_ptr, weights_ptr, rows_ptr, segments_ptr,
    num_segments, x_stride, w_stride, out_features, in_features,
    X_DIV: tl.constexpr, MXFP4: tl.constexpr, HAS_BIAS: tl.constexpr, WEIGHTED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
):  # fmt: skip
    # GROUP_M neighbouring segments (often one expert's) share a column of weights in L2.
    num_n = tl.cdiv(out_features, BLOCK_N)
    pid = tl.program_id(0)
    group = pid // (GROUP_M * num_n)
    height = tl.minimum(num_segments - group * GROUP_M, GROUP_M)
    in_group = pid - group * GROUP_M * num_n
    segment = group * GROUP_M + in_group % height
    pid_n = in_group // height
    count = tl.load(segments_ptr + segment * 4 + 3)
    if count == 0:
        return
    expert = tl.load(segments_ptr + segment * 4 + 1).to(tl.int64)
    first = tl.load(segments_ptr + segment * 4 + 2)
    m = tl.arange(0, BLOCK_M)
    live = m < count
    row = tl.load(rows_ptr + first + m, mask=live, other=0).to(tl.int64)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    n_live = n < out_features
    # Columns past the end read a row that exists; their result is not stored.
    n_read = tl.where(n_live, n, 0)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + (row // X_DIV)[:, None] * x_stride + k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    w_row = expert * out_features + n_read  # [BLOCK_N] int64
    if MXFP4:
        kb = tl.arange(0, BLOCK_K // 2)
        ks = tl.arange(0, BLOCK_K // 32)
        w_ptrs = w_ptr + w_row[:, None] * w_stride + kb[None, :]
        s_ptrs = scale_ptr + w_row[:, None] * (in_features // 32) + ks[None, :]
        for k0 in range(0, in_features, BLOCK_K):
            if EVEN_K:
                x = tl.load(x_ptrs, mask=live[:, None], other=0.0)
                packed = tl.load(w_ptrs)
                scale = tl.load(s_ptrs)
            else:
                left = in_features - k0
                x = tl.load(x_ptrs, mask=live[:, None] & (k[None, :] < left), other=0.0)
                packed = tl.load(w_ptrs, mask=kb[None, :] < left // 2, other=0)
                scale = tl.load(s_ptrs, mask=ks[None, :] < left // 32, other=0)
            scale = _mxfp4_scales(scale, x.dtype)[:, :, None]
            scale = tl.broadcast_to(scale, [BLOCK_N, BLOCK_K // 32, 16])
            scale = tl.reshape(scale, [BLOCK_N, BLOCK_K // 2])
            packed = packed.to(tl.int16)
            x_even, x_odd = tl.split(tl.reshape(x, [BLOCK_M, BLOCK_K // 2, 2]))
            even = _mxfp4_values(packed & 15, scale, x.dtype)
            odd = _mxfp4_values(packed >> 4, scale, x.dtype)
            acc = tl.dot(x_even, tl.trans(even), acc, input_precision="ieee")
            acc = tl.dot(x_odd, tl.trans(odd), acc, input_precision="ieee")
            x_ptrs += BLOCK_K
            w_ptrs += BLOCK_K // 2
            s_ptrs += BLOCK_K // 32
        if x_ptr.dtype.element_ty == tl.bfloat16:
            acc *= 18446744073709551616.0  # 2^64
    else:
        w_ptrs = w_ptr + w_row[None, :] * w_stride + k[:, None]
        for k0 in range(0, in_features, BLOCK_K):
            if EVEN_K:
                x = tl.load(x_ptrs, mask=live[:, None], other=0.0)
                w = tl.load(w_ptrs)
            else:
                left = in_features - k0
                x = tl.load(x_ptrs, mask=live[:, None] & (k[None, :] < left), other=0.0)
                w = tl.load(w_ptrs, mask=k[:, None] < left, other=0.0)
            acc = tl.dot(x, w, acc, input_precision="ieee")
            x_ptrs += BLOCK_K
            w_ptrs += BLOCK_K
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * out_features + n_read)
        acc += bias.to(tl.float32)[None, :]
    if WEIGHTED:
        acc *= tl.load(weights_ptr + row, mask=live, other=0.0)[:, None]
    y_ptrs = y_ptr + row[:, None] * out_features + n[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=live[:, None] & n_live[None, :])


def _grouped_reference(x: Tensor, experts: ExpertWeights, ids: Tensor, x_div: int) -> Tensor:
    """x [rows, in] -> [N, out], from ids.

    This is also how a CPU serves, hence three ways. Which one is taken depends on shapes alone, and
    each multiplies matrices of fixed shapes, so no row's bits depend on other rows. A GPU's
    reference judges and does not serve: it goes by expert.
    """
    if x.is_cuda:
        return _by_expert(x, experts, ids, x_div)
    weight = experts.dense(x.dtype)  # [E, out, in]
    num_experts, out, in_ = weight.shape
    num_rows, num_pairs = x.shape[0], ids.numel()
    # Microseconds on one AVX-512 core: a call's overhead, then its multiplications.
    size = out * in_
    # One row costs as much as four: the weights' bytes then take longer than the multiplications.
    all_experts_us = 12 + max(num_rows, 4) * num_experts * size / 40e3
    pairs_us = num_pairs * (6 + size / 8e3)
    num_blocks = min(num_experts, num_pairs) + num_pairs // CPU_BLOCK_ROWS
    blocks_us = 30 + num_blocks * (3 + CPU_BLOCK_ROWS * size / 40e3)
    flat_ids = ids.flatten()  # [N]
    if all_experts_us <= min(pairs_us, blocks_us):
        y = torch.mm(x, weight.view(-1, in_).t()).view(-1, out)  # [rows · E, out]
        row = torch.arange(num_pairs, dtype=torch.int32, device=x.device)
        if x_div > 1:
            row //= x_div
        y = y.index_select(0, row.mul_(num_experts).add_(flat_ids))  # [N, out]
    elif pairs_us <= blocks_us:
        y = x.new_empty(num_pairs, out)  # [N, out]
        sources, results = x.unbind(0), y.unbind(0)
        for pair, expert in enumerate(flat_ids.tolist()):
            torch.mv(weight[expert], sources[pair // x_div], out=results[pair])
    else:
        y = _by_blocks(x, weight, flat_ids, x_div)
    if experts.bias is not None:
        y += experts.bias.index_select(0, flat_ids)
    return y


def _by_expert(x: Tensor, experts: ExpertWeights, ids: Tensor, x_div: int) -> Tensor:
    """One product for all rows of an expert: each weight is unpacked and read once a call.

    Memory beside the result: one expert's weights, and its rows.
    """
    flat_ids = ids.flatten()  # [N]
    order = torch.sort(flat_ids, stable=True).indices  # [N]
    counts = torch.bincount(flat_ids, minlength=experts.num_experts).tolist()  # [E]
    y = x.new_empty(len(order), experts.out_features)  # [N, out]
    for expert, pairs in enumerate(order.split(counts)):
        if len(pairs):
            rows = x.index_select(0, pairs // x_div)  # [n, in]
            product = rows @ experts.dense_expert(expert, x.dtype).t()  # [n, out]
            if experts.bias is not None:
                product += experts.bias[expert]
            y.index_copy_(0, pairs, product)
    return y


def _by_blocks(x: Tensor, weight: Tensor, flat_ids: Tensor, x_div: int) -> Tensor:
    """Rows of one expert side by side in blocks of CPU_BLOCK_ROWS; a short block repeats a row."""
    size = CPU_BLOCK_ROWS
    order = torch.sort(flat_ids, stable=True).indices  # [N]
    counts = torch.bincount(flat_ids, minlength=weight.shape[0])  # [E]
    blocks = (counts + size - 1) // size  # [E]
    # How far each expert's rows move when short blocks before them are filled up.
    shift = (blocks.cumsum(0) - blocks) * size - (counts.cumsum(0) - counts)  # [E]
    place = torch.empty_like(order)  # [N] pair -> row of the padded buffer
    place[order] = torch.arange(len(order), device=x.device) + shift[flat_ids.long()[order]]
    num_blocks = int(blocks.sum())
    source = torch.zeros(num_blocks * size, dtype=torch.int64, device=x.device)
    source[place] = torch.arange(len(order), device=x.device) // x_div
    padded = x.index_select(0, source).view(num_blocks, size, -1)  # [blocks, rows, in]
    y = x.new_empty(num_blocks, size, weight.shape[1])  # [blocks, rows, out]
    expert_of_block = torch.repeat_interleave(blocks).tolist()
    turned = weight.transpose(1, 2).unbind(0)
    for expert, rows, result in zip(expert_of_block, padded.unbind(0), y.unbind(0), strict=True):
        torch.mm(rows, turned[expert], out=result)
    return y.flatten(0, 1).index_select(0, place)  # [N, out]


def random_experts(
    num_experts: int, out: int, in_: int, kind: str, device: str, dtype: torch.dtype, seed: int
) -> ExpertWeights:
    """Weights of about unit gain for cases and benchmarks.

    kind  "dense", "bias" (dense with a bias), "mxfp4" or "packed"
    """
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_experts, out, in_, generator=g) / in_**0.5  # [E, out, in]
    bias = torch.randn(num_experts, out, generator=g).bfloat16().to(device, dtype)  # [E, out]
    if kind in ("mxfp4", "packed"):
        blocks, scales = (part.to(device) for part in quantize_mxfp4(weight))
        experts = ExpertWeights(blocks=blocks, scales=scales, bias=bias)
        return experts.pack() if kind == "packed" else experts
    weight = weight.bfloat16().to(device, dtype)
    return ExpertWeights(weight=weight, bias=bias if kind == "bias" else None)


def _cases(down: bool) -> Iterator[Case]:
    def case(
        name: str,
        tokens: int,
        top_k: int,
        experts: int,
        out: int,
        in_: int,
        kind: str,
        small: bool = True,
    ) -> Case:
        def make(device: str, dtype: torch.dtype, seed: int) -> Inputs:
            g = torch.Generator().manual_seed(seed)
            ids = torch.rand(tokens, experts, generator=g).argsort(-1)[:, :top_k].int().to(device)
            x = torch.randn(tokens * top_k if down else tokens, in_, generator=g)  # [rows, in]
            weights = torch.rand(tokens, top_k, generator=g).to(device)  # [T, K]
            inputs: Inputs = {
                "h" if down else "x": x.bfloat16().to(device, dtype),
                "experts": random_experts(experts, out, in_, kind, device, dtype, seed),
                "ids": ids,
                "work": build_worklist(ids, None, experts, 0, moe_block_m(tokens, top_k, experts)),
            }
            return {**inputs, "weights": weights} if down else inputs

        return Case(f"{kind}_{name}", make, small)

    for kind in ("dense", "bias", "mxfp4", "packed"):
        odd = 96 if kind in ("mxfp4", "packed") else 77
        yield case("odd", 7, 3, 5, 70, odd, kind)
        yield case("one", 1, 1, 1, 32, 32, kind)
        yield case("crowded", 40, 2, 3, 48, 320, kind)
    for kind in ("mxfp4", "packed"):
        gpt_oss = (4, 32, 2880 if down else 5760, 2880, kind, False)
        for tokens in (1, 8, 32):
            yield case(f"gpt_oss_{tokens}", tokens, *gpt_oss)
        yield case("gpt_oss_prefill", 1600, *gpt_oss)
    shape = (2048, 768) if down else (1536, 2048)
    yield case("qwen3_16", 16, 8, 128, *shape, "dense", False)


def _aot(down: bool) -> Iterator[AotSpec]:
    pointers = ("x_ptr", "w_ptr", "scale_ptr", "bias_ptr", "y_ptr")
    numbers = ("x_stride", "w_stride", "out_features", "in_features")
    signature = {
        **dict.fromkeys(pointers, "*bf16"),
        "weights_ptr": "*fp32",
        "rows_ptr": "*i32",
        "segments_ptr": "*i32",
        **dict.fromkeys(numbers, "i32:16"),
        "num_segments": "i32",
    }
    quantized = signature | {"w_ptr": "*u8", "scale_ptr": "*u8"}
    out = 2880 if down else 5760
    for tokens in (1, 32, 1600):
        for mxfp4 in (True, False) if tokens > 1 else (True,):
            op = "moe_gemm_mxfp4" if mxfp4 else "moe_gemm"
            tiles = tiles_for(op, {"rows": 4 * tokens, "out": out, "in": 2880}, "NVIDIA H200")
            constants = {
                "X_DIV": 1 if down else 4, "MXFP4": mxfp4, "HAS_BIAS": True, "WEIGHTED": down,
                "BLOCK_M": moe_block_m(tokens, 4, 32), "BLOCK_N": tiles.block_n,
                "BLOCK_K": tiles.block_k, "GROUP_M": tiles.group_m,
                "EVEN_K": 2880 % tiles.block_k == 0,
            }  # fmt: skip
            yield AotSpec(
                f"moe_{'down' if down else 'gate_up'}_{'mxfp4' if mxfp4 else 'bf16'}_{tokens}",
                _grouped_kernel, quantized if mxfp4 else signature, constants,
                num_warps=tiles.num_warps, num_stages=tiles.num_stages,
            )  # fmt: skip
    yield from packed_specs(down, out)


def _bytes(inputs: Inputs) -> int:
    """Weights of the experts that are hit, each once, and the rows."""
    experts: ExpertWeights = inputs["experts"]
    hit = int(inputs["ids"].unique().numel())
    per_value = 17 / 32 if experts.weight is None else experts.weight.itemsize  # padding left out
    x = inputs["h"] if "h" in inputs else inputs["x"]
    rows = inputs["ids"].numel() * (experts.in_features + experts.out_features) * x.itemsize
    return int(hit * experts.out_features * experts.in_features * per_value) + rows


def _flops(inputs: Inputs) -> int:
    experts: ExpertWeights = inputs["experts"]
    return 2 * inputs["ids"].numel() * experts.out_features * experts.in_features


assert GROUP == 32, "the kernel's scale tile is one exponent for 32 values"

OPS = (
    Op(
        name="moe_gate_up",
        run=moe_gate_up,
        reference=moe_gate_up_reference,
        cases=lambda: _cases(down=False),
        outputs=lambda inputs, result: [result],
        aot=lambda: _aot(down=False),
        bytes=_bytes,
        flops=_flops,
    ),
    Op(
        name="moe_down",
        run=moe_down,
        reference=moe_down_reference,
        cases=lambda: _cases(down=True),
        outputs=lambda inputs, result: [result],
        aot=lambda: _aot(down=True),
        bytes=_bytes,
        flops=_flops,
    ),
)
