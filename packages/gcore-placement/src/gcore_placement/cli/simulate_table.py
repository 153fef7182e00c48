"""What `gcore-placement simulate` prints: a table of strategies, and how far it has come."""

import multiprocessing
import sys
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gcore_bench.placement.study.studies import Comparison, RunAll
from gcore_placement.simulation.step_account import IDLE

_FILE_WIDTH = 10_000  # columns where the output is no terminal: nothing is cut or folded

T = TypeVar("T")


@contextmanager
def counting(what: str) -> Generator[Callable[[int], None]]:
    """Counts on the terminal, while the block lasts; elsewhere says nothing."""
    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.completed:,.0f} {task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda number: progress.advance(task, number)


@contextmanager
def in_processes(count: int) -> Generator[RunAll]:
    """Calls tasks in so many processes, 1: in this one, with a bar on the terminal for each call."""
    console = Console(file=sys.stderr)
    columns = (TextColumn("comparisons"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    pool = ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) if count > 1 else None
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:

        def run_all(tasks: Sequence[Callable[[], T]]) -> list[T]:
            bar = progress.add_task("", total=len(tasks))
            if pool is None:
                return [task() for task in progress.track(tasks, task_id=bar)]
            # The last are the largest.
            futures = [pool.submit(task) for task in reversed(tasks)]
            for future in futures:
                future.add_done_callback(lambda _: progress.advance(bar))
            return [future.result() for future in reversed(futures)]

        try:
            yield run_all
        finally:
            if pool is not None:
                pool.shutdown(cancel_futures=True)


def print_comparison(comparison: Comparison) -> None:
    """A row for each strategy."""
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
