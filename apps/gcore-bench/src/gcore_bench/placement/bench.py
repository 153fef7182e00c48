"""`gcore-bench placement`: how well work is divided over devices, planned and predicted; one part for each experiment.

The parts are the balancer of training work, the planner, predictions against published steps, live runs, and studies of
dynamic placement in simulated time.
"""

from dataclasses import asdict

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
"""Map each part's name to the function that runs it: from the options and the session to tables."""


def run(options: PlacementOptions, session: BenchSession) -> None:
    """Run the parts of ``options``, and print their tables with the aims that they meet."""
    for part in options.parts:
        for table in PARTS[part](options, session):
            session.add(
                part,
                tables=[render_table(table)],
                lines=table.aims,
                **asdict(table),
            )
