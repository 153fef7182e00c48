"""No advantages from scores: the policy learns from its teachers alone."""

import numpy as np
from numpy.typing import NDArray

from gcore_trainer.advantages.estimator import ScoredGroup, advantage_estimator


@advantage_estimator()
def distillation(group: ScoredGroup) -> list[NDArray[np.floating]]:
    """Return A_i = 0, to which `gcore_trainer.add_distillation` adds the teachers' advantages."""
    return group.at_every_token(np.zeros(len(group.masks)))
