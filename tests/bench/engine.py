"""The engine's table: a full-size random model and random adapters, driven over pipes by closed
loops of clients.

    python tests/bench/engine.py [--shape gpt-oss-20b] [--concurrency 1,8,16,32] [--adapters 8] ...

Writes tests/bench/results/engine.csv (one row a concurrency, base and with adapters) and prints it.
Needs a GPU for the full shapes;
`--model DIR --vocab N` drives any checkpoint, a tiny one on a CPU too. Not a test: it asserts only
that every request came back whole.
"""

import argparse
import csv
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.shapes import SHAPES, write_adapter, write_model  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "engine.csv"


class Client:
    """A serve-stdio child. `ask` sends a request and blocks until its last token; times are this
    process's."""

    def __init__(self, command: list[str]) -> None:
        self.child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        self._waiting: dict[str, dict[str, Any]] = {}
        self._lock, self._stats, self._got_stats = threading.Lock(), {}, threading.Event()
        self.ready: dict[str, Any] = {}
        self._is_ready = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def wait_ready(self, timeout_s: float) -> dict[str, Any]:
        """The ready line. Exits if the child ends or is late."""
        end = time.monotonic() + timeout_s
        while not self._is_ready.wait(0.2):
            if self.child.poll() is not None or time.monotonic() > end:
                sys.exit(f"the engine was not ready (exit code {self.child.poll()})")
        return self.ready

    def ask(self, **request: Any) -> dict[str, Any]:
        """One request, whole."""
        entry = {
            "sent": time.perf_counter(),
            "first": None,
            "ids": [],
            "error": None,
            "done": threading.Event(),
        }
        with self._lock:
            self._waiting[request["id"]] = entry
            self._send(request)
        if not entry["done"].wait(900):
            entry["error"] = "timed out"
        return entry

    def stats(self) -> dict[str, Any]:
        """The engine's own counters."""
        self._got_stats.clear()
        with self._lock:
            self._send({"cmd": "stats"})
        self._got_stats.wait(60)
        return self._stats

    def quit(self) -> None:
        """End the child."""
        with self._lock:
            self._send({"cmd": "quit"})
        self.child.wait(60)

    def _send(self, message: dict[str, Any]) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps(message) + "\n")
        self.child.stdin.flush()

    def _read(self) -> None:
        assert self.child.stdout is not None
        for line in self.child.stdout:
            now, message = time.perf_counter(), json.loads(line)
            if "ready" in message:
                self.ready = message
                self._is_ready.set()
            elif "stats" in message:
                self._stats = message["stats"]
                self._got_stats.set()
            else:
                entry = self._waiting[message["id"]]
                if message["token_ids"] and entry["first"] is None:
                    entry["first"], entry["first_count"] = now, len(message["token_ids"])
                entry["ids"] += message["token_ids"]
                entry["error"] = message["error"] or entry["error"]
                if message["finish_reason"] or message["error"]:
                    entry["last"] = now
                    entry["done"].set()


