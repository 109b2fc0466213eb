"""The choice of experts and the worklist of a decode step in one launch.

What moe_gate.py and worklist.py do in two: of few tokens one program holds the whole table of
tokens by experts, and a worklist is nothing but sums over its rows and columns. Not here: larger
batches (passed on to the two), worklists by adapter slot.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.lora_tables import Worklist
from kernels.moe_gate import choose_experts, moe_gate, moe_gate_reference
from kernels.op import AotSpec, Case, Inputs, Op, use_triton
from kernels.overlap import can_overlap, follow
from kernels.worklist import build_worklist, build_worklist_reference, segment_capacity

# What one program holds: 64 tokens of 32 experts, 16 of 128.
MAX_CELLS = 2048
CELLS_PER_WARP = 256
SEGMENT_LANES = 64


def moe_route(
    logits: Tensor, top_k: int, renormalize: bool, block_m: int
) -> tuple[Tensor, Tensor, Worklist]:
    """Each token's experts and their weights, and the pairs grouped by expert.

    Shapes:  logits [T, E]  ->  weights [T, K] fp32, ids [T, K] int32, worklist of T·K rows
    Results: those of `moe_gate`, and of `build_worklist` by expert alone.
    Errors:  ValueError unless 1 <= top_k <= E.      Cost:  one launch for few tokens, else two.
    """
    num_tokens, num_experts = logits.shape
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k must be in 1..{num_experts} (the experts), not {top_k}")
    form = _form(num_tokens, num_experts)
    if not use_triton(logits) or not num_tokens or form is None:
        weights, ids = moe_gate(logits, top_k, renormalize)
        return weights, ids, build_worklist(ids, None, num_experts, 0, block_m)
    assert logits.stride(1) == 1, "the logits of a token must lie side by side"
    num_rows = num_tokens * top_k
    num_segments = segment_capacity(num_rows, num_experts, block_m)
    weights = logits.new_empty(num_tokens, top_k, dtype=torch.float32)  # [T, K]
    ids = logits.new_empty(num_tokens, top_k, dtype=torch.int32)  # [T, K]
    rows = logits.new_empty(num_rows, dtype=torch.int32)  # [N]
    segments = logits.new_empty(num_segments, 4, dtype=torch.int32)  # [W, 4]
    block_t, block_e, num_warps = form
    overlap = can_overlap(logits.device)
    _route_kernel[(1,)](
        logits, weights, ids, rows, segments, num_tokens, num_segments, logits.stride(0),
        num_experts, TOP_K=top_k, RENORMALIZE=renormalize, BLOCK_M=block_m, BLOCK_T=block_t,
        BLOCK_E=block_e, BLOCK_W=SEGMENT_LANES, OVERLAP=overlap, num_warps=num_warps,
        **follow(overlap),
    )  # fmt: skip
    return weights, ids, Worklist(rows, segments, block_m, ())


def moe_route_reference(
    logits: Tensor, top_k: int, renormalize: bool, block_m: int
) -> tuple[Tensor, Tensor, Worklist]:
    """The same in torch."""
    weights, ids = moe_gate_reference(logits, top_k, renormalize)
    return weights, ids, build_worklist_reference(ids, None, logits.shape[1], 0, block_m)


def _form(num_tokens: int, num_experts: int) -> tuple[int, int, int] | None:
    """(BLOCK_T, BLOCK_E, warps) of the one program, or None: more than it can hold."""
    block_t, block_e = triton.next_power_of_2(num_tokens), triton.next_power_of_2(num_experts)
    cells = block_t * block_e
    if cells > MAX_CELLS:
        return None
    return block_t, block_e, min(8, max(1, cells // CELLS_PER_WARP))


@triton.jit(do_not_specialize=["num_tokens", "num_segments"])
def _route_kernel(
    logits_ptr, weights_ptr, ids_ptr, rows_ptr, segments_ptr,
    num_tokens, num_segments, row_stride, num_experts,
    TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_W: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
    token = tl.arange(0, BLOCK_T)[:, None]
    expert = tl.arange(0, BLOCK_E)[None, :]
    live = (token < num_tokens) & (expert < num_experts)
    logits_ptrs = logits_ptr + token.to(tl.int64) * row_stride + expert
    if OVERLAP:
        gdc_wait()
    logits = tl.load(logits_ptrs, mask=live, other=0.0, cache_modifier=".cg")
    place, weights = choose_experts(logits, live, TOP_K, RENORMALIZE, BLOCK_E)
    chosen = place >= 0
    row = token * TOP_K + place
    tl.store(weights_ptr + row, weights, mask=chosen)
    tl.store(ids_ptr + row, expert.to(tl.int32), mask=chosen)
    # A token chooses an expert once: so an expert's rows are in the order of their tokens.
    hit = chosen.to(tl.int32)
    within = tl.cumsum(hit, 0) - hit
    count = tl.sum(hit, 0)
    blocks = (count + BLOCK_M - 1) // BLOCK_M
    first = (tl.cumsum(count, 0) - count)[None, :] + within
    segment = (tl.cumsum(blocks, 0) - blocks)[None, :] + within // BLOCK_M
    tl.store(rows_ptr + first, row, mask=chosen)
    # The last row of a segment knows all of it.
    in_block = within % BLOCK_M
    last = chosen & ((in_block == BLOCK_M - 1) | (within == count[None, :] - 1))
    at = segments_ptr + segment * 4
    tl.store(at, tl.full([BLOCK_T, BLOCK_E], -1, tl.int32), mask=last)
    tl.store(at + 1, expert.to(tl.int32), mask=last)
    tl.store(at + 2, first - in_block, mask=last)
    tl.store(at + 3, in_block + 1, mask=last)
    total = tl.sum(blocks, 0)
    for start in range(total, num_segments, BLOCK_W):
        spare = start + tl.arange(0, BLOCK_W)
        for column in tl.static_range(4):
            value = -1 if column < 2 else 0
            tl.store(segments_ptr + spare * 4 + column, value, mask=spare < num_segments)


def _cases() -> Iterator[Case]:
    def case(
        name: str, tokens: int, experts: int, top_k: int, renormalize: bool, block_m: int = 16,
        small: bool = True,
    ) -> Case:  # fmt: skip
        def make(device: str, dtype: torch.dtype, seed: int) -> Inputs:
            g = torch.Generator().manual_seed(seed)
            # Distinct values: a tie in one dtype and none in another would change the order.
            x = torch.rand(tokens, experts, generator=g).argsort(-1).float() / 16  # [T, E]
            return {
                "logits": x.to(device, dtype), "top_k": top_k, "renormalize": renormalize,
                "block_m": block_m,
            }  # fmt: skip

        return Case(name, make, small)

    yield case("odd", 5, 7, 3, True)
    yield case("all_of_them", 3, 5, 5, False)
    yield case("one", 1, 1, 1, True)
    yield case("crowded", 61, 5, 2, True)
    yield case("gpt_oss_64", 64, 32, 4, True)
    yield case("qwen3", 9, 128, 8, True)
    yield case("many_experts", 16, 512, 8, False)
    for tokens in (1, 8, 32):
        yield case(f"gpt_oss_{tokens}", tokens, 32, 4, True, small=False)
    yield case("prefill", 401, 32, 4, True, 64, False)


def _aot() -> Iterator[AotSpec]:
    signature = dict.fromkeys(("ids_ptr", "rows_ptr", "segments_ptr"), "*i32")
    signature |= {"logits_ptr": "*bf16", "weights_ptr": "*fp32", "row_stride": "i32:16"}
    signature |= {"num_tokens": "i32", "num_segments": "i32", "num_experts": "i32:16"}
    for tokens, experts, top_k in ((1, 32, 4), (32, 32, 4), (64, 32, 4), (1, 128, 8), (16, 128, 8)):
        form = _form(tokens, experts)
        assert form is not None, (tokens, experts)
        constants = {
            "TOP_K": top_k, "RENORMALIZE": True, "BLOCK_M": 16, "BLOCK_T": form[0],
            "BLOCK_E": form[1], "BLOCK_W": SEGMENT_LANES, "OVERLAP": True,
        }  # fmt: skip
        name = f"moe_route_{tokens}_of_{experts}"
        yield AotSpec(name, _route_kernel, signature, constants, num_warps=form[2])


OPS = (
    Op(
        name="moe_route",
        run=moe_route,
        reference=moe_route_reference,
        cases=_cases,
        outputs=lambda inputs, result: [*result[:2], result[2].rows, result[2].segments],
        aot=_aot,
        bytes=lambda i: i["logits"].nbytes,
    ),
)
