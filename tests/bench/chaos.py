"""Kill parts of the service under streams, and hold what clients got against the unbroken answers.

    python -m tests.bench.chaos [--kills 200] [--seed 0] [--kinds replica,silent,...]

Three Ray nodes on this machine (tests/ray_cluster.py). A round: some streams begin, one of them
gets k tokens, a part is killed, all streams come to their ends; then the service becomes whole
again. `silent` is a replica that stands still. Prints a line for each round, and percentiles of the
longest gap in each stream. The exit code is 1 if an answer differs or a client saw an error.
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
from typing import Any

import httpx

import tests.conftest  # noqa: F401  # the environment for Ray, before it starts
from tests.ray_cluster import STYLES, Nodes, three_nodes, wait_until
from tests.sse_client import ReconnectingStream

KINDS = ("replica", "silent", "ingress", "router", "catalog", "store", "node")
ACTORS = {"router": "#Router#", "catalog": "catalog-", "store": "host-tier"}
TOKENS = (0, 1, 50)  # how many of them a client has when the part is killed
NUM_STREAMS = 4
LENGTH = 110


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
    """What one kill did. errors  what clients saw;  wrong  answers that differ."""

    kind: str
    tokens: int
    gaps_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    num_wrong: int = 0
    num_reconnected: int = 0
    num_stopped: int = 0
    whole_after_s: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.kind:8s} k={self.tokens:<3d} longest gap {max(self.gaps_s):5.2f} s, "
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
        result = self.hit(kind, tokens)
        begin = time.monotonic()
        if kind == "node":  # in the main thread
            self.nodes.second = self.nodes.add_second()
        self.nodes.wait_whole()
        result.whole_after_s = time.monotonic() - begin
        return result

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS))
    args = parser.parse_args()
    rounds: list[Round] = []
    with three_nodes() as nodes:
        campaign = Campaign(nodes)
        for kind, tokens in plan(args.kinds.split(","), args.kills, args.seed):
            rounds.append(campaign.run(kind, tokens))
            print(rounds[-1], flush=True)
    return report(rounds)


def report(rounds: list[Round]) -> int:
    """Percentiles of the longest gap of each stream, by kind. 1 if anything was wrong."""
    for kind in dict.fromkeys(r.kind for r in rounds):
        gaps = sorted(gap for r in rounds if r.kind == kind for gap in r.gaps_s)
        p50, p95, worst = gaps[len(gaps) // 2], gaps[int(0.95 * (len(gaps) - 1))], gaps[-1]
        print(
            f"{kind:8s} {len(gaps):4d} streams: gap p50 {p50:.2f} p95 {p95:.2f} max {worst:.2f} s"
        )
    num_wrong = sum(r.num_wrong for r in rounds)
    errors = [error for r in rounds for error in r.errors]
    print(f"{len(rounds)} kills, {num_wrong} wrong answers, {len(errors)} errors at clients")
    return int(bool(num_wrong or errors))


if __name__ == "__main__":
    sys.exit(main())
