"""Medians over runs, and ratios of figures that were measured in the same round."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from gcore_bench.harness.rounds import Figures, Run

Rows = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One part: medians over all rounds by row and metric; peaks are the highest."""

    part: str
    rows: dict[str, Figures]
    load: float
    """Mean load of the machine before the runs."""


def summarise(part: str, runs: Sequence[Run]) -> Summary:
    """Take medians over all rounds, and the highest of every ``peak_bytes``."""
    found: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        for row, figures in run.rows.items():
            for metric, value in figures.items():
                found.setdefault(row, {}).setdefault(metric, []).append(value)
    rows = {
        row: {metric: (max if metric == "peak_bytes" else median)(values) for metric, values in metrics.items()}
        for row, metrics in found.items()
    }
    return Summary(part=part, rows=rows, load=fmean(run.load for run in runs))


def paired_ratio(
    runs: Sequence[Run], row: str, base: str, metric: str, *, base_metric: str | None = None
) -> float | None:
    """Return the median over rounds of the row's figure over the base's; None where the base was not measured."""
    values = {(run.round, name): figures for run in runs for name, figures in run.rows.items()}
    ratios = [
        figures[metric] / values[number, base][base_metric or metric]
        for (number, name), figures in values.items()
        if name == row and (number, base) in values
    ]
    return median(ratios) if ratios else None
