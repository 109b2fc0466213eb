"""MXFP4 expert products at the GPT-OSS-20B shape: checked, then timed, tile by tile. Needs a GPU.

    python tests/bench/moe_gemm.py [--tokens 1,8,16,32,64,512,1632,2048] [--layers 8] [--workers 16]

Weights are never in the L2 cache: a captured graph walks over the layers, each with its own weights
and routing. `floor` is what the chosen experts' bytes (17 a group of 32) take at 4.3 TB/s, or the
products at 790 Tflop/s if that is longer. A variant that fails to compile or to compute says so;
others go on. Kernels are compiled in several processes first: they meet in Triton's cache.
"""

import argparse
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from kernels.fused_moe import ExpertWeights, moe_down, moe_gate_up  # noqa: E402
from kernels.lora_tables import Worklist  # noqa: E402
from kernels.mxfp4_packed import packed_product, unpack_mxfp4  # noqa: E402
from kernels.tiling import Tiles, gpu_name, moe_block_m, narrow_block_m, tiles_for  # noqa: E402
from kernels.worklist import build_worklist  # noqa: E402

HIDDEN, NUM_EXPERTS, TOP_K, NUM_LAYERS = 2880, 32, 4, 24
OUT = {"gate_up": 5760, "down": 2880}
BYTES_PER_S, FLOPS_PER_S = 4.3e12, 790e12
LARGEST_ERROR = 1e-2


Variant = Tiles | str | None


def _packed(
    block_n: int, warps: int, stages: int, block_m: int = 128, split: int = 1, group: int = 1,
    registers: int = 0,
) -> Tiles:  # fmt: skip
    return Tiles(block_n, 64, split, group, warps, stages, block_m, registers)


# None: weights as the checkpoint has them, in the tiles that ship. "ships": packed, likewise.
FEW = (
    _packed(64, 4, 3, 8), _packed(64, 2, 3, 8, registers=168), _packed(64, 2, 4, 8, registers=168),
    _packed(128, 4, 3, 8, registers=168), _packed(128, 2, 3, 8), _packed(32, 1, 3, 8),
)  # fmt: skip
FEWEST = (*FEW, _packed(128, 4, 3, 8, split=4), _packed(32, 1, 4, 8), _packed(32, 2, 3, 8))
SOME = (
    _packed(64, 4, 3, 16), _packed(64, 2, 3, 8, registers=168),
    _packed(64, 2, 3, 16, registers=168), _packed(128, 4, 3, 16, registers=168),
)  # fmt: skip
MANY = (
    _packed(128, 8, 3, group=4), _packed(128, 8, 3, group=8), _packed(128, 8, 2, group=4),
    _packed(128, 8, 3, 64, group=4), _packed(128, 8, 2, 64, group=4, registers=128),
    _packed(64, 4, 3, 64, group=4), _packed(64, 4, 2, 64, group=4, registers=168),
    _packed(64, 4, 3, group=4), _packed(256, 8, 3, 64, group=4),
)  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """One layer's weights of one projection in both forms, and its routing."""

    plain: ExpertWeights
    packed: ExpertWeights
    x: Tensor
    ids: Tensor
    weights: Tensor
    work: Worklist


def variants_for(tokens: int) -> tuple[Variant, ...]:
    """What is timed at this number of tokens."""
    if tokens <= 32:
        return ("ships", *(FEWEST if tokens == 1 else FEW))
    return ("ships", *(SOME if tokens <= 128 else MANY))


