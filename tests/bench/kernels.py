"""Times the registry's kernels on this machine's GPU: `python -m tests.bench.kernels [OP ...]`.

Not here: correctness (tests/kernels), and the engine's steps (tests/bench/engine.py).

How: a captured graph runs the kernel over several sets of inputs in turn, so that what it reads
is not in the L2 cache from the call before (tiny inputs stay there, as they do in service); the
time is that of a replay divided by the sets. The roofline is what this GPU itself reaches: the
bandwidth of a large copy, the rate of a large bf16 product. `roof_percent` is the time that the
declared bytes or flops would take there, whichever is longer, over the median.
"""

import argparse
import csv
import datetime
import subprocess
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import triton

from kernels.op import Case, Op
from kernels.registry import OPS

RESULTS = Path(__file__).parent / "results" / "kernels.csv"
ROOT = Path(__file__).parents[2]
NUM_REPLAYS = 100
MAX_SETS = 16


@dataclass(frozen=True)
class Roof:
    """What the GPU reaches: bytes/s of a copy (both ways counted), flop/s of a bf16 product."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class Row:
    """One line of the table; empty where an op declares no bytes or no flops."""

    op: str
    case: str
    p20_us: float
    p50_us: float
    p80_us: float
    gb_per_s: float | None
    tflop_per_s: float | None
    roof_percent: float | None
    num_sets: int
    gpu: str
    torch: str
    triton: str
    commit: str
    utc: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("op", nargs="*", help="names of the registry; none: all of them")
    parser.add_argument("--out", type=Path, default=RESULTS, help="CSV file to bring up to date")
    wanted = parser.parse_args()
    unknown = sorted(set(wanted.op) - set(OPS))
    if unknown:
        sys.exit(f"no such kernel: {', '.join(unknown)}; there are {', '.join(sorted(OPS))}")
    if not torch.cuda.is_available():
        sys.exit("tests.bench.kernels measures a GPU, and torch sees none here")
    roof = measure_roof()
    print(f"{torch.cuda.get_device_name()}: a copy moves {roof.bytes_per_s / 1e9:.0f} GB/s,")
    print(f"a bf16 product does {roof.flops_per_s / 1e12:.0f} Tflop/s")
    print(
        f"{'kernel':44} {'p20':>8} {'p50':>8} {'p80 us':>8} {'GB/s':>6} {'Tflop/s':>7} {'roof':>5}"
    )
    rows, failed = [], []
    for name in wanted.op or sorted(OPS):
        for case in OPS[name].cases():
            if case.small:
                continue
            try:
                row = measure(OPS[name], case, roof)
            except Exception as error:  # one kernel that cannot run must not hide the others
                failed.append(f"{name} {case.name}: {type(error).__name__}: {error}")
                print(failed[-1].splitlines()[0])
                continue
            rows.append(row)
            print_row(row)
    save(rows, wanted.out)
    if failed:
        sys.exit(f"{len(failed)} not measured:\n" + "\n".join(failed))


def measure(op: Op, case: Case, roof: Roof) -> Row:
    """Time one case under graph replay."""
    first = case.make("cuda", torch.bfloat16, 0)
    num_bytes = op.bytes(first) if op.bytes else None
    num_flops = op.flops(first) if op.flops else None
    cache_bytes = torch.cuda.get_device_properties().L2_cache_size
    num_sets = min(MAX_SETS, -(-2 * cache_bytes // num_bytes)) if num_bytes else 4
    sets = [first, *(case.make("cuda", torch.bfloat16, seed) for seed in range(1, num_sets))]
    for inputs in sets:
        op.run(**inputs)  # compiles; and what the inputs choose may differ
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [op.run(**inputs) for inputs in sets]
    low, middle, high = (t / num_sets for t in replay_times_us(graph))
    del kept
    floor_s = max(
        (num_bytes or 0) / roof.bytes_per_s,
        (num_flops or 0) / roof.flops_per_s,
    )
    now = datetime.datetime.now(datetime.UTC)
    return Row(
        op=op.name,
        case=case.name,
        p20_us=round(low, 2),
        p50_us=round(middle, 2),
        p80_us=round(high, 2),
        gb_per_s=round(num_bytes / middle / 1e3, 1) if num_bytes else None,
        tflop_per_s=round(num_flops / middle / 1e6, 2) if num_flops else None,
        roof_percent=round(100e6 * floor_s / middle, 1) if floor_s else None,
        num_sets=num_sets,
        gpu=torch.cuda.get_device_name(),
        torch=torch.__version__,
        triton=triton.__version__,
        commit=commit(),
        utc=now.strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def replay_times_us(graph: torch.cuda.CUDAGraph) -> tuple[float, float, float]:
    """20th, 50th and 80th percentile of a replay, in microseconds."""
    for _ in range(5):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_REPLAYS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    pairs = zip(marks, marks[1:], strict=False)
    times = sorted(1e3 * begin.elapsed_time(end) for begin, end in pairs)
    return tuple(times[NUM_REPLAYS * percent // 100] for percent in (20, 50, 80))


def measure_roof() -> Roof:
    """The GPU's own copy and product, as the kernels are timed."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    left, right = torch.randn(2, 8192, 8192, device="cuda").bfloat16()
    product = torch.empty_like(left)
    torch.mm(left, right, out=product)
    torch.cuda.synchronize()
    copying, multiplying = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(copying):
        target.copy_(source)
    with torch.cuda.graph(multiplying):
        torch.mm(left, right, out=product)
    copy_s = replay_times_us(copying)[1] / 1e6
    product_s = replay_times_us(multiplying)[1] / 1e6
    return Roof(2 * source.numel() / copy_s, 2 * 8192**3 / product_s)


def commit() -> str:
    """The commit of the tree, with a plus sign if something of it was changed; else "unknown"."""

    def ask(*command: str) -> str:
        return subprocess.run(
            ["git", *command], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return ask("rev-parse", "--short", "HEAD") + ("+" if ask("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def print_row(row: Row) -> None:
    def show(value: float | None, width: int, digits: int) -> str:
        return f"{'-' if value is None else format(value, f'.{digits}f'):>{width}}"

    print(
        f"{row.op + ' ' + row.case:44}",
        *(show(value, 8, 2) for value in (row.p20_us, row.p50_us, row.p80_us)),
        show(row.gb_per_s, 6, 0),
        show(row.tflop_per_s, 7, 1),
        show(row.roof_percent, 4, 0) + "%",
        flush=True,
    )


def save(rows: list[Row], path: Path) -> None:
    """Bring the file up to date: a line of the same op, case and GPU is replaced, others stay."""
    names = [field.name for field in fields(Row)]
    lines: dict[tuple[str, str, str], dict[str, object]] = {}
    if path.exists():
        with path.open(newline="") as file:
            for line in csv.DictReader(file):
                lines[line["op"], line["case"], line["gpu"]] = dict(line)
    for row in rows:
        lines[row.op, row.case, row.gpu] = asdict(row)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines[key] for key in sorted(lines))


if __name__ == "__main__":
    main()
