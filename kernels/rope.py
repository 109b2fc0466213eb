"""Rotary positions, applied in place to queries and keys.

Not here: the frequencies (YaRN, Llama-3 scaling): the caller's table holds them, and the attention
scaling with them. Nor the interleaved pairs of DeepSeek.
"""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.op import AotSpec, Case, Inputs, Op, use_triton

_BLOCK_H = 8  # heads of one program


def apply_rope(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
    """Rotate every head's pairs (i, i + D/2) by its token's position, in place.

    Shapes:  q [T, Q, D] (written);  k [T, G, D] (written): any token stride (both may be column
             slices of one fused buffer), heads and values contiguous;
             cos_sin [max_pos, D] float32: cos in the first half, sin in the second, attention
             scaling included;  positions [T] int64, each below max_pos.
    Numerics: fp32, rounded once to q's dtype.
    Cost:    reads and writes q and k once.
    """
    if not use_triton(q):
        apply_rope_reference(q, k, cos_sin, positions)
        return
    num_tokens, num_q, dim = q.shape
    num_k = k.shape[1]
    assert q.stride()[1:] == (dim, 1), f"q must have contiguous heads, strides {q.stride()}"
    assert k.stride()[1:] == (dim, 1), f"k must have contiguous heads, strides {k.stride()}"
    assert cos_sin.shape[1] == dim, f"cos_sin is {cos_sin.shape[1]} wide, the head {dim}"
    assert cos_sin.is_contiguous() and cos_sin.dtype == torch.float32
    if num_tokens == 0:
        return
    grid = (num_tokens, triton.cdiv(num_q, _BLOCK_H) + triton.cdiv(num_k, _BLOCK_H))
    _rope_kernel[grid](
        q,
        k,
        cos_sin,
        positions,
        q.stride(0),
        k.stride(0),
        Q=num_q,
        G=num_k,
        D=dim,
        BLOCK_H=_BLOCK_H,
        BLOCK_HALF=triton.next_power_of_2(dim // 2),
        num_warps=1 if dim <= 64 else 2,
    )


def apply_rope_reference(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
    """`apply_rope` in torch."""
    half = cos_sin.shape[1] // 2
    rows = cos_sin[positions].unsqueeze(1)  # [T, 1, D]
    cos, sin = rows[..., :half], rows[..., half:]  # [T, 1, D / 2] each
    for x in (q, k):
        wide = x.float()  # [T, heads, D]; x itself if it is fp32
        left, right = wide[..., :half], wide[..., half:]  # [T, heads, D / 2] each
        turned = torch.addcmul(left * cos, right, sin, value=-1)  # [T, heads, D / 2]
        right.mul_(cos).addcmul_(left, sin)
        left.copy_(turned)
        if wide is not x:
            x.copy_(wide)


@triton.jit(do_not_specialize_on_alignment=["positions"])
def _rope_kernel(
    q,
    k,
    cos_sin,
    positions,
    q_stride,
    k_stride,
    Q: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    q_blocks: tl.constexpr = (Q + BLOCK_H - 1) // BLOCK_H
    half: tl.constexpr = D // 2
    pair = tl.arange(0, BLOCK_HALF)  # [BLOCK_HALF]
    table = cos_sin + tl.load(positions + token).to(tl.int64) * D + pair  # [BLOCK_HALF]
    cos = tl.load(table, mask=pair < half, other=0.0)[None, :]  # [1, BLOCK_HALF]
    sin = tl.load(table + half, mask=pair < half, other=0.0)[None, :]  # [1, BLOCK_HALF]
    if block < q_blocks:
        base = q + token * q_stride
        head = block * BLOCK_H + tl.arange(0, BLOCK_H)  # [BLOCK_H]
        live = (head < Q)[:, None] & (pair < half)[None, :]  # [BLOCK_H, BLOCK_HALF]
    else:
        base = k + token * k_stride
        head = (block - q_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)  # [BLOCK_H]
        live = (head < G)[:, None] & (pair < half)[None, :]  # [BLOCK_H, BLOCK_HALF]
    place = base + head[:, None] * D + pair[None, :]  # [BLOCK_H, BLOCK_HALF]
    left = tl.load(place, mask=live, other=0.0).to(tl.float32)
    right = tl.load(place + half, mask=live, other=0.0).to(tl.float32)
    dtype = q.dtype.element_ty
    tl.store(place, (left * cos - right * sin).to(dtype), mask=live)
    tl.store(place + half, (right * cos + left * sin).to(dtype), mask=live)


def _make(num_tokens: int, num_q: int, num_k: int, dim: int, fused: bool) -> Case:
    """A case; fused: q and k are slices of one qkv buffer."""

    def make(device: str, dtype: torch.dtype, seed: int) -> Inputs:
        draw = torch.Generator(device).manual_seed(seed)
        width = (num_q + 2 * num_k) * dim
        qkv = torch.randn(num_tokens, width, generator=draw, device=device).to(dtype)  # [T, qkv]
        q = qkv[:, : num_q * dim].view(num_tokens, num_q, dim)  # [T, Q, D]
        k = qkv[:, num_q * dim : -num_k * dim].view(num_tokens, num_k, dim)  # [T, G, D]
        if not fused:
            q, k = q.contiguous(), k.contiguous()
        max_pos = 512
        positions = torch.randint(max_pos, (num_tokens,), generator=draw, device=device)  # [T]
        powers = torch.arange(0, dim, 2, device=device) / dim  # [D / 2]
        angle = torch.arange(max_pos, device=device)[:, None] / 10000**powers  # [max_pos, D / 2]
        cos_sin = torch.cat((angle.cos(), angle.sin()), 1).contiguous()  # [max_pos, D]
        return {"q": q, "k": k, "cos_sin": cos_sin, "positions": positions}

    name = f"t{num_tokens}_q{num_q}_k{num_k}_d{dim}" + ("_fused" if fused else "")
    return Case(name, make, small=num_tokens <= 8)


def _cases() -> Iterable[Case]:
    yield _make(3, 5, 1, 24, False)
    yield _make(7, 10, 2, 64, True)
    yield _make(1, 4, 4, 128, True)
    yield _make(32, 64, 8, 64, True)
    yield _make(4096, 32, 4, 128, True)


def _aot() -> Iterable[AotSpec]:
    for num_q, num_k, dim in ((64, 8, 64), (32, 4, 128)):
        yield AotSpec(
            name=f"q{num_q}_d{dim}",
            fn=_rope_kernel,
            signature={
                "q": "*bf16",
                "k": "*bf16",
                "cos_sin": "*fp32",
                "positions": "*i64",
                "q_stride": "i32:16",
                "k_stride": "i32:16",
            },
            constexprs={
                "Q": num_q,
                "G": num_k,
                "D": dim,
                "BLOCK_H": _BLOCK_H,
                "BLOCK_HALF": dim // 2,
            },
            num_warps=1 if dim <= 64 else 2,
        )


OPS = (
    Op(
        name="rope",
        run=apply_rope,
        reference=apply_rope_reference,
        cases=_cases,
        outputs=lambda inputs, result: [inputs["q"], inputs["k"]],
        aot=_aot,
        bytes=lambda inputs: 2 * sum(inputs[n].numel() * inputs[n].element_size() for n in "qk"),
    ),
)
