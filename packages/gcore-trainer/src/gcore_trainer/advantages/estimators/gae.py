"""GAE: temporal differences of a critic's values, whitened over the batch."""

import numpy as np
from numpy.typing import NDArray

from gcore_trainer.advantages.estimator import ScoredGroup, advantage_estimator
from gcore_trainer.config import Fraction
from gcore_trainer.sample import require_finite


@advantage_estimator(needs_critic=True, reads_token_rewards=True, whiten=True)
def gae(
    group: ScoredGroup, *, gamma: Fraction = 1.0, lam: Fraction = 1.0
) -> tuple[list[NDArray[np.float64]], list[NDArray[np.float64]]]:
    """Return the `gae_advantages` of every response: advantages, and the returns that the critic learns.

    ``gamma`` is the discount per token, ``lam`` the weight of longer horizons.
    """
    assert group.values is not None
    advantages: list[NDArray[np.float64]] = []
    returns: list[NDArray[np.float64]] = []
    for rewards, values, mask in zip(group.rewards, group.values, group.masks, strict=True):
        of_response = gae_advantages(rewards, values, mask, gamma=gamma, lam=lam)
        advantages.append(of_response[0])
        returns.append(of_response[1])
    return advantages, returns


def gae_advantages(
    rewards: NDArray[np.floating],
    values: NDArray[np.floating],
    mask: NDArray[np.bool_],
    *,
    gamma: float,
    lam: float,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Compute generalised advantage estimates along one response (arXiv 1506.02438, eq. 16), before whitening.

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  return_t = A_t + V_t. Tokens outside the
    mask take no part, and the value after the last token is 0.

    Args:
        rewards: [R] of one response.
        values: [R], V of the state before each token.
        mask: [R] tokens of the policy.

    Returns:
        advantages [R] and returns [R], 0 outside the mask.

    Raises:
        BatchError: the reward or the value of a token in the mask is not finite.
    """
    require_finite("rewards", rewards, mask)
    require_finite("values", values, mask)
    advantages = np.zeros(rewards.shape, np.float64)
    next_advantage = next_value = 0.0
    for t in np.flatnonzero(mask)[::-1]:
        delta = float(rewards[t]) + gamma * next_value - float(values[t])
        next_advantage = delta + gamma * lam * next_advantage
        next_value = float(values[t])
        advantages[t] = next_advantage
    return advantages, np.where(mask, advantages + values, 0.0)
