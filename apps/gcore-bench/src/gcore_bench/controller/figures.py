"""What a contender's steps come to."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

WARMUP_STEPS = 2
"""Of every contender in every round, in which buffers, connections and mapped pages are made."""


@dataclass(frozen=True, kw_only=True)
class ControlFigures:
    """One control process: when each step began and ended on the machine's clock, and how large the process was."""

    steps: list[tuple[float, float]]
    idle_bytes: int
    peak_bytes: int


def step_row(processes: Sequence[ControlFigures]) -> dict[str, float]:
    """Of all control processes of a contender: a step lasts from the first to begin it to the last to end it.

    The first steps do not count, but their memory does.
    """
    steps = zip(*(process.steps[WARMUP_STEPS:] for process in processes), strict=True)
    seconds = [max(end for _, end in step) - min(start for start, _ in step) for step in steps]
    return {
        "step_s": median(seconds),
        "idle_bytes": float(max(process.idle_bytes for process in processes)),
        "peak_bytes": float(max(process.peak_bytes for process in processes)),
    }
