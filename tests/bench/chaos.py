"""Kill parts of the service under streams, and hold what clients got against the unbroken answers.

    python -m tests.bench.chaos [--kills 200] [--seed 0] [--dead-only] [--kinds replica,router,...]

Three Ray nodes on this machine (tests/ray_cluster.py). A round: some streams begin, one of them
gets k tokens, a part is killed, all streams come to their ends; then the service becomes whole
again. `silent` is a replica that stands still; --dead-only leaves it out. Prints a line for each
round, and percentiles of the longest gap in each stream; a row for each kill goes to
results/kills.csv. The exit code is 1 if an answer differs, a client saw an error, or a stream's gap
was longer than --max-gap and what one adapter's load took in that round.
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx

import tests.conftest  # noqa: F401  # the environment for Ray, before it starts
from deployments.placement.view import ReplicaView
from model_runner.stats import EngineStats
from tests.bench.results import ABOUT, RESULTS, append_rows, describe_run
from tests.ray_cluster import STYLES, Nodes, three_nodes, wait_until
from tests.sse_client import ReconnectingStream

KINDS = ("replica", "silent", "ingress", "router", "catalog", "store", "node")
ACTORS = {"router": "#Router#", "catalog": "catalog-", "store": "host-tier"}
TOKENS = (0, 1, 50)  # how many of them a client has when the part is killed
NUM_STREAMS = 4
LENGTH = 110
MAX_GAP_S = 3.0
COLUMNS = (
    "kind", "k", "under_way", "longest_gap_s", "load_s", "limit_s", "errors", "wrong",
    "reconnected", "whole_after_s", "seed", "machine_load", *ABOUT,
)  # fmt: skip


@dataclass
class Answer:
    """What a client made of one stream, by choice: tokens, text, reason to end."""

    tokens: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    text: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    ends: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, chunk: dict[str, Any]) -> None:
        for choice in chunk["choices"]:
            index = choice["index"]
            self.text[index] += choice["text"]
            self.tokens[index] += (choice["logprobs"] or {}).get("tokens", [])
            if choice["finish_reason"]:
                self.ends[index].append(choice["finish_reason"])

    def num_tokens(self) -> int:
        return max(map(len, self.tokens.values()), default=0)


@dataclass
class Round:
    """What one kill did.

    gaps_s  the longest of each stream;  errors  what clients saw;  num_wrong  answers that differ;
    num_stopped  streams under way;  load_s  what an adapter's load took meanwhile, 0 if none was
    """

    kind: str
    tokens: int
    gaps_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    num_wrong: int = 0
    num_reconnected: int = 0
    num_stopped: int = 0
    whole_after_s: float = 0.0
    load_s: float = 0.0

    @property
    def longest_gap_s(self) -> float:
        return max(self.gaps_s, default=0.0)

    def is_late(self, max_gap_s: float) -> bool:
        """Whether a client waited longer than for this and an adapter's load."""
        return self.longest_gap_s > max_gap_s + self.load_s

    def row(self, max_gap_s: float, seed: int) -> dict[str, Any]:
        """Of the table, without what every row says of its run."""
        return {
            "kind": self.kind,
            "k": self.tokens,
            "under_way": self.num_stopped,
            "longest_gap_s": f"{self.longest_gap_s:.3f}",
            "load_s": f"{self.load_s:.3f}",
            "limit_s": f"{max_gap_s + self.load_s:.3f}",
            "errors": len(self.errors),
            "wrong": self.num_wrong,
            "reconnected": self.num_reconnected,
            "whole_after_s": f"{self.whole_after_s:.1f}",
            "seed": seed,
            "machine_load": f"{os.getloadavg()[0]:.1f}",
        }

    def __str__(self) -> str:
        return (
            f"{self.kind:8s} k={self.tokens:<3d} longest gap {self.longest_gap_s:5.2f} s, "
            f"{self.num_stopped} streams under way, {self.num_reconnected} reconnected, "
            f"{self.num_wrong} wrong, whole after {self.whole_after_s:5.1f} s {self.errors or ''}"
        )


