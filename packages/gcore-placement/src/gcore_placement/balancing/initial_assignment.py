"""Initial assignments: folding, longest first, and best fit decreasing. Costs are in falling order."""

from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray

SINGLE_ROUNDS = 512
"""Rounds that deal one item to each part; later ones deal bundles, whose items are too light to matter."""


def fold(costs: NDArray[np.float64], num_parts: int) -> NDArray[np.intp]:
    """Return the part of each item: `num_parts` items, or bundles, at a time, the heaviest to the lightest part so far.

    Counts differ by at most one. A round cannot widen the spread of loads beyond the larger of the old one and that of
    its own items, so that it stays within the largest cost.

    Args:
        costs: [num_items], falling.
    """
    deal = _Deal(costs, num_parts)
    every = np.arange(num_parts)
    while deal.num_left:
        deal.to(every[np.argsort(deal.loads, kind="stable")], num_rows=deal.bundle)
    return deal.part_of


def longest_first(costs: NDArray[np.float64], num_parts: int, *, max_count: int) -> NDArray[np.intp]:
    """Return the part of each item: by falling cost, each to the lightest part so far with fewer than `max_count`.

    Graham's LPT rule (SIAM J. Appl. Math. 17, 1969), for many items at a time: parts that are within an item of the
    lightest get one each, and where another part is further above them, as many as bring them up to it. No part is
    empty where there are items enough. `num_parts * max_count` must hold all items.

    Args:
        costs: [num_items], falling.
    """
    deal = _Deal(costs, num_parts)
    while deal.num_left:
        open_parts = np.flatnonzero(deal.counts < max_count)
        lightest = open_parts[np.argsort(deal.loads[open_parts], kind="stable")]
        loads = deal.loads[lightest]
        width = int(np.searchsorted(loads, loads[0] + costs[deal.num_dealt], side="right"))
        num_rows = deal.bundle if width == len(loads) else deal.rows_of(float(loads[width] - loads[0]), width)
        capacity = max_count - int(deal.counts[lightest[:width]].max())
        deal.to(lightest[:width], num_rows=min(num_rows, capacity))
    return deal.part_of


class _Deal:
    """Items dealt to parts, the most costly first.

    Attributes:
        part_of: [num_items], the part of each item that is dealt.
        loads: [num_parts], the summed costs of each part.
        counts: [num_parts], its items.
        num_dealt: items that are.
    """

    def __init__(self, costs: NDArray[np.float64], num_parts: int) -> None:
        self._costs = costs
        self._until = np.concatenate([[0.0], np.cumsum(costs)])
        self._num_rounds = 0
        self._depth = max(1, -(-(len(costs) // num_parts - SINGLE_ROUNDS) // SINGLE_ROUNDS))
        self.part_of = np.empty(len(costs), dtype=np.intp)
        self.loads = np.zeros(num_parts)
        self.counts = np.zeros(num_parts, dtype=np.intp)
        self.num_dealt = 0

    @property
    def num_left(self) -> int:
        return len(self._costs) - self.num_dealt

    @property
    def bundle(self) -> int:
        """Rows to deal at once where parts are level."""
        return 1 if self._num_rounds < SINGLE_ROUNDS else self._depth

    def rows_of(self, cost: float, width: int) -> int:
        """Return the number of rows of ``width`` items that add at most ``cost`` to a part."""
        last = np.searchsorted(self._until, self._until[self.num_dealt] + cost * width, side="right")
        return max(1, (int(last) - 1 - self.num_dealt) // width)

    def to(self, parts: NDArray[np.intp], *, num_rows: int) -> None:
        """Deal rows of an item for each of `parts`, whose loads rise, the most costly bundle to the first.

        A bundle is a column of the rows, whose direction alternates: two differ by no more than two items may. Where
        fewer items are left, the first parts get them.
        """
        width = min(len(parts), self.num_left)
        num_rows = min(num_rows, self.num_left // width)
        rows = np.arange(self.num_dealt, self.num_dealt + num_rows * width).reshape(num_rows, width)
        rows[1::2] = rows[1::2, ::-1]
        sums = self._costs[rows].sum(axis=0)
        heaviest = np.argsort(-sums, kind="stable")
        self.part_of[rows[:, heaviest]] = parts[:width]
        self.loads[parts[:width]] += sums[heaviest]
        self.counts[parts[:width]] += num_rows
        self.num_dealt += num_rows * width
        self._num_rounds += 1


def longest_first_within(
    costs: NDArray[np.float64], weights: NDArray[np.float64], num_parts: int, *, capacity: float
) -> NDArray[np.intp] | None:
    """`longest_first` under a bound on each part's summed weights; None where no part has the capacity for an item."""
    part_of = np.empty(len(costs), dtype=np.intp)
    loads = np.zeros(num_parts)
    free = np.full(num_parts, capacity)
    for item in range(len(costs)):
        part = int(np.where(free >= weights[item], loads, np.inf).argmin())
        if free[part] < weights[item]:
            return None
        part_of[item] = part
        loads[part] += costs[item]
        free[part] -= weights[item]
    return part_of


def best_fit_decreasing(weights: NDArray[np.float64], *, capacity: float) -> NDArray[np.intp]:
    """Return the part of each item, by falling weight, each in the fullest part that can hold it, in as few as needed.

    At most 11/9 of the least possible number of parts, plus a constant (Johnson et al., SIAM J. Comput. 3, 1974).
    """
    part_of = np.empty(len(weights), dtype=np.intp)
    free: list[tuple[float, int]] = []
    num_parts = 0
    order = np.argsort(-weights, kind="stable")
    for item, weight in zip(order.tolist(), weights[order].tolist(), strict=True):
        fit = bisect_left(free, (weight, -1))
        if fit < len(free):
            left, part = free.pop(fit)
        else:
            left, part = capacity, num_parts
            num_parts += 1
        part_of[item] = part
        insort(free, (left - weight, part))
    return part_of


def fill_empty(part_of: NDArray[np.intp], num_parts: int) -> NDArray[np.intp]:
    """Return `part_of` with an item of a fuller part in each empty one, as long as a part holds two."""
    filled = part_of.copy()
    counts = np.bincount(filled, minlength=num_parts)
    for empty in np.flatnonzero(counts == 0).tolist():
        donor = int(counts.argmax())
        if counts[donor] < 2:
            break
        filled[np.flatnonzero(filled == donor)[-1]] = empty
        counts[donor] -= 1
        counts[empty] = 1
    return filled
