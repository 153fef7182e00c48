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
    low, high = (metrics.get(f"critic/score/{name}") for name in ("min", "max"))
    if low is None or high is None:
        return "no response got a score; look at the reward and at its errors in logs/"
    found = f"every response scored {low:.3g}"
    if low != high:
        was_kept = metrics.get("sampling/groups", 1.0)
        found = f"in every group all responses scored alike{'' if was_kept else ', so none was kept'}"
    return f"{found}; look at the reward, at samples/ and at how hard the prompts are"
