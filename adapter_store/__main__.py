"""`python -m adapter_store validate URI --model DIR`: would this adapter be served? If not, why?

Which weights an adapter may change is the model's knowledge, and imports in this house run from
model_runner down to here, never up. So the command stands there (model_runner/validate_command.py),
and this file, which nobody imports, only starts it by its name.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS = {"validate": "model_runner.validate_command"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; gives its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m adapter_store", description="Commands about adapters."
    )
    parser.add_argument("command", choices=sorted(COMMANDS))
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="COMMAND --help lists them")
    args = parser.parse_args(argv)
    return int(import_module(COMMANDS[args.command]).main(args.arguments))


if __name__ == "__main__":
    sys.exit(main())
