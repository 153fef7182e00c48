"""`gcore-bench placement`: runs its parts, prints their tables, and writes the file with all figures."""

from dataclasses import asdict

from rich.console import Console

from gcore_bench.harness.report import Session
from gcore_bench.placement import balancer, live, planner
from gcore_bench.placement.options import PlacementOptions
from gcore_bench.placement.oracles import part as oracles
from gcore_bench.placement.simulations import study, sweep
from gcore_bench.placement.tables import render_table

PARTS = {
    "balancer": balancer.run,
    "planner": planner.run,
    "oracles": oracles.run,
    "live": live.run,
    "study": study.run,
    "sweep": sweep.run,
}
"""Functions by name of the part: each takes the options and a function that prints a line, and returns its tables."""


def run(options: PlacementOptions, console: Console) -> None:
    """Run the parts of ``options``, print their tables, and write the figures."""
    options = options.resize_if_quick()
    with Session(options, console) as session:
        for part in options.parts:
            for table in PARTS[part](options, session.say):
                session.add(part, tables=[render_table(table)], lines=table.aims, **asdict(table))
