"""Bounded local search: exchanges between parts until the heaviest cannot be made lighter."""

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from gcore_placement.quantities import Floats, Ints

NOTHING = -1
"""Marks an exchange that gives an item away and takes none back."""


def sum_per_part(part_of: Ints, amounts: Floats, num_parts: int) -> Floats:
    """Return the summed amounts of the items in each part: [num_parts]."""
    return np.asarray(np.bincount(part_of, weights=amounts, minlength=num_parts), dtype=np.float64)


def by_part(part_of: Ints, num_parts: int) -> Ints:
    """Return the items sorted by their part, ties by index."""
    # Two bytes are sorted by radix, many times as fast.
    keys = part_of.astype(np.uint16) if num_parts <= 1 << 16 else part_of
    return np.argsort(keys, kind="stable")


@dataclass(kw_only=True)
class Assignment:
    """Items in parts, mutable: `apply` keeps `part_of`, `loads` and `filled` in step."""

    costs: Floats
    """[num_items], falling, in [0, 1], which lets a part's number and a cost share one sort key."""
    weights: Floats
    """[num_items], what an item takes of its part's capacity."""
    capacity: float
    """Bound on the summed weights of each part."""
    part_of: Ints
    """[num_items], the part of each item."""
    num_parts: int
    loads: Floats = field(init=False)
    """[num_parts], the summed costs of each part."""
    filled: Floats = field(init=False)
    """[num_parts], the summed weights of each part."""

    def __post_init__(self) -> None:
        self.loads = sum_per_part(self.part_of, self.costs, self.num_parts)
        self.filled = sum_per_part(self.part_of, self.weights, self.num_parts)

    @property
    def makespan(self) -> float:
        """The load of the heaviest part."""
        return float(self.loads.max())

    def parts(self, index_of: Ints) -> list[Ints]:
        """Return the items of each part by their caller's index `index_of` [num_items], ascending."""
        part_of = np.empty_like(self.part_of)
        part_of[index_of] = self.part_of
        counts = np.bincount(part_of, minlength=len(self.loads))
        return np.split(by_part(part_of, len(self.loads)), np.cumsum(counts)[:-1])

    def sample(self, per_part: int, *, first: int) -> "tuple[Assignment, Ints]":
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
        sampled = replace(self, costs=self.costs[items], weights=self.weights[items], part_of=self.part_of[items])
        sampled.loads, sampled.filled = self.loads, self.filled
        return sampled, items

    def apply(self, exchanges: "Exchanges") -> None:
        """Carry out exchanges; no part may occur in two of them."""
        heavy, light, given, taken = exchanges
        shift, weight_shift = self.shift(given, taken), _shift(self.weights, given, taken)
        swapped = taken != NOTHING
        self.part_of[given] = light[:, None]
        self.part_of[taken[swapped]] = np.broadcast_to(heavy[:, None], taken.shape)[swapped]
        self.loads[heavy] -= shift
        self.loads[light] += shift
        self.filled[heavy] -= weight_shift
        self.filled[light] += weight_shift

    def shift(self, given: Ints, taken: Ints) -> Floats:
        """Return the load that exchanges take from the heavy part to the light one: [num_pairs]."""
        return _shift(self.costs, given, taken)


Exchanges = tuple[Ints, Ints, Ints, Ints]
"""Heavy and light parts, [num_pairs], and the items that a heavy part gives and takes, [num_pairs, num_items]; these
may be NOTHING. The load that is shifted is above 0, and below the gap between the two parts."""


def _shift(amounts: Floats, given: Ints, taken: Ints) -> Floats:
    return amounts[given].sum(axis=1) - np.where(taken == NOTHING, 0.0, amounts[taken]).sum(axis=1)


class ExchangeSearch:
    """Finds swaps and moves in an assignment that others change between calls.

    For a pair whose loads differ by a gap, every item of the heavy part looks up, by bisection in the sorted costs of
    the light part, the partner that makes the load that is shifted nearest to half the gap.
    """

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self._order = np.arange(len(assignment.costs))[::-1]

    def best(self, heavy: Ints, light: Ints) -> Exchanges:
        """The best exchange of each pair `heavy[i]`, `light[i]`; pairs without one that helps are left out."""
        state = self._assignment
        keys = self._sort_by_part_then_cost()
        counts = np.bincount(state.part_of, minlength=len(state.loads))
        uneven = (state.loads[heavy] > state.loads[light]) & (counts[heavy] > 0)
        heavy, light = heavy[uneven], light[uneven]
        ends = np.cumsum(counts)
        starts = ends - counts

        # One query per pair and item of its heavy part, pair by pair.
        sizes = counts[heavy]
        first_query = np.cumsum(sizes) - sizes
        pair = np.repeat(np.arange(len(heavy)), sizes)
        heavy, light = heavy[pair], light[pair]
        given = self._order[starts[heavy] + np.arange(len(pair)) - first_query[pair]]

        half_gap = (state.loads[heavy] - state.loads[light]) / 2
        above = np.searchsorted(keys, 2 * light + np.maximum(state.costs[given] - half_gap, 0.0))
        # Rounding in `loads` must not let a part give away its only item.
        taken = np.full(len(pair), NOTHING)
        miss = self._miss(heavy, light, given, taken, half_gap, possible=sizes[pair] > 1)
        for position in (above - 1, above):
            inside = (position >= starts[light]) & (position < ends[light])
            partner = self._order[np.where(inside, position, 0)]
            partner_miss = self._miss(heavy, light, given, partner, half_gap, possible=inside)
            better = partner_miss < miss
            taken[better], miss[better] = partner[better], partner_miss[better]

        # The first of each pair's best queries.
        best = np.flatnonzero(miss == np.minimum.reduceat(miss, first_query)[pair]) if len(pair) else pair
        best = best[np.searchsorted(best, first_query)]
        best = best[np.isfinite(miss[best])]
        return heavy[best], light[best], given[best, None], taken[best, None]

    def _miss(
        self, heavy: Ints, light: Ints, given: Ints, taken: Ints, half_gap: Floats, *, possible: NDArray[np.bool_]
    ) -> Floats:
        """[num_queries], how far the load shifted is from half the gap; infinite where the exchange would not help."""
        state = self._assignment
        shift = state.shift(given[:, None], taken[:, None])
        weight_shift = _shift(state.weights, given[:, None], taken[:, None])
        fits = state.filled[light] + weight_shift <= state.capacity
        fits &= state.filled[heavy] - weight_shift <= state.capacity
        helps = (shift > 0) & (shift < 2 * half_gap)
        return np.where(possible & fits & helps, np.abs(shift - half_gap), np.inf)

    def _sort_by_part_then_cost(self) -> Floats:
        """Sorts `_order` again and returns its keys; few items have moved since, which a stable sort is quick at."""
        keys = 2 * self._assignment.part_of[self._order] + self._assignment.costs[self._order]
        resort = np.argsort(keys, kind="stable")
        self._order = self._order[resort]
        return keys[resort]


