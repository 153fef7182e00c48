"""Which steps stay after a commit."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

_logger = logging.getLogger(__name__)

BestMode: TypeAlias = Literal["max", "min"]


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Steps to keep after a commit.

    Attributes:
        keep: How many of the latest; None for all.
        keep_every: Multiples of this stay for good.
        keep_best: How many of those with the best metrics stay, too.
        best_mode: Whether the highest or the lowest metric is the best.
    """

    keep: int | None = None
    keep_every: int | None = None
    keep_best: int | None = None
    best_mode: BestMode = "max"

    def __post_init__(self) -> None:
        if self.keep is not None and self.keep < 1:
            raise ValueError(f"keep is {self.keep}; expected None (keep all steps) or 1 or more")
        for name, value in (("keep_every", self.keep_every), ("keep_best", self.keep_best)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; expected None or 1 or more")
            if value is not None and self.keep is None:
                raise ValueError(
                    f"{name} is {value} and keep is None, which keeps all steps; expected a keep"
                )
        if self.best_mode not in ("max", "min"):
            raise ValueError(f"best_mode is {self.best_mode!r}; expected 'max' or 'min'")

    def find_superfluous(
        self, steps: list[int], committed: int | None, metric_of: Callable[[int], float | None]
    ) -> list[int]:
        """Return those of `steps` (ascending) that may go, never the one just committed.

        `metric_of` returns the metric of a step, and is called only if the best are kept.
        """
        if self.keep is None:
            return []
        candidates = [step for step in steps if step != committed]
        num_latest = self.keep
        if committed is not None:
            num_latest -= 1
        best = self._best(steps, metric_of)
        superfluous: list[int] = []
        for step in candidates[: max(0, len(candidates) - num_latest)]:
            is_multiple = self.keep_every is not None and step % self.keep_every == 0
            if not is_multiple and step not in best:
                superfluous.append(step)
        return superfluous

    def _best(self, steps: Sequence[int], metric_of: Callable[[int], float | None]) -> list[int]:
        """Return the steps with the best metrics; of equal ones the later."""
        if self.keep_best is None:
            return []
        ranked: list[tuple[float, int]] = []
        for step in steps:
            metric = metric_of(step)
            if metric is None:
                continue
            if self.best_mode == "min":
                metric = -metric
            ranked.append((metric, step))
        ranked.sort(reverse=True)
        return [step for _, step in ranked[: self.keep_best]]


def finite_metric(step: int, metric: float | None) -> float | None:
    """Return a metric as it is stored; None, after a warning, for one that is not finite."""
    if metric is None:
        return None
    value = float(metric)
    if not math.isfinite(value):
        _logger.warning("metric of step %d is %s: the step is none of the best", step, value)
        return None
    return value
