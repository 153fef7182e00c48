"""Independent simulations in several processes."""

import multiprocessing
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from operator import methodcaller
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import track

T = TypeVar("T")


def run_all(tasks: Sequence[Callable[[], T]], *, processes: int) -> list[T]:
    """Call independent tasks in so many processes, or in this one if 1, with a bar on the terminal."""
    console = Console(file=sys.stderr)
    bar: dict[str, Any] = {"console": console, "disable": not console.is_terminal, "transient": True}
    if processes == 1:
        return [task() for task in track(tasks, "simulations", **bar)]
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        # The last tasks are the largest.
        results = pool.map(methodcaller("__call__"), reversed(tasks))
        return list(track(results, "simulations", len(tasks), **bar))[::-1]
