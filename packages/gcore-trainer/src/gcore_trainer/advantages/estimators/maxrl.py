"""MaxRL: the gradient of the likelihood of success, in which a prompt weighs more the fewer responses succeed."""

import numpy as np
from numpy.typing import NDArray

from gcore_trainer.advantages.estimator import ScoredGroup, advantage_estimator, checked_scores
from gcore_trainer.advantages.estimators.grpo import centred_scores
from gcore_trainer.errors import BatchError


@advantage_estimator(min_group_size=2)
def maxrl(group: ScoredGroup) -> list[NDArray[np.floating]]:
    """Give all tokens of a response A_i = (r_i - mean(r)) / mean(r): Tajwar et al. (arXiv 2602.02710, section 4).

    With scores of 0 and 1 its expectation is the gradient of the likelihood of success, cut after n - 1 terms. A group
    without a success has advantages of 0.

    Raises:
        BatchError: a score is below 0, or not finite.
    """
    r = checked_scores(group.scores)
    if r.min() < 0:
        raise BatchError(f"scores is {r}; expected numbers of at least 0 with adv_estimator maxrl")
    return group.at_every_token(centred_scores(r) / (r.mean() or 1.0))
