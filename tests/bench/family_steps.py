"""Decode of one family's full shape: tokens a second and a step's kernels beside their floors, base
and with adapters. Needs a GPU for the kernels.

    python -m tests.bench.family_steps --shape deepseek-v2-lite [--concurrency 1,8,32] [--out DIR]

Weights are a seed, or an fp8 checkpoint that is read as any other is (`--checkpoint`; deleted once
read). Adapters are a seed too: one expert's factors serve all experts of a weight, each in its own
place in the arena, so that as much is read as of any other adapter. Not here: how fast files of
adapters load (engine.py), prompts (engine.py; latent_tiles.py).
"""

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from adapter_store.ref import AdapterRef
from adapter_store.weights import AdapterManifest, AdapterWeights, LoraFactors, LoraTarget
from model_runner.assembly import read_model_config
from model_runner.config import EngineConfig
from model_runner.engine import Engine
from model_runner.models.lora_targets import list_lora_targets
from tests.bench.family_shapes import FAMILY_SHAPES, floor_bytes, plain_products
from tests.bench.floors import COPY_BYTES_PER_S, table_rows
from tests.bench.profile_step import SETTLE_STEPS, StepProfile, empty, fill, measure, show
from tests.bench.results import ABOUT, KERNELS, RESULTS, append_rows, describe_run
from tests.bench.shapes import cut_layers, write_model

COLUMNS = (
    "shape", "adapters", "rank", "concurrency", "otps_per_user", "total_tok_s", "step_ms",
    "kernel_ms", "floor_ms", "launches", "distinct_experts", "startup_s", *ABOUT,
)  # fmt: skip
# Tokens that a sequence makes while the others come in and while it is measured.
TOKENS_OUT = 256
CUT_LAYERS = 4  # of every kind that a shape has, at least one


def adapted(targets: Sequence[LoraTarget]) -> list[LoraTarget]:
    """What the adapters change: every projection; not embedding, routers and head."""
    return [target for target in targets if "_proj" in target.name]


def repeated_factors(targets: Sequence[LoraTarget], seed: int, lora_rank: int) -> AdapterWeights:
    """An adapter from a seed. Factors [E, r, in] and [E, r, out], the same for all experts."""
    g, factors = torch.Generator().manual_seed(seed), {}
    for target in adapted(targets):
        a = torch.randn(1, lora_rank, target.in_features, generator=g) / target.in_features**0.5
        b = torch.randn(1, lora_rank, target.out_features, generator=g) * 0.1
        shape = (target.num_experts, -1, -1)
        factors[target.name] = LoraFactors(
            a.bfloat16().expand(shape), b.bfloat16().expand(shape)
        )  # [E, r, in], [E, r, out]
    return AdapterWeights(factors, AdapterManifest())


def start_engine(args: argparse.Namespace, folder: Path) -> tuple[Engine, list[AdapterRef]]:
    """The engine, all adapters loaded."""
    shape = FAMILY_SHAPES[args.shape]
    model = Path(args.checkpoint)
    from_file = shape.fp8 and not args.compile_only
    if not from_file:
        model = folder / "model"
        write_model(model, cut_layers(shape.config, CUT_LAYERS if args.compile_only else 0))
    on_cpu = not torch.cuda.is_available()
    family, config = read_model_config(model)
    targets = adapted(list_lora_targets(config, family.names))
    values = sum(t.num_experts * (t.in_features + t.out_features) for t in targets) * args.rank
    stored = args.adapters * values * (4 if on_cpu else 2)
    clients = [int(c) for c in args.concurrency.split(",")]
    began = time.perf_counter()
    engine = Engine(
        EngineConfig(
            str(model),
            load_format="safetensors" if from_file else "random:7",
            max_num_seqs=max(clients),
            max_step_tokens=max(2048, *clients),
            max_model_len=args.tokens_in + TOKENS_OUT,
            max_loras=args.adapters,
            max_lora_rank=args.rank,
            lora_bytes=stored * 5 // 4 + (64 << 20),
            # Room for all of them once more: their sizes in the host tier are rounded up.
            host_cache_dir=str(folder / "host"),
            host_cache_bytes=stored * 5 // 4 + (256 << 20),
            kv_bytes=max(clients) * (args.tokens_in + TOKENS_OUT + 64) * config.kv_values
            * config.num_layers * (4 if on_cpu else 2),
            adapter_load_threads=8,
            prefix_cache=False,
        )
    )  # fmt: skip
    print(f"{args.shape}: engine started in {time.perf_counter() - began:.1f} s", flush=True)
    if from_file:
        shutil.rmtree(model)  # the adapters want its room
    refs = []
    for seed in range(args.adapters):
        at = folder / f"adapter-{seed}"
        at.mkdir()
        (at / "adapter_config.json").write_text(json.dumps({"seed": seed}))
        (at / "adapter_model.safetensors").write_bytes(b"from the seed")
        refs.append(AdapterRef(f"adapter-{seed}", str(at)))

    def load(at: Path, targets: Sequence[LoraTarget], **limits: int) -> AdapterWeights:
        seed = json.loads((at / "adapter_config.json").read_text())["seed"]
        return repeated_factors(targets, seed, args.rank)

    engine.store.loader._load_adapter = load
    engine.load_adapters(refs)
    return engine, refs


