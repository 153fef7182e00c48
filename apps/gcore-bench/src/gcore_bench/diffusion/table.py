"""The bench of images as a person reads it."""

from collections.abc import Sequence

from rich.table import Table

from gcore_bench.diffusion.loop import GCORE, LIMIT, PLAIN, STAGES, LoopRow
from gcore_bench.tables import figures_table
from gcore_placement import Comparison

AIM = 1.5


def loop_table(rows: Sequence[LoopRow]) -> Table:
    """A line for each contender."""
    shown = figures_table("Flow-GRPO-Fast, seconds of a step", "images/s", "step s", *(f"{s} s" for s in STAGES))
    for row in rows:
        stages = (f"{row.stage_s[stage]:.3f}" if row.stage_s[stage] else "-" for stage in STAGES)
        shown.add_row(row.name, f"{row.images_per_s:.1f}", f"{row.step_s:.3f}", *stages)
    return shown


def loop_aims(rows: Sequence[LoopRow]) -> list[str]:
    """Whether gcore's aim is met."""
    best = {
        names: max((row for row in rows if row.name in names), key=lambda row: row.images_per_s)
        for names in (PLAIN, tuple(GCORE)[1:])
    }
    plain, gcore = best.values()
    [limit] = [row for row in rows if row.name == LIMIT]
    ratio = gcore.images_per_s / plain.images_per_s
    return [
        f"two plain loops at once make {limit.images_per_s / plain.images_per_s:.2f} times the images of one: what the "
        "cores give at best",
        f"aim: with 2 controllers at least {AIM} times the images of a plain loop: {ratio:.2f} times "
        f"({gcore.name}, beside {plain.name}; {'met' if ratio >= AIM else 'not met'})",
    ]


def simulation_table(comparisons: Sequence[Comparison]) -> Table:
    """A line for each strategy on each trace."""
    shown = figures_table(
        f"simulated: {comparisons[0].num_devices} devices, samplers and a judge",
        "step s",
        "x colocated",
        "x best split",
        "moves",
        "idle %",
    )
    for comparison in comparisons:
        for run in comparison.runs:
            shown.add_row(
                f"{comparison.name}: {run.strategy}",
                f"{run.step_s:.1f}",
                f"{comparison.colocated.seconds / run.seconds:.2f}",
                f"{comparison.best_split.seconds / run.seconds:.2f}",
                str(run.num_moves),
                f"{100 * run.idle_share:.1f}",
            )
    return shown
