"""Contenders, tables and aims of the bench of images."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from gcore_bench.harness.report import figures_table, verdict
from gcore_placement import Comparison

STAGES = ("gen", "reward", "prepare", "train", "sync")

PLAIN = ("plain loop, 1 thread", "plain loop, 2 threads")
LIMIT = "two plain loops at once"
"""Two independent loops of one thread each: the most that two cores can do."""
GCORE: dict[str, tuple[str, ...]] = {
    "gcore, 1 controller": ("--threads", "1"),
    "gcore, 2 controllers, 2 engines": ("--threads", "1", "--controllers", "2", "--rollout.num-processes", "2"),
    "gcore on Ray, 2 controllers, 2 engines, 2 ranks": (
        *("--runtime", "ray", "--threads", "2", "--controllers", "2", "--trainer.num-processes", "2"),
    ),
}
"""Options in addition to those of the embedded run."""

AIM = 1.5


@dataclass(frozen=True, kw_only=True)
class LoopRow:
    """A contender: medians over all its measured steps."""

    name: str
    step_s: float
    images_per_s: float
    stage_s: dict[str, float]
    load: float
    """Highest load of the machine as its runs started."""


def loop_table(rows: Sequence[LoopRow]) -> Table:
    """Return a table with a line for each contender."""
    shown = figures_table("Flow-GRPO-Fast, seconds of a step", "images/s", "step s", *(f"{s} s" for s in STAGES))
    for row in rows:
        stages = (f"{row.stage_s[stage]:.3f}" if row.stage_s[stage] else "-" for stage in STAGES)
        shown.add_row(row.name, f"{row.images_per_s:.1f}", f"{row.step_s:.3f}", *stages)
    return shown


def loop_aims(rows: Sequence[LoopRow]) -> list[str]:
    """Return the limit of the machine, and whether gcore's aim is met."""
    best = {
        names: max((row for row in rows if row.name in names), key=lambda row: row.images_per_s)
        for names in (PLAIN, tuple(GCORE)[1:])
    }
    plain, gcore = best.values()
    [limit] = [row for row in rows if row.name == LIMIT]
    ratio = gcore.images_per_s / plain.images_per_s
    return [
        f"two plain loops at once make {limit.images_per_s / plain.images_per_s:.2f} times the images of one: the most "
        "that the cores can do",
        f"aim: with 2 controllers at least {AIM} times the images of a plain loop: {ratio:.2f} times "
        f"({gcore.name}, against {plain.name}; {verdict(ratio >= AIM)})",
    ]


def simulation_table(comparisons: Sequence[Comparison]) -> Table:
    """Return a table with a line for each strategy on each trace."""
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
                f"{comparison['colocated'].seconds / run.seconds:.2f}",
                f"{comparison['split'].seconds / run.seconds:.2f}",
                str(run.num_moves),
                f"{100 * run.idle_share:.1f}",
            )
    return shown
