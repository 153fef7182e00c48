"""REINFORCE++: discounted returns, whitened over the batch."""

import numpy as np
from numpy.typing import NDArray

from gcore_trainer.advantages.estimator import ScoredGroup, advantage_estimator
from gcore_trainer.advantages.estimators.gae import gae_advantages
from gcore_trainer.config import Fraction


@advantage_estimator(reads_token_rewards=True, whiten=True)
def reinforce_plus_plus(group: ScoredGroup, *, gamma: Fraction = 1.0) -> list[NDArray[np.float64]]:
    """Return the `discounted_returns` of every response; ``gamma`` is the discount per token."""
    return [
        discounted_returns(r, m, gamma=gamma)
        for r, m in zip(group.rewards, group.masks, strict=True)
    ]


def discounted_returns(
    rewards: NDArray[np.floating], mask: NDArray[np.bool_], *, gamma: float
) -> NDArray[np.float64]:
    """Return the discounted sum of the rewards from each token on: REINFORCE++ (arXiv 2501.03262), before whitening.

    Tokens outside the mask (a tool's output) take no part: their rewards do not count, and time does not pass.

    Args:
        rewards: [R] of one response.
        mask: [R] tokens of the policy.

    Returns:
        [R], 0 outside the mask.

    Raises:
        BatchError: the reward of a token in the mask is not finite.
    """
    return gae_advantages(rewards, np.zeros(rewards.shape), mask, gamma=gamma, lam=1.0)[0]
