"""Puts the keys and values of a step into the paged cache.

Not here: which token owns which place (scheduling decides it), and the cache's memory.
"""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.op import AotSpec, Case, Inputs, Op, use_triton


def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, write_idx: Tensor) -> None:
    """Write each token's key and value where its index says.

    Shapes:  k, v [T, G, D], any token stride, heads and values contiguous;
             k_cache, v_cache [P, C, G, D], contiguous (written);
             write_idx [T] int64: page·C + offset, distinct; -1 = this token is not written.
    Cost:    reads k and v, writes as much.
    """
    if not use_triton(k):
        kv_write_reference(k, v, k_cache, v_cache, write_idx)
        return
    num_tokens, num_heads, dim = k.shape
    assert k.stride()[1:] == (dim, 1), f"k must have contiguous heads, strides {k.stride()}"
    assert v.stride()[1:] == (dim, 1), f"v must have contiguous heads, strides {v.stride()}"
    assert k_cache.is_contiguous() and v_cache.is_contiguous()
    assert k_cache.shape[2:] == k.shape[1:] and v_cache.shape == k_cache.shape
    if num_tokens == 0:
        return
    width = num_heads * dim
    _kv_write_kernel[(num_tokens,)](
        k,
        v,
        k_cache,
        v_cache,
        write_idx,
        k.stride(0),
        v.stride(0),
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=1 if width <= 512 else 4,
    )


def kv_write_reference(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, write_idx: Tensor
) -> None:
    """`kv_write` in torch."""
    kept = (write_idx >= 0).nonzero().squeeze(1)  # [kept]
    if kept.numel() < write_idx.numel():
        k, v, write_idx = k[kept], v[kept], write_idx[kept]  # [kept, G, D] twice, [kept]
    k_cache.view(-1, *k_cache.shape[2:]).index_copy_(0, write_idx, k.to(k_cache.dtype))
    v_cache.view(-1, *v_cache.shape[2:]).index_copy_(0, write_idx, v.to(v_cache.dtype))


@triton.jit(do_not_specialize_on_alignment=["write_idx"])
def _kv_write_kernel(
    k,
    v,
    k_cache,
    v_cache,
    write_idx,
    k_stride,
    v_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(write_idx + token).to(tl.int64)
    if place < 0:  # past the end, or computed for its logits alone: nothing may be touched
        return
    col = tl.arange(0, BLOCK)  # [BLOCK]
    live = col < WIDTH
    key = tl.load(k + token * k_stride + col, mask=live)  # [BLOCK]
    value = tl.load(v + token * v_stride + col, mask=live)  # [BLOCK]
    tl.store(k_cache + place * WIDTH + col, key.to(k_cache.dtype.element_ty), mask=live)
    tl.store(v_cache + place * WIDTH + col, value.to(v_cache.dtype.element_ty), mask=live)


def _make(num_tokens: int, num_heads: int, dim: int, num_skipped: int) -> Case:
    """A case whose caches start as NaN: whatever was not to be written must still be NaN."""

    def make(device: str, dtype: torch.dtype, seed: int) -> Inputs:
        draw = torch.Generator(device).manual_seed(seed)
        page = 16
        num_pages = num_tokens // page + 3
        width = num_heads * dim
        qkv = torch.randn(num_tokens, 3 * width, generator=draw, device=device)  # [T, 3 G D]
        kv = qkv.to(dtype).view(num_tokens, 3, num_heads, dim)  # [T, 3, G, D]
        order = torch.randperm(num_pages * page, generator=draw, device=device)  # [P C]
        write_idx = order[:num_tokens].clone()  # [T]
        write_idx[torch.randperm(num_tokens, generator=draw, device=device)[:num_skipped]] = -1
        cache = torch.full(
            (num_pages, page, num_heads, dim), float("nan"), device=device, dtype=dtype
        )  # [P, C, G, D]
        return {
            "k": kv[:, 1],  # [T, G, D]
            "v": kv[:, 2],  # [T, G, D]
            "k_cache": cache,
            "v_cache": cache.clone(),
            "write_idx": write_idx,
        }

    name = f"t{num_tokens}_g{num_heads}_d{dim}_skip{num_skipped}"
    return Case(name, make, small=num_tokens <= 32)


def _cases() -> Iterable[Case]:
    yield _make(1, 1, 24, 0)
    yield _make(7, 3, 20, 3)
    yield _make(5, 2, 64, 5)
    yield _make(32, 8, 64, 4)
    yield _make(4096, 4, 128, 100)


def _aot() -> Iterable[AotSpec]:
    yield AotSpec(
        name="g8_d64",
        fn=_kv_write_kernel,
        signature={
            "k": "*bf16",
            "v": "*bf16",
            "k_cache": "*bf16",
            "v_cache": "*bf16",
            "write_idx": "*i64",
            "k_stride": "i32:16",
            "v_stride": "i32:16",
        },
        constexprs={"WIDTH": 512, "BLOCK": 512},
        num_warps=1,
    )


OPS = (
    Op(
        name="kv_write",
        run=kv_write,
        reference=kv_write_reference,
        cases=_cases,
        outputs=lambda inputs, result: [inputs["k_cache"], inputs["v_cache"]],
        aot=_aot,
        bytes=lambda inputs: 4 * inputs["k"].numel() * inputs["k"].element_size(),
    ),
)
