"""The part sweep: dynamic against the best split in hindsight, on loads that swing, jump, drift and are noisy."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from statistics import fmean
from typing import Any

from rich.table import Table

from gcore_bench.harness.options import BenchError
from gcore_bench.harness.report import Row, figures_table, verdict_on_all
from gcore_bench.placement.options import PlacementOptions
from gcore_bench.placement.simulations.tables import markdown_table, spread, write_sections
from gcore_bench.placement.simulations.tasks import run_all
from gcore_placement import StrategyRun
from gcore_placement.simulation.scenarios import FAMILY, scenario

AIM_LOSS = 0.02
"""Most that dynamic should lose to the best split, over a whole run."""
JOBS = {37: "7B", 64: "32B", 512: "32B"}
"""Job on so many devices: engines of one device use all of 37."""

_COLUMNS = ("devices", "trace", "loss %", "of generation and rewarding %", "moves")


def run(options: PlacementOptions, *, say: Callable[[str], object]) -> dict[str, Any]:
    """Simulate every trace on every number of devices, with each seed, and write `sweep.md`.

    Returns:
        ``rows``, one a trace and number of devices: by how much longer the run takes under dynamic than under the best
        split (``losses``, one a seed), the same of generation and rewarding alone (``sampling_losses``), and the mean
        number of ``moves``.
    """
    cases, seeds = list(product(options.sweep_devices, options.sweep_traces or FAMILY)), options.sweep_seeds
    for name in options.sweep_traces:
        if name not in FAMILY:
            raise BenchError(f"sweep_traces holds {name!r}; expected names of {', '.join(FAMILY)}")
    tasks = [
        partial(_simulated, *case, seed, options.study_steps or None) for case in cases for seed in range(1, seeds + 1)
    ]
    found = run_all(tasks, processes=options.num_study_processes)
    rows: list[Row] = []
    for first, (devices, trace) in zip(range(0, len(found), seeds), cases, strict=True):
        losses, sampling_losses, moves = zip(*found[first : first + seeds], strict=True)
        row = {"devices": devices, "trace": trace, "losses": losses, "sampling_losses": sampling_losses}
        rows.append(row | {"moves": fmean(moves)})
    section = {"The family": markdown_table(_COLUMNS, _cells(rows)) + "".join(f"\n{line}\n" for line in aims(rows))}
    write_sections(options.study_folder, "sweep.md", section)
    say(f"sweep: {len(found)} runs under dynamic, seeds 1 to {seeds}")
    return {"rows": rows}


def _simulated(devices: int, trace: str, seed: int, num_steps: int | None) -> tuple[float, float, int]:
    """Return the share by which dynamic takes longer, in all and in generation and rewarding, and its moves."""
    simulator = scenario(trace, JOBS[devices], devices, seed=seed, num_steps=num_steps)
    split, dynamic = simulator.best_split(), simulator.dynamic()
    loss, sampling_loss = dynamic.seconds / split.seconds - 1, _sampling_s(dynamic) / _sampling_s(split) - 1
    return loss, sampling_loss, dynamic.num_moves


def _sampling_s(run: StrategyRun) -> float:
    return sum(step.stage_s["generation"] for step in run.steps)


def table(figures: Mapping[str, Any]) -> Table:
    """Return a table with a line for each number of devices and trace."""
    shown = figures_table("seconds under dynamic over those of the best split, less 1", *_COLUMNS[1:])
    for cells in _cells(figures["rows"]):
        shown.add_row(*cells)
    return shown


def _cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    losses = ("losses", "sampling_losses")
    return [
        (
            *(str(row["devices"]), row["trace"]),
            *(spread([100 * loss for loss in row[name]], form="+.1f") for name in losses),
            f"{row['moves']:.0f}",
        )
        for row in rows
    ]


def aims(rows: Sequence[Row]) -> list[str]:
    """Return whether gcore's aim is met."""
    worst = max(rows, key=lambda row: max(row["losses"]))
    missed = [f"{row['trace']} on {row['devices']}" for row in rows if max(row["losses"]) > AIM_LOSS]
    where = f"{max(worst['losses']):+.1%} on {worst['trace']} with {worst['devices']} devices"
    return [
        f"aim: dynamic loses at most {AIM_LOSS:.0%} to the best split on every trace, with every seed; most: {where} "
        f"({verdict_on_all(missed)})"
    ]
