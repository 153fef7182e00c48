"""Dr. GRPO: GRPO without the division by the group's standard deviation."""

import numpy as np
from numpy.typing import NDArray

from gcore_trainer.advantages.estimator import ScoredGroup, advantage_estimator
from gcore_trainer.advantages.estimators.grpo import grpo_advantages


@advantage_estimator(min_group_size=2)
def dr_grpo(group: ScoredGroup) -> list[NDArray[np.floating]]:
    """Return A_i = r_i - mean(r) (arXiv 2503.20783)."""
    return group.at_every_token(grpo_advantages(group.scores, norm_adv_by_std_in_grpo=False))
