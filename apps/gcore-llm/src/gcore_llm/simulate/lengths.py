"""Lengths of responses from what a run tells of them: their number, mean and maximum, and how many were cut.

They are taken to be log-normal. What generation takes depends above all on the longest response and on all tokens
together, and these two are met exactly, step by step.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from gcore_llm.simulate.config import LengthConfig

_INVERSE = np.vectorize(NormalDist().inv_cdf, otypes=[np.float64])
_NUM_QUANTILES = 4096
_MAX_SIGMA = 3.0


@dataclass(frozen=True, kw_only=True)
class SampledLengths:
    """Of one step's responses, in tokens."""

    number: int
    mean: float
    longest: int
    num_cut: int
    """Responses that were cut at ``limit``."""
    limit: int
    """Longest that they may be."""


def fit_lengths(steps: Sequence[SampledLengths]) -> LengthConfig:
    """Log-normal lengths whose mean, cut at the limit, is that of all steps.

    Where a step cuts more than one response on average, their share is as measured, too; else the mean of the steps'
    maxima.

    Raises:
        ValueError: no step has responses.
    """
    steps = [step for step in steps if step.number]
    if not steps:
        raise ValueError("steps have no responses: one or more are needed")
    number = np.array([step.number for step in steps])
    mean = float(np.average([step.mean for step in steps], weights=number))
    longest, num_cut = (float(np.mean([getattr(s, name) for s in steps])) for name in ("longest", "num_cut"))
    limit, size = steps[0].limit, float(number.mean())
    u = (np.arange(_NUM_QUANTILES) + 0.5) / _NUM_QUANTILES
    z = _INVERSE(u)
    # The maximum of N draws has the quantiles of one, at the N-th root.
    z_top = _INVERSE(u ** (1 / size))

    def median(sigma: float) -> float:
        return _root(lambda m: float(_cut(m * np.exp(sigma * z), limit).mean()), mean, highest=float(limit))

    def spread(sigma: float) -> float:
        if num_cut > 1:
            return float((median(sigma) * np.exp(sigma * z) >= limit - 0.5).mean())
        return float(_cut(median(sigma) * np.exp(sigma * z_top), limit).mean())

    sigma = _root(spread, num_cut / size if num_cut > 1 else longest, highest=_MAX_SIGMA)
    return LengthConfig(median=median(sigma), sigma=sigma)


def step_lengths(step: SampledLengths, *, sigma: float) -> NDArray[np.int64]:
    """[number] lengths, ascending, with the step's sum and maximum; between these they are quantiles of a log-normal.

    Args:
        sigma: standard deviation of the lengths' logarithm.
    """
    num_top = min(step.number, max(1, step.num_cut))
    rest = step.number - num_top
    top = np.full(num_top, step.longest)
    if not rest:
        return top
    total = min(max(round(step.number * step.mean) - num_top * step.longest, rest), rest * step.longest)
    shape = np.exp(sigma * _INVERSE((np.arange(rest) + 0.5) / step.number))
    scale = _root(lambda s: float(_cut(s * shape, step.longest).sum()), total, highest=step.longest / shape[0])
    exact = _cut(scale * shape, step.longest)
    lengths = np.floor(exact).astype(np.int64)
    # What rounding down has taken away goes to those that lost most.
    lost = np.argsort(lengths - exact, kind="stable")
    lengths[lost[: total - int(lengths.sum())]] += 1
    return np.concatenate([np.sort(lengths), top])


def _cut(lengths: NDArray[np.float64], limit: int) -> NDArray[np.float64]:
    return np.clip(lengths, 1, limit)


def _root(function: Callable[[float], float], value: float, *, highest: float) -> float:
    """Where a function that does not fall has a value, between 0 and ``highest``: the nearer end, if it has it not."""
    low, high = 0.0, highest
    while high - low > 1e-9 * highest and not math.isclose(low, high):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < value else (low, middle)
    return (low + high) / 2
