"""GRPO: each response relative to the other responses to its prompt."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gcore_trainer.advantages.estimator import ScoredGroup, advantage_estimator, checked_scores


@advantage_estimator(min_group_size=2)
def grpo(group: ScoredGroup, *, norm_adv_by_std_in_grpo: bool = True) -> list[NDArray[np.floating]]:
    """Give all tokens of a response its `grpo_advantages`."""
    return group.at_every_token(
        grpo_advantages(group.scores, norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo)
    )


def grpo_advantages(
    scores: ArrayLike, *, norm_adv_by_std_in_grpo: bool = True, epsilon: float = 1e-6
) -> NDArray[np.float32]:
    """Return the group-relative advantages [n] of one prompt's responses.

    A_i = (r_i - mean(r)) / (std(r) + epsilon), std with n - 1 in the denominator: DeepSeekMath (arXiv 2402.03300),
    section 4.1.2. Without the division it is Dr. GRPO's estimator (arXiv 2503.20783), which does not weigh easy and
    hard prompts up.

    Args:
        scores: [n] rewards of the group, n >= 1. A single response keeps its score: mean 0 and std 1, as in verl.

    Raises:
        BatchError: a score is not finite.
    """
    r = checked_scores(scores)
    centred = centred_scores(r)
    if norm_adv_by_std_in_grpo:
        std = r.std(ddof=1) if r.size > 1 else 1.0
        centred = centred / (std + epsilon)
    return centred.astype(np.float32)


def add_turn_advantages(
    turns: Sequence[tuple[NDArray[np.floating], float]],
    *,
    norm_adv_by_std_in_grpo: bool,
    weight: float = 1.0,
) -> None:
    """Add the `grpo_advantages` of turns among each other to their tokens; each turn is a view of these and a score."""
    if turns:
        scores = [score for _, score in turns]
        advantages = grpo_advantages(scores, norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo)
        for (tokens, _), advantage in zip(turns, advantages.tolist(), strict=True):
            tokens += weight * advantage


def centred_scores(r: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the scores of a group less their mean; a single response keeps its score."""
    if r.size == 1:
        return r
    # The mean of equal scores may be off by a rounding, and so would be a gradient that should be zero.
    return np.zeros_like(r) if (r == r[0]).all() else r - r.mean()
