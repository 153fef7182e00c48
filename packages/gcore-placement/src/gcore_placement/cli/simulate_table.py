"""The output of `gcore-placement simulate`: a table of strategies, and a counter of progress."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gcore_placement.simulation.comparison import Comparison
from gcore_placement.simulation.step_account import IDLE

_FILE_WIDTH = 10_000  # columns where the output is not a terminal, so that nothing is cut or folded


@contextmanager
def counting(what: str) -> Generator[Callable[[int], None]]:
    """Show a counter on the terminal during the block; print nothing elsewhere."""
    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.completed:,.0f} {task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda number: progress.advance(task, number)


def print_comparison(comparison: Comparison) -> None:
    """Print a row for each strategy."""
    width = None if sys.stdout.isatty() else _FILE_WIDTH
    console = Console(file=sys.stdout, width=width, highlight=False, emoji=False)
    steps = len(comparison.colocated.steps)
    console.print(f"{comparison.name}: {comparison.num_devices:,} devices, {steps} steps")
    causes = [name for name in IDLE if any(run.share(name) >= 5e-4 for run in comparison.runs)]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("strategy")
    for name in ("step", "x colocated", "x best split", "moves", "idle", *(c.replace("_", " ") for c in causes)):
        table.add_column(name, justify="right")
    for run in comparison.runs:
        table.add_row(
            run.strategy,
            f"{run.step_s:,.1f} s",
            f"{comparison.colocated.seconds / run.seconds:.2f}",
            f"{comparison.best_split.seconds / run.seconds:.2f}",
            str(run.num_moves),
            f"{run.idle_share:.1%}",
            *(f"{run.share(cause):.1%}" for cause in causes),
        )
    console.print(table)
