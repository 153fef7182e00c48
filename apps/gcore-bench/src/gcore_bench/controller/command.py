"""`gcore-bench controller`: both parts, their tables, the page and the file with every figure."""

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from gcore_bench.controller import dispatch
from gcore_bench.controller.cluster import quiet_stderr
from gcore_bench.controller.options import ControllerOptions
from gcore_bench.controller.summary import aims, dispatch_rows
from gcore_bench.controller.table import dispatch_table, notes, scaling_table
from gcore_bench.figures_file import write_figures


def run(options: ControllerOptions, console: Console) -> None:
    """Measure, print, and write what ``options`` asks for.

    Raises:
        BenchError: a contender failed, or features did not arrive as they were made.
    """
    options = options.sized()
    say = partial(console.print, markup=False, soft_wrap=True)
    results: list[dict[str, object]] = []
    lines: Sequence[str] = ()
    for part in dict.fromkeys(options.parts):
        if part == "dispatch":
            with tempfile.TemporaryDirectory(prefix="gcore-bench-") as scratch, quiet_stderr(Path(scratch) / "log"):
                runs = asyncio.run(dispatch.run_rounds(options, say=say))
            rows = dispatch_rows(runs)
            console.print(dispatch_table(rows, options, fmean(run.load for run in runs)))
            lines = aims(rows)
            found: dict[str, Any] = {"rows": [asdict(row) for row in rows], "runs": [asdict(run) for run in runs]}
            results.append({"part": part, **found, "aims": list(lines)})
        else:
            from gcore_bench.controller.page import write_page
            from gcore_bench.controller.scaling import run_sizes

            sizes = run_sizes(options, say=say)
            console.print(scaling_table(sizes))
            results.append({"part": part, "rows": [asdict(row) for row in sizes]})
            if options.html is not None:
                write_page(options.html, sizes)
    for line in [*lines, *notes(options)]:
        console.print(line, soft_wrap=True)
    write_figures(options.json, options, results)
