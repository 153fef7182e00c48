"""The figures as a person reads them."""

from collections.abc import Sequence
from typing import get_args

from rich.table import Table

from gcore_bench.harness.tables import figures_table
from gcore_bench.placement.balancer import PRECISION, BalancerRow
from gcore_bench.placement.options import Counts
from gcore_bench.placement.planner.rounds import PlannerFigures

JUDGED_SAMPLES = 100_000
"""Sequences from which the speed is judged."""

AIM_FASTER = 20

AIM_SECONDS, AIM_BYTES = 0.20, 0.15
"""Largest errors of predicted seconds and peak memory, as shares of the measurements."""


def balancer_table(rows: Sequence[BalancerRow]) -> Table:
    """A line for each batch and number of ranks."""
    columns = ("samples", "ranks", "counts", "ours - 1", "verl - 1", "random - 1", "ours s", "verl s", "faster")
    shown = figures_table("work of the busiest rank over the mean, less 1; CPU seconds", *columns)
    for row in rows:
        shown.add_row(
            row.lengths,
            f"{row.samples:,}",
            str(row.ranks),
            row.counts,
            f"{row.ours - 1:.1e}",
            "-" if row.verl is None else f"{row.verl - 1:.1e}",
            f"{row.random - 1:.1e}",
            f"{row.ours_s:.3f}",
            "-" if row.verl_s is None else f"{row.verl_s:.2f}",
            "-" if row.times_faster is None else f"{row.times_faster:.1f}x",
        )
    return shown


def balancer_aims(rows: Sequence[BalancerRow]) -> list[str]:
    """Return whether gcore's aims are met, where verl was measured."""
    asked = [row for row in rows if row.is_as_even is not None]
    if not asked:
        return []
    worse = [f"{row.samples:,} over {row.ranks} ({row.lengths}, {row.counts})" for row in asked if not row.is_as_even]
    even = f"not met: {'; '.join(worse)}" if worse else f"met in all {len(asked)}"
    lines = [f"aim: as even as verl's or more, to {PRECISION:.0e} of the ratio ({even})"]
    for counts in get_args(Counts):
        speeds = [row.times_faster for row in asked if row.samples >= JUDGED_SAMPLES and row.counts == counts]
        found = [speed for speed in speeds if speed is not None]
        if found:
            verdict = "met" if min(found) >= AIM_FASTER else "not met"
            lines.append(
                f"aim: {AIM_FASTER} times as fast as verl from {JUDGED_SAMPLES:,} sequences on, {counts} counts: "
                f"{min(found):.1f} to {max(found):.1f} times ({verdict})"
            )
    return lines


def planner_table(figures: PlannerFigures) -> Table:
    """A line for each run, those that the laws are fitted to first."""
    columns = ("", "measured s", "predicted s", "off", "measured MB", "predicted MB", "off")
    shown = figures_table("small runs, and the predictions of the planner", *columns)
    for row in figures.rows:
        memory = ("", "", "")
        if row.measured_bytes is not None and row.predicted_bytes is not None and row.bytes_off is not None:
            memory = (f"{row.measured_bytes / 1e6:,.0f}", f"{row.predicted_bytes / 1e6:,.0f}", f"{row.bytes_off:+.0%}")
        shown.add_row(
            row.name,
            "held out" if row.is_held_out else "fitted to",
            f"{row.measured_s:.3f}",
            f"{row.predicted_s:.3f}",
            f"{row.seconds_off:+.0%}",
            *memory,
        )
    shown.caption = f"seconds: the median of the rounds; load of the machine up to {figures.load:.1f}"
    return shown


def planner_aims(figures: PlannerFigures) -> list[str]:
    """Return whether gcore's aims are met by the held-out runs."""
    held_out = [row for row in figures.rows if row.is_held_out]
    return [
        _within("step time", AIM_SECONDS, {row.name: row.seconds_off for row in held_out}),
        _within("peak memory", AIM_BYTES, {row.name: row.bytes_off for row in held_out if row.bytes_off is not None}),
    ]


def _within(what: str, aim: float, off: dict[str, float]) -> str:
    worse = [f"{name} {value:+.1%}" for name, value in off.items() if not abs(value) <= aim]
    verdict = f"not met: {'; '.join(worse)}" if worse else f"met in all {len(off)}"
    span = f"{min(off.values()):+.1%} to {max(off.values()):+.1%}"
    return f"aim: predicted {what} of held-out runs within {aim:.0%}: {span} ({verdict})"
