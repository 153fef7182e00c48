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


def by_part(part_of: Ints, num_parts: int) -> tuple[Ints, Ints, Ints]:
    """Return the items sorted by part, ties by index, and the count and first position of each part's items."""
    # Two bytes are sorted by radix, many times as fast.
    keys = part_of.astype(np.uint16) if num_parts <= 1 << 16 else part_of
    counts = np.bincount(part_of, minlength=num_parts)
    return np.argsort(keys, kind="stable"), counts, np.cumsum(counts) - counts


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
        self._order = np.arange(len(self.costs))[::-1]

    @property
    def makespan(self) -> float:
        """The load of the heaviest part."""
        return float(self.loads.max())

    def parts(self, index_of: Ints) -> list[Ints]:
        """Return the items of each part by their caller's index `index_of` [num_items], ascending."""
        part_of = np.empty_like(self.part_of)
        part_of[index_of] = self.part_of
        order, _, starts = by_part(part_of, self.num_parts)
        return np.split(order, starts[1:])

    def sample(self, per_part: int, *, first: int) -> "tuple[Assignment, Ints]":
        """Return about `per_part` items of each part, evenly spaced by cost from the `first` (modulo the spacing) on.

        The others stay fixed. Also returns the items' indices.
        """
        order, counts, starts = by_part(self.part_of, self.num_parts)
        rank = np.arange(len(order)) - np.repeat(starts, counts)
        stride = np.repeat(np.maximum(counts // per_part, 1), counts)
        items = np.sort(order[rank % stride == first % stride])
        sampled = replace(
            self, costs=self.costs[items], weights=self.weights[items], part_of=self.part_of[items]
        )
        sampled.loads = self.loads
        sampled.filled = self.filled
        return sampled, items

    def apply(self, exchanges: "Exchanges") -> None:
        """Carry out exchanges; no part may occur in two of them."""
        heavy, light, heavy_items, light_items = exchanges
        shift = _shift(self.costs, heavy_items, light_items)
        weight_shift = _shift(self.weights, heavy_items, light_items)
        swapped = light_items != NOTHING
        self.part_of[heavy_items] = light[:, None]
        self.part_of[light_items[swapped]] = np.broadcast_to(heavy[:, None], light_items.shape)[
            swapped
        ]
        self.loads[heavy] -= shift
        self.loads[light] += shift
        self.filled[heavy] -= weight_shift
        self.filled[light] += weight_shift

    def miss(
        self,
        heavy: Ints,
        light: Ints,
        heavy_items: Ints,
        light_items: Ints,
        possible: NDArray[np.bool_],
    ) -> Floats:
        """Return the distance of the load that exchanges shift from half the gap; infinite if they do not help.

        Items are [..., num_items], all else and the result [...]
        """
        half_gap = (self.loads[heavy] - self.loads[light]) / 2
        shift = _shift(self.costs, heavy_items, light_items)
        weight_shift = _shift(self.weights, heavy_items, light_items)
        fits = self.filled[light] + weight_shift <= self.capacity
        fits &= self.filled[heavy] - weight_shift <= self.capacity
        helps = (shift > 0) & (shift < 2 * half_gap)
        return np.where(possible & fits & helps, np.abs(shift - half_gap), np.inf)

    def find_exchanges(self, heavy: Ints, light: Ints) -> "Exchanges":
        """Return the best exchange of each pair `heavy[i]`, `light[i]`; pairs without one that helps are left out.

        Every item of a pair's heavy part looks up, by bisection in the sorted costs of the light part, the partner that
        makes the load that is shifted nearest to half the gap.
        """
        keys = self._sort_by_part_then_cost()
        counts = np.bincount(self.part_of, minlength=self.num_parts)
        uneven = (self.loads[heavy] > self.loads[light]) & (counts[heavy] > 0)
        heavy = heavy[uneven]
        light = light[uneven]
        ends = np.cumsum(counts)
        starts = ends - counts

        # One query per pair and item of its heavy part, pair by pair.
        sizes = counts[heavy]
        first_query = np.cumsum(sizes) - sizes
        pair = np.repeat(np.arange(len(heavy)), sizes)
        heavy = heavy[pair]
        light = light[pair]
        heavy_items = self._order[starts[heavy] + np.arange(len(pair)) - first_query[pair]]

        half_gap = (self.loads[heavy] - self.loads[light]) / 2
        above = np.searchsorted(
            keys, 2 * light + np.maximum(self.costs[heavy_items] - half_gap, 0.0)
        )
        # Rounding in `loads` must not let a part give away its only item.
        light_items = np.full(len(pair), NOTHING)
        miss = self.miss(heavy, light, heavy_items[:, None], light_items[:, None], sizes[pair] > 1)
        for position in (above - 1, above):
            inside = (position >= starts[light]) & (position < ends[light])
            partner = self._order[np.where(inside, position, 0)]
            partner_miss = self.miss(heavy, light, heavy_items[:, None], partner[:, None], inside)
            better = partner_miss < miss
            light_items[better] = partner[better]
            miss[better] = partner_miss[better]

        # The first of each pair's best queries.
        best = (
            np.flatnonzero(miss == np.minimum.reduceat(miss, first_query)[pair])
            if len(pair)
            else pair
        )
        best = best[np.searchsorted(best, first_query)]
        best = best[np.isfinite(miss[best])]
        return heavy[best], light[best], heavy_items[best, None], light_items[best, None]

    def _sort_by_part_then_cost(self) -> Floats:
        """Sort `_order` again and return its keys; few items have moved since, which a stable sort is quick at."""
        keys = 2 * self.part_of[self._order] + self.costs[self._order]
        resort = np.argsort(keys, kind="stable")
        self._order = self._order[resort]
        return keys[resort]


Exchanges = tuple[Ints, Ints, Ints, Ints]
"""Heavy and light parts, [num_pairs], and the items of each that change sides, [num_pairs, num_items]; a light part's
may be NOTHING. The load that is shifted is above 0, and below the gap."""


def _shift(amounts: Floats, heavy_items: Ints, light_items: Ints) -> Floats:
    """Return the amount that exchanges take from the heavy part to the light one: [...]."""
    return amounts[heavy_items].sum(axis=-1) - np.where(
        light_items == NOTHING, 0.0, amounts[light_items]
    ).sum(axis=-1)


MAX_SUMS = 1 << 16
"""Sums of two items that a round looks at, on either side."""
FEWEST_ITEMS = 12
MOST_ITEMS = 64
"""Least and most items of a part to try."""
GOLDEN = 0.6180339887498949
"""Golden ratio: the fractional parts of its multiples are spread evenly over [0, 1]."""


def swap_pairs(
    assignment: Assignment, heavy: Ints, light: Ints, *, target: float, number: int
) -> None:
    """Make the best exchange of two items for two of each pair `heavy[i]`, `light[i]`, in place.

    As in `Assignment.find_exchanges`, for the sums of two items. Only so many items of a part are tried, evenly spaced
    by cost, others in each round. No part occurs twice in `heavy` and `light`; pairs whose heavy part has at most the
    target are left alone.
    """
    order, counts, starts = by_part(assignment.part_of, assignment.num_parts)
    chosen = assignment.loads[heavy] > np.maximum(target, assignment.loads[light])
    chosen &= np.minimum(counts[heavy], counts[light]) >= 2
    heavy = heavy[chosen]
    light = light[chosen]
    if not len(heavy):
        return
    size = int(np.clip(np.sqrt(2 * MAX_SUMS / len(heavy)), FEWEST_ITEMS, MOST_ITEMS))
    size = min(size, int(max(counts[heavy].max(), counts[light].max())))
    phase = number * GOLDEN % 1
    one, two = np.triu_indices(size, 1)

    def sums_of(parts: Ints) -> tuple[Ints, Floats]:
        """Return the items of each sum, [num_pairs, num_sums, 2], and the sums; 4, above any sum, without items."""
        rank = ((np.arange(size) + phase) * np.maximum(counts[parts] / size, 1)[:, None]).astype(
            np.intp
        )
        exists = rank < counts[parts][:, None]
        items = order[np.where(exists, starts[parts][:, None] + rank, 0)]
        pairs = np.stack([items[:, one], items[:, two]], axis=-1)
        return pairs, np.where(
            exists[:, one] & exists[:, two], assignment.costs[pairs].sum(axis=-1), 4.0
        )

    heavy_items, heavy_sums = sums_of(heavy)
    light_items, light_sums = sums_of(light)
    by_sum = np.argsort(light_sums, axis=1)
    row = np.arange(len(heavy))
    pair = row[:, None]
    half_gap = (assignment.loads[heavy] - assignment.loads[light])[:, None] / 2
    keys = (8 * pair + light_sums[pair, by_sum]).ravel()
    above = np.searchsorted(
        keys, (8 * pair + np.maximum(heavy_sums - half_gap, 0.0)).ravel()
    ).reshape(heavy_sums.shape)
    above -= pair * len(one)

    best_miss = np.full(len(heavy), np.inf)
    best_heavy_items = heavy_items[:, 0]
    best_light_items = light_items[:, 0]
    for position in (above - 1, above):
        inside = (position >= 0) & (position < len(one))
        partner = by_sum[pair, np.where(inside, position, 0)]
        exists = inside & (heavy_sums < 4) & (light_sums[pair, partner] < 4)
        miss = assignment.miss(
            heavy[:, None], light[:, None], heavy_items, light_items[pair, partner], exists
        )
        first = miss.argmin(axis=1)
        better = miss[row, first] < best_miss
        best_miss = np.where(better, miss[row, first], best_miss)
        best_heavy_items = np.where(better[:, None], heavy_items[row, first], best_heavy_items)
        best_light_items = np.where(
            better[:, None], light_items[row, partner[row, first]], best_light_items
        )

    helps = np.isfinite(best_miss)
    assignment.apply((heavy[helps], light[helps], best_heavy_items[helps], best_light_items[helps]))


MAX_ROUNDS = 200
CLOSE_ENOUGH = 2e-10
CLOSE_FOR_FEW = 1e-8
"""Relative distances from the lower bound at which another round is worth less than its own time: in general, and where
a round would try all of very many items."""
FEW_PER_PART = 64
SAMPLES = 8
"""Items of a part that are enough to choose from, most of the time, and the most samples of so few to try."""
WORTHWHILE = 0.5
"""Share of the distance from the lower bound that may remain after a round that is followed by another of its kind."""
PATIENCE = 12
"""Rounds that together must remove a tenth of the distance."""


def refine(assignment: Assignment, *, lower_bound: float, tolerance: float = 0.0) -> None:
    """Lower the makespan of `assignment` in place; never raises it, and never breaks its capacity.

    Each round pairs the heaviest part with the lightest, the second heaviest with the second lightest and so on, and
    makes the best exchange of each pair: of an item for at most one, and where that has become slow of two for two. A
    round that leaves the makespan where it was is followed by a search between the heaviest part and all others. The
    search ends where that finds nothing, or within `tolerance` of the lower bound. Of long parts a few items are tried
    first, then all unless that came close, then others a few at a time.
    """
    target = lower_bound * (1 + max(CLOSE_ENOUGH, tolerance))
    if len(assignment.costs) <= 2 * FEW_PER_PART * assignment.num_parts:
        _refine(assignment, lower_bound=lower_bound, target=target)
        return
    for number in range(SAMPLES):
        sampled, items = assignment.sample(FEW_PER_PART, first=number)
        _refine(sampled, lower_bound=lower_bound, target=target)
        assignment.part_of[items] = sampled.part_of
        if number == 0:
            _refine(
                assignment,
                lower_bound=lower_bound,
                target=max(target, lower_bound * (1 + CLOSE_FOR_FEW)),
            )
        if assignment.makespan <= target:
            return


def _refine(assignment: Assignment, *, lower_bound: float, target: float) -> None:
    half = assignment.num_parts // 2
    seen: deque[float] = deque(maxlen=PATIENCE)
    for number in range(MAX_ROUNDS):
        makespan = assignment.makespan
        slow = len(seen) == PATIENCE and makespan - lower_bound > 0.9 * (seen[0] - lower_bound)
        if makespan <= target or slow:
            return
        seen.append(makespan)
        ranked = np.argsort(assignment.loads, kind="stable")
        assignment.apply(assignment.find_exchanges(ranked[::-1][:half], ranked[:half]))
        if assignment.makespan - lower_bound <= WORTHWHILE * (makespan - lower_bound):
            continue
        ranked = np.argsort(assignment.loads, kind="stable")
        swap_pairs(assignment, ranked[::-1][:half], ranked[:half], target=target, number=number)
        if assignment.makespan < makespan:
            continue
        ranked = np.argsort(assignment.loads, kind="stable")
        heavy, light, heavy_items, light_items = assignment.find_exchanges(
            np.repeat(ranked[-1:], len(ranked) - 1), ranked[:-1]
        )
        if not len(heavy):
            return
        shift = _shift(assignment.costs, heavy_items, light_items)
        row = [
            int(
                np.maximum(
                    assignment.loads[heavy] - shift, assignment.loads[light] + shift
                ).argmin()
            )
        ]
        assignment.apply((heavy[row], light[row], heavy_items[row], light_items[row]))
