"""Adapter memory: a factor in one extent, or its rank rows in pages of 8 or 16 that lie anywhere?
`python -m tests.bench.design [--seconds 110]`. Needs a GPU.

Decode, row by row, by the same pair of kernels: only how they find a rank row differs. `shipped` is
the kernel that serves, beside them, without overlap of its two launches. Prints a table, us a
layer, L2-cold under graph replay; values are checked against torch.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kernels.lora_decode import DecodeTiles, add_pairs, add_rows
from kernels.lora_tables import LoraTables
from kernels.tune.inputs import Batch as Calls
from kernels.tune.timing import GraphTimer
from tests.bench.floors import COPY_BYTES_PER_S
from tests.bench.lora_parts import FEW_SLOTS
from tests.bench.lora_paths import compile_ahead
from tests.bench.paged_lora import Memory, add_paged

LAYERS, HIDDEN, EXPERTS, TOP_K = 8, 2880, 32, 4
PAGE_SIZES = (0, 8, 16)  # 0: one extent
PAGED_TOKENS, PAGED_RANKS = (1, 8, 32), (16, 32, 64)
# Name, width of x, width of y, experts.
PAGED_SHAPES = (("expert gate_up", HIDDEN, 2 * HIDDEN, EXPERTS), ("q, k, v", HIDDEN, 5120, 1))


def random_factors(
    layers: int, experts: int, rank: int, in_: int, out: int, filled: bool = True
) -> tuple[Tensor, Tensor, LoraTables]:
    """A [layers · L, E, r, in] and B [layers · L, E, r, out] in one memory, and the tables by which
    the shipped kernels find them."""
    adapters = layers * FEW_SLOTS
    sizes = [adapters * experts * rank * width for width in (in_, out)]
    memory = torch.empty(sum(sizes), dtype=torch.bfloat16, device="cuda")
    for piece in memory.split(1 << 28) if filled else ():
        piece.normal_(0, HIDDEN**-0.5)
    a, b = (
        part.view(adapters, experts, rank, width)
        for part, width in zip(memory.split(sizes), (in_, out), strict=True)
    )
    places = torch.arange(adapters, device="cuda").view(layers, FEW_SLOTS)  # [layers, L]
    several = int(experts > 1)
    strides = [torch.full_like(places, several * rank * width) for width in (in_, out)]
    ranks = torch.full(places.shape, rank, dtype=torch.int32, device="cuda")
    offsets = places * a[0].numel(), places * b[0].numel() + sizes[0]
    return a, b, LoraTables(memory, *offsets, strides[0], strides[1], ranks, rank)


def paged_table(timer: GraphTimer, end: float) -> None:
    """A line a shape and rank."""
    print("\nrow by row, us a layer: floor / extents / pages of 8 / pages of 16 / shipped")
    print(f"| shape, rank | {' | '.join(f'T={t}' for t in PAGED_TOKENS)} |")
    print("|" + "---|" * (len(PAGED_TOKENS) + 1))
    for name, in_, out, experts in PAGED_SHAPES:
        for rank in PAGED_RANKS:
            a, b, tables = random_factors(LAYERS, experts, rank, in_, out)
            times: dict[tuple[int, int], float] = {}
            floors = {t: 0.0 for t in PAGED_TOKENS}
            for page in (*PAGE_SIZES, -1):
                stores = [Memory(f, page) for f in (a, b)] if page >= 0 else []
                for tokens in PAGED_TOKENS:
                    if time.monotonic() > end:
                        continue
                    calls, want, floors[tokens] = paged_calls(
                        tokens, experts, rank, page, stores, a, b, tables
                    )
                    error = calls.error(calls.calls[0](), want)
                    calls.restore()
                    assert error < calls.bound, f"{name} r{rank} T={tokens} page {page}: {error}"
                    times[tokens, page] = timer(calls)
                del stores
            cells = [
                " / ".join(
                    [f"{floors[t]:.1f}", *(f"{times.get((t, p), float('nan')):.1f}"
                                           for p in (*PAGE_SIZES, -1))]
                )
                for t in PAGED_TOKENS
            ]  # fmt: skip
            print(f"| {name} r{rank} | {' | '.join(cells)} |", flush=True)
            del a, b, tables
            torch.cuda.empty_cache()


def paged_calls(
    tokens: int, experts: int, rank: int, page: int, stores: list[Memory], a: Tensor, b: Tensor,
    tables: LoraTables,
) -> tuple[Calls, Tensor, float]:  # fmt: skip
    """A call a layer, what the first should give, and the bandwidth floor in us."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    top_k, layers = (TOP_K if experts > 1 else 1), len(a) // FEW_SLOTS
    in_, out = a.shape[3], b.shape[3]
    slots = torch.arange(tokens, device="cuda").remainder(FEW_SLOTS).int()
    x = torch.randn(tokens, in_, generator=generator, device="cuda").bfloat16()
    y = torch.randn(tokens * top_k, out, generator=generator, device="cuda").mul(0.02).bfloat16()
    tiles = DecodeTiles(128, 64, 1, 1) if tokens * top_k > 8 else DecodeTiles(128, 64, 2, 2)
    calls: list[Callable[[], Tensor]] = []
    used = 0
    for layer in range(layers):
        scores = torch.rand(tokens, experts, generator=generator, device="cuda")
        ids = scores.argsort(-1)[:, :top_k].int().contiguous()  # [T, K]
        used += (slots[:, None] * experts + ids).unique().numel()
        if page >= 0:
            args = (
                y,
                x,
                stores[0],
                stores[1],
                slots,
                ids,
                layer,
                FEW_SLOTS,
                experts,
                rank,
                page,
                tiles,
            )
            calls.append(partial(add_paged, *args))
        else:
            calls.append(partial(_shipped, y, x, tables, layer, ids, slots, experts, tiles))
        if layer == 0:
            flat = ids.flatten().long()
            at = slots.long().repeat_interleave(top_k)  # layer 0: adapters 0..L - 1
            rows = x.float().repeat_interleave(top_k, 0)  # [T·K, in]
            z = torch.bmm(a[at, flat].float(), rows.unsqueeze(2)).squeeze(2)  # [T·K, r]
            delta = torch.bmm(z.unsqueeze(1), b[at, flat].float()).squeeze(1)  # [T·K, out]
            want = y.float() + delta
    moved = 2 * (used * rank * (in_ + out) / layers + tokens * in_ + 2 * tokens * top_k * out)
    floor = 1e6 * moved / COPY_BYTES_PER_S
    return Calls(tuple(calls), lambda: want, 3e-2, y.clone(), y), want, floor


