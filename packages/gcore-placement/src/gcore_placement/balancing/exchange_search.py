"""For many pairs of parts at once, the exchange that brings the loads of each pair nearest to each other."""

import numpy as np
from numpy.typing import NDArray

from gcore_placement.balancing.assignment import NOTHING, Assignment, Exchanges


class ExchangeSearch:
    """Finds swaps and moves in an assignment that others change between calls.

    For a pair whose loads differ by a gap, every item of the heavy part looks up, by bisection in the sorted costs of
    the light part, the partner that makes the load that is shifted nearest to half the gap.
    """

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self._order = np.arange(len(assignment.costs))[::-1]

    def best(self, heavy: NDArray[np.intp], light: NDArray[np.intp]) -> Exchanges:
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
        return Exchanges(
            heavy=heavy[best],
            light=light[best],
            given=given[best],
            taken=taken[best],
            shift=self._shift(state.costs, given[best], taken[best]),
        )

    def _miss(
        self,
        heavy: NDArray[np.intp],
        light: NDArray[np.intp],
        given: NDArray[np.intp],
        taken: NDArray[np.intp],
        half_gap: NDArray[np.float64],
        *,
        possible: NDArray[np.bool_],
    ) -> NDArray[np.float64]:
        """[num_queries], how far the load shifted is from half the gap; infinite where the exchange would not help."""
        state = self._assignment
        shift = self._shift(state.costs, given, taken)
        weight_shift = self._shift(state.weights, given, taken)
        fits = state.filled[light] + weight_shift <= state.capacity
        fits &= state.filled[heavy] - weight_shift <= state.capacity
        helps = (shift > 0) & (shift < 2 * half_gap)
        return np.where(possible & fits & helps, np.abs(shift - half_gap), np.inf)

    @staticmethod
    def _shift(amounts: NDArray[np.float64], given: NDArray[np.intp], taken: NDArray[np.intp]) -> NDArray[np.float64]:
        return amounts[given] - np.where(taken == NOTHING, 0.0, amounts[taken])

    def _sort_by_part_then_cost(self) -> NDArray[np.float64]:
        """Sorts `_order` again and returns its keys; few items have moved since, which a stable sort is quick at."""
        keys = 2 * self._assignment.part_of[self._order] + self._assignment.costs[self._order]
        resort = np.argsort(keys, kind="stable")
        self._order = self._order[resort]
        return keys[resort]
