"""What a process is told, and what runs of it amount to."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What one process is to do."""

    part: str
    contender: str
    folder: str
    """With the model and the samples; scratch of the processes too."""
    options: dict[str, Any]
    """Of the command, as plain values."""
    rank: int = 0
    world_size: int = 1
    batches: list[list[int]] = field(default_factory=list[list[int]])
    """Samples of each micro-batch, where the parent has chosen them."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One contender in one round."""

    part: str
    contender: str
    round: int
    load: float
    """Runnable processes on the machine, averaged over the minute before the run."""
    rows: dict[str, dict[str, float]]
    """Figures by row of the table: of several ranks the highest, ``total_cpu_s`` their sum."""