def run_closed_loop(
    client: Client, args: argparse.Namespace, names: list[str | None], clients: int
) -> dict[str, Any]:
    """One table row: `clients` clients, each asking again as soon as it was answered; half greedy,
    half at temperature 1."""
    rng, total = (
        random.Random(args.seed * 1000 + clients),
        max(4, (3 if clients < 16 else 2) * clients),
    )
    requests = iter(
        [
            {
                "id": f"{clients}-{k}-{names[k % len(names)]}",
                "adapter": names[k % len(names)],
                "input_ids": [
                    rng.randrange(args.vocab // 8, args.vocab - 2) for _ in range(args.tokens_in)
                ],
                "max_tokens": args.tokens_out,
                "temperature": float(k % 2),
                "seed": k,
                "ignore_eos": True,
            }
            for k in range(total)
        ]
    )
    done: list[dict[str, Any]] = []
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                request = next(requests, None)
            if request is None:
                return
            done.append(client.ask(**request))

    client.stats()
    started = time.perf_counter()
    threads = [threading.Thread(target=work) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall, stats = time.perf_counter() - started, client.stats()
    for name in stats.get("late_compiles", ()):
        print(f"compiled after warm-up: {name}", file=sys.stderr)
    bad = [d["error"] for d in done if d["error"] or len(d["ids"]) != args.tokens_out]
    if bad:
        sys.exit(f"{len(bad)} of {total} requests did not come back whole: {bad[:3]}")
    speed = [(len(d["ids"]) - d["first_count"]) / max(1e-9, d["last"] - d["first"]) for d in done]
    ttft = sorted(1e3 * (d["first"] - d["sent"]) for d in done)
    return {
        "concurrency": clients,
        "adapters": len([n for n in names if n]),
        "otps_per_user": round(statistics.median(speed), 1),
        "total_tok_s": round(sum(len(d["ids"]) for d in done) / wall, 1),
        "ttft_p50_ms": round(ttft[len(ttft) // 2], 1),
        "ttft_p99_ms": round(ttft[min(len(ttft) - 1, int(0.99 * len(ttft)))], 1),
        "distinct_experts": round(stats["distinct_experts"], 2),
        "compiles_after_warmup": stats["compiles"],
    }


def describe_run() -> dict[str, Any]:
    """Where and of what the numbers are: GPU, torch, commit, whether it was changed, UTC time.

    A copy of the tree without git is told its commit by the variable COMMIT.
    """
    import torch

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip()

    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "commit": git("rev-parse", "--short", "HEAD") or os.environ.get("COMMIT", "unknown"),
        "changed": bool(git("status", "--porcelain", "--untracked-files=no")),
        "utc": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def main() -> None:
    """Make model and adapters, run the loops, print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="gpt-oss-20b")
    parser.add_argument("--model", default="", help="a checkpoint to drive instead of a shape")
    parser.add_argument("--vocab", type=int, default=0)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--concurrency", default="1,8,16,32")
    parser.add_argument("--tokens-in", type=int, default=1600)
    parser.add_argument("--tokens-out", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layers", type=int, default=0, help="cut the shape to so many layers")
    parser.add_argument(
        "--work", default="", help="folder for the adapters; default: a temporary one"
    )
    parser.add_argument(
        "--config", default="{}", help="JSON fields of EngineConfig over the benchmark's own"
    )
    parser.add_argument("--base-too", action="store_true", help="run the base model's rows as well")
    parser.add_argument("--out", default=str(RESULTS))
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    config = dict(shape.config)
    if args.layers:
        config |= {
            "num_hidden_layers": args.layers,
            "layer_types": config["layer_types"][: args.layers],
        }
    clients = [int(c) for c in args.concurrency.split(",")]
    with tempfile.TemporaryDirectory(dir=args.work or None) as folder:
        work = Path(folder)
        names = [f"a{i}" for i in range(args.adapters)]
        if args.model:
            model, names = Path(args.model), []
        else:
            import torch

            args.vocab = args.vocab or config["vocab_size"]
            model = work / "model"
            write_model(model, config)
            device = "cuda" if torch.cuda.is_available() else "cpu"
            for i, name in enumerate(names):
                write_adapter(work / name, config, args.rank, 100 + i, device)
        settings = {
            "load_format": "safetensors" if args.model else "random:7",
            "max_num_seqs": max(clients),
            "max_model_len": args.tokens_in + args.tokens_out + 16,
            "max_lora_rank": args.rank,
            "prefix_cache": False,
            "host_cache_dir": str(work / "host"),
            "host_cache_bytes": 24 << 30,
            "lora_bytes": 0,
            **json.loads(args.config),
        }
        (work / "engine.json").write_text(json.dumps(settings))
        command = [sys.executable, "-m", "model_runner", "serve-stdio", "--model", str(model)]
        command += ["--config", str(work / "engine.json")]
        if names:
            command += ["--adapters", ",".join(f"{n}={work / n}" for n in names)]
        client = Client(command)
        ready = client.wait_ready(900)
        print(f"ready after {ready['startup_s']} s: {ready}", flush=True)
        rows = []
        for kind in [[None], names] if args.base_too and names else [names or [None]]:
            warm = argparse.Namespace(**{**vars(args), "tokens_out": 8})
            run_closed_loop(client, warm, kind, max(2, len(kind)))
            for count in clients:
                rows.append(run_closed_loop(client, args, kind, count))
                print(rows[-1], flush=True)
        client.quit()
    about = {
        "shape": args.model or args.shape + (f"/{args.layers} layers" if args.layers else ""),
        "rank": args.rank,
    }
    write_rows(Path(args.out), [{**about, **row, **describe_run()} for row in rows])


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Append rows to a CSV file, with its head if it is new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        if new:
            writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