def jobs() -> list[tuple[str, dict[str, Any]]]:
    """(tenant, body): greedy and drawn, base and adapters, one choice and two, a stop string."""
    made: list[tuple[str, dict[str, Any]]] = []
    for number, style in enumerate((*STYLES, *STYLES)):
        body: dict[str, Any] = {
            "model": style if number % 2 else "demo",
            "prompt": f"What is the capital of Japan? Say it {number} times.",
            "max_tokens": LENGTH,
            "logprobs": 1,
            "stream": True,
            "ignore_eos": True,
            "temperature": 0 if number < 2 else 1.2,
            "n": 2 if number == 3 else 1,
        }
        if number >= 2:
            body["seed"] = number
        made.append((style, body))
    return made


class Campaign:
    """Rounds of kills against one service."""

    def __init__(self, nodes: Nodes, patience_s: float = 60.0) -> None:
        self.nodes = nodes
        self.patience_s = patience_s
        self._jobs = jobs()
        self._unbroken = [asyncio.run(self._alone(*job)) for job in self._jobs]
        self._turn = cycle(range(len(self._jobs)))
        self._stopped: list[int] = []

    def hit(self, kind: str, tokens: int) -> Round:
        """One kill, and what became of the streams."""
        result = Round(kind, tokens)
        if kind in ACTORS:  # some end with the replica that made them, and the next makes one
            wait_until(lambda: bool(self.nodes.actors(ACTORS[kind])), 30, f"there is a {kind}")
        numbers = [next(self._turn) for _ in range(NUM_STREAMS)]
        try:
            asyncio.run(self._round(result, numbers))
        finally:
            while self._stopped:
                os.kill(self._stopped.pop(), signal.SIGKILL)
        return result

    def run(self, kind: str, tokens: int) -> Round:
        """The same, and then the service is whole again."""
        before = self._stats()
        result = self.hit(kind, tokens)
        begin = time.monotonic()
        if kind == "node":  # in the main thread
            self.nodes.second = self.nodes.add_second()
        self.nodes.wait_whole()
        result.whole_after_s = time.monotonic() - begin
        result.load_s = adapter_load_s(before, self._stats())
        return result

    def _stats(self) -> dict[str, EngineStats]:
        """Of each replica, by its name; a call that fails is made again."""
        found: list[ReplicaView] = []

        def look() -> bool:
            found[:] = self.nodes.views()
            return bool(found)

        wait_until(look, 30, "the replicas tell their stats")
        return {view.replica_id: view.stats for view in found}

    async def _alone(self, tenant: str, body: dict[str, Any]) -> Answer:
        answer = Answer()
        async with httpx.AsyncClient(timeout=60) as client:
            async for chunk in self._stream(client, tenant, body).chunks():
                answer.add(chunk)
        return answer

    def _stream(
        self, client: httpx.AsyncClient, tenant: str, body: dict[str, Any]
    ) -> ReconnectingStream:
        headers = {"Authorization": f"Bearer key-of-{tenant}"}
        url = f"{self.nodes.url}/v1/completions"
        return ReconnectingStream(client, url, body, headers, self.patience_s)

    async def _round(self, result: Round, numbers: list[int]) -> None:
        answers = [Answer() for _ in numbers]
        due = asyncio.Event()
        async with httpx.AsyncClient(timeout=60) as client:
            streams = [self._stream(client, *self._jobs[number]) for number in numbers]

            async def follow(stream: ReconnectingStream, answer: Answer) -> None:
                async for chunk in stream.chunks():
                    answer.add(chunk)
                    if answer.num_tokens() >= result.tokens:
                        due.set()

            tasks = [
                asyncio.create_task(follow(stream, answer))
                for stream, answer in zip(streams, answers, strict=True)
            ]
            if result.tokens:
                await asyncio.wait_for(due.wait(), self.patience_s)
            else:
                await asyncio.sleep(0.02)  # the requests are sent, no token is back
            result.num_stopped = sum(not task.done() for task in tasks)
            await asyncio.to_thread(self.kill, result.kind)
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        result.errors = [repr(end) for end in ends if end is not None]
        result.num_wrong = sum(
            answer != self._unbroken[number]
            for number, answer in zip(numbers, answers, strict=True)
        )
        result.gaps_s = [max(stream.gaps_s, default=0.0) for stream in streams]
        result.num_reconnected = sum(stream.num_connections > 1 for stream in streams)

    def kill(self, kind: str) -> None:
        nodes = self.nodes
        if kind == "node":
            nodes.kill_second()
        elif kind == "replica":
            nodes.kill(nodes.busy_replica())
        elif kind == "silent":
            self._stopped.append(nodes.stop(nodes.busy_replica()))
        elif kind == "ingress":
            nodes.kill(nodes.busy_ingress())
        else:
            nodes.kill(ACTORS[kind])


