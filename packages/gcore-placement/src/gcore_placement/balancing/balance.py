"""Balance items with costs over parts, at once or as they arrive, and sequences over micro-batches."""

from bisect import bisect_left, insort

import numpy as np
from numpy.typing import ArrayLike

from gcore_placement.balancing.local_search import Assignment, refine, sum_per_part
from gcore_placement.errors import PlacementError, refusal
from gcore_placement.quantities import (
    Floats,
    Ints,
    check_above_0,
    check_amount_list,
    check_amounts,
    check_lengths,
    check_positive,
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
) -> list[Ints]:
    """Split items over `num_parts` parts so that the largest summed cost is small.

    Starts from Graham's LPT rule, then exchanges items between heavy and light parts, a bounded number of times.
    Without a capacity the largest sum is at most sum(costs) / num_parts + max(costs). Deterministic and stable: only
    the sorted costs (with their weights) decide, so that items in another order give parts of the same costs. A changed
    cost may move any item.

    Args:
        costs: [num_items], in any unit, at least 0.
        equal_count: every part gets num_items / num_parts items.
        max_count: no part gets more items than this, at least num_items / num_parts. Not together with `equal_count`.
        weights: [num_items], what an item takes of its part's capacity, such as tokens of memory, at least 0.
        capacity: bound on each part's summed weights, without either of the counts. Items are tried longest first and
            heaviest first, so that a capacity within a few percent of sum(weights) / num_parts may be refused
            (PlacementError) though a packing exists.
        tolerance: relative distance from a lower bound of the largest sum at which the search may end: 1e-4 takes a
            fraction of the time of 0.

    Returns:
        The indices of each part, ascending. A part is empty only where there are fewer items than parts.

    Raises:
        PlacementError: a number is out of its bounds, or no such parts exist or were found; the message names the
            bound that would do.

    Examples:
        A bound that binds costs evenness. By cost alone both parts get 8, with at most three items one gets 10:

        >>> [part.tolist() for part in balance([8, 2, 2, 2, 2], 2)]
        [[0], [1, 2, 3, 4]]
        >>> [part.tolist() for part in balance([8, 2, 2, 2, 2], 2, max_count=3)]
        [[0, 4], [1, 2, 3]]

        Four items of weight 5 are more than a capacity of 16, three are not:

        >>> [part.tolist() for part in balance([8, 2, 2, 2, 2], 2, weights=[1, 5, 5, 5, 5], capacity=16)]
        [[0, 4], [1, 2, 3]]
    """
    amounts = check_amount_list("costs", costs)
    check_positive("num_parts", num_parts)
    most_items = _most_per_part(
        len(amounts), num_parts, equal_count=equal_count, max_count=max_count
    )
    check_amounts("tolerance", tolerance)
    sizes, most_weight = _capacity(
        weights, capacity, len(amounts), counted=equal_count or max_count is not None
    )
    if not len(amounts):
        return [np.empty(0, dtype=np.intp) for _ in range(num_parts)]

    if num_parts == 1 and sizes is None:
        return [np.arange(len(amounts))]
    order = np.argsort(-amounts, kind="stable") if sizes is None else np.lexsort((-sizes, -amounts))
    falling = scale_to_one(amounts[order])
    # The heaviest item shares its part with as many others as it must.
    company = len(falling) // num_parts - 1 if equal_count else 0
    lower_bound = max(
        float(falling.sum()) / num_parts,
        float(falling[0] + falling[len(falling) - company :].sum()),
    )
    if sizes is None:
        sizes = np.ones(len(falling))
        most_weight = float(most_items)
        start = longest_first(falling, num_parts, max_count=most_items)
        # A bound that folding keeps, and that the rule was never seen to break.
        if sum_per_part(start, falling, num_parts).max() > falling.sum() / num_parts + falling[0]:
            start = longest_first(falling, num_parts, max_count=most_items, is_folded=True)
        starts = [start]
    else:
        sizes = sizes[order]
        starts = _starts_within(falling, sizes, num_parts, capacity=most_weight)
    best = _refine_starts(
        starts, falling, sizes, num_parts, most_weight, lower_bound=lower_bound, tolerance=tolerance
    )
    return best.parts(order)


