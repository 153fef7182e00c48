"""Warnings of a run: one line on the screen, and a list for the report."""

from gcore_rollout import Failure
from gcore_runs.display import Display
from gcore_runs.run_folder import RunFolder, append_json, read_jsonl


class RunWarnings:
    """Writes warnings of a run to `warnings.jsonl`, and shows the first one of each key on the screen."""

    def __init__(self, run: RunFolder, display: Display) -> None:
        self._path = run.warnings
        self._display = display
        self._shown: set[str] = set()
        self._recorded = {(row["step"], row["key"]) for row in read_jsonl(run.warnings)}

    def warn(self, step: int, message: str, *, key: str, count: int = 1) -> None:
        """Record a warning, once for each step and key.

        Args:
            step: where it occurred.
            message: one sentence, without a full stop.
            key: of warnings that are the same.
            count: how many there are in the step.
        """
        if (step, key) not in self._recorded:
            self._recorded.add((step, key))
            append_json(self._path, {"step": step, "key": key, "message": message, "count": count})
        if key not in self._shown:
            self._shown.add(key)
            times = f" ({count} times)" if count > 1 else ""
            self._display.say(f"warning: step {step}: {message}{times}")

    def rewards_failed(self, step: int, failures: list[Failure]) -> None:
        """Record rewards that failed and were dropped."""
        for failure in failures:
            message = (
                f"a reward failed and its group was dropped: {failure.kind}: {failure.message or 'no message'}; "
                f"the traceback is in {self._path.parent / 'logs'}"
            )
            self.warn(step, message, key=failure.kind, count=failure.count)
