"""`logits`: what the model says of given token ids, through the engine's own paged path.

A job is one JSON line: {"id", "model" (folder; default --model), "adapter" (a folder, a name of
--adapters, or null), "input_ids", "score_from" (optional)}.
OUT/<id>.safetensors holds `logits` float32 (tokens, vocabulary). With score_from = n,
OUT/<id>.score.json holds instead "chosen" (the logit of
input_ids[i + 1] at position i, for i = n .. len - 2) and "best" (the largest logit there), and no
vocabulary-wide array is kept.
OUT/<id>.error.txt says why a job was refused, and the exit code stays 0; a line that is none, or
whose id names no file, ends the command before any has run.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from adapter_store.ref import AdapterRef
from kernels.op import use_reference_kernels
from model_runner.assembly import read_model_config
from model_runner.command_line import (
    CommandError,
    add_engine_options,
    read_adapters,
    read_config,
    read_ids,
    read_name,
)
from model_runner.config import EngineConfig
from model_runner.engine import Engine
from model_runner.execution.kv_cache import page_bytes, plan_kv

# Tokens of one step of the reference on a GPU. It unpacks each expert once a step, and 16,384
# tokens of four experts each keep some 8 GB of activations.
REFERENCE_STEP_TOKENS = 16384


@dataclass
class Job:
    """One line of the jobs file, and what came out so far."""

    name: str
    model: str
    adapter: AdapterRef | None
    input_ids: tuple[int, ...]
    score_from: int | None
    parts: list[Tensor] = field(default_factory=list)
    chosen: list[float] = field(default_factory=list)
    best: list[float] = field(default_factory=list)

    def take(self, first: int, logits: Tensor) -> None:
        """Keep what is wanted of the logits [n, V] of positions first, first + 1, ..."""
        if self.score_from is None:
            self.parts.append(logits.float().cpu())
            return
        start, end = max(first, self.score_from), min(first + len(logits), len(self.input_ids) - 1)
        if start < end:
            rows = logits[start - first : end - first].float()  # [n, V]
            following = torch.tensor(self.input_ids[start + 1 : end + 1], device=rows.device)
            self.chosen += rows.gather(1, following[:, None])[:, 0].tolist()
            self.best += rows.amax(-1).tolist()

    def write(self, out: Path) -> None:
        """One result file."""
        if self.score_from is None:
            save_file(
                {"logits": torch.cat(self.parts).contiguous()},
                str(out / f"{self.name}.safetensors"),
            )
        else:
            text = json.dumps({"chosen": self.chosen, "best": self.best})
            (out / f"{self.name}.score.json").write_text(text)


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """The command's options."""
    parser = commands.add_parser(
        "logits", help="logits or scores of given ids, through the paged path"
    )
    add_engine_options(parser, model_required=False)
    parser.add_argument(
        "--jobs",
        required=True,
        help='one JSON job a line: {"id": "a", "input_ids": [1, 2], "adapter": NAME or null}',
    )
    parser.add_argument("--out", required=True, help="folder for the results")
    parser.add_argument(
        "--batch", type=int, default=16, help="jobs that run side by side (default 16)"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Run all jobs, model by model. A refused job is no failure of the command: its reason is in
    its error file."""
    use_reference_kernels(args.kernels == "reference")
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    jobs = list(_read_jobs(args, out))
    for model in dict.fromkeys(job.model for job in jobs):
        mine = [job for job in jobs if job.model == model]
        try:
            engine = Engine(plan_scoring(args, model, mine))
        except CommandError:
            raise
        except (ValueError, OSError) as error:
            for job in mine:
                _refuse(out, job.name, f"{type(error).__name__}: {error}")
            continue
        try:
            engine.score(
                [(job.input_ids, job.adapter, job.take) for job in mine],
                partial(_end, out, mine),
            )
        finally:
            engine.close()
    return 0


def plan_scoring(args: argparse.Namespace, model: str, jobs: list[Job]) -> EngineConfig:
    """The settings under which these jobs are scored.

    References on a GPU compute in fp32 from weights as they are served; long steps, and pages for
    the jobs alone, leave them the memory that this takes.
    Errors: ValueError (config, model).
    """
    fields: dict[str, Any] = {
        "max_loras": max(1, min(args.batch, len({job.adapter for job in jobs if job.adapter}))),
        "max_num_seqs": args.batch,
        "prefix_cache": False,
        "cuda_graphs": False,
        "max_lora_rank": 256,
    }
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.kernels != "reference" or device == "cpu":
        return read_config(args, model, **fields)
    _, shape = read_model_config(Path(model))
    kept = "float32" if shape.dtype == "float32" else "bfloat16"
    fields |= {
        "dtype": "float32",
        "weight_dtype": kept,
        "max_step_tokens": max(REFERENCE_STEP_TOKENS, args.batch),
    }
    config = read_config(args, model, **fields)
    if config.kv_bytes:
        return config
    layout = plan_kv(shape)
    dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
    # Jobs that are too long are refused one by one, and need no pages.
    most = min(config.max_model_len or shape.max_positions, shape.max_positions)
    lengths = sorted(len(job.input_ids) + 1 for job in jobs if len(job.input_ids) < most)
    blocks = sum(n // config.page_tokens + 2 for n in lengths[-config.max_num_seqs :])
    pages = len(layout.groups) * max(2, blocks)
    kv_bytes = pages * page_bytes(shape, layout, config.page_tokens, dtype)
    return dataclasses.replace(config, kv_bytes=kv_bytes)


def _end(out: Path, jobs: list[Job], number: int, why: str) -> None:
    job = jobs[number]
    if why:
        _refuse(out, job.name, why)
    else:
        job.write(out)
    job.parts.clear()


def _refuse(out: Path, name: str, why: str) -> None:
    (out / f"{name}.error.txt").write_text(why + "\n")
    print(f"{name} is refused: {why}", file=sys.stderr, flush=True)


def _read_jobs(args: argparse.Namespace, out: Path) -> Iterator[Job]:
    refs = read_adapters(args.adapters)
    try:
        lines = Path(args.jobs).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"--jobs {args.jobs}: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
            if not isinstance(raw, dict) or "input_ids" not in raw:
                raise ValueError(f"not {line!r:.60}")
            name = read_name(raw)
        except (ValueError, RecursionError) as error:
            raise CommandError(
                f"{args.jobs}:{number}: a job is a JSON object with id and input_ids at least "
                f"({type(error).__name__}: {error})"
            ) from None
        if not name.isprintable() or "/" in name or name in ("", ".", ".."):
            raise CommandError(f"{args.jobs}:{number}: id {name!r} is no file name")
        try:
            yield _read_job(raw, name, args.model, refs)
        except ValueError as error:
            _refuse(out, name, str(error))


def _read_job(raw: dict[str, Any], name: str, model: str, refs: dict[str, AdapterRef]) -> Job:
    """Errors: ValueError naming the field that is at fault."""
    for field_name in ("model", "adapter"):
        value = raw.get(field_name)
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{field_name} must be a string or null, not {value!r:.60}")
    score_from, adapter = raw.get("score_from"), raw.get("adapter")
    if score_from is not None and (type(score_from) is not int or score_from < 0):
        raise ValueError(f"score_from must be an integer >= 0, not {score_from!r:.60}")
    model = raw.get("model") or model
    if not model:
        raise ValueError("the job names no model and --model was not given")
    if adapter is not None and adapter not in refs and not Path(adapter).is_dir():
        raise ValueError(f"adapter {adapter!r} is neither a name of --adapters nor a folder")
    ref = None if adapter is None else refs.get(adapter) or AdapterRef(adapter, adapter)
    return Job(name, model, ref, read_ids(raw, "input_ids"), score_from)
