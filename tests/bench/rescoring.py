"""What re-scoring with the reference kernels costs: a cut of a shape at full width, timed layer by
layer, and the projected total for all layers.

    python -m tests.bench.rescoring [--shape gpt-oss-20b] [--layers 2,4] [--jobs 48] [--tokens 2200]

Scores random token ids under an adapter, another and none, as a judge does, with what the `logits`
command would choose. Not here: whether the scores are right (engine.py re-scores what it timed).
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from adapter_store.ref import AdapterRef  # noqa: E402
from kernels.op import use_reference_kernels  # noqa: E402
from model_runner.command_line import read_adapters  # noqa: E402
from model_runner.engine import Engine  # noqa: E402
from model_runner.logits_command import Job, add_parser, plan_scoring  # noqa: E402
from tests.bench.shapes import SHAPES, cut_layers, write_adapter, write_model  # noqa: E402


def make_jobs(
    count: int, tokens: int, vocab: int, refs: list[AdapterRef], scored: int
) -> list[Job]:
    """`count` jobs: sequences in turn, each under its own adapter, the next one and none."""
    generator = torch.Generator().manual_seed(1)
    jobs: list[Job] = []
    while len(jobs) < count:
        k = len(jobs) // 3
        ids = tuple(torch.randint(vocab // 8, vocab - 2, (tokens,), generator=generator).tolist())
        for ref in (refs[k % len(refs)], refs[(k + 1) % len(refs)], None):
            jobs.append(Job(f"j{len(jobs)}", "", ref, ids, tokens - scored - 1))
    return jobs[:count]


def time_cut(args: argparse.Namespace, layers: int, work: Path) -> dict[str, float]:
    """Seconds of a cut of so many layers: engine, adapters, scores."""
    shape, device = SHAPES[args.shape], "cuda" if torch.cuda.is_available() else "cpu"
    config = cut_layers(shape.config, layers)
    model = work / f"model{layers}"
    write_model(model, config)
    for i in range(args.adapters):
        folder = work / f"{layers}-a{i}"
        write_adapter(folder, config, args.rank, 100 + i, device, shape.cut_b_std(layers))
    named = ",".join(f"a{i}={work}/{layers}-a{i}" for i in range(args.adapters))
    commands = argparse.ArgumentParser().add_subparsers()
    line = ["--load-format", "random:7", "--adapters", named, "--kernels", "reference"]
    options = add_parser(commands).parse_args([*line, "--jobs", "-", "--out", "-"])
    settings = work / "logits.json"
    settings.write_text(f'{{"host_cache_dir": "{work}/host", "host_cache_bytes": {24 << 30}}}')
    options.config = str(settings)
    refs = list(read_adapters(named).values())
    jobs = make_jobs(args.jobs, args.tokens, config["vocab_size"], refs, args.scored)
    took: dict[str, float] = {}

    def lap(name: str, since: float) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        took[name] = time.perf_counter() - since
        return time.perf_counter()

    start = time.perf_counter()
    engine = Engine(plan_scoring(options, str(model), jobs))
    start = lap("engine", start)
    engine.load_adapters(refs)
    start = lap("adapters", start)
    failed: list[str] = []
    try:
        engine.score(
            [(job.input_ids, job.adapter, job.take) for job in jobs],
            lambda number, why: failed.append(why) if why else None,
        )
        lap("score", start)
        took["steps"] = engine.stats().num_steps
    finally:
        engine.close()
    assert not failed, failed[:2]
    assert all(len(job.best) == args.scored for job in jobs), "scores are missing"
    if device == "cuda":
        took["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        del engine
        torch.cuda.empty_cache()
    return took


def main() -> None:
    """Two cuts, what a layer adds, and the whole."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="gpt-oss-20b")
    parser.add_argument("--layers", default="2,4", help="two cuts: a layer costs their difference")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--jobs", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=2200)
    parser.add_argument("--scored", type=int, default=600, help="last tokens whose scores are kept")
    args = parser.parse_args()
    use_reference_kernels(True)
    cuts = [int(n) for n in args.layers.split(",")]
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        if torch.cuda.is_available():
            torch.empty(1, device="cuda")  # the device's own start is no layer's
        for n in cuts:
            found.append(time_cut(args, n, Path(folder)))
            text = ", ".join(f"{k} {v:.2f}" for k, v in found[-1].items())
            print(f"{n} layers: {text}", flush=True)
    first, last = found[0], found[-1]
    total, full = 0.0, SHAPES[args.shape].config["num_hidden_layers"]
    for part in ("engine", "adapters", "score"):
        per_layer = (last[part] - first[part]) / max(1, cuts[-1] - cuts[0])
        whole = last[part] + per_layer * (full - cuts[-1])
        total += whole
        print(f"{part}: {per_layer:.3f} s a layer, {whole:.1f} s projected for {full} layers")
    print(f"projected total {total:.0f} s for {args.jobs} jobs of {args.tokens} tokens")


if __name__ == "__main__":
    main()
