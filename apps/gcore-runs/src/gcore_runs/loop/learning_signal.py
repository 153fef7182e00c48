"""Reports of steps without a learning signal, and of runs that had no other steps."""

from collections.abc import Mapping
from typing import Any

from gcore_controller import Modality
from gcore_runs.run_folder import RunFolder, read_jsonl
from gcore_runs.run_warnings import RunWarnings

_SIGNAL = Modality.HAS_SIGNAL
_PATIENCE = 5
"""Number of consecutive steps without a signal that is reported."""


class LearningSignal:
    """Warn when several consecutive steps had nothing to learn from."""

    def __init__(self, warnings: RunWarnings) -> None:
        self._warnings = warnings
        self._num_idle = 0

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take in a step's metrics."""
        if metrics.get(_SIGNAL, 1.0):
            self._num_idle = 0
            return
        self._num_idle += 1
        if self._num_idle % _PATIENCE == 0:
            message = f"the last {_PATIENCE} steps had nothing to learn from: {_reason(metrics)}"
            self._warnings.warn(step, message, key=_SIGNAL)


def check_signal(run: RunFolder, warnings: RunWarnings) -> bool:
    """Return whether any step of a run had a learning signal, and warn if none had.

    A run without recorded steps, or of a release that did not record signals, counts as one that had.
    """
    rows: list[dict[str, Any]] = [row for row in read_jsonl(run.metrics) if _SIGNAL in row]
    if not rows or any(row[_SIGNAL] for row in rows):
        return True
    message = f"the run trained nothing: no step had anything to learn from: {_reason(rows[-1])}"
    warnings.warn(rows[-1]["step"], message, key="no signal in the run")
    return False


def _reason(metrics: Mapping[str, float]) -> str:
    look = "look at the reward, at samples/ and at how hard the prompts are"
    low, high = (metrics.get(f"critic/score/{name}") for name in ("min", "max"))
    if low is None or high is None:
        return "no response got a score; look at the reward and at its errors in logs/"
    if low == high:
        return f"every response scored {low:.3g}; {look}"
    if not metrics.get("sampling/groups", 1.0):
        return f"in every group all responses scored alike, so none was kept; {look}"
    return f"in every group all responses scored alike; {look}"
