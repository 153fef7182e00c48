"""The assignment of items to parts, and exchanges between parts."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NOTHING = -1
"""Marks an exchange that gives an item away and takes none back."""


def sum_per_part(part_of: NDArray[np.intp], amounts: NDArray[np.float64], num_parts: int) -> NDArray[np.float64]:
    """Return the summed amounts of the items in each part: [num_parts]."""
    return np.asarray(np.bincount(part_of, weights=amounts, minlength=num_parts), dtype=np.float64)


def by_part(part_of: NDArray[np.intp], num_parts: int) -> NDArray[np.intp]:
    """Return the items sorted by their part, ties by index."""
    # Two bytes are sorted by radix, many times as fast.
    keys = part_of.astype(np.uint16) if num_parts <= 1 << 16 else part_of
    return np.argsort(keys, kind="stable")


@dataclass(kw_only=True)
class Assignment:
    """Items in parts, mutable: `apply` keeps `part_of`, `loads` and `filled` in step.

    Attributes:
        costs: [num_items], falling, in [0, 1], which lets a part's number and a cost share one sort key.
        weights: [num_items], what an item takes of its part's capacity.
        capacity: bound on the summed weights of each part.
        part_of: [num_items], the part of each item.
        loads: [num_parts], the summed costs of each part.
        filled: [num_parts], the summed weights of each part.
    """

    costs: NDArray[np.float64]
    weights: NDArray[np.float64]
    capacity: float
    part_of: NDArray[np.intp]
    loads: NDArray[np.float64]
    filled: NDArray[np.float64]

    @classmethod
    def of(
        cls,
        part_of: NDArray[np.intp],
        *,
        costs: NDArray[np.float64],
        weights: NDArray[np.float64],
        capacity: float,
        num_parts: int,
    ) -> "Assignment":
        return cls(
            costs=costs,
            weights=weights,
            capacity=capacity,
            part_of=part_of,
            loads=sum_per_part(part_of, costs, num_parts),
            filled=sum_per_part(part_of, weights, num_parts),
        )

    @property
    def makespan(self) -> float:
        """The load of the heaviest part."""
        return float(self.loads.max())

    def parts(self, index_of: NDArray[np.intp]) -> list[NDArray[np.intp]]:
        """Return the items of each part by their caller's index `index_of` [num_items], ascending."""
        part_of = np.empty_like(self.part_of)
        part_of[index_of] = self.part_of
        counts = np.bincount(part_of, minlength=len(self.loads))
        return np.split(by_part(part_of, len(self.loads)), np.cumsum(counts)[:-1])

    def sample(self, per_part: int, *, first: int) -> "tuple[Assignment, NDArray[np.intp]]":
        """Return about `per_part` items of each part, evenly spaced by cost, and their indices; the others stay fixed.

        Args:
            first: which of a part's items comes first, counted modulo the spacing.
        """
        order = by_part(self.part_of, len(self.loads))
        counts = np.bincount(self.part_of, minlength=len(self.loads))
        starts = np.cumsum(counts) - counts
        rank = np.arange(len(order)) - np.repeat(starts, counts)
        stride = np.repeat(np.maximum(counts // per_part, 1), counts)
        items = np.sort(order[rank % stride == first % stride])
        sampled = Assignment(
            costs=self.costs[items],
            weights=self.weights[items],
            capacity=self.capacity,
            part_of=self.part_of[items],
            loads=self.loads,
            filled=self.filled,
        )
        return sampled, items

    def apply(self, exchanges: "Exchanges") -> None:
        """Carry out exchanges; no part may occur in two of them."""
        heavy, light, given, taken = exchanges.heavy, exchanges.light, exchanges.given, exchanges.taken
        swapped = taken != NOTHING
        weight_shift = self.weights[given] - np.where(swapped, self.weights[taken], 0.0)
        self.part_of[given] = light
        self.part_of[taken[swapped]] = heavy[swapped]
        self.loads[heavy] -= exchanges.shift
        self.loads[light] += exchanges.shift
        self.filled[heavy] -= weight_shift
        self.filled[light] += weight_shift

    def exchange_groups(
        self, heavy: NDArray[np.intp], light: NDArray[np.intp], *, given: NDArray[np.intp], taken: NDArray[np.intp]
    ) -> None:
        """Carry out exchanges of several items, [num_pairs, num_given] for [num_pairs, num_taken]; as `apply`."""
        shift = self.costs[given].sum(axis=1) - self.costs[taken].sum(axis=1)
        weight_shift = self.weights[given].sum(axis=1) - self.weights[taken].sum(axis=1)
        self.part_of[given] = light[:, None]
        self.part_of[taken] = heavy[:, None]
        self.loads[heavy] -= shift
        self.loads[light] += shift
        self.filled[heavy] -= weight_shift
        self.filled[light] += weight_shift


@dataclass(frozen=True, kw_only=True)
class Exchanges:
    """One row per pair of parts: `heavy` gives item `given`, and `light` gives `taken` (or NOTHING) back for it.

    `shift` is the load that goes from heavy to light: above 0, below the gap between the two.
    """

    heavy: NDArray[np.intp]
    light: NDArray[np.intp]
    given: NDArray[np.intp]
    taken: NDArray[np.intp]
    shift: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.heavy)

    def row(self, index: int) -> "Exchanges":
        """Return the exchange at `index` alone."""
        rows = slice(index, index + 1)
        return Exchanges(
            heavy=self.heavy[rows],
            light=self.light[rows],
            given=self.given[rows],
            taken=self.taken[rows],
            shift=self.shift[rows],
        )