def make_weights(name: str, layer: int, num_experts: int) -> tuple[ExpertWeights, ExpertWeights]:
    g = torch.Generator("cuda").manual_seed(100 * layer + len(name))
    shape = (num_experts, OUT[name], HIDDEN // 32)
    blocks = torch.randint(0, 256, (*shape, 16), generator=g, device="cuda", dtype=torch.uint8)
    scales = torch.randint(119, 121, shape, generator=g, device="cuda", dtype=torch.uint8)
    bias = torch.randn(shape[:2], generator=g, device="cuda").bfloat16()
    plain = ExpertWeights(blocks=blocks.flatten(2), scales=scales, bias=bias)
    return plain, plain.pack()


def make_layer(
    name: str, tokens: int, seed: int, weights: tuple[ExpertWeights, ExpertWeights]
) -> Layer:
    """Fresh rows and routing."""
    g = torch.Generator("cuda").manual_seed(seed)
    num_experts = weights[0].num_experts
    top_k = min(TOP_K, num_experts)
    ids = torch.rand(tokens, num_experts, generator=g, device="cuda").argsort(-1)[:, :top_k].int()
    rows = tokens if name == "gate_up" else tokens * top_k
    x = torch.randn(rows, HIDDEN, generator=g, device="cuda").bfloat16()
    factors = torch.rand(tokens, top_k, generator=g, device="cuda")
    block_m = moe_block_m(tokens, TOP_K, NUM_EXPERTS)
    work = build_worklist(ids.contiguous(), None, num_experts, 0, block_m)
    return Layer(*weights, x, ids.contiguous(), factors, work)


def run(name: str, layer: Layer, variant: Variant) -> Tensor:
    if variant is None or variant == "ships":
        experts = layer.plain if variant is None else layer.packed
        if name == "gate_up":
            return moe_gate_up(layer.x, experts, layer.ids, layer.work)
        return moe_down(layer.x, experts, layer.ids, layer.work, layer.weights)
    assert isinstance(variant, Tiles) and layer.packed.packed is not None
    x_div, factors = (layer.ids.shape[1], None) if name == "gate_up" else (1, layer.weights)
    return packed_product(
        layer.x, layer.packed.packed, layer.packed.bias, layer.ids.shape[0], layer.ids.numel(),
        layer.work, x_div, factors, variant,
    )  # fmt: skip


def kernel_of(job: tuple[str, int, Variant]) -> tuple[str, int, str]:
    """Equal for jobs that need the same compiled kernel."""
    name, tokens, variant = job
    block_m = narrow_block_m(moe_block_m(tokens, TOP_K, NUM_EXPERTS), tokens)
    block_m = min(block_m, tiles_of(name, tokens, variant).block_m)
    return name, block_m, describe(variant, tokens, name).replace("ships ", "packed")


def compile_one(job: tuple[str, int, Variant]) -> None:
    """In a process of its own: the same kernel on four experts; the cache keeps it."""
    name, tokens, variant = job
    torch.cuda.set_device(0)
    # Tiles that ship are chosen by rows, so these stay as they are.
    run(name, make_layer(name, tokens, 0, make_weights(name, 0, TOP_K)), variant)
    torch.cuda.synchronize()


def true_rows(name: str, layer: Layer, dense: Tensor) -> Tensor:
    """fp32, expert by expert, from dense [E, out, in]."""
    flat = layer.ids.flatten().long()  # [N]
    source = torch.arange(len(flat), device="cuda")
    x = layer.x.float()[source // layer.ids.shape[1] if name == "gate_up" else source]  # [N, in]
    y = torch.empty(len(flat), OUT[name], device="cuda")
    for e in flat.unique().tolist():
        mine = flat == e
        y[mine] = x[mine] @ dense[e].t()
    assert layer.packed.bias is not None
    y += layer.packed.bias.float()[flat]
    return y if name == "gate_up" else y * layer.weights.reshape(-1, 1)


def check(name: str, layer: Layer, variant: Variant, want: Tensor) -> str:
    """What is wrong, if anything. Outputs lie where NaN lay; a race shows as bits that change."""
    first: Tensor | None = None
    for _ in range(8):
        poison = torch.full(want.shape, float("nan"), device="cuda", dtype=torch.bfloat16)
        del poison
        y = run(name, layer, variant)
        if first is not None and not torch.equal(y, first):
            return "bits change from run to run"
        first = y
    assert first is not None
    error = float((first.float() - want).norm() / want.norm())
    return "" if error < LARGEST_ERROR else f"error {error:.2e}"


def company(name: str, layer: Layer, variant: Variant) -> bool:
    """Whether token 0's rows keep their bits when all other tokens become NaN."""
    top_k = layer.ids.shape[1]
    mine = run(name, layer, variant)[:top_k].clone()
    rows = 1 if name == "gate_up" else top_k
    x = layer.x.clone()
    x[rows:] = float("nan")
    other = Layer(layer.plain, layer.packed, x, layer.ids, layer.weights, layer.work)
    return torch.equal(run(name, other, variant)[:top_k], mine)


def time_us(name: str, layers: list[Layer], variant: Variant) -> float:
    """Median of a replay over all layers, a layer."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [run(name, layer, variant) for layer in layers]
    for _ in range(3):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(21)]
    for mark in marks:
        mark.record()
        graph.replay()
    torch.cuda.synchronize()
    del kept
    pairs = zip(marks, marks[1:], strict=False)
    return statistics.median(1e3 * a.elapsed_time(b) for a, b in pairs) / len(layers)


def floor_us(name: str, layers: list[Layer]) -> tuple[float, float]:
    """The limit, and the distinct experts, a layer."""
    hit = statistics.mean(layer.ids.unique().numel() for layer in layers)
    values = OUT[name] * HIDDEN
    moving = hit * values * 17 / 32 / BYTES_PER_S
    return 1e6 * max(moving, 2 * layers[0].ids.numel() * values / FLOPS_PER_S), hit


def tiles_of(name: str, tokens: int, variant: Variant) -> Tiles:
    if isinstance(variant, Tiles):
        return variant
    op = "moe_gemm_mxfp4" if variant is None else "moe_gemm_packed"
    shape = {"rows": tokens * TOP_K, "out": OUT[name], "in": HIDDEN}
    return tiles_for(op, shape, gpu_name(torch.device("cuda")))


def describe(variant: Variant, tokens: int, name: str) -> str:
    tiles = tiles_of(name, tokens, variant)
    kind = "packed" if isinstance(variant, Tiles) else variant or "plain"
    return (
        f"{kind:6} n{tiles.block_n:<3} w{tiles.num_warps} s{tiles.num_stages} k/{tiles.split_k} "
        f"g{tiles.group_m} m{tiles.block_m:<3} r{tiles.max_registers:<3}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default="1,8,16,32,64,512,1632,2048")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--workers", type=int, default=16)
    args = parser.parse_args()
    begin = time.perf_counter()
    counts = [int(t) for t in args.tokens.split(",")]
    jobs: list[tuple[str, int, Variant]]
    jobs = [(n, t, v) for n in OUT for t in counts for v in variants_for(t)]
    broken: dict[tuple[str, int, str], str] = {}
    distinct = {kernel_of(job): job for job in jobs}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.workers, mp_context=spawn) as pool:
        waiting = {pool.submit(compile_one, job): kernel for kernel, job in distinct.items()}
        for future in as_completed(waiting):
            if error := future.exception():
                broken[waiting[future]] = f"{type(error).__name__}: {error}".splitlines()[0][:90]
    took = time.perf_counter() - begin
    print(f"{len(distinct)} compiled after {took:.0f} s, {len(broken)} failed", flush=True)
    best: dict[tuple[str, int], float] = {}
    ships: dict[tuple[str, int], float] = {}
    for name in OUT:
        weights = [make_weights(name, i, NUM_EXPERTS) for i in range(args.layers)]
        packed = weights[0][1].packed
        assert packed is not None
        dense = unpack_mxfp4(packed, torch.float32)
        assert torch.equal(dense, weights[0][0].dense(torch.float32)), "packing lost bits"
        for tokens in counts:
            layers = [make_layer(name, tokens, 7 * i + 1, w) for i, w in enumerate(weights)]
            want = true_rows(name, layers[0], dense)
            floor, hit = floor_us(name, layers)
            print(f"\n{name} T={tokens}: {hit:.1f} experts, floor {floor:.1f} us", flush=True)
            for variant in variants_for(tokens):
                label = describe(variant, tokens, name)
                try:
                    wrong = broken.get(kernel_of((name, tokens, variant))) or check(
                        name, layers[0], variant, want
                    )
                    if not wrong and not company(name, layers[0], variant):
                        wrong = "a row's bits depend on other rows"
                    if wrong:
                        print(f"  {label}  WRONG: {wrong}", flush=True)
                        continue
                    took = time_us(name, layers, variant)
                except Exception as error:  # one variant must not end the run
                    told = str(error).splitlines() or [""]
                    print(f"  {label}  {type(error).__name__}: {told[0][:90]}", flush=True)
                    continue
                print(f"  {label}  {took:7.1f} us  {100 * floor / took:3.0f} %", flush=True)
                if variant == "ships":
                    ships[name, tokens] = took
                best[name, tokens] = min(took, best.get((name, tokens), took))
        del weights, dense
        torch.cuda.empty_cache()
    print(f"\nms a step of {NUM_LAYERS} layers, both products: ships, best")
    for tokens in counts:
        if all((n, tokens) in best and (n, tokens) in ships for n in OUT):
            sums = [NUM_LAYERS * sum(part[n, tokens] for n in OUT) / 1e3 for part in (ships, best)]
            print(f"  T={tokens:<5} {sums[0]:8.2f} {sums[1]:8.2f}")
    print(f"{torch.cuda.get_device_name()}, {time.perf_counter() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