def plan(kinds: list[str], num_kills: int, seed: int) -> Iterator[tuple[str, int]]:
    """Every kind at every k in turn, the order drawn anew each time."""
    rng = random.Random(seed)
    every = [(kind, tokens) for kind in kinds for tokens in TOKENS]
    while num_kills > 0:
        rng.shuffle(every)
        yield from every[:num_kills]
        num_kills -= len(every)


def adapter_load_s(before: dict[str, EngineStats], after: dict[str, EngineStats]) -> float:
    """What the load of one adapter took since `before`: the mean of each tier, one after the other.

    By replica; one that is new counts from its start.
    """
    total_s = 0.0
    tiers = {tier for stats in after.values() for tier in stats.loads}
    for tier in tiers:
        number, seconds = 0, 0.0
        for name, now in after.items():
            then = before.get(name, EngineStats())
            number += now.loads.get(tier, 0) - then.loads.get(tier, 0)
            seconds += now.load_seconds.get(tier, 0.0) - then.load_seconds.get(tier, 0.0)
        total_s += seconds / number if number else 0.0
    return total_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--dead-only", action="store_true", help="without `silent`")
    parser.add_argument("--max-gap", type=float, default=MAX_GAP_S, metavar="SECONDS")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where kills.csv is")
    args = parser.parse_args()
    kinds = [kind for kind in args.kinds.split(",") if not (args.dead_only and kind == "silent")]
    if not kinds or not set(kinds) <= set(KINDS):
        parser.error(f"--kinds: some of {','.join(KINDS)}")
    rounds: list[Round] = []
    with three_nodes() as nodes:
        campaign = Campaign(nodes)
        for kind, tokens in plan(kinds, args.kills, args.seed):
            rounds.append(campaign.run(kind, tokens))
            print(rounds[-1], flush=True)
            row = rounds[-1].row(args.max_gap, args.seed) | describe_run()
            append_rows(args.out / "kills.csv", COLUMNS, [row])
    return report(rounds, args.max_gap)


def report(rounds: list[Round], max_gap_s: float = MAX_GAP_S) -> int:
    """Percentiles of the longest gap of each stream, by kind. 1 if anything was wrong or late."""
    for kind in dict.fromkeys(r.kind for r in rounds):
        of_kind = [r for r in rounds if r.kind == kind]
        gaps = sorted(gap for r in of_kind for gap in r.gaps_s)
        p50, p95, worst = gaps[len(gaps) // 2], gaps[int(0.95 * (len(gaps) - 1))], gaps[-1]
        num_late = sum(r.is_late(max_gap_s) for r in of_kind)
        print(
            f"{kind:8s} {len(gaps):4d} streams: gap p50 {p50:.2f} p95 {p95:.2f} max {worst:.2f} s, "
            f"{num_late} of {len(of_kind)} kills over {max_gap_s:g} s and an adapter's load"
        )
    num_wrong = sum(r.num_wrong for r in rounds)
    num_late = sum(r.is_late(max_gap_s) for r in rounds)
    errors = [error for r in rounds for error in r.errors]
    print(
        f"{len(rounds)} kills, {num_wrong} wrong answers, {len(errors)} errors at clients, "
        f"{num_late} gaps too long"
    )
    return int(bool(num_wrong or errors or num_late))


if __name__ == "__main__":
    sys.exit(main())
