"""Assignments to start from: folding, longest first, best fit decreasing. Costs come in falling order."""

from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

SINGLE_ROUNDS = 512
"""Rounds of folding that deal one item to each part; later ones deal bundles, whose items are too light to matter."""


def fold(costs: NDArray[np.float64], num_parts: int, *, loads: NDArray[np.float64] | None = None) -> NDArray[np.intp]:
    """The part of each item: `num_parts` items, or bundles, at a time, the heaviest to the lightest part so far.

    Counts differ by at most one. A round cannot widen the spread of loads beyond the larger of the old one and that of
    its own items, so that it stays within the largest cost, or what it was in `loads`. A bundle of b items is a column
    of b rows whose direction alternates: two bundles differ by no more than two items may.

    Args:
        costs: [num_items], falling.
        loads: [num_parts], what the parts hold already.
    """
    part_of = np.empty(len(costs), dtype=np.intp)
    loads = np.zeros(num_parts) if loads is None else loads.copy()

    def deal(bundles: NDArray[np.intp]) -> None:
        """Bundles [depth, width] of items, width at most num_parts."""
        sums = costs[bundles].sum(axis=0)
        lightest = np.argsort(loads, kind="stable")[: len(sums)]
        heaviest = np.argsort(-sums, kind="stable")
        part_of[bundles[:, heaviest]] = lightest
        loads[lightest] += sums[heaviest]

    num_rows = len(costs) // num_parts
    rows = np.arange(num_rows * num_parts).reshape(num_rows, num_parts)
    rows[1::2] = rows[1::2, ::-1]
    singles = min(num_rows, SINGLE_ROUNDS)
    depth = max(1, -(-(num_rows - singles) // SINGLE_ROUNDS))
    for row in range(singles):
        deal(rows[row : row + 1])
    for row in range(singles, num_rows, depth):
        deal(rows[row : row + depth])
    if num_rows * num_parts < len(costs):
        deal(np.arange(num_rows * num_parts, len(costs))[None])
    return part_of


def longest_first(costs: NDArray[np.float64], num_parts: int, *, max_count: int) -> NDArray[np.intp]:
    """The part of each item: in falling cost, each to the lightest part so far that holds fewer than `max_count`.

    Graham's LPT rule (SIAM J. Appl. Math. 17, 1969); equal loads go to the part with fewer items, so no part is empty
    where there are items enough. Once loads are within an item of each other, the rest is folded, which keeps them so.
    `num_parts * max_count` must hold all items.
    """
    part_of = np.empty(len(costs), dtype=np.intp)
    heap = [(0.0, 0, part) for part in range(num_parts)]
    heapify(heap)
    for item, cost in enumerate(costs.tolist()):
        if item and item % num_parts == 0 and len(heap) == num_parts:
            rounds = -(-(len(costs) - item) // num_parts)
            fullest = max(count for _, count, _ in heap)
            if max(heap)[0] - heap[0][0] <= cost and fullest + rounds <= max_count:
                loads = np.empty(num_parts)
                loads[[part for _, _, part in heap]] = [load for load, _, _ in heap]
                part_of[item:] = fold(costs[item:], num_parts, loads=loads)
                break
        load, count, part = heappop(heap)
        part_of[item] = part
        if count + 1 < max_count:
            heappush(heap, (load + cost, count + 1, part))
    return part_of


def longest_first_within(
    costs: NDArray[np.float64], weights: NDArray[np.float64], num_parts: int, *, capacity: float
) -> NDArray[np.intp] | None:
    """`longest_first` under a bound on each part's summed weights; None where an item finds no part with room."""
    part_of = np.empty(len(costs), dtype=np.intp)
    loads = np.zeros(num_parts)
    room = np.full(num_parts, capacity)
    for item in range(len(costs)):
        part = int(np.where(room >= weights[item], loads, np.inf).argmin())
        if room[part] < weights[item]:
            return None
        part_of[item] = part
        loads[part] += costs[item]
        room[part] -= weights[item]
    return part_of


def best_fit_decreasing(weights: NDArray[np.float64], *, capacity: float) -> NDArray[np.intp]:
    """The part of each item, in as many parts as it takes: by falling weight, each to the fullest part with room.

    At most 11/9 of the least possible number of parts, plus a constant (Johnson et al., SIAM J. Comput. 3, 1974).
    """
    part_of = np.empty(len(weights), dtype=np.intp)
    rooms: list[tuple[float, int]] = []
    num_parts = 0
    order = np.argsort(-weights, kind="stable")
    for item, weight in zip(order.tolist(), weights[order].tolist(), strict=True):
        fit = bisect_left(rooms, (weight, -1))
        if fit < len(rooms):
            room, part = rooms.pop(fit)
        else:
            room, part = capacity, num_parts
            num_parts += 1
        part_of[item] = part
        insort(rooms, (room - weight, part))
    return part_of


def fill_empty(part_of: NDArray[np.intp], num_parts: int) -> NDArray[np.intp]:
    """`part_of` with an item of a fuller part in each empty one, as long as a part holds two."""
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
