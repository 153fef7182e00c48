"""The figures as a person reads them."""

from collections.abc import Sequence

from rich.table import Table

from gcore_bench.placement.balancer import PRECISION, BalancerRow
from gcore_bench.tables import figures_table

JUDGED_SAMPLES = 100_000
"""Sequences from which the speed is judged."""

AIM_FASTER = 20


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


def aims(rows: Sequence[BalancerRow]) -> list[str]:
    """Whether gcore's aims are met, where verl was asked."""
    asked = [row for row in rows if row.is_as_even is not None]
    if not asked:
        return []
    worse = [f"{row.samples:,} over {row.ranks} ({row.lengths}, {row.counts})" for row in asked if not row.is_as_even]
    even = f"not met: {'; '.join(worse)}" if worse else f"met in all {len(asked)}"
    lines = [f"aim: as even as verl's or more, to {PRECISION:.0e} of the ratio ({even})"]
    for counts in ("free", "equal"):
        speeds = [row.times_faster for row in asked if row.samples >= JUDGED_SAMPLES and row.counts == counts]
        found = [speed for speed in speeds if speed is not None]
        if found:
            verdict = "met" if min(found) >= AIM_FASTER else "not met"
            lines.append(
                f"aim: {AIM_FASTER} times as fast as verl from {JUDGED_SAMPLES:,} sequences on, {counts} counts: "
                f"{min(found):.1f} to {max(found):.1f} times ({verdict})"
            )
    return lines
