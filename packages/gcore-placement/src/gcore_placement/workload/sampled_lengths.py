"""Lengths of responses from a run's metrics of a step: their number, mean and maximum, and how many were cut.

Lengths are assumed to be log-normal. The time of generation depends above all on the longest response and on all tokens
together, and these two are met exactly, step by step.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from gcore_placement.errors import refusal
from gcore_placement.workload.lengths import normal_quantiles

_NUM_QUANTILES = 4096
_MAX_SIGMA = 3.0


@dataclass(frozen=True, kw_only=True)
class SampledLengths:
    """The response lengths of one step, in tokens."""

    number: int
    mean: float
    longest: int
    num_cut: int
    """Responses that were cut at ``limit``."""
    limit: int
    """Longest response that the run allows."""

    @classmethod
    def of_metrics(cls, row: Mapping[str, float], *, n: int, limit: int) -> Self:
        """Read a step's line of a gcore-llm run's `metrics.jsonl`; ``n`` is the number of responses to a prompt."""
        mean = row.get("response_length/mean", 0.0)
        found = row["perf/total_num_tokens"] / (mean + row["prompt_length/mean"]) if mean else 0.0
        number = round(found / n) * n
        return cls(
            number=number,
            mean=mean,
            longest=max(1, int(row.get("response_length/max", 0))),
            num_cut=round(row.get("response_length/clip_ratio", 0.0) * number),
            limit=limit,
        )


def fit_lengths(steps: Sequence[SampledLengths]) -> tuple[float, float]:
    """Fit one log-normal distribution to the lengths of all steps.

    Its mean, cut at the limit, is that of all steps. Where a step cuts more than one response on average, so is the
    share that is cut; otherwise the mean of the steps' maxima is met.

    Returns:
        Median, and standard deviation of the logarithm.

    Raises:
        PlacementError: no step has responses.
    """
    steps = [step for step in steps if step.number]
    if not steps:
        raise refusal("steps", [], "at least one step with responses")
    number = np.array([step.number for step in steps])
    mean = float(np.average([step.mean for step in steps], weights=number))
    longest, num_cut = (float(np.mean([getattr(s, name) for s in steps])) for name in ("longest", "num_cut"))
    limit, size = steps[0].limit, float(number.mean())
    u = (np.arange(_NUM_QUANTILES) + 0.5) / _NUM_QUANTILES
    z = normal_quantiles(u)
    # The maximum of N draws has the quantiles of one draw, at the N-th root.
    z_top = normal_quantiles(u ** (1 / size))

    def median(sigma: float) -> float:
        return _root(lambda m: float(_cut(m * np.exp(sigma * z), limit).mean()), mean, highest=float(limit))

    def spread(sigma: float) -> float:
        if num_cut > 1:
            return float((median(sigma) * np.exp(sigma * z) >= limit - 0.5).mean())
        return float(_cut(median(sigma) * np.exp(sigma * z_top), limit).mean())

    sigma = _root(spread, num_cut / size if num_cut > 1 else longest, highest=_MAX_SIGMA)
    return median(sigma), sigma


def step_lengths(step: SampledLengths, *, sigma: float) -> NDArray[np.int64]:
    """Return [number] ascending lengths with the step's sum and maximum; the others are quantiles of a log-normal.

    Args:
        sigma: standard deviation of the lengths' logarithm.
    """
    num_top = min(step.number, max(1, step.num_cut))
    rest = step.number - num_top
    top = np.full(num_top, step.longest)
    if not rest:
        return top
    total = min(max(round(step.number * step.mean) - num_top * step.longest, rest), rest * step.longest)
    shape = np.exp(sigma * normal_quantiles((np.arange(rest) + 0.5) / step.number))
    scale = _root(lambda s: float(_cut(s * shape, step.longest).sum()), total, highest=step.longest / shape[0])
    exact = _cut(scale * shape, step.longest)
    lengths = np.floor(exact).astype(np.int64)
    # The tokens that rounding down has removed go to the lengths that lost most.
    lost = np.argsort(lengths - exact, kind="stable")
    lengths[lost[: total - int(lengths.sum())]] += 1
    return np.concatenate([np.sort(lengths), top])


def _cut(lengths: NDArray[np.float64], limit: int) -> NDArray[np.float64]:
    return np.clip(lengths, 1, limit)


def _root(function: Callable[[float], float], value: float, *, highest: float) -> float:
    """Return where a non-decreasing function has a value, between 0 and ``highest``; the nearer end if nowhere."""
    low, high = 0.0, highest
    while high - low > 1e-9 * highest and not math.isclose(low, high):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < value else (low, middle)
    return (low + high) / 2