def _refine_starts(
    starts: list[Ints],
    costs: Floats,
    weights: Floats,
    num_parts: int,
    capacity: float,
    *,
    lower_bound: float,
    tolerance: float = 0.0,
) -> Assignment:
    """Refine an assignment from each start, and return the one with the smallest makespan."""
    assignments: list[Assignment] = []
    for start in starts:
        assignment = Assignment(
            part_of=start, costs=costs, weights=weights, capacity=capacity, num_parts=num_parts
        )
        refine(assignment, lower_bound=lower_bound, tolerance=tolerance)
        assignments.append(assignment)
    return min(assignments, key=lambda assignment: assignment.makespan)


def scale_to_one(costs: Floats) -> Floats:
    """Divide costs by the power of two at or above the largest: results are in [0, 1], and exact sums stay exact."""
    _, exponent = np.frexp(costs.max())
    return np.ldexp(costs, -exponent)


def _most_per_part(
    num_items: int, num_parts: int, *, equal_count: bool, max_count: int | None
) -> int:
    if equal_count:
        if max_count is not None:
            raise refusal(
                "max_count", max_count, "None with equal_count=True, which already fixes the counts"
            )
        if num_items % num_parts:
            accepted = f"a multiple of num_parts ({num_parts}) with equal_count=True"
            raise PlacementError(f"costs has {num_items} values; expected {accepted}")
        return num_items // num_parts
    if max_count is None:
        return num_items
    check_positive("max_count", max_count)
    if num_parts * max_count < num_items:
        least = -(-num_items // num_parts)
        raise refusal(
            "max_count", max_count, f"at least {least} for {num_items} costs in {num_parts} parts"
        )
    return max_count


def _capacity(
    weights: ArrayLike | None, capacity: float | None, num_items: int, *, counted: bool
) -> tuple[Floats | None, float]:
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
        raise PlacementError(
            f"weights has {len(sizes)} values; expected one per cost ({num_items})"
        )
    if num_items and sizes.max() > capacity:
        raise refusal("capacity", capacity, f"at least {float(sizes.max())}, the largest weight")
    return sizes, capacity


def _starts_within(
    costs: Floats, weights: Floats, num_parts: int, *, capacity: float
) -> list[Ints]:
    """Return starts that keep the capacity: by cost alone if possible; otherwise by cost, and by weight."""
    start = longest_first(costs, num_parts, max_count=len(costs))
    if sum_per_part(start, weights, num_parts).max() <= capacity:
        return [start]
    by_cost = longest_first_within(costs, weights, num_parts, capacity=capacity)
    by_weight = np.argsort(-weights, kind="stable")
    # Even weights leave most capacity to exchange items in.
    packed = longest_first(weights[by_weight], num_parts, max_count=len(costs))
    fullest = float(sum_per_part(packed, weights[by_weight], num_parts).max())
    total = float(weights.sum())
    if fullest > capacity:
        packed = best_fit_decreasing(weights[by_weight], capacity=capacity)
        if packed.max() >= num_parts:
            if by_cost is not None:
                return [fill_empty(by_cost, num_parts)]
            accepted = f"at least {fullest} for weights of {total} together in {num_parts} parts"
            raise refusal("capacity", capacity, accepted)
    start = np.empty(len(costs), dtype=np.intp)
    start[by_weight] = packed
    starts = [start] if by_cost is None else [by_cost, start]
    return [fill_empty(start, num_parts) for start in starts]


def micro_batches(
    lengths: ArrayLike, *, max_tokens: int, num_multiple: int = 1, costs: ArrayLike | None = None
) -> list[Ints]:
    """Group sequences into micro-batches of at most `max_tokens` tokens and about even cost.

    The count is the smallest found by bisection between the lower bound of bin packing and best fit decreasing, so it
    is never above best fit's, then rounded up to a multiple of `num_multiple`. Costs are made even within that count.

    Args:
        lengths: [num_sequences], tokens of each sequence, at most `max_tokens`.
        num_multiple: the count is a multiple of this, as a pipeline schedule may ask.
        costs: [num_sequences], what to make even, such as `TransformerWorkload.flops(lengths)`; `lengths` if None.

    Returns:
        The indices of each micro-batch, ascending. One is empty only where rounding up left fewer sequences than
        micro-batches; no sequences give no micro-batches.
    """
    tokens = check_lengths("lengths", check_amount_list("lengths", lengths))
    check_positive("max_tokens", max_tokens)
    check_positive("num_multiple", num_multiple)
    work = tokens if costs is None else check_amount_list("costs", costs)
    if len(work) != len(tokens):
        raise PlacementError(
            f"costs has {len(work)} values; expected one per sequence ({len(tokens)})"
        )
    if not len(tokens):
        return []
    if tokens.max() > max_tokens:
        longest = int(tokens.argmax())
        raise PlacementError(
            f"lengths[{longest}] is {int(tokens[longest])} tokens; expected at most max_tokens={max_tokens}: "
            f"raise max_tokens to at least {int(tokens[longest])}, or truncate the sequence"
        )

    if num_multiple == 1 and tokens.sum() <= max_tokens:
        return [np.arange(len(tokens))]
    order = np.lexsort((-tokens, -work))
    tokens = tokens[order]
    work = work[order]
    by_tokens, num_parts = _fewest(tokens, max_tokens=max_tokens, num_multiple=num_multiple)
    by_work = longest_first_within(work, tokens, num_parts, capacity=max_tokens)
    starts = [by_tokens] if by_work is None else [by_work, by_tokens]

    starts = [fill_empty(start, num_parts) for start in starts]
    scaled = scale_to_one(work)
    lower_bound = max(float(scaled.sum()) / num_parts, float(scaled.max()))
    return _refine_starts(
        starts, scaled, tokens, num_parts, max_tokens, lower_bound=lower_bound
    ).parts(order)


def _fewest(tokens: Floats, *, max_tokens: int, num_multiple: int) -> tuple[Ints, int]:
    """Return the micro-batch of each sequence and their count: few, a multiple of `num_multiple`, within the budget."""
    packed = best_fit_decreasing(tokens, capacity=max_tokens)
    # Two sequences of more than half the budget never share a micro-batch.
    least = max(-(-int(tokens.sum()) // max_tokens), int((tokens * 2 > max_tokens).sum()), 1)
    below = (least - 1) // num_multiple
    enough = -(-(int(packed.max()) + 1) // num_multiple)
    fewest = packed
    while enough - below > 1:
        middle = (below + enough) // 2
        tried = np.empty(len(tokens), dtype=np.intp)
        for part, items in enumerate(balance(tokens, middle * num_multiple)):
            tried[items] = part
        if sum_per_part(tried, tokens, middle * num_multiple).max() <= max_tokens:
            fewest = tried
            enough = middle
        else:
            below = middle
    return fewest, enough * num_multiple


_SINGLE_ROUNDS = 512
"""Rounds that assign one item to each part; later rounds assign bundles of light items."""


def longest_first(
    costs: Floats, num_parts: int, *, max_count: int, is_folded: bool = False
) -> Ints:
    """Return the part of each item: by falling cost [num_items], each to the lightest part with fewer than `max_count`.

    Graham's LPT rule (SIAM J. Appl. Math. 17, 1969), for many items at a time: parts that are within an item of the
    lightest get one each, and where another part is further above them, as many as bring them up to it. No part is
    empty where there are items enough. `num_parts * max_count` must hold all items.

    Folded, each round gives an item, or a bundle, to every part, the heaviest to the lightest. Counts then differ by at
    most one, and loads by at most the largest cost: no round widens their spread beyond that of its own items.
    """
    until = np.concatenate([[0.0], np.cumsum(costs)])
    depth = max(1, -(-(len(costs) // num_parts - _SINGLE_ROUNDS) // _SINGLE_ROUNDS))
    part_of = np.empty(len(costs), dtype=np.intp)
    loads = np.zeros(num_parts)
    counts = np.zeros(num_parts, dtype=np.intp)
    num_dealt = num_rounds = 0
    while num_dealt < len(costs):
        num_left = len(costs) - num_dealt
        parts = np.flatnonzero(counts < max_count)
        parts = parts[np.argsort(loads[parts], kind="stable")]
        num_rows = 1 if num_rounds < _SINGLE_ROUNDS else depth
        if not is_folded:
            rising = loads[parts]
            width = int(np.searchsorted(rising, rising[0] + costs[num_dealt], side="right"))
            if width < len(parts):
                added = float(rising[width] - rising[0]) * width
                last = np.searchsorted(until, until[num_dealt] + added, side="right")
                num_rows = max(1, (int(last) - 1 - num_dealt) // width)
            parts = parts[:width]
            num_rows = min(num_rows, max_count - int(counts[parts].max()))
        # Where fewer items are left, the first parts get them.
        parts = parts[:num_left]
        num_rows = min(num_rows, num_left // len(parts))
        # A bundle is a column of the rows, whose direction alternates: two differ by no more than two items may.
        rows = np.arange(num_dealt, num_dealt + num_rows * len(parts)).reshape(num_rows, len(parts))
        rows[1::2] = rows[1::2, ::-1]
        sums = costs[rows].sum(axis=0)
        heaviest = np.argsort(-sums, kind="stable")
        part_of[rows[:, heaviest]] = parts
        loads[parts] += sums[heaviest]
        counts[parts] += num_rows
        num_dealt += num_rows * len(parts)
        num_rounds += 1
    return part_of


def longest_first_within(
    costs: Floats, weights: Floats, num_parts: int, *, capacity: float
) -> Ints | None:
    """Run `longest_first` with a bound on each part's summed weights; None if no part has capacity for an item."""
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


def best_fit_decreasing(weights: Floats, *, capacity: float) -> Ints:
    """Return the part of each item: by falling weight, each in the fullest part that can hold it, or in a new one.

    At most 11/9 of the least possible number of parts, plus a constant (Johnson et al., SIAM J. Comput. 3, 1974).
    """
    part_of = np.empty(len(weights), dtype=np.intp)
    free: list[tuple[float, int]] = []
    num_parts = 0
    order = np.argsort(-weights, kind="stable")
    for item, weight in zip(order.tolist(), weights[order].tolist(), strict=True):
        fit = bisect_left(free, (weight, -1))
        if fit < len(free):
            part_capacity, part = free.pop(fit)
        else:
            part_capacity = capacity
            part = num_parts
            num_parts += 1
        part_of[item] = part
        insort(free, (part_capacity - weight, part))
    return part_of


def fill_empty(part_of: Ints, num_parts: int) -> Ints:
    """Return `part_of` with one item moved to each empty part, from the part with most items, if it has two."""
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


class StreamingBalancer:
    """Assigns items to parts as they arrive, with one number of memory per part.

    Each item goes to the part that is lightest so far, and stays there; the items of one chunk are taken heaviest
    first. That is list scheduling (Graham, Bell System Technical Journal 45, 1966): at all times, over the costs so far

        max(loads) <= sum(costs) / num_parts + (1 - 1 / num_parts) * max(costs) <= (2 - 1 / num_parts) * optimum

    In one chunk alone it is the LPT rule, with 4/3 - 1 / (3 num_parts).

    Example:
        >>> balancer = StreamingBalancer(2)
        >>> balancer.add([5, 3, 3]).tolist()
        [0, 1, 1]
        >>> balancer.add([4]).tolist()
        [0]
        >>> balancer.loads.tolist()
        [9.0, 6.0]
    """

    def __init__(self, num_parts: int) -> None:
        check_positive("num_parts", num_parts)
        self._loads = np.zeros(num_parts)

    @property
    def loads(self) -> Floats:
        """[num_parts], the summed costs of each part."""
        return self._loads.copy()

    def add(self, costs: ArrayLike) -> Ints:
        """Return the part of each of the next items, [num_items]; where a cost is wrong, none is assigned."""
        amounts = check_amount_list("costs", costs)
        part_of = np.empty(len(amounts), dtype=np.intp)
        order = np.argsort(-amounts, kind="stable")
        first = 0
        while first < len(order):
            # The next items go to one part each, for as long as none of these is the lightest again.
            lightest = np.argsort(self._loads, kind="stable")[: len(order) - first]
            items = order[first : first + len(lightest)]
            loads = self._loads[lightest] + amounts[items]
            again = self._loads[lightest[1:]] > np.minimum.accumulate(loads)[:-1]
            count = int(again.argmax()) + 1 if again.any() else len(items)
            part_of[items[:count]] = lightest[:count]
            self._loads[lightest[:count]] = loads[:count]
            first += count
        return part_of
