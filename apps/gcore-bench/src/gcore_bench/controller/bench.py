"""`gcore-bench controller`: both parts, and the page of the part sim."""

import asyncio
from statistics import fmean

from rich.console import Console

from gcore_bench.controller import dispatch
from gcore_bench.controller.options import ControllerOptions
from gcore_bench.controller.report import aims, dispatch_rows, dispatch_table, notes, scaling_table
from gcore_bench.harness.processes import stderr_to
from gcore_bench.harness.report import Session


def run(options: ControllerOptions, console: Console) -> None:
    """Measure, print and write the figures that ``options`` asks for.

    Raises:
        BenchError: a contender failed, or features arrived with other bytes.
    """
    options = options.sized()
    with Session(options, console, notes=notes(options)) as session:
        for part in dict.fromkeys(options.parts):
            if part == "dispatch":
                with stderr_to(session.folder / "log"):
                    runs = asyncio.run(dispatch.run_rounds(options, say=session.say))
                rows = dispatch_rows(runs)
                table = dispatch_table(rows, options, fmean(run.load for run in runs))
                session.add(part, tables=[table], lines=aims(rows), rows=rows, runs=runs, aims=aims(rows))
                continue
            from gcore_bench.controller.page import write_page
            from gcore_bench.controller.scaling import run_sizes

            sizes = run_sizes(options, say=session.say)
            session.add(part, tables=[scaling_table(sizes)], rows=sizes)
            if options.html is not None:
                write_page(options.html, sizes)
