"""`gcore-bench placement`: its parts, their tables, and the file with all figures."""

from rich.console import Console

from gcore_bench.harness.report import Session
from gcore_bench.placement import balancer, live, planner
from gcore_bench.placement.options import PlacementOptions
from gcore_bench.placement.oracles import part as oracles
from gcore_bench.placement.simulations import sweep
from gcore_bench.placement.simulations.study import run_study


def run(options: PlacementOptions, console: Console) -> None:
    """Run the parts of ``options``, print their tables, and write the figures."""
    options = options.sized()
    with Session(options, console) as session:
        for name in dict.fromkeys(options.parts):
            if name == "study":
                session.say(run_study(options))
                continue
            part = {"balancer": balancer, "live": live, "oracles": oracles, "planner": planner, "sweep": sweep}[name]
            figures = part.run(options, say=session.say)
            aims = part.aims(figures["rows"])
            tables = [part.table(figures)]
            if part is oracles:
                tables.append(oracles.statements_table(figures))
            session.add(name, tables=tables, lines=aims, **figures, aims=aims)
