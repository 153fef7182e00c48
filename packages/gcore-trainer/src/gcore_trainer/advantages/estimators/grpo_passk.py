"""Pass@k: the best response of a group alone has an advantage, by how much it is better than the second."""

import numpy as np
from numpy.typing import NDArray

from gcore_trainer.advantages.estimator import ScoredGroup, advantage_estimator, checked_scores

_EPSILON = 1e-6


@advantage_estimator(min_group_size=2)
def grpo_passk(
    group: ScoredGroup, *, norm_adv_by_std_in_grpo: bool = True
) -> list[NDArray[np.floating]]:
    """Give the best response (r_1 - r_2) / (std(r) + 1e-6), r_1 and r_2 being the largest scores, and the others 0.

    Tang et al. (arXiv 2503.19595); std with n - 1 in the denominator, and no division without
    ``norm_adv_by_std_in_grpo``, as in verl.
    """
    r = checked_scores(group.scores)
    second, best = np.argsort(r)[-2:]
    advantages = np.zeros_like(r)
    advantages[best] = r[best] - r[second]
    if norm_adv_by_std_in_grpo:
        advantages /= r.std(ddof=1) + _EPSILON
    return group.at_every_token(advantages)
