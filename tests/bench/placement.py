"""Placement policies against each other over a day of many tenants; what a choice and a sync cost.

    python -m tests.bench.placement [--trace FILE] [--hours H] [--choices N]

FILE is a day of ServeGen (https://github.com/alibaba/ServeGen, Apache-2.0) as csv.gz: client_id,
window_start_s, rate_rps, interarrival_cv, ... in windows of ten minutes. Without one, tenants of a
Zipf law that wax and wane over the day; with `--hours 0`, no day. A request has 1,366 tokens, the
mean of the Azure conversation trace of 2023 (CC-BY 4.0). Not here: what engines make of it
(serving).
"""

import argparse
import asyncio
import csv
import gzip
import math
import pickle
import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from statistics import mean, median, quantiles

import numpy as np

from adapter_store.ref import AdapterRef
from deployments.metrics import MetricDelta
from deployments.placement.registry import POLICIES
from deployments.placement.shares import Shares
from deployments.placement.view import Place, Placement, ReplicaView, TenantLoad
from deployments.router import ROUND_S
from model_runner.stats import EngineStats
from tests.deployments.routing_world import FakeReplica, Ingress, pending_request

TOKENS_A_REQUEST = 1366
WINDOW_S = 600

Rates = dict[str, list[tuple[float, float]]]
"""tenant -> (requests a second, variation of the gaps) of each window."""


def read_trace(path: str, copies: int) -> Rates:
    """Each client `copies` times, its day turned by another number of hours."""
    found: dict[str, dict[int, tuple[float, float]]] = defaultdict(dict)
    with gzip.open(path, "rt") as lines:
        for row in csv.DictReader(lines):
            window = int(float(row["window_start_s"])) // WINDOW_S
            values = float(row["rate_rps"]), float(row["interarrival_cv"] or 1)
            found[row["client_id"]][window] = values
    rates: Rates = {}
    for client, windows in found.items():
        day = [windows.get(window, (0.0, 1.0)) for window in range(144)]
        for copy in range(copies):
            turn = 12 * copy % 144 + copy // 12
            rates[f"c{client}-{copy}/x"] = day[turn:] + day[:turn]
    return rates


def invent(num_tenants: int) -> Rates:
    """Zipf's law with exponent 1.1, each tenant with a noon of its own."""
    rng = np.random.default_rng(7)
    rates: Rates = {}
    for number in range(num_tenants):
        top, noon = 20 / (number + 1) ** 1.1, rng.uniform(0, 144)
        wave = [1 + 0.9 * math.cos((window - noon) / 144 * 2 * math.pi) for window in range(144)]
        rates[f"z{number}/x"] = [(top * height, 2.0) for height in wave]
    return rates


def arrivals(rates: Rates, hours: float) -> Iterator[dict[str, int]]:
    """Requests of each tenant, round by round: Poisson, or bursty as its gaps vary."""
    rng = np.random.default_rng(11)
    names = list(rates)
    for number in range(int(hours * 3600 / ROUND_S)):
        window = int(number * ROUND_S) // WINDOW_S % 144
        means = np.array([rates[name][window][0] * ROUND_S for name in names])
        burst = np.array([min(rates[name][window][1], 20.0) ** 2 - 1 for name in names])
        is_bursty = (burst > 0.01) & (means > 0)
        shape = np.where(is_bursty, means / np.maximum(burst, 0.01), 1.0)
        lumpy = rng.gamma(np.maximum(shape, 1e-9), np.maximum(burst, 0.01))
        counts = rng.poisson(np.where(is_bursty, lumpy, means))
        yield {name: int(count) for name, count in zip(names, counts, strict=True) if count}


def run_day(policy: str, rates: Rates, num_seats: int, slots: int, hours: float) -> list[str]:
    """One policy through the day; the cells of its row."""
    seats = [f"m-{number}" for number in range(num_seats)]
    resident = {seat: OrderedDict[str, None]() for seat in seats}
    refs = {name: AdapterRef(name, "u", base="m") for name in rates}
    shares, placement = Shares(), Placement()
    moves = loads = 0
    peaks, took_s = [], []
    minute: dict[str, float] = defaultdict(float)
    for number, counts in enumerate(arrivals(rates, hours)):
        now_s = number * ROUND_S
        stats = {
            seat: EngineStats(num_slots=slots, resident=tuple(refs[n] for n in resident[seat]))
            for seat in seats
        }
        views = [ReplicaView(seat, "m", seat, "n", stats[seat]) for seat in seats]
        now = shares.rates(now_s)
        tenants = [TenantLoad(name, refs[name], 1.0, now.get(name, 0.0)) for name in rates]
        start = time.thread_time()
        after = POLICIES[policy](placement, tenants, views)
        took_s.append(time.thread_time() - start)
        if after is not placement:
            moves += len(after.moves)
            placement = after
        for name, count in counts.items():
            homes = placement.homes[name]
            for seat in homes[:count]:
                minute[seat] += count * TOKENS_A_REQUEST / min(len(homes), count)
                if name not in resident[seat]:
                    loads += 1
                    if len(resident[seat]) == slots:
                        resident[seat].popitem(last=False)
                resident[seat][name] = None
                resident[seat].move_to_end(name)
        shares.add(now_s, {n: c * TOKENS_A_REQUEST for n, c in counts.items()}, ROUND_S)
        if now_s % 60 == 50:
            if now_s > 1800:
                peaks.append(max(minute.values()) / (sum(minute.values()) / num_seats))
            minute.clear()
    return [
        policy,
        f"{median(peaks):.2f}",
        f"{quantiles(peaks, n=20)[-1]:.2f}",
        f"{moves / hours:.1f}",
        f"{loads / hours:.0f}",
        f"{mean(took_s) * 1000:.1f} / {max(took_s) * 1000:.0f}",
    ]


