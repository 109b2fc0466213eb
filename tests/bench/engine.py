"""The engine's table: a full-size random model and random adapters, driven over pipes as an
outsider would, and judged.

    python -m tests.bench.engine [--shape gpt-oss-20b] [--phases closed,rescore]

Phases, in this order, all if none are named: start (a first start with an empty compile cache, a
second with what it left), closed (loops of clients, the base model and with adapters), open
(Poisson arrivals at 70 % of the closed loop's requests a second), rescore (greedy answers through
the reference kernels), profile (a decode step kernel by kernel, in a process of its own). Each row
says whether it counts, or why not (judging.py). Appends to results/engine.csv, kernels_step.csv and
start.csv. With --work DIR the timed answers stay there, and `rescore` or `profile` may come in a
later call.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.bench.client import ROOT, Answer, Client
from tests.bench.judging import (
    find_faults,
    find_score_faults,
    make_jobs,
    pick_answers,
    read_shares,
    score,
)
from tests.bench.loops import OPEN_SHARE, Load, Run, run_closed, run_open, summarise, warm_up
from tests.bench.results import (
    ENGINE,
    KERNELS,
    RESULTS,
    START,
    append_rows,
    describe_run,
)
from tests.bench.shapes import SHAPES
from tests.bench.workload import Wishes, Workload, prepare

PHASES = ("start", "closed", "open", "rescore", "profile")
FIRST_START_S, SECOND_START_S = 240.0, 60.0
READY_TIMEOUT_S = 600.0


def start_twice(work: Workload) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Rows of a start with an empty compile cache and of one with what the first left (the adapters
    too are then in the host tier), and the environment that has the cache."""
    env = {**os.environ, "TRITON_CACHE_DIR": str(work.folder / "compiled")}
    rows = []
    for cache, limit in (("empty", FIRST_START_S), ("warm", SECOND_START_S)):
        client = Client(work.serve, READY_TIMEOUT_S, env)
        rows.append(
            {
                "compile_cache": cache,
                "startup_s": round(client.startup_s, 1),
                "limit_s": limit,
            }
        )
        print(
            f"start with {cache} compile cache: {client.startup_s:.1f} s (limit {limit:.0f}), the"
            f" engine's own part {client.ready['startup_s']} s",
            flush=True,
        )
        client.quit()
    return rows, env


def run_loops(
    work: Workload, load: Load, args: argparse.Namespace, env: dict[str, str] | None, end: float
) -> list[dict[str, Any]]:
    """One entry a loop: its row, its faults and its answers."""
    client = Client(work.serve, READY_TIMEOUT_S, env)
    print(f"ready after {client.startup_s:.1f} s: {client.ready}", flush=True)
    entries: list[dict[str, Any]] = []

    def keep(run: Run, kind: str) -> None:
        row = summarise(run, load) | {"startup_s": round(client.startup_s, 1)}
        faults = find_faults(run, load, work.experts, work.top_k)
        answers = [(a.request, a.ids) for a in run.answers if not a.error]
        entries.append({"kind": kind, "row": row, "faults": faults, "answers": answers})
        print({"kind": kind, **row, "faults": faults}, flush=True)

    for kind in args.kinds.split(","):
        names: list[str | None] = list(work.names) if kind == "adapters" else [None]
        if not names:
            continue
        warm_up(client, load, names)
        for clients in map(int, args.concurrency.split(",")):
            run = run_closed(client, load, names, clients)
            keep(run, kind)
            if "open" in args.phases:
                rate = OPEN_SHARE * run.requests_per_s
                if time.monotonic() + 1.2 * run.wall_s / OPEN_SHARE > end:
                    print(f"no time left for the open loop of {clients}", flush=True)
                else:
                    keep(run_open(client, load, names, clients, rate), kind)
    for name in client.stats().get("late_compiles", ()):
        print(f"compiled after ready: {name}", file=sys.stderr)
    client.quit()
    return entries


def rescore(
    work: Workload, entries: list[dict[str, Any]], seed: int
) -> dict[str, dict[str, float]]:
    """Kind -> shares of re-scored tokens. One run of the references scores both kinds."""
    jobs_of = {}
    for kind in dict.fromkeys(entry["kind"] for entry in entries):
        found = [
            Answer(dict(request), 0.0, list(ids))
            for entry in entries
            if entry["kind"] == kind
            for request, ids in entry["answers"]
        ]
        jobs_of[kind] = make_jobs(pick_answers(found, seed), work.names)
    started = time.perf_counter()
    score(work.logits, [job for jobs in jobs_of.values() for job in jobs], work.folder)
    shares = {kind: read_shares(jobs, work.folder) for kind, jobs in jobs_of.items()}
    count = sum(map(len, jobs_of.values()))
    print(f"re-scored {count} jobs in {time.perf_counter() - started:.1f} s: {shares}", flush=True)
    return shares


def profile(work: Workload, concurrency: str) -> list[dict[str, Any]]:
    """Entries of profile_step.py, run in a process of its own."""
    out = work.folder / "profile.json"
    words = ["-m", "tests.bench.profile_step", "--prepared", str(work.folder)]
    words += ["--concurrency", concurrency, "--json", str(out)]
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True)
    return list(json.loads(out.read_text()))


