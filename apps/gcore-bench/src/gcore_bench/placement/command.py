"""The command `gcore-bench placement`: its parts, their tables, and the file with all figures."""

from dataclasses import asdict
from functools import partial

from rich.console import Console

from gcore_bench.harness.session import write_figures
from gcore_bench.placement.balancer import run_balancer
from gcore_bench.placement.live.runs import run_live
from gcore_bench.placement.live.table import live_aims, live_table
from gcore_bench.placement.options import PlacementOptions
from gcore_bench.placement.planner.rounds import run_planner
from gcore_bench.placement.study.run import run_study
from gcore_bench.placement.table import balancer_aims, balancer_table, planner_aims, planner_table


def run(options: PlacementOptions, console: Console) -> None:
    """Run the parts of ``options``, print their tables, and write the figures.

    Raises:
        BenchError: a run failed.
    """
    options = options.sized()
    say = partial(console.print, markup=False, soft_wrap=True)
    parts: list[dict[str, object]] = []
    for part in dict.fromkeys(options.parts):
        if part == "balancer":
            rows = run_balancer(options, say=say)
            table, lines, figures = balancer_table(rows), balancer_aims(rows), {"rows": [asdict(row) for row in rows]}
        elif part == "live":
            runs = run_live(options, say=say)
            table, lines, figures = live_table(runs), live_aims(runs), {"rows": [asdict(run) for run in runs]}
        elif part == "study":
            say(run_study(options))
            continue
        else:
            found = run_planner(options, say=say)
            table, lines, figures = planner_table(found), planner_aims(found), asdict(found)
        console.print(table)
        for line in lines:
            say(line)
        parts.append({"part": part, **figures, "aims": lines})
    write_figures(options.json, options, parts)
