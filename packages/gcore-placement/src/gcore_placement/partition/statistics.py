"""Robust statistics of few values, and means over normal variables."""

import numpy as np

from gcore_placement.quantities import Floats

NORMAL_MEDIAN = 0.6745
"""Median of the absolute value of a standard normal variable."""
NORMAL_NODES = np.array([-np.sqrt(3), 0.0, np.sqrt(3)])
NORMAL_WEIGHTS = np.array([1, 4, 1]) / 6
"""Gauss-Hermite quadrature for the mean over a standard normal variable."""


def weighted_median(values: Floats, weights: Floats) -> float:
    """Return the weighted median; if it lies between two values, their mean."""
    order = np.argsort(values, kind="stable")
    values = values[order]
    total = np.cumsum(weights[order])
    half = total[-1] / 2
    low = np.searchsorted(total, half * (1 - 1e-9))
    high = np.searchsorted(total, half * (1 + 1e-9), side="right")
    return float(values[low] + values[min(high, len(values) - 1)]) / 2


def median_line(at: Floats, values: Floats, weights: Floats) -> tuple[float, float]:
    """Return the slope of a line through values at ascending places, and how far it misses them in the median.

    The median of the slopes between all pairs, those far apart weighing most (Theil, 1950; Sen, JASA 63, 1968).
    """
    first, second = np.triu_indices(len(at), 1)
    apart = at[second] - at[first]
    slope = weighted_median((values[second] - values[first]) / apart, apart)
    rest = values - slope * at
    return slope, weighted_median(np.abs(rest - weighted_median(rest, weights)), weights)


def expected_max(values_PRK: Floats, weights_K: Floats) -> Floats:
    """Return the mean of the largest of R independent variables, each with K values of these weights: [P].

    It is the sum of all values, each times what the product of the R distributions rises by there.
    """
    all_PV = values_PRK.reshape(len(values_PRK), -1)
    order = np.argsort(all_PV, axis=1, kind="stable")
    rises = np.kron(np.eye(values_PRK.shape[1]), weights_K[:, None])
    """[R * K, R], what each value adds to the distribution of its variable."""
    below = np.cumsum(rises[order], axis=1).prod(axis=2)
    return np.einsum(
        "pv,pv->p", np.take_along_axis(all_PV, order, axis=1), np.diff(below, axis=1, prepend=0.0)
    )
