"""The `gcore-placement` command and its subcommands.

Exit code 0: fine. 2: wrong use, or an error, in one line. 130: Ctrl-C.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from gcore_placement.errors import PlacementError

COMMANDS = {
    "plan": ("gcore_placement.cli.plan", "choose the devices of each role, and predict a step's seconds and memory"),
    "simulate": (
        "gcore_placement.cli.simulate",
        "compare placement strategies on a trace: step time, and causes of idleness",
    ),
    "ledger": (
        "gcore_placement.cli.ledger",
        "divide the device time of a run into work and causes of idleness",
    ),
}
"""Module with `main(argv) -> int`, and a short description. Modules are imported when they are used."""

_EXIT_ERROR, _EXIT_INTERRUPTED = 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; wrong use raises `SystemExit(2)`."""
    arguments = _parser().parse_args(argv)
    module, _ = COMMANDS[arguments.command]
    run: Callable[[Sequence[str]], int] = import_module(module).main
    try:
        return run(arguments.arguments)
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except (PlacementError, OSError) as error:
        print(f"gcore-placement: error: {str(error).replace(chr(10), ' ')}", file=sys.stderr)
        return _EXIT_ERROR


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {name:<10} {text}" for name, (_, text) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="gcore-placement",
        description=f"Placement of RLHF work.\n\ncommands:\n{listed}",
        epilog="gcore-placement COMMAND --help shows its options. Exit codes: 0 fine, 2 an error, 130 interrupted.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of the above")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its own arguments")
    return parser


if __name__ == "__main__":
    sys.exit(main())
