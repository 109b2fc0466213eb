"""Closed loops of clients and open Poisson arrivals, and the row of numbers that each gives.

The rules are those of an outside judge: random prompts, end-of-text ignored, requests in turn over
the adapters, every second one greedy and the others at temperature 1 with given seeds. Arrivals
alone keep closer to their rate than the judge's.
Not here: whether a row counts (judging.py).
"""

import random
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.bench.client import Answer, Client

OPEN_SHARE = 0.7  # of the closed loop's requests a second


@dataclass(frozen=True)
class Load:
    """What every request asks for. vocab: ids are drawn from 1000 to vocab - 2000."""

    tokens_in: int
    tokens_out: int
    vocab: int
    seed: int = 1


@dataclass(frozen=True)
class Run:
    """One loop's answers. rate: requests a second that were offered, None = a closed loop."""

    concurrency: int
    rate: float | None
    answers: tuple[Answer, ...]
    wall_s: float
    stats: dict[str, Any]

    @property
    def requests_per_s(self) -> float:
        return len(self.answers) / self.wall_s


def count_requests(clients: int) -> int:
    """Requests of a loop: three rounds, two from 16 clients on, four at least."""
    return max(4, 3 * clients) if clients < 16 else 2 * clients


def make_requests(
    load: Load, names: Sequence[str | None], clients: int, seed: int, tag: str
) -> list[dict[str, Any]]:
    """All requests of one loop."""
    rng = random.Random(seed)
    return [
        {
            "id": f"{seed}-{clients}-{k}-{tag}",
            "adapter": names[k % len(names)],
            "input_ids": [rng.randrange(1000, load.vocab - 2000) for _ in range(load.tokens_in)],
            "max_tokens": load.tokens_out,
            "temperature": float(k % 2),
            "seed": seed + k,
            "ignore_eos": True,
        }
        for k in range(count_requests(clients))
    ]


def run_closed(client: Client, load: Load, names: Sequence[str | None], clients: int) -> Run:
    """`clients` clients, each asking again as soon as it was answered."""
    seed = load.seed * 1000 + clients
    requests = iter(make_requests(load, names, clients, seed, "c" if names[0] else "cb"))
    answers: list[Answer] = []
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                request = next(requests, None)
            if request is None:
                return
            answer = client.submit(request).wait()
            with lock:
                answers.append(answer)

    client.stats()
    started = time.perf_counter()
    threads = [threading.Thread(target=work) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall = time.perf_counter() - started
    return Run(clients, None, tuple(answers), wall, client.stats())


def run_open(
    client: Client, load: Load, names: Sequence[str | None], clients: int, rate: float
) -> Run:
    """The same number of requests, arriving as a Poisson process of `rate` requests a second."""
    seed = load.seed * 1000 + clients + 500
    requests = make_requests(load, names, clients, seed, "o" if names[0] else "ob")
    client.stats()
    started = time.perf_counter()
    answers = []
    for request, due in zip(requests, arrival_times(len(requests), rate, seed), strict=True):
        time.sleep(max(0.0, started + due - time.perf_counter()))
        answers.append(client.submit(request))
    for answer in answers:
        answer.wait()
    wall = time.perf_counter() - started
    return Run(clients, rate, tuple(answers), wall, client.stats())


def arrival_times(count: int, rate: float, seed: int) -> list[float]:
    """When they arrive, s: those Poisson processes that have `count` arrivals in count / rate.

    Given their number, arrivals are uniform and independent. Gaps drawn one by one have that rate
    on average over many arrivals alone: four came at nearly twice the rate that was asked for.
    """
    rng = random.Random(seed)
    return sorted(rng.uniform(0, count / rate) for _ in range(count))


def warm_up(client: Client, load: Load, names: Sequence[str | None]) -> None:
    """Eight tokens under every adapter, so that all are resident."""
    short = Load(load.tokens_in, 8, load.vocab, 1000)
    run_closed(client, short, names, max(2, len(names)))


def find_bad(run: Run, load: Load) -> list[Answer]:
    """Answers that are not exactly what was asked for."""
    return [
        a
        for a in run.answers
        if a.error
        or a.last is None
        or len(a.ids) != load.tokens_out
        or not all(0 <= i < load.vocab for i in a.ids)
    ]


def summarise(run: Run, load: Load) -> dict[str, Any]:
    """The measured columns of a row."""
    bad = {id(a) for a in find_bad(run, load)}
    good = [a for a in run.answers if id(a) not in bad]
    ttft = [a.ttft_ms for a in good]
    return {
        "concurrency": run.concurrency,
        "open_rate": round(run.rate, 4) if run.rate else "",
        "otps_per_user": round(statistics.median(a.tokens_per_s for a in good), 1) if good else 0,
        "total_tok_s": round(sum(len(a.ids) for a in good) / run.wall_s, 1),
        "ttft_p50_ms": round(quantile(ttft, 0.5), 1) if good else "",
        "ttft_p99_ms": round(quantile(ttft, 0.99), 1) if good else "",
        "compiles_after_warmup": run.stats.get("compiles"),
        "distinct_experts": round(run.stats.get("distinct_experts", 0.0), 2),
    }


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all lie below (the largest for 1)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
