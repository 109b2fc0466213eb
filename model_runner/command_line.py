"""What the commands of `python -m model_runner` share: the options that describe an engine, the
fields of their lines. Not here: any one command."""

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from adapter_store.ref import AdapterRef
from model_runner.config import EngineConfig


class CommandError(ValueError):
    """The command line, or a file that it names, does not say what to do."""


def add_engine_options(parser: argparse.ArgumentParser, model_required: bool) -> None:
    """--model, --load-format, --adapters, --config, --device, --dtype, --kernels."""
    parser.add_argument(
        "--model", required=model_required, default="", help="folder in Hugging Face format"
    )
    parser.add_argument("--load-format", default="", help="safetensors (default) or random:SEED")
    parser.add_argument(
        "--adapters", default="", help="NAME=FOLDER,... the names that requests may use"
    )
    parser.add_argument(
        "--config", default="", help="YAML or JSON file with fields of EngineConfig"
    )
    parser.add_argument(
        "--device", default="", help="cpu, cuda, cuda:1; default: a GPU if there is one"
    )
    parser.add_argument("--dtype", default="", help="bfloat16 or float32")
    parser.add_argument(
        "--kernels",
        choices=("fast", "reference"),
        default="fast",
        help="reference: torch in place of Triton",
    )


def read_config(args: argparse.Namespace, model: str, **defaults: Any) -> EngineConfig:
    """The engine's settings: the file's, then the command line's over them.

    Errors: CommandError naming the file and the field at fault."""
    fields: dict[str, Any] = dict(defaults)
    if args.config:
        try:
            loaded = yaml.safe_load(Path(args.config).read_text()) or {}
        except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
            raise CommandError(f"{args.config}: {error}") from None
        if not isinstance(loaded, dict):
            raise CommandError(f"{args.config} is no table of fields")
        known = {f.name for f in dataclasses.fields(EngineConfig)}
        unknown = sorted(set(loaded) - known)
        if unknown:
            raise CommandError(
                f"{args.config}: unknown fields {unknown}; known are {sorted(known)}"
            )
        fields.update(loaded)
    for name in ("load_format", "device", "dtype", "max_lora_rank", "lora_bytes"):
        if getattr(args, name, None):  # no command has all of these options
            fields[name] = getattr(args, name)
    fields["model"] = model
    try:
        return EngineConfig(**fields)
    except (ValueError, TypeError) as error:
        raise CommandError(f"{args.config or 'settings'}: {error}") from None


def is_name(value: object) -> bool:
    """Whether it can be a request's id: a string or an integer."""
    return isinstance(value, str | int) and not isinstance(value, bool)


def read_name(message: Mapping[str, object]) -> str:
    """The field `id` of a line. Errors: ValueError."""
    name = message.get("id")
    if not is_name(name):
        raise ValueError(f"id must be a string or an integer, not {name!r:.60}")
    return str(name)


def read_ids(message: Mapping[str, object], field: str) -> tuple[int, ...]:
    """A field of token ids. Errors: ValueError naming it."""
    ids = message.get(field)
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise ValueError(f"{field} must be a list of token ids, not {ids!r:.60}")
    return tuple(ids)


def read_adapters(text: str) -> dict[str, AdapterRef]:
    """NAME=FOLDER,... -> name -> ref. Errors: CommandError for a part without '=' or a name
    given twice."""
    refs: dict[str, AdapterRef] = {}
    for part in filter(None, text.split(",")):
        name, eq, uri = part.partition("=")
        if not eq or not name or not uri or name in refs:
            raise CommandError(
                f"--adapters wants NAME=FOLDER,... with distinct names, not {part!r}"
            )
        refs[name] = AdapterRef(name, uri)
    return refs
