"""A run that had nothing to learn from, and why."""

from collections.abc import Mapping
from typing import Any

from gcore_controller import Modality
from gcore_runs.run_folder import RunFolder, RunWarnings, read_jsonl

SIGNAL = Modality.HAS_SIGNAL


def check_signal(run: RunFolder, warnings: RunWarnings) -> bool:
    """Return whether any step of a run had a learning signal, or none recorded any, and warn otherwise."""
    rows: list[dict[str, Any]] = [row for row in read_jsonl(run.metrics) if SIGNAL in row]
    if not rows or any(row[SIGNAL] for row in rows):
        return True
    message = f"the run trained nothing: no step had anything to learn from: {reason(rows[-1])}"
    warnings.warn(rows[-1]["step"], message, key="no signal in the run")
    return False


def reason(metrics: Mapping[str, float]) -> str:
    """Say why a step had nothing to learn from, by its metrics."""
    low = metrics.get("critic/score/min")
    high = metrics.get("critic/score/max")
    if low is None or high is None:
        return "no response got a score; look at the reward and at its errors in logs/"
    cause = f"every response scored {low:.3g}"
    if low != high:
        cause = "in every group all responses scored alike"
        if not metrics.get("sampling/groups", 1.0):
            cause += ", so none was kept"
    return f"{cause}; look at the reward, at samples/ and at how hard the prompts are"
