"""Balance items with costs over parts, so that the heaviest part is nearly as light as possible."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gcore_placement.balancing.assignment import Assignment, sum_per_part
from gcore_placement.balancing.initial_assignment import (
    best_fit_decreasing,
    fill_empty,
    fold,
    longest_first,
    longest_first_within,
)
from gcore_placement.balancing.refine import refine
from gcore_placement.errors import (
    PlacementError,
    check_above_0,
    check_amount_list,
    check_amounts,
    check_positive,
    refusal,
)


def balance(
    costs: ArrayLike,
    num_parts: int,
    *,
    equal_count: bool = False,
    max_count: int | None = None,
    weights: ArrayLike | None = None,
    capacity: float | None = None,
    tolerance: float = 0.0,
) -> list[NDArray[np.intp]]:
    """Split items over `num_parts` parts so that the largest summed cost is small.

    Starts from Graham's LPT rule, then exchanges items between heavy and light parts, a bounded number of times.
    Without a capacity the largest sum is at most

        sum(costs) / num_parts + max(costs)

    Deterministic and stable: only the sorted costs (with their weights) decide, so that items in another order give
    parts of the same costs, and equal items change places at most. A changed cost may move any item.

    Args:
        costs: [num_items], in any unit, at least 0.
        num_parts: at least 1.
        equal_count: every part gets num_items / num_parts items.
        max_count: no part gets more items than this. Not together with `equal_count`.
        weights: [num_items], what an item takes of its part's capacity, such as tokens of memory, at least 0.
        capacity: no part's summed weights exceed this. With `weights` alone, and with neither of the counts.
        tolerance: relative distance from the least possible largest sum, so far as that is known, at which the search
            may end: 1e-4 takes a fraction of the time of 0.

    Returns:
        The indices of each part, ascending. A part is empty only where there are fewer items than parts.

    Raises:
        PlacementError: a cost or weight is negative or not finite, or the counts or the capacity asked for cannot be
            met. Whether items fit at all is bin packing: they are tried longest first and heaviest first, so that a
            capacity within a few percent of sum(weights) / num_parts may be refused though a packing exists.
    """
    amounts = check_amount_list("costs", costs)
    check_positive("num_parts", num_parts)
    most = _most_per_part(len(amounts), num_parts, equal_count=equal_count, max_count=max_count)
    check_amounts("tolerance", tolerance)
    sizes, most_weight = _capacity(weights, capacity, len(amounts), counted=equal_count or max_count is not None)
    if not len(amounts):
        return [np.empty(0, dtype=np.intp) for _ in range(num_parts)]

    order = np.argsort(-amounts, kind="stable") if sizes is None else np.lexsort((-sizes, -amounts))
    falling = scale_to_one(amounts[order])
    lower_bound = _lower_bound(falling, num_parts, equal_count=equal_count)
    if sizes is None:
        sizes, most_weight = np.ones(len(falling)), float(most)
        start = longest_first(falling, num_parts, max_count=most)
        # A bound that folding keeps, and that the rule was never seen to break.
        if sum_per_part(start, falling, num_parts).max() > falling.sum() / num_parts + falling[0]:
            start = fold(falling, num_parts)
    else:
        sizes = sizes[order]
        start = _start_within(falling, sizes, num_parts, capacity=most_weight)
    result = Assignment.of(start, costs=falling, weights=sizes, capacity=most_weight, num_parts=num_parts)
    refine(result, lower_bound=lower_bound, tolerance=tolerance)
    return result.parts(order)


def scale_to_one(costs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Divide costs by the power of two at or above the largest: results are in [0, 1], and exact sums stay exact."""
    _, exponent = np.frexp(costs.max())
    return np.ldexp(costs, -exponent)


def _most_per_part(num_items: int, num_parts: int, *, equal_count: bool, max_count: int | None) -> int:
    if equal_count:
        if max_count is not None:
            raise refusal("max_count", max_count, "None with equal_count=True, which already fixes the counts")
        if num_items % num_parts:
            raise PlacementError(
                f"costs has {num_items} values; expected a multiple of num_parts ({num_parts}) with equal_count=True"
            )
        return num_items // num_parts
    if max_count is None:
        return num_items
    check_positive("max_count", max_count)
    if num_parts * max_count < num_items:
        least = -(-num_items // num_parts)
        raise refusal("max_count", max_count, f"at least {least} for {num_items} costs in {num_parts} parts")
    return max_count


def _capacity(
    weights: ArrayLike | None, capacity: float | None, num_items: int, *, counted: bool
) -> tuple[NDArray[np.float64] | None, float]:
    if weights is None and capacity is None:
        return None, 0.0
    if weights is None or capacity is None:
        missing = "weights" if weights is None else "capacity"
        raise PlacementError(f"{missing} is None; expected weights and capacity together")
    if counted:
        raise refusal("capacity", capacity, "None with equal_count or max_count")
    check_above_0("capacity", capacity)
    sizes = check_amount_list("weights", weights)
    if len(sizes) != num_items:
        raise PlacementError(f"weights has {len(sizes)} values; expected one per cost ({num_items})")
    if num_items and sizes.max() > capacity:
        raise refusal("capacity", capacity, f"at least {float(sizes.max())}, the largest weight")
    return sizes, capacity


def _start_within(
    costs: NDArray[np.float64], weights: NDArray[np.float64], num_parts: int, *, capacity: float
) -> NDArray[np.intp]:
    """Return a start that keeps the capacity: by cost where that works, by weight otherwise."""
    start = longest_first(costs, num_parts, max_count=len(costs))
    if np.bincount(start, weights, num_parts).max() <= capacity:
        return start
    start = longest_first_within(costs, weights, num_parts, capacity=capacity)
    if start is not None:
        return fill_empty(start, num_parts)
    by_weight = np.argsort(-weights, kind="stable")
    packed = best_fit_decreasing(weights[by_weight], capacity=capacity)
    if packed.max() >= num_parts:
        packed = longest_first(weights[by_weight], num_parts, max_count=len(costs))
        if (fullest := float(np.bincount(packed, weights[by_weight], num_parts).max())) > capacity:
            total = float(weights.sum())
            raise refusal(
                "capacity", capacity, f"at least {fullest} for weights of {total} together in {num_parts} parts"
            )
    start = np.empty(len(costs), dtype=np.intp)
    start[by_weight] = packed
    return fill_empty(start, num_parts)


def _lower_bound(falling: NDArray[np.float64], num_parts: int, *, equal_count: bool) -> float:
    """Return a lower bound: the mean, and the heaviest item with the items that must share its part."""
    company = len(falling) // num_parts - 1 if equal_count else 0
    return max(float(falling.sum()) / num_parts, float(falling[0] + falling[len(falling) - company :].sum()))
