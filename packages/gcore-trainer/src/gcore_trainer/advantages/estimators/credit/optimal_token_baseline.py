"""OTB: each token has a baseline of its own, the one of least variance for what is learned up to it."""

import numpy as np
from numpy.typing import NDArray

from gcore_trainer.advantages.estimator import ScoredGroup, advantage_estimator

_EPSILON = 1e-8


@advantage_estimator(needs_squared_norms=True, reads_token_rewards=True, min_group_size=2)
def optimal_token_baseline(group: ScoredGroup) -> list[NDArray[np.floating]]:
    """Return A_it = G_it - B_t at token t of response i, counted among its tokens that the policy wrote.

    B_t = sum_i G_it W_it / sum_i W_it (arXiv 2602.07078), where G_it is the sum of the rewards from t on, and W_it that
    of the squared norms |d log p(y_j) / d logits|^2 = 1 - 2 p(y_j) + sum_v p(v)^2 up to t. Beyond the second longest
    response B is 0. As verl's ``tir_optimal_token_baseline``, and where the policy wrote all tokens its
    ``optimal_token_baseline``, both without importance weights.
    """
    assert group.squared_norms is not None
    counts = [int(mask.sum()) for mask in group.masks]
    returns_NT = np.zeros((len(counts), max(counts)))
    weights_NT = np.zeros_like(returns_NT)
    rows = zip(group.rewards, group.squared_norms, group.masks, strict=True)
    for i, (rewards, norms, mask) in enumerate(rows):
        returns_NT[i, : counts[i]] = rewards[mask][::-1].cumsum()[::-1]
        weights_NT[i, : counts[i]] = norms[mask].cumsum(dtype=np.float64)
    baselines_T = (returns_NT * weights_NT).sum(0) / (weights_NT.sum(0) + _EPSILON)
    second_longest = sorted([0, *counts])[-2]
    baselines_T[second_longest:] = 0.0
    advantages = group.at_every_token(np.zeros(len(counts)))
    for i, mask in enumerate(group.masks):
        advantages[i][mask] = (returns_NT[i] - baselines_T)[: counts[i]]
    return advantages
