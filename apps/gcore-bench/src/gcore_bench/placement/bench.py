"""`gcore-bench placement`: how well work is divided over devices, planned and predicted; one part for each experiment.

The parts are the balancer of training work, the planner, predictions against published steps, live runs, and studies of
dynamic placement in simulated time.
"""

from dataclasses import asdict

from rich.console import Console

from gcore_bench.harness.report import BenchSession
from gcore_bench.placement import balancer, live, planner, study
from gcore_bench.placement.options import PlacementOptions
from gcore_bench.placement.oracles import part as oracles
from gcore_bench.placement.tables import render_table

PARTS = {
    "balancer": balancer.run,
    "planner": planner.run,
    "oracles": oracles.run,
    "live": live.run,
    "study": study.run,
}
"""Map each part's name to the function that runs it: from the options, and a function that prints a line, to tables."""


def run(options: PlacementOptions, console: Console) -> None:
    """Run the parts of ``options``, print their tables with the aims that they meet, and write the file of results."""
    options = options.resize_if_quick()
    with BenchSession(options, console) as session:
        for part in options.parts:
            for table in PARTS[part](options, session.say):
                session.add(part, tables=[render_table(table)], lines=table.aims, **asdict(table))
