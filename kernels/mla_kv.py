"""What happens to the queries' rotary part and to the new latents before latent attention, in one
launch: the norm of the latent, rotary positions, the writes to the paged cache.

Not here: the frequencies (the caller's table), the projections around it, attention itself
(mla_attention.py).
"""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.norm import rms_norm_reference
from kernels.op import AotSpec, Case, Inputs, Op, require_contiguous, use_triton
from kernels.rope_kv import rotate

_BLOCK_H = 8  # heads of one program


def mla_kv_write(
    q_rope: Tensor, kv: Tensor, cos_sin: Tensor, positions: Tensor, cache: Tensor,
    write_idx: Tensor, norm: Tensor, eps: float, interleaved: bool,
) -> None:  # fmt: skip
    """Rotate every head of q_rope in place; norm the latents, rotate the shared keys, write both.

    Shapes:  q_rope [T, Q, Dr] (written), any token and head strides;  kv [T, R + Dr]: the latent,
             then the key that all heads share, any token stride;
             cos_sin [max_pos, Dr] float32: cos in the first half, sin in the second, attention
             scaling included;  positions [T] int64;
             cache [P, C, R + Dr], contiguous (written);  norm [R];
             write_idx [T] int64: page·C + offset, distinct; -1 = nothing of this token is written
    Rotated are the pairs (2 i, 2 i + 1) where `interleaved`, else (i, i + Dr/2).
    Numerics: the norm as in kernels.norm, rounded to kv's dtype; the rotation in fp32, rounded
    once.
    Cost:    reads both once, and writes as much.
    """
    if not use_triton(q_rope):
        mla_kv_write_reference(
            q_rope, kv, cos_sin, positions, cache, write_idx, norm, eps, interleaved
        )
        return
    num_tokens, num_heads, dim = q_rope.shape
    latent = norm.shape[0]
    assert q_rope.stride(2) == 1 and kv.stride(1) == 1, (q_rope.stride(), kv.stride())
    assert cache.shape[2] == latent + dim == kv.shape[1], (cache.shape, kv.shape, latent, dim)
    assert cos_sin.shape[1] == dim and cos_sin.dtype == torch.float32, (cos_sin.shape, dim)
    require_contiguous(
        cache=cache, cos_sin=cos_sin, positions=positions, write_idx=write_idx, norm=norm
    )
    if num_tokens:
        _mla_kv_kernel[(num_tokens, triton.cdiv(num_heads, _BLOCK_H) + 1)](
            q_rope, kv, cos_sin, positions, cache, write_idx, norm,
            q_rope.stride(0), q_rope.stride(1), kv.stride(0), eps, num_heads,
            R=latent, D=dim, BLOCK_H=_BLOCK_H, BLOCK_R=triton.next_power_of_2(latent),
            BLOCK_HALF=triton.next_power_of_2(dim // 2), INTERLEAVED=interleaved, num_warps=1,
        )  # fmt: skip


def mla_kv_write_reference(
    q_rope: Tensor, kv: Tensor, cos_sin: Tensor, positions: Tensor, cache: Tensor,
    write_idx: Tensor, norm: Tensor, eps: float, interleaved: bool,
) -> None:  # fmt: skip
    """The same in torch."""
    latent, half = norm.shape[0], cos_sin.shape[1] // 2
    rows = cos_sin[positions].unsqueeze(1)  # [T, 1, Dr]
    cos, sin = rows[..., :half], rows[..., half:]  # [T, 1, Dr / 2] each
    q_rope.copy_(rotate(q_rope.float(), cos, sin, interleaved))
    key = rotate(kv[:, None, latent:].float(), cos, sin, interleaved).to(kv.dtype)  # [T, 1, Dr]
    normed = rms_norm_reference(kv[:, :latent], norm, eps)  # [T, R]
    kept = (write_idx >= 0).nonzero().squeeze(1)  # [kept]
    new = torch.cat((normed, key.squeeze(1)), 1).to(cache.dtype)  # [T, R + Dr]
    cache.view(-1, cache.shape[2]).index_copy_(0, write_idx[kept], new[kept])


@triton.jit(do_not_specialize_on_alignment=["positions", "write_idx"])
def _mla_kv_kernel(
    q_rope, kv, cos_sin, positions, cache, write_idx, norm,
    q_token, q_head, kv_token, eps, num_heads,
    R: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    half: tl.constexpr = D // 2
    step: tl.constexpr = 1 if INTERLEAVED else half
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    pair = tl.arange(0, BLOCK_HALF)
    lane = pair * 2 if INTERLEAVED else pair
    table = cos_sin + tl.load(positions + token).to(tl.int64) * D + pair
    cos = tl.load(table, mask=pair < half, other=0.0)[None, :]
    sin = tl.load(table + half, mask=pair < half, other=0.0)[None, :]
    dtype = kv.dtype.element_ty
    if block < tl.num_programs(1) - 1:
        head = block * BLOCK_H + tl.arange(0, BLOCK_H)
        live = (head < num_heads)[:, None] & (pair < half)[None, :]
        at = q_rope + token * q_token + head[:, None] * q_head + lane[None, :]
        left = tl.load(at, mask=live, other=0.0).to(tl.float32)
        right = tl.load(at + step, mask=live, other=0.0).to(tl.float32)
        tl.store(at, (left * cos - right * sin).to(dtype), mask=live)
        tl.store(at + step, (right * cos + left * sin).to(dtype), mask=live)
        return
    place = tl.load(write_idx + token).to(tl.int64)
    if place < 0:
        return  # past the end, or computed for its logits alone: nothing may be touched
    to = cache + place * (R + D)
    n = tl.arange(0, BLOCK_R)
    x = tl.load(kv + token * kv_token + n, mask=n < R, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / R + eps)
    weight = tl.load(norm + n, mask=n < R, other=0.0).to(tl.float32)
    normed = ((x * scale).to(dtype).to(tl.float32) * weight).to(dtype)
    tl.store(to + n, normed.to(cache.dtype.element_ty), mask=n < R)
    live = (pair < half)[None, :]
    at = kv + token * kv_token + R + lane[None, :]
    left = tl.load(at, mask=live, other=0.0).to(tl.float32)
    right = tl.load(at + step, mask=live, other=0.0).to(tl.float32)
    turned = (left * cos - right * sin).to(dtype).to(cache.dtype.element_ty)
    tl.store(to + R + lane[None, :], turned, mask=live)
    turned = (right * cos + left * sin).to(dtype).to(cache.dtype.element_ty)
    tl.store(to + R + step + lane[None, :], turned, mask=live)


def _make(
    num_tokens: int, num_heads: int, latent: int, dim: int, num_skipped: int, interleaved: bool
) -> Case:
    """A case whose cache starts as NaN: whatever was not to be written must still be NaN."""

    def make(device: str, dtype: torch.dtype, seed: int) -> Inputs:
        draw = torch.Generator(device).manual_seed(seed)
        wide = torch.randn(num_tokens, num_heads, dim + 8, generator=draw, device=device).to(dtype)
        max_pos, page = 512, 16
        powers = torch.arange(0, dim, 2, device=device) / dim  # [Dr / 2]
        angle = torch.arange(max_pos, device=device)[:, None] / 10000**powers  # [max_pos, Dr / 2]
        num_pages = num_tokens // page + 3
        order = torch.randperm(num_pages * page, generator=draw, device=device)  # [P C]
        write_idx = order[:num_tokens].clone()  # [T]
        write_idx[torch.randperm(num_tokens, generator=draw, device=device)[:num_skipped]] = -1
        both = torch.randn(num_tokens, latent + dim + 5, generator=draw, device=device)
        return {
            "q_rope": wide[..., 8:],
            "kv": both.to(dtype)[:, 5:],
            "cos_sin": torch.cat((angle.cos(), angle.sin()), 1).contiguous(),  # [max_pos, Dr]
            "positions": torch.randint(max_pos, (num_tokens,), generator=draw, device=device),
            "cache": torch.full(
                (num_pages, page, latent + dim), float("nan"), device=device, dtype=dtype
            ),
            "write_idx": write_idx,
            "norm": (1 + 0.1 * torch.randn(latent, generator=draw, device=device)).to(dtype),
            "eps": 1e-6,
            "interleaved": interleaved,
        }

    turn = "pairs" if interleaved else "halves"
    name = f"t{num_tokens}_q{num_heads}_r{latent}_d{dim}_skip{num_skipped}_{turn}"
    return Case(name, make, small=num_tokens * num_heads * dim <= 5000)


def _cases() -> Iterable[Case]:
    yield _make(3, 5, 24, 8, 0, True)
    yield _make(7, 9, 40, 12, 3, False)
    yield _make(1, 16, 512, 64, 0, True)
    yield _make(32, 128, 512, 64, 4, True)
    yield _make(4096, 16, 512, 64, 100, True)


def _aot() -> Iterable[AotSpec]:
    signature = dict.fromkeys(("q_rope", "kv", "cache", "norm"), "*bf16")
    signature |= dict.fromkeys(("positions", "write_idx"), "*i64")
    signature |= dict.fromkeys(("q_token", "q_head", "kv_token"), "i32:16")
    signature |= {"cos_sin": "*fp32", "eps": "fp32", "num_heads": "i32:16"}
    constants = {
        "R": 512, "D": 64, "BLOCK_H": _BLOCK_H, "BLOCK_R": 512, "BLOCK_HALF": 32,
        "INTERLEAVED": True,
    }  # fmt: skip
    yield AotSpec("deepseek", _mla_kv_kernel, signature, constants, num_warps=1)


OPS = (
    Op(
        name="mla_kv_write",
        run=mla_kv_write,
        reference=mla_kv_write_reference,
        cases=_cases,
        outputs=lambda inputs, result: [inputs["q_rope"], inputs["cache"]],
        aot=_aot,
        bytes=lambda inputs: 2 * (inputs["q_rope"].nbytes + inputs["kv"].nbytes),
    ),
)
