"""ReMax: each response against the greedy response to the same prompt."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gcore_trainer.advantages.estimator import ScoredGroup, advantage_estimator, checked_scores


@advantage_estimator(needs_greedy=True)
def remax(group: ScoredGroup) -> list[NDArray[np.floating]]:
    """Give all tokens of a response its `remax_advantages`."""
    assert group.greedy_score is not None
    return group.at_every_token(remax_advantages(group.scores, group.greedy_score))


def remax_advantages(scores: ArrayLike, greedy_score: float) -> NDArray[np.float32]:
    """Return the advantages [n] of responses over the greedy one: ReMax (arXiv 2310.10505).

    Args:
        scores: [n] rewards of the sampled responses, n >= 1.
        greedy_score: reward of the greedy response.

    Raises:
        BatchError: a score is not finite.
    """
    return (checked_scores(scores) - checked_scores([greedy_score])).astype(np.float32)
