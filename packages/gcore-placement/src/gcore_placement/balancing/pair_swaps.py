"""Exchanges of two items for two, which balance loads to far more digits than those of one for one."""

import numpy as np
from numpy.typing import NDArray

from gcore_placement.balancing.assignment import Assignment, by_part

MAX_SUMS = 1 << 16
"""Sums of two items that a round looks at, on either side."""

FEWEST_ITEMS, MOST_ITEMS = 12, 64
"""Least and most items of a part to try."""

GOLDEN = 0.6180339887498949
"""Multiples of it, without their whole part, are spread evenly over [0, 1]."""


def swap_pairs(
    assignment: Assignment, heavy: NDArray[np.intp], light: NDArray[np.intp], *, target: float, number: int
) -> None:
    """Make the best exchange of two items for two of each pair `heavy[i]`, `light[i]`, in place.

    Every sum of two items of the heavy part looks up, by bisection in the sorted sums of the light part, the one that
    makes the load that is shifted nearest to half the gap. Only so many items of a part are tried, evenly spaced by
    cost, others in each round.

    Args:
        heavy: parts; no part occurs twice in `heavy` and `light` together.
        target: pairs whose heavy part has no more are left alone.
        number: of the round.
    """
    counts = np.bincount(assignment.part_of, minlength=len(assignment.loads))
    chosen = (assignment.loads[heavy] > np.maximum(target, assignment.loads[light])) & (
        np.minimum(counts[heavy], counts[light]) >= 2
    )
    heavy, light = heavy[chosen], light[chosen]
    if not len(heavy):
        return
    order = by_part(assignment.part_of, len(assignment.loads))
    starts = np.cumsum(counts) - counts
    size = int(np.clip(np.sqrt(2 * MAX_SUMS / len(heavy)), FEWEST_ITEMS, MOST_ITEMS))
    size = min(size, int(max(counts[heavy].max(), counts[light].max())))
    phase = number * GOLDEN % 1
    one, two = np.triu_indices(size, 1)

    def sums_of(parts: NDArray[np.intp]) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.float64]]:
        """Both items of every sum, and the sums, [num_pairs, num_sums]; 4, more than any, where there are none."""
        place = ((np.arange(size) + phase) * np.maximum(counts[parts] / size, 1)[:, None]).astype(np.intp)
        exists = place < counts[parts][:, None]
        items = order[np.where(exists, starts[parts][:, None] + place, 0)]
        sums = np.where(
            exists[:, one] & exists[:, two], assignment.costs[items[:, one]] + assignment.costs[items[:, two]], 4.0
        )
        return items[:, one], items[:, two], sums

    given_one, given_two, given_sums = sums_of(heavy)
    taken_one, taken_two, taken_sums = sums_of(light)
    by_sum = np.argsort(taken_sums, axis=1)
    pair = np.arange(len(heavy))[:, None]
    half_gap = (assignment.loads[heavy] - assignment.loads[light])[:, None] / 2
    keys = (8 * pair + np.take_along_axis(taken_sums, by_sum, axis=1)).ravel()
    above = np.searchsorted(keys, (8 * pair + np.maximum(given_sums - half_gap, 0.0)).ravel()).reshape(given_sums.shape)
    above -= pair * len(one)

    best_miss = np.full(len(heavy), np.inf)
    best = np.zeros((len(heavy), 4), dtype=np.intp)
    row = np.arange(len(heavy))
    for position in (above - 1, above):
        inside = (position >= 0) & (position < len(one))
        partner = np.take_along_axis(by_sum, np.where(inside, position, 0), axis=1)
        shift = given_sums - np.take_along_axis(taken_sums, partner, axis=1)
        weight_shift = (
            assignment.weights[given_one]
            + assignment.weights[given_two]
            - assignment.weights[taken_one[pair, partner]]
            - assignment.weights[taken_two[pair, partner]]
        )
        helps = inside & (given_sums < 4) & (shift > 0) & (shift < 2 * half_gap)
        helps &= assignment.filled[light][:, None] + weight_shift <= assignment.capacity
        helps &= assignment.filled[heavy][:, None] - weight_shift <= assignment.capacity
        miss = np.where(helps, np.abs(shift - half_gap), np.inf)
        first = miss.argmin(axis=1)
        better = miss[row, first] < best_miss
        best_miss = np.where(better, miss[row, first], best_miss)
        other = partner[row, first]
        found = np.stack(
            [given_one[row, first], given_two[row, first], taken_one[row, other], taken_two[row, other]], 1
        )
        best[better] = found[better]

    made = np.isfinite(best_miss)
    assignment.exchange_groups(heavy[made], light[made], given=best[made, :2], taken=best[made, 2:])
