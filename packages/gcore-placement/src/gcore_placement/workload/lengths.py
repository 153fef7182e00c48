"""Lengths of prompts and responses as a distribution, from a law or from a record."""

from dataclasses import dataclass
from statistics import NormalDist
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gcore_placement.errors import check_above_0, check_amount_list, check_amounts, refusal

_EDGES = np.concatenate([np.linspace(0, 1, 513)[:-1], 1 - 2.0 ** -np.arange(10, 42), [1.0]])
"""Edges of the probabilities that the lengths of a law stand for, finer and finer in the long tail."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Lengths:
    """A distribution over tokens, as rising values and their weights; use `log_normal` or `recorded`."""

    values: NDArray[np.float64]
    """[num_values], rising."""
    edges: NDArray[np.float64]
    """[num_values + 1]: value i stands for probabilities from edge i to edge i + 1."""

    @classmethod
    def log_normal(cls, *, median: float, sigma: float, longest: float) -> Self:
        """Return log-normal lengths, cut at `longest`; `sigma` is the standard deviation of their logarithm.

        Raises:
            PlacementError: median or longest is not above 0, sigma is negative, or the median is beyond the longest.
        """
        check_above_0("median", median)
        check_above_0("longest", longest)
        check_amounts("sigma", sigma)
        if median > longest:
            raise refusal("median", median, f"at most longest ({longest})")
        deviations = normal_quantiles((_EDGES[1:] + _EDGES[:-1]) / 2)
        with np.errstate(over="ignore"):  # infinite ones are cut too
            values = median * np.exp(sigma * deviations)
        return cls(values=np.clip(values, 1, longest), edges=_EDGES)

    @classmethod
    def recorded(cls, lengths: ArrayLike) -> Self:
        """Return the distribution of recorded lengths, at least one.

        Raises:
            PlacementError: there is none, or one is negative or not finite.
        """
        values = np.sort(check_amount_list("lengths", lengths))
        if not values.size:
            raise refusal("lengths", [], "at least one length")
        return cls(values=values, edges=np.linspace(0, 1, values.size + 1))

    def __repr__(self) -> str:
        return f"Lengths(mean={self.mean:.1f}, longest={self.longest:.0f})"

    @property
    def weights(self) -> NDArray[np.float64]:
        """[num_values], of sum 1."""
        return np.diff(self.edges)

    @property
    def mean(self) -> float:
        return float(self.weights @ self.values)

    @property
    def mean_square(self) -> float:
        return float(self.weights @ self.values**2)

    @property
    def longest(self) -> float:
        return float(self.values[-1])

    def expected_longest(self, count: float) -> float:
        """Return the mean of the longest of ``count`` draws."""
        return float(self.values @ np.diff(self.edges ** max(1.0, count)))

    def cut(self, longest: float) -> "Lengths":
        """Return the lengths cut at `longest`."""
        return Lengths(values=np.minimum(self.values, longest), edges=self.edges)

    def remaining(self) -> "Lengths":
        """Return the remaining lengths of sequences at a random moment of steady work.

        Their density is (1 - F) / mean (the renewal equation's residual life). Only its values' grid is coarser.
        """
        rising = np.concatenate([[0.0], self.values])
        alive = 1 - self.edges[:-1]
        cumulated = np.concatenate([[0.0], np.cumsum(np.diff(rising) * alive)])
        middles = (_EDGES[1:] + _EDGES[:-1]) / 2
        return Lengths(values=np.interp(middles, cumulated / cumulated[-1], rising), edges=_EDGES)

    def most_alive(self, offset: float) -> float:
        """Return the most tokens held per sequence if all start together and leave as they end; offset: of prompts."""
        alive = 1 - self.edges[:-1]
        return float(np.max(alive * (offset + self.values)))


def normal_quantiles(probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the quantiles of a standard normal variable, of the shape of the probabilities."""
    return np.vectorize(NormalDist().inv_cdf, otypes=[np.float64])(probabilities)
