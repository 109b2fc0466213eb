"""Two commands with which anybody can compare this engine with another.

    python -m model_runner logits --jobs FILE --out DIR [--model DIR] ...     logits or scores of
    given ids, through the paged path
    python -m model_runner serve-stdio --model DIR ...                       requests as JSON lines
    on stdin, tokens on stdout

Not for serving: that is `serve run deployments:app`.
"""

import argparse
import sys
from collections.abc import Sequence

from adapter_store.errors import AdapterError
from model_runner import logits_command, stdio_command
from model_runner.command_line import CommandError
from model_runner.execution.checkpoint import CheckpointError
from model_runner.models.base import ModelUnsupported


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and run one command; gives the exit code: 2 if what was asked for makes no sense."""
    parser = argparse.ArgumentParser(
        prog="python -m model_runner", description=__doc__.splitlines()[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for module in (logits_command, stdio_command):
        module.add_parser(commands).set_defaults(run=module.run)
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except (CommandError, AdapterError, ModelUnsupported, CheckpointError, OSError) as error:
        parser.exit(2, f"{parser.prog} {args.command}: {error}\n")


if __name__ == "__main__":
    sys.exit(main())
