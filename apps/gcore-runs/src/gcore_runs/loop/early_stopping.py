"""Early stopping: a run ends after some evaluations in a row without improvement; metrics.jsonl has their number."""

from collections.abc import Mapping
from pathlib import Path

from gcore_runs.run_folder import read_jsonl

BEST, SINCE_BEST = "val/best", "val/evaluations_since_best"
"""Metrics of evaluations: the best score until then, and the evaluations after the one that had it."""


def compared(metrics_file: Path, score: float | None) -> dict[str, float]:
    """Return `BEST` and `SINCE_BEST` of an evaluation, from those of the ones before; ``score`` None is no best."""
    earlier = [row for row in read_jsonl(metrics_file) if SINCE_BEST in row]
    best, num_since = (earlier[-1].get(BEST), earlier[-1][SINCE_BEST]) if earlier else (None, -1)
    if score is not None and (best is None or score > best):
        return {BEST: score, SINCE_BEST: 0.0}
    return {SINCE_BEST: num_since + 1.0, **({} if best is None else {BEST: best})}


def is_due(metrics: Mapping[str, float], patience: int) -> bool:
    """Return whether a run ends with the evaluation that has these metrics; ``patience`` 0: never."""
    return 0 < patience <= metrics.get(SINCE_BEST, 0)


def has_ended(metrics_file: Path, patience: int, *, last_step: int) -> bool:
    """Return whether a run that has reached ``last_step`` ended there."""
    rows = [row for row in read_jsonl(metrics_file) if row["step"] == last_step]
    return any(is_due(row, patience) for row in rows)
