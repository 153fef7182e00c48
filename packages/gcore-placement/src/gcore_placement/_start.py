"""Assignments to start from: round robin, folding, longest first, best fit decreasing."""

from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray


def heaviest_first(amounts: NDArray[np.float64]) -> NDArray[np.intp]:
    """Items by falling amount, ties by index."""
    return np.argsort(-amounts, kind="stable")


def round_robin(num_items: int, num_parts: int) -> NDArray[np.intp]:
    """The part of each item, dealt in the order given."""
    return np.arange(num_items) % num_parts


def fold(costs: NDArray[np.float64], num_parts: int) -> NDArray[np.intp]:
    """The part of each item: `num_parts` items at a time in falling cost, the heaviest to the lightest part so far.

    Counts differ by at most one. Loads differ by at most max(costs) - min(costs) where num_parts divides the number of
    items, since a round cannot widen the spread beyond the larger of the old one and that of its own items.
    """
    order = heaviest_first(costs)
    part_of = np.empty(len(costs), dtype=np.intp)
    loads = np.zeros(num_parts)
    for begin in range(0, len(order), num_parts):
        items = order[begin : begin + num_parts]
        lightest = np.argsort(loads, kind="stable")[: len(items)]
        part_of[items] = lightest
        loads[lightest] += costs[items]
    return part_of


def longest_first(costs: NDArray[np.float64], num_parts: int, *, max_count: int) -> NDArray[np.intp]:
    """The part of each item: in falling cost, each to the lightest part so far that holds fewer than `max_count`.

    Graham's LPT rule (SIAM J. Appl. Math. 17, 1969); equal loads go to the part with fewer items, so no part is empty
    where there are items enough. `num_parts * max_count` must hold all items.
    """
    part_of = np.empty(len(costs), dtype=np.intp)
    heap = [(0.0, 0, part) for part in range(num_parts)]
    heapify(heap)
    order = heaviest_first(costs)
    for item, cost in zip(order.tolist(), costs[order].tolist(), strict=True):
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
    for item in heaviest_first(costs).tolist():
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
    order = heaviest_first(weights)
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