MAX_SUMS = 1 << 16
"""Sums of two items that a round looks at, on either side."""

FEWEST_ITEMS, MOST_ITEMS = 12, 64
"""Least and most items of a part to try."""

GOLDEN = 0.6180339887498949
"""Multiples of it, without their whole part, are spread evenly over [0, 1]."""


def swap_pairs(assignment: Assignment, heavy: Ints, light: Ints, *, target: float, number: int) -> None:
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

    def sums_of(parts: Ints) -> tuple[Ints, Ints, Floats]:
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
    assignment.apply((heavy[made], light[made], best[made, :2], best[made, 2:]))


MAX_ROUNDS = 200
CLOSE_ENOUGH = 2e-10
"""Relative distance from the lower bound at which another round is worth less than its own time."""

CLOSE_FOR_FEW = 1e-8
"""Relative distance that is close enough where a round would try all of very many items."""

FEW_PER_PART = 64
"""Items of a part that are enough to choose from, most of the time."""

SAMPLES = 8
"""Most samples of so few items to try."""

WORTHWHILE = 0.5
"""Share of the distance from the lower bound that may remain after a round that is followed by another of its kind."""

PATIENCE = 12
"""Rounds that together must remove a tenth of the distance."""


def refine(assignment: Assignment, *, lower_bound: float, tolerance: float = 0.0) -> None:
    """Lower the makespan of `assignment` in place; never raises it, and never breaks its capacity.

    Each round pairs the heaviest part with the lightest, the second heaviest with the second lightest and so on, and
    makes the best exchange of each pair: of an item for at most one, and where that has become slow of two for two. A
    round that leaves the makespan where it was is followed by a search between the heaviest part and all others; where
    that finds nothing either, or where the makespan is within `tolerance` of the lower bound, the search ends. Of long
    parts a few items are tried first, then all unless that came close, then others a few at a time.
    """
    target = lower_bound * (1 + max(CLOSE_ENOUGH, tolerance))
    if len(assignment.costs) <= 2 * FEW_PER_PART * len(assignment.loads):
        _refine(assignment, lower_bound=lower_bound, target=target)
        return
    for number in range(SAMPLES):
        sampled, items = assignment.sample(FEW_PER_PART, first=number)
        _refine(sampled, lower_bound=lower_bound, target=target)
        assignment.part_of[items] = sampled.part_of
        if number == 0:
            _refine(assignment, lower_bound=lower_bound, target=max(target, lower_bound * (1 + CLOSE_FOR_FEW)))
        if assignment.makespan <= target:
            return


def _refine(assignment: Assignment, *, lower_bound: float, target: float) -> None:
    num_parts = len(assignment.loads)
    search = ExchangeSearch(assignment)
    seen: deque[float] = deque(maxlen=PATIENCE)
    for number in range(MAX_ROUNDS):
        makespan = assignment.makespan
        slow = len(seen) == PATIENCE and makespan - lower_bound > 0.9 * (seen[0] - lower_bound)
        if makespan <= target or slow:
            return
        seen.append(makespan)
        ranked = np.argsort(assignment.loads, kind="stable")
        assignment.apply(search.best(ranked[::-1][: num_parts // 2], ranked[: num_parts // 2]))
        if assignment.makespan - lower_bound <= WORTHWHILE * (makespan - lower_bound):
            continue
        ranked = np.argsort(assignment.loads, kind="stable")
        swap_pairs(assignment, ranked[::-1][: num_parts // 2], ranked[: num_parts // 2], target=target, number=number)
        if assignment.makespan < makespan:
            continue
        ranked = np.argsort(assignment.loads, kind="stable")
        heavy, light, given, taken = search.best(np.repeat(ranked[-1:], num_parts - 1), ranked[:-1])
        if not len(heavy):
            return
        shift = assignment.shift(given, taken)
        row = [int(np.maximum(assignment.loads[heavy] - shift, assignment.loads[light] + shift).argmin())]
        assignment.apply((heavy[row], light[row], given[row], taken[row]))
