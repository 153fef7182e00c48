"""GDPO: the parts of a reward are normalised one by one, so that none of them drowns the others."""

import math
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from gcore_trainer.advantages.estimator import ScoredGroup, advantage_estimator
from gcore_trainer.advantages.estimators.grpo import grpo_advantages
from gcore_trainer.config import ConfigBound

_WEIGHTS = ConfigBound(
    lambda weights: weights and all(map(math.isfinite, weights.values())),
    "a table of finite weights, by the names of the reward's parts",
)


@advantage_estimator(whiten=True, min_group_size=2)
def gdpo(
    group: ScoredGroup,
    *,
    gdpo_rewards: Annotated[dict[str, float] | None, _WEIGHTS] = None,
    norm_adv_by_std_in_grpo: bool = True,
) -> list[NDArray[np.floating]]:
    """Return A_i = sum_k w_k (r_ik - mean(r_k)) / (std(r_k) + 1e-6), before whitening (arXiv 2601.05242, eq. 4 to 6).

    ``gdpo_rewards`` has the weight w_k of each part r_k of the reward that counts, by its name.

    Raises:
        BatchError: a response does not have one of the parts.
    """
    advantages = np.zeros(len(group.masks))
    for name, weight in (gdpo_rewards or {}).items():
        advantages += weight * grpo_advantages(
            group.part(name), norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo
        )
    return group.at_every_token(advantages)