async def time_choices(
    num_seats: int, num_adapters: int, num_choices: int
) -> dict[str, tuple[float, float, float]]:
    """How long `_choose_replica_for_request` takes where a home has room, in this thread's own
    time: what else the machine does is not counted. Case -> (p50, p99, most) in us."""
    replicas = [FakeReplica(f"m-{number}", 1 << 30) for number in range(num_seats)]
    ingress = Ingress(replicas)
    await asyncio.sleep(0.5)  # the first probes
    rng = np.random.default_rng(3)
    names = [f"t{number}/x" for number in range(num_adapters)]
    seats = [tuple(f"m-{s}" for s in rng.integers(0, num_seats, 1 + n % 3)) for n in range(3000)]
    cases = {
        "one to three homes": [Place(seats[n], names[n]) for n in range(num_adapters)],
        "home unknown or dead": [Place(("gone",), name) for name in names],
        "base model": [Place()],
    }
    found = {}
    for case, places in cases.items():
        took_us = []
        for number in range(num_choices):
            pending = pending_request(places[number % len(places)], f"i{number}")
            start = time.thread_time_ns()
            replica = await ingress.choose(pending)
            took_us.append((time.thread_time_ns() - start) / 1000)
            ingress.router.on_send_request(replica.replica_id)
        cuts = quantiles(took_us, n=100)
        found[case] = cuts[49], cuts[98], max(took_us)
    return found


def weigh_syncs(num_adapters: int, num_seats: int) -> None:
    """What goes between router and ingress, and what a round costs the router."""
    seats = [f"m-{number}" for number in range(num_seats)]
    stats = EngineStats(num_slots=32)
    views = [ReplicaView(seat, "m", seat, "n", stats) for seat in seats]
    refs = [
        AdapterRef(f"tenant-{n}/adapter", "s3://bucket/x", base="m") for n in range(num_adapters)
    ]
    idle = [TenantLoad(ref.adapter_id, ref) for ref in refs]
    busy = [
        TenantLoad(ref.adapter_id, ref, 1.0, 3000 / (n + 1) if n < 2000 else 0.0)
        for n, ref in enumerate(refs)
    ]
    place = POLICIES["bin_pack"]
    steps = [("first map", idle, views), ("traffic comes", busy, views)]
    steps += [(f"round {number}", busy, views) for number in (2, 3)]
    steps += [("a seat is lost", busy, views[1:])]
    placement = Placement()
    for name, loads, replicas in steps:
        start = time.thread_time()
        after = place(placement, loads, replicas)
        took_ms = (time.thread_time() - start) * 1000
        update = after.update_from(placement if placement.version else None)
        size = len(pickle.dumps(update, protocol=5))
        print(f"| {name} | {took_ms:.0f} | {len(update.homes)} | {size / 1024:.1f} |")
        placement = after
    empty = len(pickle.dumps(MetricDelta()))
    tokens = {ref.adapter_id: 1000 for ref in refs[:200]}
    print(f"an ingress' turn with 200 adapters in use: {len(pickle.dumps(tokens)) + empty} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", help="a day of ServeGen; without it a Zipf law is made up")
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--choices", type=int, default=50_000)
    args = parser.parse_args()
    head = "| policy | peak / mean: median | p95 | moves/h | loads/h | place(), ms: mean / max |"
    for copies, seats, slots in ((1, 8, 24), (12, 100, 24)) if args.hours else ():
        rates = read_trace(args.trace, copies) if args.trace else invent(162 * copies)
        print(f"\n{len(rates)} adapters, {seats} seats of {slots} slots, {args.hours} h\n{head}")
        for policy in POLICIES:
            print("| " + " | ".join(run_day(policy, rates, seats, slots, args.hours)) + " |")
    print(f"\n| {args.choices} choices among 100 seats, 2000 adapters, us | p50 | p99 | most |")
    for case, took_us in asyncio.run(time_choices(100, 2000, args.choices)).items():
        print(f"| {case} | " + " | ".join(f"{us:.0f}" for us in took_us) + " |")
    print("\n| 10,000 adapters, 100 seats | place(), ms | homes changed | update, KiB |")
    weigh_syncs(10_000, 100)


if __name__ == "__main__":
    main()
