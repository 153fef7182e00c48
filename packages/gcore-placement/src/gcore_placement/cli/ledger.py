"""The command `gcore-placement ledger`."""

import argparse
import json
from collections.abc import Sequence

from gcore_placement.ledger import Ledger, read_spans, select_steps


def main(argv: Sequence[str]) -> int:
    """Read a run's spans and print its ledger; return the exit code."""
    arguments = _parser().parse_args(argv)
    steps = select_steps(read_spans(arguments.run), arguments.steps)
    ledger = Ledger.of(steps)
    if arguments.json:
        print(json.dumps({"steps": [steps[0].step, steps[-1].step], **ledger.to_dict()}, indent=2))
        return 0
    from gcore_placement.cli.tables import print_ledger

    print_ledger(ledger, steps)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gcore-placement ledger",
        description="Assign each device-second of a run to a role, and to work or one cause of idleness.",
        epilog="example: gcore-placement ledger runs/default --steps 10:20",
    )
    parser.add_argument("run", metavar="RUN", help="a run's folder, or the spans.jsonl in it")
    parser.add_argument("--steps", default=":", metavar="FIRST:LAST", help="only these, both included (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser
