"""Ratios of figures that were taken in turn."""

from collections.abc import Mapping, Sequence
from statistics import median

from gcore_bench.trainer.figures import Run


def paired_ratio(
    runs: Sequence[Run], row: str, base: str, metric: str, *, base_metric: str | None = None
) -> float | None:
    """Median over the rounds of the row's figure over the base's in the same round; None: the base was not measured."""
    values = {(run.round, name): figures for run in runs for name, figures in run.rows.items()}
    ratios = [
        figures[metric] / values[number, base][base_metric or metric]
        for (number, name), figures in values.items()
        if name == row and (number, base) in values
    ]
    return median(ratios) if ratios else None


def ratios(part: str, runs: Sequence[Run], bases: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """Of each row to its base, by metric: over the base's metric of the same name, of new weights over its seconds."""
    found: dict[str, dict[str, float]] = {}
    for row, base in bases.items():
        values = {
            metric: paired_ratio(runs, row, base, metric, base_metric=base_metric)
            for metric, base_metric in _OVER[part].items()
        }
        found[row] = {metric: value for metric, value in values.items() if value is not None}
    return found


_OVER = {
    "generation": {"tokens_per_s": "tokens_per_s", "cpu_s": "cpu_s"},
    "sync": dict.fromkeys(("wall_s", "busy_s", "no_token_s", "copy_s"), "wall_s"),
    "forms": {"wall_s": "wall_s"},
    "sandbox": {name: name for name in ("alone_ms", "cpu_ms", "together_ms")},
}
