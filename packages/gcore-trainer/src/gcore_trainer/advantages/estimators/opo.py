"""OPO: each response against the mean score of its group's tokens, the baseline of least variance."""

import numpy as np
from numpy.typing import NDArray

from gcore_trainer.advantages.estimator import ScoredGroup, advantage_estimator, checked_scores


@advantage_estimator(min_group_size=2)
def opo(group: ScoredGroup) -> list[NDArray[np.floating]]:
    """Give all tokens of response i, of l_i tokens, A_i = r_i - sum_j l_j r_j / sum_j l_j (arXiv 2505.23585, eq. 9).

    A single response keeps its score, as in verl.
    """
    r = checked_scores(group.scores)
    lengths = np.array([mask.sum() for mask in group.masks])
    baseline = 0.0
    if r.size > 1 and lengths.any():
        baseline = (lengths * r).sum() / lengths.sum()
    # Equal scores have no gradient, also where the mean is off by a rounding.
    advantages = r - baseline if r.size == 1 or np.ptp(r) else np.zeros_like(r)
    return group.at_every_token(advantages)
