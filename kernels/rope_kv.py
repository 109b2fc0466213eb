"""What happens to queries, keys and values between their projection and attention, in one launch:
the norm of each head (where the family has one), rotary positions, and the writes to the paged
cache.

Not here: the frequencies (YaRN, Llama-3 scaling): the caller's table holds them, and the attention
scaling with them; DeepSeek's latent cache (mla_kv.py); which token owns which place (scheduling
decides it), and the cache's memory.
"""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.norm import rms_norm_reference
from kernels.op import AotSpec, Case, Inputs, Op, require_contiguous, use_triton
from kernels.overlap import can_overlap, follow

_BLOCK_H = 8  # heads of one program


def rope_kv_write(
    q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor | None, positions: Tensor, k_cache: Tensor,
    v_cache: Tensor, write_idx: Tensor, q_norm: Tensor | None = None, k_norm: Tensor | None = None,
    eps: float = 0.0, interleaved: bool = False, settled: bool = False,
) -> None:  # fmt: skip
    """Norm and rotate every head of q in place; norm and rotate k, and write it and v to the cache.

    Shapes:  q [T, Q, D] (written);  k, v [T, G, D]: any token stride (all may be column slices of
             one fused buffer), heads and values contiguous;
             cos_sin [max_pos, D] float32: cos in the first half, sin in the second, attention
             scaling included; None: nothing is rotated;  positions [T] int64, each below max_pos;
             k_cache, v_cache [P, C, G, D], contiguous (written);
             write_idx [T] int64: page·C + offset, distinct; -1 = nothing of this token is written;
             q_norm, k_norm [D], both or none
    settled  positions and write_idx are older than the launch in front of this one (overlap.py)
    Rotated are the pairs (i, i + D/2), or (2 i, 2 i + 1) where `interleaved` (Llama 4).
    Numerics: a norm as in kernels.norm, rounded to q's dtype; the rotation in fp32, rounded once.
    Cost:    reads all three once, and writes as much.
    """
    if not use_triton(q):
        rope_kv_write_reference(
            q, k, v, cos_sin, positions, k_cache, v_cache, write_idx, q_norm, k_norm, eps,
            interleaved,
        )  # fmt: skip
        return
    num_tokens, num_q, dim = q.shape
    num_k = k.shape[1]
    for name, x in (("q", q), ("k", k), ("v", v)):
        assert x.stride()[1:] == (dim, 1), f"{name} must have contiguous heads, {x.stride()}"
    if cos_sin is not None:
        assert cos_sin.shape[1] == dim, f"cos_sin is {cos_sin.shape[1]} wide, the head {dim}"
        assert cos_sin.dtype == torch.float32, cos_sin.dtype
    assert k_cache.shape[2:] == k.shape[1:] == v.shape[1:] and v_cache.shape == k_cache.shape
    assert (q_norm is None) == (k_norm is None), "a norm of q or k alone is not known"
    require_contiguous(
        cos_sin=cos_sin, positions=positions, k_cache=k_cache, v_cache=v_cache,
        write_idx=write_idx, q_norm=q_norm, k_norm=k_norm,
    )  # fmt: skip
    if num_tokens == 0:
        return
    overlap = can_overlap(q.device)
    num_blocks = triton.cdiv(num_q, _BLOCK_H) + 2 * triton.cdiv(num_k, _BLOCK_H)
    _rope_kv_kernel[(num_tokens, num_blocks)](
        q, k, v, q if cos_sin is None else cos_sin, positions, k_cache, v_cache, write_idx,
        q if q_norm is None else q_norm, k if k_norm is None else k_norm,
        q.stride(0), k.stride(0), v.stride(0), eps,
        Q=num_q, G=num_k, D=dim, BLOCK_H=_BLOCK_H, BLOCK_HALF=triton.next_power_of_2(dim // 2),
        NORM=q_norm is not None, ROTATE=cos_sin is not None, INTERLEAVED=interleaved,
        SETTLED=settled, OVERLAP=overlap,
        num_warps=1 if dim <= 64 else 2, **follow(overlap),
    )  # fmt: skip


def rope_kv_write_reference(
    q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor | None, positions: Tensor, k_cache: Tensor,
    v_cache: Tensor, write_idx: Tensor, q_norm: Tensor | None = None, k_norm: Tensor | None = None,
    eps: float = 0.0, interleaved: bool = False, settled: bool = False,
) -> None:  # fmt: skip
    """The same in torch."""
    half = q.shape[2] // 2
    turned = []
    for x, weight in ((q, q_norm), (k, k_norm)):
        if weight is not None:
            x = rms_norm_reference(x, weight, eps)
        if cos_sin is not None:
            rows = cos_sin[positions].unsqueeze(1)  # [T, 1, D]
            x = rotate(x.float(), rows[..., :half], rows[..., half:], interleaved)
        turned.append(x)
    q.copy_(turned[0])
    kept = (write_idx >= 0).nonzero().squeeze(1)  # [kept]
    for x, cache in ((turned[1].to(k.dtype), k_cache), (v, v_cache)):
        flat = cache.view(-1, *cache.shape[2:])  # [P · C, G, D]
        if kept.numel() < write_idx.numel():
            flat.index_copy_(0, write_idx[kept], x[kept].to(cache.dtype))
        else:
            flat.index_copy_(0, write_idx, x.to(cache.dtype))


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Every head of x [T, heads, D] float32 turned by its token's angles [T, 1, D / 2]."""
    half = x.shape[-1] // 2
    first, second = slice(0, half), slice(half, None)
    if interleaved:
        first, second = slice(0, None, 2), slice(1, None, 2)
    left, right = x[..., first], x[..., second]  # [T, heads, D / 2] each
    new = torch.empty_like(x, memory_format=torch.contiguous_format)  # [T, heads, D]
    torch.addcmul(left * cos, right, sin, value=-1, out=new[..., first])
    torch.addcmul(right * cos, left, sin, out=new[..., second])
    return new


@triton.jit
def _normed(
    left, right, weight_ptr, lane, pair_live, eps,
    D: tl.constexpr, STEP: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The norm of heads [BLOCK_H, D] given as halves, rounded as kernels.norm does."""
    scale = tl.rsqrt((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / D + eps)[:, None]
    w_left = tl.load(weight_ptr + lane, mask=pair_live, other=0.0).to(tl.float32)[None, :]
    w_right = tl.load(weight_ptr + STEP + lane, mask=pair_live, other=0.0).to(tl.float32)
    left = ((left * scale).to(DTYPE).to(tl.float32) * w_left).to(DTYPE).to(tl.float32)
    right = ((right * scale).to(DTYPE).to(tl.float32) * w_right[None, :]).to(DTYPE)
    return left, right.to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=["positions", "write_idx"])
def _rope_kv_kernel(
    q, k, v, cos_sin, positions, k_cache, v_cache, write_idx, q_norm, k_norm,
    q_stride, k_stride, v_stride, eps,
    Q: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr, NORM: tl.constexpr, ROTATE: tl.constexpr, INTERLEAVED: tl.constexpr,
    SETTLED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # A program has some heads of q, of k or of v.
    q_blocks: tl.constexpr = (Q + BLOCK_H - 1) // BLOCK_H
    k_blocks: tl.constexpr = (G + BLOCK_H - 1) // BLOCK_H
    half: tl.constexpr = D // 2
    # A pair is this far apart in memory.
    step: tl.constexpr = 1 if INTERLEAVED else half
    if OVERLAP:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if OVERLAP and not SETTLED:
        gdc_wait()
    pair = tl.arange(0, BLOCK_HALF)  # [BLOCK_HALF]
    pair_live = pair < half
    lane = pair * 2 if INTERLEAVED else pair  # [BLOCK_HALF]
    place = tl.load(write_idx + token).to(tl.int64)
    if ROTATE:
        table = cos_sin + tl.load(positions + token).to(tl.int64) * D + pair  # [BLOCK_HALF]
        cos = tl.load(table, mask=pair_live, other=0.0)[None, :]  # [1, BLOCK_HALF]
        sin = tl.load(table + half, mask=pair_live, other=0.0)[None, :]  # [1, BLOCK_HALF]
    else:
        cos, sin = 1.0, 0.0
    if OVERLAP:
        gdc_wait()
    dtype = q.dtype.element_ty
    if block < q_blocks:
        head = block * BLOCK_H + tl.arange(0, BLOCK_H)  # [BLOCK_H]
        live = (head < Q)[:, None] & pair_live[None, :]  # [BLOCK_H, BLOCK_HALF]
        at = q + token * q_stride + head[:, None] * D + lane[None, :]
        left = tl.load(at, mask=live, other=0.0, cache_modifier=".cg").to(tl.float32)
        right = tl.load(at + step, mask=live, other=0.0, cache_modifier=".cg").to(tl.float32)
        if NORM:
            left, right = _normed(left, right, q_norm, lane, pair_live, eps, D, step, dtype)
        tl.store(at, (left * cos - right * sin).to(dtype), mask=live)
        tl.store(at + step, (right * cos + left * sin).to(dtype), mask=live)
    elif place >= 0:  # else past the end, or computed for its logits alone: nothing may be touched
        is_k = block < q_blocks + k_blocks
        first = block - tl.where(is_k, q_blocks, q_blocks + k_blocks)
        head = first * BLOCK_H + tl.arange(0, BLOCK_H)  # [BLOCK_H]
        live = (head < G)[:, None] & pair_live[None, :]  # [BLOCK_H, BLOCK_HALF]
        inside = head[:, None] * D + lane[None, :]  # [BLOCK_H, BLOCK_HALF]
        to = place * G * D + inside
        if is_k:
            at = k + token * k_stride + inside
            left = tl.load(at, mask=live, other=0.0, cache_modifier=".cg").to(tl.float32)
            right = tl.load(at + step, mask=live, other=0.0, cache_modifier=".cg").to(tl.float32)
            if NORM:
                left, right = _normed(left, right, k_norm, lane, pair_live, eps, D, step, dtype)
            turned = (left * cos - right * sin).to(dtype).to(k_cache.dtype.element_ty)
            tl.store(k_cache + to, turned, mask=live)
            turned = (right * cos + left * sin).to(dtype).to(k_cache.dtype.element_ty)
            tl.store(k_cache + to + step, turned, mask=live)
        else:
            at = v + token * v_stride + inside
            first_half = tl.load(at, mask=live, other=0.0, cache_modifier=".cg")
            last_half = tl.load(at + step, mask=live, other=0.0, cache_modifier=".cg")
            tl.store(v_cache + to, first_half.to(v_cache.dtype.element_ty), mask=live)
            tl.store(v_cache + to + step, last_half.to(v_cache.dtype.element_ty), mask=live)


def _make(
    num_tokens: int, num_q: int, num_k: int, dim: int, num_skipped: int, norm: bool = False,
    turn: str = "halves",
) -> Case:  # fmt: skip
    """A case whose caches start as NaN: whatever was not to be written must still be NaN."""

    def make(device: str, dtype: torch.dtype, seed: int) -> Inputs:
        draw = torch.Generator(device).manual_seed(seed)
        width = (num_q + 2 * num_k) * dim
        qkv = torch.randn(num_tokens, width, generator=draw, device=device).to(dtype)  # [T, qkv]
        q, k, v = qkv.view(num_tokens, -1, dim).split((num_q, num_k, num_k), 1)
        max_pos, page = 512, 16
        positions = torch.randint(max_pos, (num_tokens,), generator=draw, device=device)  # [T]
        powers = torch.arange(0, dim, 2, device=device) / dim  # [D / 2]
        angle = torch.arange(max_pos, device=device)[:, None] / 10000**powers  # [max_pos, D / 2]
        num_pages = num_tokens // page + 3
        order = torch.randperm(num_pages * page, generator=draw, device=device)  # [P C]
        write_idx = order[:num_tokens].clone()  # [T]
        write_idx[torch.randperm(num_tokens, generator=draw, device=device)[:num_skipped]] = -1
        cache = torch.full(
            (num_pages, page, num_k, dim), float("nan"), device=device, dtype=dtype
        )  # [P, C, G, D]
        weights = 1 + 0.1 * torch.randn(2, dim, generator=draw, device=device)  # [2, D]
        inputs: Inputs = {
            "q": q, "k": k, "v": v,
            "cos_sin": torch.cat((angle.cos(), angle.sin()), 1).contiguous(),  # [max_pos, D]
            "positions": positions, "k_cache": cache, "v_cache": cache.clone(),
            "write_idx": write_idx, "interleaved": turn == "pairs",
        }  # fmt: skip
        if turn == "none":
            inputs["cos_sin"] = None
        if norm:
            q_norm, k_norm = weights.to(dtype)
            inputs |= {"q_norm": q_norm, "k_norm": k_norm, "eps": 1e-6}
        return inputs

    name = f"t{num_tokens}_q{num_q}_k{num_k}_d{dim}_skip{num_skipped}" + ("_norm" if norm else "")
    name += "" if turn == "halves" else f"_{turn}"
    return Case(name, make, small=num_tokens * num_q * dim <= 5000)


def _cases() -> Iterable[Case]:
    yield _make(3, 5, 1, 24, 0)
    yield _make(7, 10, 2, 64, 3)
    yield _make(1, 4, 4, 128, 0, norm=True)
    yield _make(6, 9, 3, 20, 2, norm=True)
    yield _make(4, 12, 10, 16, 4)
    yield _make(5, 4, 2, 24, 1, norm=True, turn="pairs")
    yield _make(7, 10, 2, 64, 3, turn="pairs")
    yield _make(5, 4, 2, 24, 1, turn="none")
    yield _make(1, 64, 8, 64, 0)
    yield _make(32, 64, 8, 64, 4)
    yield _make(32, 32, 4, 128, 4, norm=True)
    yield _make(4096, 32, 4, 128, 100, norm=True)


def _aot() -> Iterable[AotSpec]:
    bf16 = ("q", "k", "v", "k_cache", "v_cache", "q_norm", "k_norm")
    signature = dict.fromkeys(bf16, "*bf16") | dict.fromkeys(("positions", "write_idx"), "*i64")
    signature |= dict.fromkeys(("q_stride", "k_stride", "v_stride"), "i32:16")
    signature |= {"cos_sin": "*fp32", "eps": "fp32"}
    for num_q, num_k, dim, norm, turn in (
        (40, 8, 128, False, "none"), (40, 8, 128, True, "pairs"), (64, 8, 64, False, "halves"),
        (32, 4, 128, True, "halves"),
    ):  # fmt: skip
        constants = {
            "Q": num_q, "G": num_k, "D": dim, "BLOCK_H": _BLOCK_H, "BLOCK_HALF": dim // 2,
            "NORM": norm, "ROTATE": turn != "none", "INTERLEAVED": turn == "pairs",
            "SETTLED": True, "OVERLAP": True,
        }  # fmt: skip
        warps = 1 if dim <= 64 else 2
        yield AotSpec(
            f"q{num_q}_d{dim}_{turn}", _rope_kv_kernel, signature, constants, num_warps=warps
        )


OPS = (
    Op(
        name="rope_kv_write",
        run=rope_kv_write,
        reference=rope_kv_write_reference,
        cases=_cases,
        outputs=lambda inputs, result: [inputs[name] for name in ("q", "k_cache", "v_cache")],
        aot=_aot,
        bytes=lambda inputs: 2 * sum(inputs[name].nbytes for name in "qkv"),
    ),
)
