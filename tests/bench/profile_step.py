"""Where a decode step's time goes, kernel by kernel: the engine in this process, under torch's
profiler. Needs a GPU.

    python -m tests.bench.profile_step [--shape gpt-oss-20b] [--concurrency 1,8,16,32] [--top 24]

Prints for each concurrency, with every slot -1 and with adapters, the wall time of a step without
the profiler, its kernels by time, and their groups beside the time that their bytes take.
`--json FILE` keeps the numbers. Never run beside a timed loop: the profiler slows it.
"""

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from adapter_store.ref import AdapterRef
from model_runner.config import EngineConfig
from model_runner.engine import Engine
from model_runner.request import Request, SamplingParams
from tests.bench.floors import GroupTime, dense_roles, group_kernels, step_bytes, table_rows
from tests.bench.shapes import SHAPES
from tests.bench.workload import Wishes, Workload, prepare

SETTLE_STEPS = 8


@dataclass(frozen=True)
class StepProfile:
    """One decode step, the mean over some.

    wall_ms  without the profiler;  busy_ms  in which any kernel ran (kernels may overlap: their own
             times can add up to more)
    kernels  name -> (us, launches);  groups  as floors.py names them
    distinct  experts hit in a layer
    """

    wall_ms: float
    busy_ms: float
    kernels: dict[str, tuple[float, float]]
    groups: dict[str, GroupTime]
    distinct: float

    @property
    def launches(self) -> float:
        return sum(launches for _, launches in self.kernels.values())


def fill(engine: Engine, count: int, refs: list[AdapterRef | None], tokens_in: int) -> None:
    """Submit `count` long requests and step until all of them decode."""
    most = engine.max_len - tokens_in
    sampling = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
    generator = torch.Generator().manual_seed(count)
    vocab = engine.model_config.vocab_size
    for i in range(count):
        ids = torch.randint(vocab // 8, vocab - 2, (tokens_in,), generator=generator).tolist()
        engine.submit(
            Request(f"p{count}-{i}-{bool(refs[0])}", tuple(ids), sampling, refs[i % len(refs)])
        )
    started = 0
    while started < count:
        started += len({o.request_id for o in engine.step() if o.num_output_tokens == 1})
    for _ in range(SETTLE_STEPS):
        engine.step()


def empty(engine: Engine, count: int, kind: bool) -> None:
    """End what `fill` began."""
    for i in range(count):
        engine.abort(f"p{count}-{i}-{kind}")
    while engine.has_work:
        engine.step()


def measure(engine: Engine, steps: int, roles: Sequence[str]) -> StepProfile:
    """A decode step of what is running now; roles: of its plain products, for the groups."""
    engine.stats(count_experts=True)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        engine.step()
    torch.cuda.synchronize()
    wall = 1e3 * (time.perf_counter() - start) / steps
    distinct = engine.stats(count_experts=True).distinct_experts
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    spent, launches = Counter[str](), Counter[str]()
    busy, end = 0.0, 0.0
    for event in events:
        span = event.time_range
        busy += max(0.0, span.end - max(end, span.start)) / steps
        end = max(end, span.end)
        spent[event.name] += event.device_time_total / steps
        launches[event.name] += 1 / steps
    return StepProfile(
        wall,
        busy / 1e3,
        {name: (us, launches[name]) for name, us in spent.most_common()},
        group_kernels([(e.name, e.device_time_total) for e in events], roles, steps),
        distinct,
    )


def profile(work: Workload, clients: list[int], steps: int, top: int) -> list[dict[str, Any]]:
    """One entry for each concurrency and kind ("base": adapters resident, every slot -1)."""
    wishes, found = work.wishes, list[dict[str, Any]]()
    settings = work.settings | {"load_format": f"random:{wishes.seed}"}
    engine = Engine(EngineConfig(str(work.folder / "model"), **settings))
    refs = [AdapterRef(name, str(work.folder / name)) for name in work.names]
    engine.load_adapters(refs)
    for count in clients:
        for kind, used in (("base", [None]), ("adapters", refs)):
            if not used:
                continue
            fill(engine, count, list(used), wishes.tokens_in)
            step = measure(engine, steps, dense_roles(work.config))
            empty(engine, count, kind == "adapters")
            floors = step_bytes(
                work.config,
                count,
                wishes.tokens_in + SETTLE_STEPS + steps,
                len(refs) if kind == "adapters" else 0,
                wishes.lora_rank,
                step.distinct,
            )
            entry = {
                "concurrency": count,
                "kind": kind,
                "wall_ms": step.wall_ms,
                "busy_ms": step.busy_ms,
                "launches": step.launches,
                "distinct": step.distinct,
                "table": table_rows(step.groups, floors),
            }
            found.append(entry)
            show(entry, step, top)
    engine.close()
    return found


def show(entry: dict[str, Any], step: StepProfile, top: int) -> None:
    """Print one entry."""
    print(
        f"== c={entry['concurrency']} {entry['kind']}: {step.wall_ms:.2f} ms a step,"
        f" {step.busy_ms:.2f} ms busy, {sum(us for us, _ in step.kernels.values()) / 1e3:.2f} ms of"
        f" kernels, {step.launches:.0f} launches, {step.distinct:.1f} experts a layer"
    )
    for name, (us, launches) in list(step.kernels.items())[:top]:
        print(f"  {us:8.1f} us  {launches:6.1f} x  {name[:110]}")
    for row in entry["table"]:
        print(
            f"  {row['us']:8.1f} us  {row['launches']:6.1f} x  floor {row['floor_us']:7.1f} us"
            f"  {row['kernels']}",
            flush=True,
        )


def main() -> None:
    """One table a concurrency, with adapters and without."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="gpt-oss-20b")
    parser.add_argument("--concurrency", default="1,8,16,32")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--tokens-in", type=int, default=1600)
    parser.add_argument("--tokens-out", type=int, default=600)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--top", type=int, default=24)
    parser.add_argument("--config", default="{}", help="JSON fields of EngineConfig")
    parser.add_argument("--json", default="", help="file for the numbers")
    parser.add_argument("--prepared", default="", help="workload folder of another run")
    args = parser.parse_args()
    clients = [int(c) for c in args.concurrency.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        if args.prepared:
            wishes = Wishes(**json.loads((Path(args.prepared) / "wishes.json").read_text()))
        else:
            wishes = Wishes(
                args.shape,
                args.adapters,
                args.rank,
                args.layers,
                tokens_in=args.tokens_in,
                tokens_out=args.tokens_out,
                max_clients=max(32, *clients),
                engine=args.config,
            )
        work = prepare(wishes, Path(args.prepared or folder))
        found = profile(work, clients, args.steps, args.top)
    if args.json:
        Path(args.json).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
