"""Constants of laws, fitted to measurements."""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

Constants = Mapping[str, float]
"""Values above 0 by name."""


def fit_constants(
    start: Constants,
    compute_residuals: Callable[[Constants], NDArray[np.float64]],
    upper_bounds: Constants,
) -> dict[str, float]:
    """Return the constants with the least squares of the residuals, searched over their logarithms.

    Args:
        start: where the search starts, for each constant to fit.
        compute_residuals: log(predicted / measured) for given constants.
        upper_bounds: largest values; constants without one have no limit.

    Example:
        >>> fitted = fit_constants({"rate": 1.0}, lambda c: np.log(np.array([c["rate"] / 2])), {})
        >>> round(fitted["rate"], 6)
        2.0
    """
    names = list(start)

    def compute(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        return compute_residuals(dict(zip(names, np.exp(logs).tolist(), strict=True)))

    first = np.log(list(start.values()))
    upper = np.log([upper_bounds.get(name, np.inf) for name in names])
    solution = least_squares(compute, first, bounds=(-np.inf, upper))
    return dict(zip(names, np.exp(solution.x).tolist(), strict=True))
