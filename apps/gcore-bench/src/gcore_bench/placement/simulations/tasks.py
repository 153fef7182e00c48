"""Independent simulations in several processes."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from operator import methodcaller
from typing import TypeVar

from gcore_bench.placement.options import PlacementOptions

T = TypeVar("T")


def count_processes(options: PlacementOptions) -> int:
    """Return as many processes as there are cores, or one for a quick run."""
    if options.quick:
        return 1
    return os.cpu_count() or 1


def run_all(tasks: Sequence[Callable[[], T]], *, processes: int) -> list[T]:
    """Call independent tasks in so many processes, or in this one if 1."""
    if processes == 1:
        return [task() for task in tasks]
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        # The last tasks are the largest.
        results = list(pool.map(methodcaller("__call__"), reversed(tasks)))
    return results[::-1]
