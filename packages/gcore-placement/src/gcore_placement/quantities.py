"""Checked numbers, and distributions of token lengths.

The functions `check_*` raise PlacementError, which names the field.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from statistics import NormalDist
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gcore_placement.errors import PlacementError, refusal

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]


def check_positive(field: str, value: object) -> None:
    """Check that `value` is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise refusal(field, value, "an integer of at least 1")


def check_above_0(field: str, value: object) -> None:
    """Check that `value` is a finite number above 0."""
    number = float("nan") if isinstance(value, bool) or not isinstance(value, float | int | np.number) else float(value)
    if not 0 < number < np.inf:
        raise refusal(field, value, "a finite number above 0")


def check_share(field: str, value: float) -> None:
    """Check that `value` is a number above 0 and at most 1."""
    check_above_0(field, value)
    if value > 1:
        raise refusal(field, value, "a number above 0, at most 1")


def check_amounts(field: str, values: ArrayLike) -> Floats:
    """Return finite numbers of at least 0 as float64 of the same shape; an error names the first wrong index."""
    try:
        amounts = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise PlacementError(f"{field} is {values!r}; expected an array of numbers ({error})") from error
    wrong = ~np.isfinite(amounts) | (amounts < 0)
    if wrong.any():
        index = np.unravel_index(int(wrong.argmax()), amounts.shape)
        where = ", ".join(str(int(axis)) for axis in index)
        raise refusal(f"{field}[{where}]" if where else field, float(amounts[index]), "a finite number of at least 0")
    return amounts


def check_amount_list(field: str, values: ArrayLike) -> Floats:
    """Return the numbers of `check_amounts` as float64 [num_items]."""
    amounts = check_amounts(field, values)
    if amounts.ndim != 1:
        raise refusal(f"{field}.ndim", amounts.ndim, "1 (one number per item)")
    return amounts


def check_lengths(field: str, values: ArrayLike) -> Floats:
    """Return whole numbers of tokens as float64 of the same shape."""
    lengths = check_amounts(field, values)
    fractions = lengths != np.floor(lengths)
    if fractions.any():
        raise refusal(field, float(lengths[fractions].flat[0]), "whole numbers of tokens")
    return lengths


Positive = Annotated[int, check_positive]
Above0 = Annotated[float, check_above_0]
Share = Annotated[float, check_share]
Amount = Annotated[float, check_amounts]


class Checked:
    """A dataclass whose fields are checked by what their types say: `Positive`, `Above0`, `Share` or `Amount`."""

    def __post_init__(self) -> None:
        for name, check in _checks(type(self)):
            check(name, getattr(self, name))


@cache
def _checks(kind: Any) -> list[tuple[str, Callable[[str, Any], object]]]:
    return [(field.name, check) for field in fields(kind) for check in getattr(field.type, "__metadata__", ())]


_EDGES = np.concatenate([np.linspace(0, 1, 513)[:-1], 1 - 2.0 ** -np.arange(10, 42), [1.0]])
"""Edges of the probabilities that the lengths of a law stand for, finer and finer in the long tail."""
_MIDDLES = (_EDGES[1:] + _EDGES[:-1]) / 2


def normal_quantiles(probabilities: Floats) -> Floats:
    """Return the quantiles of a standard normal variable, of the shape of the probabilities."""
    return np.vectorize(NormalDist().inv_cdf, otypes=[np.float64])(probabilities)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Lengths:
    """A distribution over tokens, as rising values and their weights; use `log_normal` or `recorded`."""

    values: Floats
    """[num_values], rising."""
    edges: Floats
    """[num_values + 1]: value i stands for probabilities from edge i to edge i + 1."""

    @classmethod
    def log_normal(cls, *, median: float, sigma: float, longest: float) -> Self:
        """Return log-normal lengths, cut at `longest`, at least `median`; sigma is that of their logarithm."""
        check_above_0("median", median)
        check_above_0("longest", longest)
        check_amounts("sigma", sigma)
        if median > longest:
            raise refusal("median", median, f"at most longest ({longest})")
        with np.errstate(over="ignore"):  # infinite ones are cut too
            values = median * np.exp(sigma * normal_quantiles(_MIDDLES))
        return cls(values=np.clip(values, 1, longest), edges=_EDGES)

    @classmethod
    def recorded(cls, lengths: ArrayLike) -> Self:
        """Return the distribution of recorded lengths, of which there must be one."""
        values = np.sort(check_amount_list("lengths", lengths))
        if not values.size:
            raise refusal("lengths", [], "at least one length")
        return cls(values=values, edges=np.linspace(0, 1, values.size + 1))

    def __repr__(self) -> str:
        return f"Lengths(mean={self.mean:.1f}, longest={self.longest:.0f})"

    @property
    def mean(self) -> float:
        return float(np.diff(self.edges) @ self.values)

    @property
    def mean_square(self) -> float:
        return float(np.diff(self.edges) @ self.values**2)

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
        cumulated = np.concatenate([[0.0], np.cumsum(np.diff(rising) * (1 - self.edges[:-1]))])
        return Lengths(values=np.interp(_MIDDLES, cumulated / cumulated[-1], rising), edges=_EDGES)

    def most_alive(self, offset: float) -> float:
        """Return the most tokens held per sequence if all start together and leave as they end; offset: of prompts."""
        return float(np.max((1 - self.edges[:-1]) * (offset + self.values)))


def lengths_of(mean: float, longest: float, *, count: float) -> Lengths:
    """Return log-normal lengths of this mean; the longest of `count` of them is about `longest`."""
    mean, longest = max(1.0, mean), max(1.0, longest)
    deviations = NormalDist().inv_cdf(1 - 1 / (count + 1)) if count > 1 else 0.0
    # ln(longest / mean) = sigma * deviations - sigma^2 / 2
    sigma = deviations - math.sqrt(max(0.0, deviations**2 - 2 * math.log(max(1.0, longest / mean))))
    return Lengths.log_normal(median=min(mean * math.exp(-(sigma**2) / 2), longest), sigma=sigma, longest=longest)


def required(mapping: Mapping[str, object], key: str) -> object:
    """Return `mapping[key]`. Raises PlacementError where the key is missing or None."""
    value = mapping.get(key)
    if value is None:
        raise PlacementError(
            f"config has no {key!r}: expected the config.json of a Llama, Mistral, Mixtral, Qwen2, Qwen3, "
            f"Qwen3-MoE, DeepSeek-V2 or DeepSeek-V3 model, got the keys {sorted(mapping)}"
        )
    return value


def gigabytes(size_bytes: float) -> str:
    """Return a size as text."""
    return f"{size_bytes / 1e9:.1f} GB"
