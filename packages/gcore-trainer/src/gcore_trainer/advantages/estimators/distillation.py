"""No advantages from scores: the policy learns from its teachers alone."""

import numpy as np
from numpy.typing import NDArray

from gcore_trainer.advantages.estimator import ScoredGroup, advantage_estimator


@advantage_estimator()
def distillation(group: ScoredGroup) -> list[NDArray[np.floating]]:
    """Return A_i = 0, to which `gcore_trainer.add_distillation` adds the teachers' advantages.

    GKD (arXiv 2306.13649) on the policy's own samples. Where the policy is its own teacher, with a prompt that has the
    solution, it is the reverse KL of OPSD (arXiv 2601.18734) and SDFT (arXiv 2601.19897), and with the reward's
    feedback, or a better response, in the prompt that of SDPO (arXiv 2601.20802), of the sampled tokens.
    """
    return group.at_every_token(np.zeros(len(group.masks)))
