"""Even shares: items with costs, split over parts so that the heaviest part is as light as can be had quickly."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gcore_placement._assignment import Assignment
from gcore_placement._refine import refine
from gcore_placement._start import fold, longest_first, round_robin
from gcore_placement.errors import PlacementError, check_amount_list, check_positive, refusal


def balance(
    costs: ArrayLike, num_parts: int, *, equal_count: bool = False, max_count: int | None = None
) -> list[NDArray[np.intp]]:
    """Splits items over `num_parts` parts so that the largest summed cost is small.

    Starts from sorted folding (equal counts) or Graham's LPT rule (free counts), then swaps and moves items between
    heavy and light parts, a bounded number of times. Deterministic, ties go by index; the largest sum is never above
    that of dealing the items round robin.

    Args:
        costs: [num_items], in any unit, at least 0.
        num_parts: at least 1.
        equal_count: every part gets num_items / num_parts items.
        max_count: no part gets more items than this. Not together with `equal_count`.

    Returns:
        The indices of each part, ascending. A part is empty only where there are fewer items than parts.

    Raises:
        PlacementError: a cost is negative or not finite, or the counts asked for cannot be met.
    """
    amounts = check_amount_list("costs", costs)
    check_positive("num_parts", num_parts)
    most = _most_per_part(len(amounts), num_parts, equal_count=equal_count, max_count=max_count)
    if not len(amounts):
        return [np.empty(0, dtype=np.intp) for _ in range(num_parts)]

    scaled = scale_to_one(amounts)

    def assigned(part_of: NDArray[np.intp]) -> Assignment:
        return Assignment.of(
            part_of, costs=scaled, weights=np.ones(len(scaled)), capacity=float(most), num_parts=num_parts
        )

    starts = [assigned(fold(scaled, num_parts))] if max_count is not None or equal_count else []
    if not equal_count:
        starts.append(assigned(longest_first(scaled, num_parts, max_count=most)))
    lower_bound = _lower_bound(scaled, num_parts, equal_count=equal_count)
    result = min(starts, key=lambda start: start.makespan)
    refine(result, lower_bound=lower_bound)

    dealt = assigned(round_robin(len(scaled), num_parts))
    if dealt.makespan < result.makespan:
        refine(dealt, lower_bound=lower_bound)
        result = dealt
    return result.parts()


def scale_to_one(costs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Costs over the power of two at or above the largest: in [0, 1], and sums that were exact stay exact."""
    _, exponent = np.frexp(costs.max())
    return np.ldexp(costs, -exponent)


def _most_per_part(num_items: int, num_parts: int, *, equal_count: bool, max_count: int | None) -> int:
    if equal_count:
        if max_count is not None:
            raise refusal("max_count", max_count, "None with equal_count=True, which already fixes the counts")
        if num_items % num_parts:
            raise PlacementError(
                f"equal_count=True needs a number of costs that num_parts ({num_parts}) divides, got {num_items}"
            )
        return num_items // num_parts
    if max_count is None:
        return num_items
    check_positive("max_count", max_count)
    if num_parts * max_count < num_items:
        least = -(-num_items // num_parts)
        raise refusal("max_count", max_count, f"at least {least} for {num_items} costs in {num_parts} parts")
    return max_count


def _lower_bound(costs: NDArray[np.float64], num_parts: int, *, equal_count: bool) -> float:
    """No split has a largest sum below the mean, nor below the heaviest item with the company it must have."""
    rising = np.sort(costs)
    company = len(costs) // num_parts - 1 if equal_count else 0
    return max(float(rising.sum()) / num_parts, float(rising[-1] + rising[:company].sum()))
