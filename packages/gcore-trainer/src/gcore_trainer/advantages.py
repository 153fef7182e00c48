"""Advantage estimators: pure functions from scores to advantages."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gcore_trainer.errors import BatchError


def grpo_advantages(
    scores: ArrayLike, *, norm_adv_by_std_in_grpo: bool = True, epsilon: float = 1e-6
) -> NDArray[np.float32]:
    """Group-relative advantages of one prompt's responses.

    A_i = (r_i - mean(r)) / (std(r) + epsilon), std with n - 1 in the denominator: DeepSeekMath (arXiv 2402.03300),
    section 4.1.2. Without the division it is Dr. GRPO's estimator (arXiv 2503.20783), which does not weigh easy and
    hard prompts up.

    Args:
        scores: [n] rewards of the group, n >= 1. A single response has advantage 0.

    Raises:
        BatchError: a score is not finite.
    """
    r = np.asarray(scores, dtype=np.float64)
    if r.ndim != 1 or r.size == 0 or not np.isfinite(r).all():
        raise BatchError(f"scores is {r}: one dimension, at least one entry and finite numbers are needed")
    centred = r - r.mean()
    if norm_adv_by_std_in_grpo and r.size > 1:
        centred = centred / (r.std(ddof=1) + epsilon)
    return centred.astype(np.float32)
