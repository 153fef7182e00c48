"""Bounded local search: exchanges between parts until the heaviest cannot be made lighter."""

import numpy as np

from gcore_placement._assignment import Assignment
from gcore_placement._search import ExchangeSearch

MAX_ROUNDS = 200
CLOSE_ENOUGH = 1e-6
"""Relative distance from the lower bound at which another round is worth less than its own time."""


def refine(assignment: Assignment, *, lower_bound: float) -> None:
    """Lowers the makespan of `assignment` in place; never raises it, and never breaks its capacity.

    Each round pairs the heaviest part with the lightest, the second heaviest with the second lightest and so on, and
    makes the best exchange of each pair. A round that leaves the makespan where it was is followed by a search between
    the heaviest part and all others; where that finds nothing, no exchange of one item for at most one can help.
    """
    num_parts = len(assignment.loads)
    search = ExchangeSearch(assignment)
    for _ in range(MAX_ROUNDS):
        makespan = assignment.makespan
        if makespan <= lower_bound * (1 + CLOSE_ENOUGH):
            return
        ranked = np.argsort(assignment.loads, kind="stable")
        assignment.apply(search.best(ranked[::-1][: num_parts // 2], ranked[: num_parts // 2]))
        if assignment.makespan < makespan:
            continue
        ranked = np.argsort(assignment.loads, kind="stable")
        exchanges = search.best(np.repeat(ranked[-1:], num_parts - 1), ranked[:-1])
        if not len(exchanges):
            return
        heavy_after = assignment.loads[exchanges.heavy] - exchanges.shift
        light_after = assignment.loads[exchanges.light] + exchanges.shift
        assignment.apply(exchanges.row(int(np.maximum(heavy_after, light_after).argmin())))
