"""The best evaluation so far, whose policy may be kept, and the end of a run that no longer gets better.

metrics.jsonl alone says which one it is, so a resumed run decides as an uninterrupted one.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from gcore_runs.errors import UserError
from gcore_runs.run_folder import RunFolder, json_object, read_jsonl, write_atomically
from gcore_runs.settings.sections import RLTrainerConfig

EvaluationT = TypeVar("EvaluationT", bound=Mapping[str, Any])

BEST = "val/best"
SINCE_BEST = "val/evaluations_since_best"
"""Metrics of evaluations: the best score until then, and the evaluations after the one that had it."""


def compare_with_best(
    metrics_file: Path, metrics: Mapping[str, float], score: float | None, trainer: RLTrainerConfig
) -> dict[str, float]:
    """Return `BEST` and `SINCE_BEST` of an evaluation, from those of the ones before.

    They are not there if no setting depends on which evaluation is best.

    Args:
        metrics_file: metrics.jsonl.
        metrics: those of the evaluation.
        score: what it is compared by unless trainer.best_metric names one of its metrics; None: it is no best.
        trainer: the settings.

    Raises:
        UserError: there is no such metric. Without a majority vote, because no response had an answer, it is no best.
    """
    if not trainer.early_stopping_patience and trainer.export != "best":
        return {}
    name = trainer.best_metric.removeprefix("-")
    if name and score is not None:
        if name not in metrics and "maj@" not in name:
            names = ", ".join(sorted(metric for metric in metrics if metric.startswith("val/")))
            raise UserError(
                f"trainer.best_metric is {name!r}; expected a metric of evaluations: {names}"
            )
        score = metrics.get(name)
    best: float | None = None
    num_since = -1
    for row in read_jsonl(metrics_file):
        if SINCE_BEST in row:
            best = row.get(BEST)
            num_since = row[SINCE_BEST]
    sign = -1 if trainer.best_metric.startswith("-") else 1
    if score is not None and (best is None or sign * score > sign * best):
        return {BEST: score, SINCE_BEST: 0.0}
    if best is None:
        return {SINCE_BEST: num_since + 1.0}
    return {SINCE_BEST: num_since + 1.0, BEST: best}


def is_best(metrics: Mapping[str, float]) -> bool:
    """Return whether the evaluation that has these metrics is the best so far."""
    return metrics.get(SINCE_BEST) == 0 and BEST in metrics


def keep_best(run: RunFolder, step: int, score: float, save: Callable[[Path], object]) -> None:
    """Let ``save`` write the policy of ``step``, the best so far, in place of the one before."""

    def write(path: Path) -> None:
        save(path / "trained")
        (path / "step.json").write_text(json.dumps({"step": step, "score": score}))

    write_atomically(run.best, write)


def best_step(run: RunFolder) -> int | None:
    """Return the step of the best policy, which is in the folder ``best/trained``; None: none is kept."""
    file = run.best / "step.json"
    if not file.is_file():
        return None
    return json_object(file.read_text(), str(file))["step"]


def exported_evaluation(evaluations: Sequence[EvaluationT], best: int | None) -> EvaluationT:
    """Return the evaluation of the policy that is exported: of the step ``best``, or the last one without it.

    Args:
        evaluations: metrics of one evaluation or more, by step.
        best: see `best_step`.
    """
    for metrics in evaluations:
        if metrics["step"] == best:
            return metrics
    return evaluations[-1]


def is_due(metrics: Mapping[str, float], patience: int) -> bool:
    """Return whether a run ends with the evaluation that has these metrics; ``patience`` 0: never."""
    return 0 < patience <= metrics.get(SINCE_BEST, 0)


def has_ended(metrics_file: Path, patience: int, *, last_step: int) -> bool:
    """Return whether a run that has reached ``last_step`` ended there."""
    rows = [row for row in read_jsonl(metrics_file) if row["step"] == last_step]
    return any(is_due(row, patience) for row in rows)