def join_rows(
    entries: list[dict[str, Any]],
    shares: dict[str, dict[str, float]],
    steps: list[dict[str, Any]],
    adapters: int,
) -> list[dict[str, Any]]:
    """Loops, re-scoring and profiles put together; columns that were not measured stay empty."""
    busy = {(s["kind"], s["concurrency"]): s for s in steps}
    rows = []
    for entry in entries:
        kind, row = entry["kind"], dict(entry["row"])
        found = shares.get(kind)
        faults = entry["faults"] + find_score_faults(found, kind == "adapters")
        row["valid"] = "; ".join(faults) or "yes"
        row["adapters"] = adapters if kind == "adapters" else 0
        for name in ("own", "other", "none"):
            row[f"rescored_{name}"] = round(found[name], 4) if found and name in found else ""
        step = busy.get((kind, row["concurrency"])) if row["open_rate"] == "" else None
        if step:
            row["kernel_ms"] = round(step["busy_ms"], 3)
            row["launches"] = round(step["launches"])
            row["host_ms_exposed"] = round(step["wall_ms"] - step["busy_ms"], 3)
            base = busy.get(("base", row["concurrency"]))
            if kind == "adapters" and base:
                row["added_by_adapters_ms"] = round(step["busy_ms"] - base["busy_ms"], 3)
        rows.append(row)
    return rows


def kernel_rows(steps: list[dict[str, Any]], adapters: int) -> list[dict[str, Any]]:
    """Rows of kernels_step.csv."""
    return [
        {
            "adapters": adapters if step["kind"] == "adapters" else 0,
            "concurrency": step["concurrency"],
            "distinct_experts": round(step["distinct"], 2),
            **row,
        }
        for step in steps
        for row in step["table"]
    ]


def run_phases(args: argparse.Namespace, work: Workload, load: Load) -> None:
    """The phases that were asked for, and the tables."""
    end = time.monotonic() + args.budget_s
    state = work.folder / "loops.json"
    starts, env = start_twice(work) if "start" in args.phases else ([], None)
    entries: list[dict[str, Any]] = []
    if "closed" in args.phases:
        entries = run_loops(work, load, args, env, end)
        state.write_text(json.dumps(entries))
    elif "rescore" in args.phases:
        entries = json.loads(state.read_text())
    shares = rescore(work, entries, load.seed) if "rescore" in args.phases else {}
    steps = profile(work, args.concurrency) if "profile" in args.phases else []
    wishes = work.wishes
    about = {"shape": wishes.label, "rank": wishes.lora_rank, **describe_run()}
    out, count = Path(args.out), wishes.adapters
    rows = [{**about, **row} for row in join_rows(entries, shares, steps, count)]
    for row in rows:
        print(", ".join(f"{k} {row[k]}" for k in ENGINE[1:-5] if row.get(k) not in (None, "")))
    append_rows(out / "engine.csv", ENGINE, rows)
    kernels = [{**about, **row} for row in kernel_rows(steps, count)]
    append_rows(out / "kernels_step.csv", KERNELS, kernels)
    append_rows(out / "start.csv", START, [{**about, "adapters": count, **row} for row in starts])


def main() -> None:
    """Make model and adapters, run the phases, keep the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="gpt-oss-20b")
    parser.add_argument("--layers", type=int, default=0, help="cut the shape; rows say so")
    parser.add_argument("--phases", default=",".join(PHASES))
    parser.add_argument("--kinds", default="base,adapters")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--concurrency", default="1,8,16,32")
    parser.add_argument("--tokens-in", type=int, default=1600)
    parser.add_argument("--tokens-out", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    parser.add_argument("--model-seed", type=int, default=7)
    parser.add_argument("--work", default="", help="folder that stays; default: a temporary one")
    parser.add_argument("--config", default="{}", help="JSON fields of EngineConfig")
    parser.add_argument("--budget-s", type=float, default=570.0, help="no open loop past it")
    parser.add_argument("--out", default=str(RESULTS), help="folder of the tables")
    args = parser.parse_args()
    args.phases = args.phases.split(",")
    if unknown := set(args.phases) - set(PHASES):
        parser.error(f"unknown phases {sorted(unknown)}; known are {PHASES}")
    if "open" in args.phases and "closed" not in args.phases:
        parser.error("the open loop takes its rate from the closed one: --phases closed,open,...")
    wishes = Wishes(
        args.shape,
        args.adapters,
        args.rank,
        args.layers,
        args.model_seed,
        args.tokens_in,
        args.tokens_out,
        max(int(c) for c in args.concurrency.split(",")),
        args.config,
    )
    vocab = SHAPES[args.shape].config["vocab_size"]
    load = Load(args.tokens_in, args.tokens_out, vocab, args.seed)
    with tempfile.TemporaryDirectory() as folder:
        work = prepare(wishes, Path(args.work or folder))
        print(f"made in {work.folder}: {asdict(wishes)}", flush=True)
        run_phases(args, work, load)


if __name__ == "__main__":
    main()
