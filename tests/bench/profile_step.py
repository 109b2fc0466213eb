"""Where a decode step's time goes, kernel by kernel: the engine in this process, under torch's
profiler. Needs a GPU.

    python tests/bench/profile_step.py [--shape gpt-oss-20b] [--concurrency 1,8,32] [--adapters 8]
    [--steps 20]

Prints for each concurrency the kernels by time a step, their launches, and the wall time of a step
without the profiler.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from adapter_store.ref import AdapterRef  # noqa: E402
from model_runner.config import EngineConfig  # noqa: E402
from model_runner.engine import Engine  # noqa: E402
from model_runner.request import Request, SamplingParams  # noqa: E402
from tests.bench.shapes import SHAPES, write_adapter, write_model  # noqa: E402


def fill(
    engine: Engine, count: int, refs: list[AdapterRef | None], args: argparse.Namespace
) -> None:
    """Submit `count` long requests and step until all of them decode."""
    sampling = SamplingParams(temperature=0.0, max_tokens=4 * args.steps + 64, ignore_eos=True)
    generator = torch.Generator().manual_seed(count)
    for i in range(count):
        ids = torch.randint(1000, 100_000, (args.tokens_in,), generator=generator).tolist()
        engine.submit(
            Request(f"p{count}-{i}-{bool(refs[0])}", tuple(ids), sampling, refs[i % len(refs)])
        )
    started = 0
    while started < count:
        started += len({o.request_id for o in engine.step() if o.num_output_tokens == 1})
    for _ in range(8):
        engine.step()


def measure(engine: Engine, steps: int) -> tuple[float, float, Counter[str], Counter[str]]:
    """Wall ms a step; ms a step in which any kernel ran; kernel us and launches a step by name.

    Kernels may overlap: then their own times add up to more than the second figure.
    """
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        engine.step()
    torch.cuda.synchronize()
    wall = 1e3 * (time.perf_counter() - start) / steps
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    spent, launches = Counter[str](), Counter[str]()
    busy, end = 0.0, 0.0
    for event in sorted(profile.events(), key=lambda e: e.time_range.start):
        if event.device_type == torch.autograd.DeviceType.CUDA:
            span = event.time_range
            busy += max(0.0, span.end - max(end, span.start)) / steps
            end = max(end, span.end)
            spent[event.name] += event.device_time_total / steps
            launches[event.name] += 1 / steps
    return wall, busy / 1e3, spent, launches


def main() -> None:
    """One table a concurrency, with adapters and without."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="gpt-oss-20b")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--tokens-in", type=int, default=1600)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--top", type=int, default=24)
    parser.add_argument("--config", default="{}")
    args = parser.parse_args()
    config = dict(SHAPES[args.shape].config)
    if args.layers:
        config |= {
            "num_hidden_layers": args.layers,
            "layer_types": config["layer_types"][: args.layers],
        }
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_model(work / "model", config)
        refs = [AdapterRef(f"a{i}", str(work / f"a{i}")) for i in range(args.adapters)]
        for i, ref in enumerate(refs):
            write_adapter(Path(ref.uri), config, args.rank, 100 + i, "cuda")
        settings = {
            "max_num_seqs": 32,
            "max_model_len": args.tokens_in + 1024,
            "max_lora_rank": args.rank,
        }
        settings |= {
            "load_format": "random:7",
            "prefix_cache": False,
            "host_cache_dir": str(work / "host"),
            "host_cache_bytes": 24 << 30,
        }
        engine = Engine(EngineConfig(str(work / "model"), **(settings | json.loads(args.config))))
        engine.load_adapters(refs)
        for count in map(int, args.concurrency.split(",")):
            for kind in ([None], refs):
                fill(engine, count, list(kind), args)
                wall, busy, spent, launches = measure(engine, args.steps)
                total, number = sum(spent.values()) / 1e3, sum(launches.values())
                label = "adapters" if kind[0] else "base"
                print(
                    f"== c={count} {label}: {wall:.2f} ms a step, {busy:.2f} ms busy,"
                    f" {total:.2f} ms of kernels, {number:.0f} launches"
                )
                for name, us in spent.most_common(args.top):
                    print(f"  {us:8.1f} us  {launches[name]:6.1f} x  {name[:110]}")
                while engine.has_work:
                    engine.step()
        engine.close()


if __name__ == "__main__":
    main()
