"""Advantage estimators: pure functions from scores to advantages.

Group-relative ones (GRPO, Dr. GRPO, RLOO, REINFORCE++-baseline) compare the responses to one prompt, ReMax compares
them to a greedy one, GAE and REINFORCE++ go along the tokens of a response. The last step of GAE and REINFORCE++ is to
whiten over the batch, wherever its parts are.
"""

from collections.abc import Sequence
from typing import Literal, assert_never

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gcore_trainer.checks import require_finite
from gcore_trainer.errors import BatchError

GroupEstimator = Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"]


def group_advantages(scores: ArrayLike, estimator: GroupEstimator) -> NDArray[np.float32]:
    """Advantages [n] of the responses to one prompt by a group-relative estimator, under verl's name.

    Raises:
        BatchError: a score is not finite.
    """
    match estimator:
        case "grpo":
            return grpo_advantages(scores)
        case "dr_grpo" | "reinforce_plus_plus_baseline":
            return grpo_advantages(scores, norm_adv_by_std_in_grpo=False)
        case "rloo":
            return rloo_advantages(scores)
        case _:
            assert_never(estimator)


def grpo_advantages(
    scores: ArrayLike, *, norm_adv_by_std_in_grpo: bool = True, epsilon: float = 1e-6
) -> NDArray[np.float32]:
    """Group-relative advantages of one prompt's responses.

    A_i = (r_i - mean(r)) / (std(r) + epsilon), std with n - 1 in the denominator: DeepSeekMath (arXiv 2402.03300),
    section 4.1.2. Without the division it is Dr. GRPO's estimator (arXiv 2503.20783), which does not weigh easy and
    hard prompts up; whitened over the batch, that is REINFORCE++-baseline (arXiv 2501.03262).

    Args:
        scores: [n] rewards of the group, n >= 1. A single response keeps its score: mean 0 and std 1, as in verl.

    Raises:
        BatchError: a score is not finite.
    """
    r = _scores(scores)
    centred = _centred(r)
    if norm_adv_by_std_in_grpo:
        centred = centred / ((r.std(ddof=1) if r.size > 1 else 1.0) + epsilon)
    return centred.astype(np.float32)


def rloo_advantages(scores: ArrayLike) -> NDArray[np.float32]:
    """Each response against the mean of the others: REINFORCE leave-one-out (arXiv 2402.14740).

    A_i = r_i - sum_{j != i} r_j / (n - 1)

    Args:
        scores: [n] rewards of the group, n >= 1. A single response keeps its score, as in verl.

    Raises:
        BatchError: a score is not finite.
    """
    r = _scores(scores)
    return (_centred(r) * r.size / max(r.size - 1, 1)).astype(np.float32)


def remax_advantages(scores: ArrayLike, greedy_score: float) -> NDArray[np.float32]:
    """Each response against the greedy one to the same prompt: ReMax (arXiv 2310.10505).

    Args:
        scores: [n] rewards of the sampled responses, n >= 1.
        greedy_score: reward of the greedy response.

    Raises:
        BatchError: a score is not finite.
    """
    return (_scores(scores) - _scores([greedy_score])).astype(np.float32)


def discounted_returns(rewards: NDArray[np.floating], mask: NDArray[np.bool_], *, gamma: float) -> NDArray[np.float64]:
    """Discounted sum of the rewards from each token on: REINFORCE++ (arXiv 2501.03262), before whitening.

    Tokens outside the mask (a tool's output) take no part: their rewards do not count, and time does not pass.

    Args:
        rewards: [R] of one response.
        mask: [R] tokens of the policy.
        gamma: discount per token.

    Returns:
        [R], 0 outside the mask.

    Raises:
        BatchError: the reward of a token in the mask is not finite.
    """
    require_finite("rewards", rewards, mask)
    returns = np.zeros(rewards.shape, np.float64)
    running = 0.0
    for t in np.flatnonzero(mask)[::-1]:
        running = float(rewards[t]) + gamma * running
        returns[t] = running
    return returns


def gae(
    rewards: NDArray[np.floating],
    values: NDArray[np.floating],
    mask: NDArray[np.bool_],
    *,
    gamma: float,
    lam: float,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Generalised advantage estimation along one response (arXiv 1506.02438, eq. 16), before whitening.

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  return_t = A_t + V_t. Tokens outside the
    mask take no part, and the value after the last token is 0.

    Args:
        rewards: [R] of one response.
        values: [R], V of the state before each token.
        mask: [R] tokens of the policy.
        gamma: discount per token.
        lam: weight of longer horizons.

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


def moments(values: Sequence[NDArray[np.floating]], masks: Sequence[NDArray[np.bool_]]) -> NDArray[np.float64]:
    """Count, sum and sum of squares of the tokens in the masks, shape [3]; those of parts of a batch add up.

    Raises:
        BatchError: the value of a token in a mask is not finite.
    """
    for i, (v, m) in enumerate(zip(values, masks, strict=True)):
        require_finite(f"values[{i}]", v, m)
    counted = [v[m].astype(np.float64) for v, m in zip(values, masks, strict=True)]
    return np.array([sum(f(v) for v in counted) for f in (np.size, np.sum, lambda v: np.square(v).sum())], np.float64)


def whiten(values: NDArray[np.floating], mask: NDArray[np.bool_], batch: NDArray[np.float64]) -> NDArray[np.float32]:
    """The values of one response with the batch's mean taken off and its standard deviation made 1; 0 outside the mask.

    (v - mean) / sqrt(var + 1e-8), var with n - 1 in the denominator. A batch of one token is only centred.

    Args:
        values: [R] of one response.
        mask: [R] tokens that count.
        batch: `moments` of the whole batch.
    """
    count, total, squares = batch.tolist()
    mean = total / max(count, 1.0)
    variance = max(squares - count * mean * mean, 0.0) / (count - 1.0) if count > 1 else 1.0
    return np.where(mask, (values - mean) / np.sqrt(variance + 1e-8), 0.0).astype(np.float32)


def _centred(r: NDArray[np.float64]) -> NDArray[np.float64]:
    """The scores of a group less their mean; of one response, the score itself."""
    if r.size == 1:
        return r
    # The mean of equal scores may be off by a rounding, and so would be a gradient that should be none.
    return np.zeros_like(r) if (r == r[0]).all() else r - r.mean()


def _scores(scores: ArrayLike) -> NDArray[np.float64]:
    r = np.asarray(scores, dtype=np.float64)
    if r.ndim != 1 or r.size == 0 or not np.isfinite(r).all():
        raise BatchError(f"scores is {r}: one dimension, at least one entry and finite numbers are needed")
    return r
