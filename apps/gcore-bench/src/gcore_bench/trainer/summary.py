"""From runs to one line a row of the table."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from gcore_bench.trainer.figures import Run


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One part: medians over all rounds by row and metric; peaks are the highest."""

    part: str
    rows: dict[str, dict[str, float]]
    load: float
    """Mean load of the machine before the runs."""


def summarise(part: str, runs: Sequence[Run]) -> Summary:
    """Medians over all rounds."""
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
