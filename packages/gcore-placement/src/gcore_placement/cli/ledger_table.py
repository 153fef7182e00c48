"""The output of `gcore-placement ledger`: a row for each column that has time, a column for each role."""

import sys
from collections.abc import Sequence

from gcore_placement.errors import MissingExtraError
from gcore_placement.ledger import CAUSES, COLUMNS, Ledger, StepIntervals

try:
    from rich import box
    from rich.console import Console
    from rich.table import Table
except ModuleNotFoundError as error:
    raise MissingExtraError("rich", "cli") from error

_FILE_WIDTH = 10_000  # columns where the output is not a terminal, so that nothing is cut or folded


def print_ledger(ledger: Ledger, steps: Sequence[StepIntervals]) -> None:
    """Print the shares of each role's device time, and of all: work, then causes of idleness."""
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _FILE_WIDTH, highlight=False, emoji=False)
    device_s = sum(ledger.total_ns.values()) / 1e9
    span = f"steps {steps[0].step} to {steps[-1].step}" if len(steps) > 1 else f"step {steps[0].step}"
    console.print(f"{span}: {device_s:,.1f} device-seconds, {ledger.idle_share():.1%} idle", soft_wrap=True)
    console.print()
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("")
    roles = list(ledger.device_ns)
    for name in (*roles, "all", "seconds"):
        table.add_column(name, justify="right")
    for column in COLUMNS:
        seconds = sum(entry[column] for entry in ledger.device_ns.values()) / 1e9
        if seconds:
            shares = [f"{ledger.share(column, role):.1%}" for role in roles]
            label = f"idle: {column}" if column in CAUSES else column
            table.add_row(label, *shares, f"{ledger.share(column):.1%}", f"{seconds:,.1f}")
    table.add_section()
    table.add_row("idle", *(f"{ledger.idle_share(role):.1%}" for role in roles), f"{ledger.idle_share():.1%}", "")
    totals = [f"{ledger.total_ns[role] / 1e9:,.1f}" for role in roles]
    table.add_row("seconds", *totals, f"{device_s:,.1f}", f"{device_s:,.1f}")
    console.print(table)
