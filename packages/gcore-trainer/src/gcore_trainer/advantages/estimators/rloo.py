"""RLOO: each response against the mean of the others."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gcore_trainer.advantages.estimator import ScoredGroup, advantage_estimator, checked_scores
from gcore_trainer.advantages.estimators.grpo import centred_scores


@advantage_estimator(min_group_size=2)
def rloo(group: ScoredGroup) -> list[NDArray[np.floating]]:
    """Give all tokens of a response its `rloo_advantages`."""
    return group.at_every_token(rloo_advantages(group.scores))


def rloo_advantages(scores: ArrayLike) -> NDArray[np.float32]:
    """Return the leave-one-out advantages [n] of one prompt's responses: RLOO (arXiv 2402.14740).

    A_i = r_i - sum_{j != i} r_j / (n - 1)

    Args:
        scores: [n] rewards of the group, n >= 1. A single response keeps its score, as in verl.

    Raises:
        BatchError: a score is not finite.
    """
    r = checked_scores(scores)
    return (centred_scores(r) * r.size / max(r.size - 1, 1)).astype(np.float32)
