"""Run all studies, and write their tables and page."""

import multiprocessing
import os
import sys
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gcore_bench.placement.options import PlacementOptions
from gcore_bench.placement.study.studies import RunAll, break_study, drift_study, payload_study, prediction_study
from gcore_bench.placement.study.tables import study_text
from gcore_placement.cli.page import page
from gcore_placement.simulation.scenarios import PUBLISHED, SCENARIOS

T = TypeVar("T")

STUDY_SIZES = (
    (64, None, (*SCENARIOS, *PUBLISHED)),
    (512, None, ("curriculum", "growing", "crossing")),
    (10_000, 30, ("curriculum", "growing", "crossing")),
)
"""Devices, steps (None: the scenario's) and scenarios of the study of drift."""


def run_study(options: PlacementOptions) -> str:
    """Answer all questions, and write `tables.md` and `study.html`; return the tables."""
    folder, num_steps = options.study_folder, options.study_steps or None
    sizes = [
        (devices, num_steps if steps is None else min(steps, num_steps or steps), names)
        for devices, steps, names in STUDY_SIZES
    ]
    few = min(24, num_steps or 24)
    with in_processes(options.study_processes or os.cpu_count() or 1) as run_all:
        drift = drift_study(sizes, run_all=run_all)
        predictions = prediction_study(num_steps=few, run_all=run_all)
        breaks = break_study(num_steps=few, run_all=run_all)
    text = study_text(drift, payload_study(), predictions, breaks)
    folder.mkdir(exist_ok=True)
    (folder / "tables.md").write_text(text)
    (folder / "study.html").write_text(page([seeded[0] for seeded in (*drift, *breaks)]))
    return text


@contextmanager
def in_processes(count: int) -> Generator[RunAll]:
    """Call tasks in so many processes, or in this one if 1, with a bar on the terminal for each call."""
    console = Console(file=sys.stderr)
    columns = (TextColumn("comparisons"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    pool = ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) if count > 1 else None
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:

        def run_all(tasks: Sequence[Callable[[], T]]) -> list[T]:
            bar = progress.add_task("", total=len(tasks))
            if pool is None:
                return [task() for task in progress.track(tasks, task_id=bar)]
            # The last tasks are the largest.
            futures = [pool.submit(task) for task in reversed(tasks)]
            for future in futures:
                future.add_done_callback(lambda _: progress.advance(bar))
            return [future.result() for future in reversed(futures)]

        try:
            yield run_all
        finally:
            if pool is not None:
                pool.shutdown(cancel_futures=True)
