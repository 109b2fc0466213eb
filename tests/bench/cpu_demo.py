"""The demo on a CPU beside transformers' `generate`, in one run: 128-token prompts, 128 tokens out,
one thread, greedy, fp32.

    python tests/bench/cpu_demo.py [--rounds 5]

Prints medians of the rounds, which alternate between the two; wall time, and CPU time for machines
that others use too.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from model_runner.config import EngineConfig  # noqa: E402
from model_runner.engine import Engine  # noqa: E402
from model_runner.request import Request, SamplingParams  # noqa: E402

MODEL = ROOT / "tests" / "data" / "demo" / "base"
TOKENS = 128


def time_of(run: Callable[[], None]) -> tuple[float, float]:
    """Wall and CPU seconds of a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    engine = Engine(EngineConfig(str(MODEL), device="cpu", max_model_len=512, prefix_cache=False))
    prompts = torch.randint(3, 600, (16, TOKENS), generator=torch.Generator().manual_seed(0))
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)

    def generate_theirs() -> None:
        with torch.inference_mode():
            ids = prompts[:1]
            out = theirs.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=TOKENS,
                min_new_tokens=TOKENS,
                do_sample=False,
            )
        assert out.shape[1] == 2 * TOKENS

    def generate_ours(streams: int) -> None:
        requests = [
            Request(f"r{i}", tuple(ids), sampling)
            for i, ids in enumerate(prompts[:streams].tolist())
        ]
        assert all(len(c.token_ids) == TOKENS for c in engine.generate(requests))

    runs = {
        "transformers, 1 stream": (generate_theirs, 1),
        "engine, 1 stream": (lambda: generate_ours(1), 1),
        "engine, 16 streams": (lambda: generate_ours(16), 16),
    }
    for run, _ in runs.values():
        run()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(args.rounds):
        for name, (run, _) in runs.items():
            times[name].append(time_of(run))
    engine.close()
    base = None
    for name, (_, streams) in runs.items():
        wall, cpu = (statistics.median(t[i] for t in times[name]) for i in range(2))
        speed, cpu_speed = streams * TOKENS / wall, streams * TOKENS / cpu
        base = base or (speed, cpu_speed)
        print(
            f"{name:24s} {speed:8.1f} tok/s ({speed / base[0]:.2f} x)   "
            f"{cpu_speed:8.1f} tok/CPU-s ({cpu_speed / base[1]:.2f} x)"
        )


if __name__ == "__main__":
    main()
