"""`python -m adapter_store validate URI --model DIR`: would this adapter be served? If not, why?

Of the model only config.json is read, and its tokenizer's files where the adapter brings such. No
GPU is asked for: the numbers are those of an engine on a GPU, or on a CPU with `--device cpu`. An
engine has one GPU, so an adapter lies there whole.
S3 is reached as the environment says (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, ...).
Exit code: 0 it would be served, 1 it would be refused or is not there, 2 the question makes no
sense (unknown option, no such model). Not here: the judgement itself (adapter_store/validation.py).
"""

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from adapter_store.validation import ServingLimits, as_values, validate
from adapter_store.weights import assuming
from model_runner.assembly import arena_bytes, choose_dtypes, read_model_config
from model_runner.command_line import read_config
from model_runner.models.lora_targets import list_lora_targets

_QUIET = logging.NullHandler()


def main(argv: Sequence[str] | None = None) -> int:
    """Judge one adapter and print the report; gives the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m adapter_store validate",
        description="Would this adapter be served? If not, why?",
    )
    parser.add_argument("uri", help="folder or s3://bucket/prefix of the adapter")
    parser.add_argument("--model", required=True, help="folder of the base model")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--config", default="", help="YAML or JSON file with fields of EngineConfig"
    )
    parser.add_argument("--device", default="", help="cpu: judge for an engine without a GPU")
    parser.add_argument("--dtype", default="", help="bfloat16 or float32")
    parser.add_argument("--max-lora-rank", type=int, default=0, help="the engine's largest rank")
    parser.add_argument("--lora-bytes", type=int, default=0, help="the engine's adapter memory")
    args = parser.parse_args(argv)
    model = Path(args.model)
    try:
        config = read_config(args, args.model)
        family, shape = read_model_config(model)
        on_cpu = config.device.startswith("cpu")
        _, dtype = choose_dtypes(config, shape, on_cpu)
    except (ValueError, TypeError, KeyError, OSError) as error:
        parser.error(f"{type(error).__name__}: {error}")
    limits = ServingLimits(
        dtype=dtype,
        pool_bytes=arena_bytes(config, on_cpu) if config.max_loras else 0,
        host_bytes=config.host_cache_bytes,
        max_rank=config.max_lora_rank,
        gpus=0 if on_cpu else 1,
    )
    # What the loader logs for an operator of a service stands in the report.
    logging.getLogger("adapter_store").addHandler(_QUIET)
    targets = assuming(list_lora_targets(shape, family.names), config.assume_transformers)
    name = model.resolve().name
    report = validate(args.uri, targets, limits, base_name=name, base_folder=model)
    values = as_values(report, limits, args.model, shape.architecture)
    text = json.dumps(values, indent=2) if args.json else "\n".join(as_lines(values))
    try:
        print(text, flush=True)
    except BrokenPipeError:  # a reader that has seen enough, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1 if report.refusals else 0


def as_lines(values: dict[str, Any]) -> Iterator[str]:
    """The same for a reader, a subject a line."""
    reasons = {refusal["reason"] for refusal in values["refused"]}
    verdict = "would be refused" if reasons else "would be served"
    if reasons & {"not_found", "unavailable"}:
        verdict = "could not be read"
    yield f"{values['uri']} on {values['model']} ({values['architecture']}): {verdict}"
    for refusal in values["refused"]:
        yield f"refused   {refusal['reason']}: {refusal['message']}"
    if values["bytes_per_gpu"] is None:
        return
    yield "layout    " + ", ".join(
        f"{layout} ({count} pairs)" for layout, count in values["layouts"].items()
    )
    where = f"on each of {values['gpus']} GPU" if values["gpus"] else "without a GPU"
    width = max(len(target["name"]) for target in values["targets"])
    for target in values["targets"]:
        ranks = ", ".join(map(str, target["ranks"]))
        scales = ", ".join(f"{scale:g}" for scale in target["scales"])
        yield (
            f"target    {target['name']:{width}}  {target['adapted']} of {target['of']}, "
            f"rank {ranks}, scale {scales}, {' and '.join(target['layouts'])}"
        )
    yield (
        f"memory    {values['bytes_per_gpu']:,} bytes in {values['dtype']} {where}; one adapter "
        f"may take {values['largest_adapter_bytes']:,} of {values['adapter_memory_bytes']:,}"
    )
    yield f"tensors   {len(values['bound'])} bound, {len(values['skipped'])} skipped"
    if values["chat_template"]:
        yield "brings    its own chat template"
    if values["generation_defaults"] or values["eos_ids"]:
        given = [f"{key} {value:g}" for key, value in values["generation_defaults"].items()]
        given += [f"end of text {token_id}" for token_id in values["eos_ids"]]
        yield f"brings    {', '.join(given)}"
    for name, why in values["skipped"].items():
        yield f"skipped   {name}: {why}"
    for warning in values["warnings"]:
        yield f"warning   {warning}"
