"""REINFORCE++-baseline: scores centred within the group, and whitened over the batch."""

import numpy as np
from numpy.typing import NDArray

from gcore_trainer.advantages.estimator import ScoredGroup, advantage_estimator
from gcore_trainer.advantages.estimators.grpo import grpo_advantages


@advantage_estimator(whiten=True, min_group_size=2)
def reinforce_plus_plus_baseline(group: ScoredGroup) -> list[NDArray[np.floating]]:
    """Return A_i = r_i - mean(r), before whitening (arXiv 2501.03262)."""
    return group.at_every_token(grpo_advantages(group.scores, norm_adv_by_std_in_grpo=False))