def _shipped(
    y: Tensor, x: Tensor, tables: LoraTables, layer: int, ids: Tensor, slots: Tensor,
    experts: int, tiles: DecodeTiles,
) -> Tensor:  # fmt: skip
    if experts > 1:
        add_pairs(y, x, tables, layer, ids, slots, experts, False, None, tiles, overlap=False)
    else:
        add_rows((y,), x, tables, (layer,), slots, tiles, overlap=False)
    return y


def everything() -> None:
    """One call of each kind, on memory without values: for the compiler."""
    for _, in_, out, experts in PAGED_SHAPES:
        for rank in PAGED_RANKS:
            a, b, tables = random_factors(1, experts, rank, in_, out, filled=False)
            for page in (*PAGE_SIZES, -1):
                stores = [Memory(f, page) for f in (a, b)] if page >= 0 else []
                for tokens in PAGED_TOKENS:
                    calls, _, _ = paged_calls(tokens, experts, rank, page, stores, a, b, tables)
                    calls.calls[0]()


@torch.inference_mode()
def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=110, help="stop measuring then")
    args = parser.parse_args()
    begin = time.monotonic()
    compile_ahead(everything, begin + args.seconds / 2)
    print(f"{torch.cuda.get_device_name()}: compiled in {time.monotonic() - begin:.0f} s")
    paged_table(GraphTimer(), begin + args.seconds)
    print(f"{time.monotonic() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
