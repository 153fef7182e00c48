"""Bounded local search: exchanges between parts until the heaviest cannot be made lighter."""

from collections import deque

import numpy as np

from gcore_placement.balancing.assignment import Assignment
from gcore_placement.balancing.exchange_search import ExchangeSearch
from gcore_placement.balancing.pair_swaps import swap_pairs

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
        exchanges = search.best(np.repeat(ranked[-1:], num_parts - 1), ranked[:-1])
        if not len(exchanges):
            return
        heavy_after = assignment.loads[exchanges.heavy] - exchanges.shift
        light_after = assignment.loads[exchanges.light] + exchanges.shift
        assignment.apply(exchanges.row(int(np.maximum(heavy_after, light_after).argmin())))