def measure_step(engine: Engine, steps: int, roles: Sequence[str]) -> StepProfile:
    """profile_step's; without a GPU the wall time alone."""
    if torch.cuda.is_available():
        return measure(engine, steps, roles)
    began = time.perf_counter()
    for _ in range(steps):
        engine.step()
    return StepProfile(1e3 * (time.perf_counter() - began) / steps, 0.0, {}, {}, 0.0)


def measure_shape(
    args: argparse.Namespace, engine: Engine, refs: Sequence[AdapterRef]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of families.csv and of kernels_step.csv."""
    rows, kernels = [], []
    roles = [role for role, _ in plain_products(engine.model_config)]
    targets = adapted(engine.targets)
    for count in (int(c) for c in args.concurrency.split(",")):
        for used in ([None], list(refs)):
            number = len(used) if used[0] is not None else 0
            fill(engine, count, used, args.tokens_in)
            step = measure_step(engine, args.steps, roles)
            empty(engine, count, number > 0)
            context = args.tokens_in + SETTLE_STEPS + args.steps
            floors = floor_bytes(
                engine.model_config, count, context, step.distinct, targets, number, args.rank
            )
            about = {"shape": args.shape, "adapters": number, "rank": args.rank,
                     "concurrency": count, "distinct_experts": round(step.distinct, 2)}  # fmt: skip
            rows.append(
                about
                | {
                    "otps_per_user": round(1e3 / step.wall_ms, 1),
                    "total_tok_s": round(count * 1e3 / step.wall_ms, 1),
                    "step_ms": round(step.wall_ms, 3),
                    "kernel_ms": round(step.busy_ms, 3),
                    "floor_ms": round(1e3 * sum(floors.values()) / COPY_BYTES_PER_S, 3),
                    "launches": round(step.launches),
                }
            )
            table = table_rows(step.groups, floors)
            kernels += [about | row for row in table]
            kind = "adapters" if number else "base"
            show({"concurrency": count, "kind": kind, "table": table}, step, args.top)
    return rows, kernels


def main() -> None:
    """One shape, or only what compiling it takes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(FAMILY_SHAPES), required=True)
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--tokens-in", type=int, default=1600)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--top", type=int, default=4, help="kernels by name, the slowest")
    parser.add_argument("--checkpoint", default="", help="folder of the fp8 shape's")
    parser.add_argument("--work", default=None, help="where temporary files go")
    parser.add_argument("--compile-only", action="store_true", help="few layers, not measured")
    parser.add_argument("--out", default=str(RESULTS), help="folder of the tables")
    args = parser.parse_args()
    if FAMILY_SHAPES[args.shape].fp8 and not args.checkpoint and not args.compile_only:
        parser.error(f"{args.shape} is read from a checkpoint: --checkpoint DIR")
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        began = time.perf_counter()
        engine, refs = start_engine(args, Path(folder))
        startup = round(time.perf_counter() - began, 1)
        print(f"{args.shape}: ready after {startup} s, adapters loaded", flush=True)
        try:
            if args.compile_only:
                fill(engine, 1, [refs[0]], args.tokens_in)
                return
            rows, kernels = measure_shape(args, engine, refs)
        finally:
            engine.close()
    about = describe_run()
    rows = [row | {"startup_s": startup} | about for row in rows]
    for row in rows:
        print(", ".join(f"{key} {row[key]}" for key in COLUMNS[1:12]), flush=True)
    append_rows(Path(args.out) / "families.csv", COLUMNS, rows)
    append_rows(Path(args.out) / "kernels_step.csv", KERNELS, [row | about for row in kernels])


if __name__ == "__main__":
    main()
