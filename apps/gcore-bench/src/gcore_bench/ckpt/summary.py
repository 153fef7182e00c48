"""From runs to one line a row of the table."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from gcore_bench.ckpt.figures import Run
from gcore_bench.ckpt.parts import LIMITS, PARTS, Part


@dataclass(frozen=True, kw_only=True)
class Line:
    """One contender, or one way of reaching a limit, over all rounds."""

    row: str
    seconds: dict[str, float]
    """Medians by metric; what is missing, it does not do."""
    ratios: dict[str, float]
    """The same over the limit's seconds, or over those of the metric that the part names."""
    peak_extra_bytes: int | None
    """Highest of all rounds."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One part."""

    part: str
    lines: list[Line]
    limits: list[Line]
    best: dict[str, str]
    """For each metric that has a limit, the fastest way of reaching it."""
    failures: dict[str, str]
    """By contender, the first."""
    load: float
    """Mean load of the machine before the runs."""


def summarise(part: str, runs: Sequence[Run]) -> Summary:
    """Medians over all rounds, and their ratios."""
    limits = {row: medians for row, medians in _medians(runs, limits=True).items() if medians}
    best: dict[str, str] = {}
    for row, medians in limits.items():
        for metric, value in medians.items():
            if metric not in best or value < limits[best[metric]][metric]:
                best[metric] = row
    base = {metric: limits[row][metric] for metric, row in best.items()}
    failures: dict[str, str] = {}
    for run in runs:
        if run.failure:
            failures.setdefault(run.contender, run.failure)
    return Summary(
        part=part,
        lines=[_line(row, medians, base, PARTS[part], runs) for row, medians in _medians(runs, limits=False).items()],
        limits=[_line(row, medians, base, PARTS[part], runs) for row, medians in limits.items()],
        best=best,
        failures=failures,
        load=fmean(run.load for run in runs),
    )


def _medians(runs: Sequence[Run], *, limits: bool) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        if (run.contender == LIMITS) is not limits:
            continue
        for row, seconds in (run.rows or {run.contender: {}}).items():
            metrics = found.setdefault(row, {})
            for metric, value in seconds.items():
                metrics.setdefault(metric, []).append(value)
    return {row: {metric: median(values) for metric, values in metrics.items()} for row, metrics in found.items()}


def _line(row: str, medians: dict[str, float], base: dict[str, float], part: Part, runs: Sequence[Run]) -> Line:
    ratios: dict[str, float] = {}
    for column in part.columns:
        below = medians.get(column.ratio_to) if column.ratio_to else base.get(column.metric)
        if below and column.metric in medians:
            ratios[column.metric] = medians[column.metric] / below
    peaks = [run.peak_extra_bytes for run in runs if run.contender == row and run.peak_extra_bytes is not None]
    return Line(row=row, seconds=medians, ratios=ratios, peak_extra_bytes=max(peaks, default=None))
