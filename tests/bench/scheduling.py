"""Host time of a decode step of 32 sequences, 8 adapters, 2 finishing and 2 entering: scheduling
and building inputs.

`python -m tests.bench.scheduling` prints microseconds of `schedule`, of filling the step's host
buffer, and of `commit`.
No device is involved: the copy to it is not counted.
"""

import argparse
import gc
import itertools
import statistics
import time
from dataclasses import dataclass

from adapter_store.ref import AdapterRef
from model_runner.execution.cuda_graphs import fit, mixed_sizes
from model_runner.execution.inputs import HostBuffer, PageTables, StepShape, fill_decode, fill_mixed
from model_runner.request import Request, SamplingParams
from model_runner.scheduling.batch import ScheduledBatch
from model_runner.scheduling.page_pool import KvGroup, PagePool
from model_runner.scheduling.scheduler import Scheduler
from model_runner.scheduling.sequence import Sequence

NUM_SEQS = 32
NUM_ADAPTERS = 8
FINISHING = 2  # per step: with 32 running, a sequence lives for 16 steps
PROMPT_TOKENS = 96
PAGE_TOKENS, MAX_LEN = 16, 4096
STEP_TOKENS = 2048
MIXED_SIZES = mixed_sizes(STEP_TOKENS)


@dataclass(frozen=True)
class Lease:
    index: int


class ResidentGate:
    """All adapters are in their slots."""

    def acquire(self, ref: AdapterRef, *, may_evict: bool = True) -> Lease:
        return Lease(int(ref.adapter_id))

    def release(self, lease: Lease, /, *, unused: bool = False) -> None:
        pass

    def error_of(self, ref: AdapterRef) -> None:
        return None


def measure(
    num_steps: int, look_ahead: bool, windows: tuple[int, ...], cpu_time: bool = False
) -> dict[str, list[float]]:
    """Microseconds by step of `schedule`, of building inputs and of `commit`, warm-up left out."""
    groups = tuple(KvGroup(f"window{w}", w) for w in windows)
    pool = PagePool(8192, PAGE_TOKENS, groups)
    scheduler = Scheduler(NUM_SEQS, STEP_TOKENS, MAX_LEN, pool, ResidentGate(), (1,))
    refs = [AdapterRef(str(i), f"file:///{i}") for i in range(NUM_ADAPTERS)]
    times: dict[str, list[float]] = {"schedule": [], "inputs": [], "commit": []}
    columns = MAX_LEN // PAGE_TOKENS
    tables = PageTables(len(windows), NUM_SEQS, columns, PAGE_TOKENS)
    decode_buffer = HostBuffer(
        StepShape(NUM_SEQS, NUM_SEQS, NUM_SEQS, columns, len(windows)), pinned=False
    )
    buffers: dict[StepShape, HostBuffer] = {}
    num_added, pending = 0, None
    life = NUM_SEQS // FINISHING
    clock = time.thread_time if cpu_time else time.perf_counter

    def add(max_tokens: int) -> None:
        nonlocal num_added
        prompt = tuple((num_added * 7919 + i) % 50000 + 10 for i in range(PROMPT_TOKENS))
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        request = Request(
            f"r{num_added}",
            prompt,
            sampling,
            refs[num_added % NUM_ADAPTERS],
            f"tenant{num_added % NUM_ADAPTERS}",
        )
        scheduler.add(Sequence(num_added, request))
        num_added += 1

    for i in range(NUM_SEQS):
        add(1 + i // FINISHING)
    gc.collect()
    gc.disable()
    for step in range(num_steps + 2 * life):
        add(life)
        add(life)
        begin = clock()
        batch = scheduler.schedule()
        middle = clock()
        assert batch is not None
        if max(batch.num_tokens) == 1:
            fill_decode(decode_buffer, tables, batch)
        else:
            fill_prefill(tables, batch, buffers)
        built = clock()
        due, pending = (pending, batch) if look_ahead else (batch, None)
        tokens = [5] * (len(due.samples) - due.samples.count(None)) if due else []
        start = clock()
        if due is not None:
            scheduler.commit(due, tokens)
        end = clock()
        if step >= 2 * life:
            assert len(batch.seq_ids) >= NUM_SEQS - FINISHING, len(batch.seq_ids)
            times["schedule"].append((middle - begin) * 1e6)
            times["inputs"].append((built - middle) * 1e6)
            times["commit"].append((end - start) * 1e6)
    gc.enable()
    return times


def fill_prefill(
    tables: PageTables, batch: ScheduledBatch, buffers: dict[StepShape, HostBuffer]
) -> None:
    """Inputs of a step with prompt chunks, as the runner builds them for a captured graph."""
    rows = [s for s, row in enumerate(batch.samples) if row is not None]
    ends = list(itertools.accumulate(batch.num_tokens))
    size = fit(MIXED_SIZES, sum(batch.num_tokens))
    shape = StepShape(NUM_SEQS, size, NUM_SEQS, MAX_LEN // PAGE_TOKENS, len(batch.pages))
    buffer = buffers.get(shape)
    if buffer is None:
        buffer = buffers[shape] = HostBuffer(shape, pinned=False)
    fill_mixed(buffer, tables, batch, [ends[s] - 1 for s in rows], rows, NUM_SEQS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--cpu-time", action="store_true", help="of the thread, not of the wall")
    options = parser.parse_args()
    print("windows,look_ahead,what,mean_us,p20_us,p50_us,p80_us")
    for windows in ((0,), (0, 128)):
        for look_ahead in (False, True):
            times = measure(options.steps, look_ahead, windows, options.cpu_time)
            times["all"] = [sum(pair) for pair in zip(*times.values(), strict=True)]
            for what, values in times.items():
                cuts = statistics.quantiles(values, n=10)
                row = (statistics.fmean(values), cuts[1], cuts[4], cuts[7])
                label = "+".join(map(str, windows))
                print(f"{label},{look_ahead},{what}," + ",".join(f"{v:.1f}" for v in row))


if __name__ == "__main__":
    main()
