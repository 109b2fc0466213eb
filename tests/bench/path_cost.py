"""What the path from an HTTP client to the engine costs, in one run: the bare engine, the service
without a model, the service.

    python -m tests.bench.path_cost [--shape gpt-oss-20b] [--concurrency 1,32] [--pairs 10]
    python -m tests.bench.path_cost --shape demo --tokens-in 64 --tokens-out 64     (any CPU)

bare     an `EngineLoop` in this process, one asyncio stream for each client
null     the whole service over an engine of ready tokens, which come when the bare engine's came in
         the leg before: what is added is the path's
free     the same, as fast as it goes
thread, process   the whole service over the engine, in a thread of its replica or a child process

A pair is one leg of each, at each concurrency, in this order; pairs follow each other until there
are enough or the seconds are spent. A leg is a closed loop of streaming clients, who ask
`--waves` times each. Prints medians with quartiles, and differences within pairs.
"""

import argparse
import json
import os
import secrets
import shutil
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployments.keeper import run_kept
from deployments.serve_flags import SERVE_FLAGS
from tests.bench.path_report import VALUES, report
from tests.bench.results import ABOUT, RESULTS, append_rows, describe_run

if TYPE_CHECKING:
    from tests.bench.path_legs import World

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "tests" / "data" / "demo"
COLUMNS = ("shape", "adapters", "tokens_in", "tokens_out", "leg", "concurrency", "pair", *VALUES,
           "cores", *ABOUT)  # fmt: skip
LEGS = ("bare", "null", "free", "thread", "process")


def demo_world(folder: Path, args: argparse.Namespace) -> "World":
    """The demo's model and adapters."""
    from tests.bench.path_legs import World

    names = ("pirate", "formal", "spanish")[: args.adapters]
    engine = {"device": "cpu", "max_num_seqs": args.max_clients, "prefix_cache": False,
              "host_cache_dir": str(folder / "host"), **json.loads(args.config)}  # fmt: skip
    adapters = {name: DEMO / "adapters" / name for name in names}
    return World(DEMO / "base", adapters, engine, "safetensors", range(300, 3000))


def random_world(folder: Path, args: argparse.Namespace) -> "World":
    """A shape filled at random, with adapters and a tokenizer."""
    from tests.bench.path_app import write_tokenizer
    from tests.bench.path_legs import World
    from tests.bench.workload import Wishes, prepare

    # A budget of its own: several engines share the device.
    engine = json.dumps({"kv_bytes": int(args.kv_gib * 2**30), **json.loads(args.config)})
    wishes = Wishes(
        args.shape,
        args.adapters,
        args.rank,
        args.layers,
        tokens_in=args.tokens_in,
        tokens_out=args.tokens_out,
        max_clients=args.max_clients,
        engine=engine,
    )
    work = prepare(wishes, folder)
    vocab = int(work.config["vocab_size"])
    write_tokenizer(folder / "model", vocab)
    adapters = {name: folder / name for name in work.names}
    load_format = f"random:{wishes.seed}"
    return World(folder / "model", adapters, work.settings, load_format, range(1000, vocab - 2000))


def set_environment(private: Path) -> None:
    """What Ray's processes read when they start; before Ray is imported."""
    token = private / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    os.environ |= {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_TMPDIR": str(private),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_worker_niceness": "0",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
    }
    for name, value in SERVE_FLAGS.items():
        os.environ.setdefault(name, value)
    os.environ.pop("RAY_ADDRESS", None)


def run(args: argparse.Namespace, private: Path) -> int:
    """Start everything, measure, write the table."""
    begin = time.monotonic()
    set_environment(private)
    from tests.bench.path_legs import Bench

    folder = Path(args.work) if args.work else private / "work"
    folder.mkdir(parents=True, exist_ok=True)
    world = demo_world(folder, args) if args.shape == "demo" else random_world(folder, args)
    bench = Bench(args, world, private)
    try:
        bench.warm_up()
        args.seconds -= time.monotonic() - begin
        print(f"ready after {time.monotonic() - begin:.0f} s", flush=True)
        about = {
            "shape": args.shape + (f"/{args.layers} layers" if args.layers else ""),
            "adapters": args.adapters,
            "tokens_in": args.tokens_in,
            "tokens_out": args.tokens_out,
            "cores": os.cpu_count(),
            **describe_run(),
        }
        rows: list[dict[str, Any]] = []
        path = Path(args.out) / "path.csv"

        def keep(row: dict[str, Any]) -> None:
            rows.append(row | about)
            append_rows(path, COLUMNS, rows[-1:])

        pairs = bench.run_pairs(keep)
        print(f"{pairs} pairs of {args.pairs}; {about['gpu']}, {about['cores']} cores\n")
        print(report([row for row in rows if row["pair"] < pairs]))
        return 0
    finally:
        bench.close()


def main() -> int:
    """Parse the command line; run below a keeper, so that nothing is left."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shape", default="gpt-oss-20b", help="of tests/bench/shapes.py, or demo")
    add("--layers", type=int, default=0, help="cut the shape; rows say so")
    add("--adapters", type=int, default=0)
    add("--rank", type=int, default=32)
    add("--concurrency", default="1,32")
    add("--pairs", type=int, default=10)
    add("--waves", type=int, default=1, help="requests of each client in a leg")
    add("--tokens-in", type=int, default=1600)
    add("--tokens-out", type=int, default=600)
    add("--loop", choices=("thread", "process", "both", "none"), default="thread")
    add("--legs", default="bare,null", help="besides the loop's: bare,null,free")
    add("--pace-ms", default="50,7", help="first token and step of null, where bare does not run")
    add("--seconds", type=float, default=540.0, help="no pair begins that would end later")
    add("--kv-gib", type=float, default=8.0, help="KV memory of each engine")
    add("--gap-ms", type=float, default=None, help="ingress.min_chunk_gap_ms")
    add("--config", default="{}", help="JSON fields of EngineConfig")
    add("--seed", type=int, default=1)
    add("--work", default="", help="folder of the model, kept; default: a temporary one")
    add("--out", default=os.environ.get("OUT") or str(RESULTS))
    args = parser.parse_args()
    args.concurrency = [int(clients) for clients in args.concurrency.split(",")]
    args.max_clients = max(8, 2 * args.adapters, *args.concurrency)
    ways = ("thread", "process") if args.loop == "both" else (args.loop,)
    args.pace_ms = [float(ms) for ms in args.pace_ms.split(",")]
    args.legs = [leg for leg in LEGS if leg in (*args.legs.split(","), *ways)]
    # Short: the path of a Unix socket, which Ray puts below it, has at most 107 characters.
    private = Path(tempfile.mkdtemp(prefix="path-", dir="/tmp"))
    try:
        return run_kept(partial(run, args, private), [private], 20.0)
    finally:
        shutil.rmtree(private, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
