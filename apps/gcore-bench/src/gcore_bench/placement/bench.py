"""`gcore-bench placement`: its parts, their tables, and the file with all figures."""

from rich.console import Console

from gcore_bench.harness.report import Session
from gcore_bench.placement.balancer import balancer_aims, balancer_table, run_balancer
from gcore_bench.placement.live import live_aims, live_table, run_live
from gcore_bench.placement.options import PlacementOptions
from gcore_bench.placement.planner import planner_aims, planner_table, run_planner
from gcore_bench.placement.study import run_study


def run(options: PlacementOptions, console: Console) -> None:
    """Run the parts of ``options``, print their tables, and write the figures."""
    options = options.sized()
    with Session(options, console) as session:
        for part in dict.fromkeys(options.parts):
            if part == "study":
                session.say(run_study(options))
                continue
            if part == "balancer":
                figures = {"rows": run_balancer(options, say=session.say)}
                table, lines = balancer_table(figures["rows"]), balancer_aims(figures["rows"])
            elif part == "live":
                figures = {"rows": run_live(options, say=session.say)}
                table, lines = live_table(figures["rows"]), live_aims(figures["rows"])
            else:
                figures = run_planner(options, say=session.say)
                table, lines = planner_table(figures["rows"], figures["load"]), planner_aims(figures["rows"])
            session.add(part, tables=[table], lines=lines, **figures, aims=lines)
