"""The legs of the path's benchmark: one closed loop over the bare engine, or over the service."""

import argparse
import asyncio
import multiprocessing
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray

from adapter_store.ref import AdapterRef
from model_runner.config import EngineConfig
from model_runner.engine import Engine
from model_runner.engine_loop import EngineLoop
from model_runner.engine_process import SWITCH_INTERVAL_S
from model_runner.request import Request, SamplingParams
from tests.bench.path_app import API_KEY, NULL, WAYS, service_config, start_service
from tests.bench.path_client import Order, Sample, find_error, run_order
from tests.bench.path_report import summarise
from tests.ready_engine import pace_seed


@dataclass(frozen=True)
class World:
    """What is served. adapters: name -> folder;  ids: prompts are drawn from these."""

    model: Path
    adapters: dict[str, Path]
    engine: dict[str, Any]
    load_format: str
    ids: range


class Bench:
    """The service, the bare engine and the clients of one run."""

    def __init__(self, args: argparse.Namespace, world: World, private: Path) -> None:
        self._args, self._world, self._rng = args, world, random.Random(args.seed)
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        sys.setswitchinterval(SWITCH_INTERVAL_S)  # as a replica has it
        config = EngineConfig(str(world.model), world.load_format, **world.engine)
        self._bare = EngineLoop(partial(Engine, config))
        building = threading.Thread(target=self._bare.start)
        if "bare" in args.legs:
            building.start()
        ways = tuple(leg for leg in args.legs if leg in WAYS)
        service = service_config(world.model, world.adapters, world.engine, world.load_format, ways,
                                 self._port, args.gap_ms)  # fmt: skip
        start_service(service, private)
        if "bare" in args.legs:
            building.join()

    def warm_up(self) -> None:
        """Every adapter into its slot, every process into its stride."""
        for leg in self._args.legs:
            clients = max(8, 2 * len(self._world.adapters))
            self.measure(leg, clients, self._prompts(clients), 16, [])

    def run_pairs(self, keep: Callable[[dict[str, Any]], None]) -> int:
        """Pairs until there are enough or the time is out; their number."""
        begin, longest = time.monotonic(), 0.0
        for pair in range(self._args.pairs):
            started = time.monotonic()
            if started + longest - begin > self._args.seconds:
                return pair
            for clients in self._args.concurrency:
                paces: list[Sample] = []
                prompts = self._prompts(clients * self._args.waves)
                for leg in self._args.legs:
                    samples = self.measure(leg, clients, prompts, self._args.tokens_out, paces)
                    if leg == "bare":
                        paces = samples
                    keep({"leg": leg, "concurrency": clients, "pair": pair} | summarise(samples))
            longest = max(longest, time.monotonic() - started)
        return self._args.pairs

    def measure(
        self, leg: str, clients: int, prompts: list[list[int]], tokens_out: int,
        paces: Sequence[Sample],
    ) -> list[Sample]:  # fmt: skip
        """The samples of one leg, in the order of the prompts. Exits if an answer is not whole."""
        if leg == "bare":
            samples = asyncio.run(self._run_bare(clients, prompts, tokens_out))
        else:
            bodies = [self._body(leg, k, p, tokens_out, paces) for k, p in enumerate(prompts)]
            order = Order("127.0.0.1", self._port, API_KEY, tuple(bodies), clients)
            samples = self._pool.submit(run_order, order).result()
        if error := find_error(samples, tokens_out):
            sys.exit(f"{leg}, {clients} clients: {error}")
        return samples

    def _prompts(self, count: int) -> list[list[int]]:
        ids, length = self._world.ids, self._args.tokens_in
        return [self._rng.choices(ids, k=length) for _ in range(count)]

    def _adapter(self, number: int) -> str:
        names = list(self._world.adapters)
        return names[number % len(names)] if names else ""

    def _body(
        self, leg: str, number: int, prompt: list[int], tokens_out: int, paces: Sequence[Sample]
    ) -> dict[str, Any]:
        adapter = self._adapter(number)
        body: dict[str, Any] = {
            "model": f"{leg}-{adapter}" if adapter else leg,
            "prompt": prompt,
            "max_tokens": tokens_out,
            "temperature": number % 2,
            "seed": number,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if leg in (NULL, "free"):
            body |= {"model": NULL, "seed": 0}
        if leg == NULL and "bare" not in self._args.legs:
            body["seed"] = pace_seed(*(ms / 1e3 for ms in self._args.pace_ms))
        elif leg == NULL and paces:
            body["seed"] = pace_seed(paces[number].ttft_s, paces[number].token_s)
        return body

    async def _run_bare(
        self, clients: int, prompts: list[list[int]], tokens_out: int
    ) -> list[Sample]:
        samples = [Sample(0.0) for _ in prompts]
        numbers = iter(range(len(prompts)))
        await asyncio.gather(
            *(self._bare_client(numbers, samples, prompts, tokens_out) for _ in range(clients))
        )
        return samples

    async def _bare_client(
        self, numbers: Iterator[int], samples: list[Sample], prompts: list[list[int]],
        tokens_out: int,
    ) -> None:  # fmt: skip
        for number in numbers:
            sample, name = samples[number], self._adapter(number)
            adapter = AdapterRef(name, str(self._world.adapters[name])) if name else None
            sampling = SamplingParams(
                temperature=number % 2, seed=number, max_tokens=tokens_out, ignore_eos=True
            )
            sample.sent = time.monotonic()
            request = Request(f"{number}", tuple(prompts[number]), sampling, adapter)
            async for output in self._bare.stream(request):
                sample.error = output.error or sample.error
                sample.num_tokens += len(output.new_token_ids)
                sample.times.append(time.monotonic())

    def close(self) -> None:
        self._pool.shutdown()
        if "bare" in self._args.legs:
            self._bare.stop()
        ray.shutdown()
