"""Length and KL penalties on a response's score, before advantages are computed."""

from collections.abc import Sequence
from itertools import chain
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from gcore_trainer.advantages.estimator import AllGather, KLController
from gcore_trainer.config import NOT_NEGATIVE, RewardKL
from gcore_trainer.errors import BatchError, ConfigError
from gcore_trainer.sample import Sample, require_finite

MAX_K3 = 10.0
"""Largest value of the k3 estimate of a token's KL divergence, in the loss and in the reward; verl's bound."""


def overlong_penalty(
    length: int, *, max_response_length: int, overlong_buffer_len: int, penalty_factor: float = 1.0
) -> float:
    """Return the penalty of a response that comes close to the length limit: DAPO (arXiv 2503.14476, eq. 13).

    0 up to max_response_length - overlong_buffer_len tokens, from there falling linearly to -penalty_factor at the
    limit, and -penalty_factor beyond it. A buffer beyond the limit, or a negative factor, is a `ConfigError`.
    """
    if not 1 <= overlong_buffer_len <= max_response_length:
        raise ConfigError(
            f"overlong_buffer_len is {overlong_buffer_len}; expected 1 to max_response_length={max_response_length}"
        )
    NOT_NEGATIVE.require("penalty_factor", penalty_factor)
    exceeded = length - (max_response_length - overlong_buffer_len)
    return -penalty_factor * min(max(exceeded / overlong_buffer_len, 0.0), 1.0)


def kl_estimates(
    log_probs: NDArray[np.floating],
    ref_log_probs: NDArray[np.floating],
    mask: NDArray[np.bool_],
    kind: RewardKL,
) -> NDArray[np.float64]:
    """Estimate KL(policy || reference) at every token, shape [R], 0 outside the mask; without a gradient.

    The formulas are those of `gcore_trainer.kl_penalty`. Their mean over a response, and over the batch's
    responses, is what a KL controller is updated with.

    Raises:
        BatchError: a log-probability of a token in the mask is not finite.
    """
    require_finite("log_probs", log_probs, mask)
    require_finite("ref_log_probs", ref_log_probs, mask)
    log_ratio = np.zeros(mask.shape, np.float64)
    log_ratio[mask] = log_probs[mask].astype(np.float64) - ref_log_probs[mask]
    match kind:
        case "k1":
            return log_ratio
        case "k2":
            return np.square(log_ratio) / 2
        case "k3":
            negative = (-log_ratio).clip(-20.0, 20.0)
            return np.minimum(np.expm1(negative) - negative, MAX_K3)
        case _:
            assert_never(kind)


def kl_rewards(
    score: float,
    log_probs: NDArray[np.floating],
    ref_log_probs: NDArray[np.floating],
    mask: NDArray[np.bool_],
    *,
    coef: float,
    kind: RewardKL = "k1",
) -> NDArray[np.float64]:
    """Compute the rewards of one response's tokens, including the KL penalty to a reference policy.

    -coef * KL_t at every token, and the score on the last one: arXiv 1909.08593, eq. 2, and arXiv 2009.01325,
    section 3.4, where ``kind`` is k1.

    Args:
        log_probs: [R] of the policy that wrote it, before its update.
        coef: weight of the divergence; a controller's value.

    Returns:
        [R], 0 outside the mask.

    Raises:
        BatchError: the mask has no token that the score could be given to, or a log-probability in it is not finite.
    """
    counted = np.flatnonzero(mask)
    if counted.size == 0:
        raise BatchError(f"mask of {mask.size} tokens has none that counts; expected at least one")
    rewards = -coef * kl_estimates(log_probs, ref_log_probs, mask, kind)
    rewards[counted[-1]] += score
    return rewards


async def follow_divergence(
    samples: Sequence[Sample], kind: RewardKL, kl: KLController, all_gather: AllGather
) -> dict[str, float]:
    """Update a KL controller with the mean divergence of the whole batch; return metrics under verl's names."""
    divergences: list[float] = []
    for sample in samples:
        if sample.mask.any():
            log_probs = sample.policy_log_probs
            assert log_probs is not None
            assert sample.ref_log_probs is not None
            estimates = kl_estimates(log_probs, sample.ref_log_probs, sample.mask, kind)
            divergences.append(float(estimates[sample.mask].mean()))
    everyones = list(chain.from_iterable(await all_gather(divergences)))
    mean = float(np.mean(everyones)) if everyones else 0.0
    metrics = {"actor/reward_kl_penalty": mean, "actor/reward_kl_penalty_coeff": kl.value}
    kl.update(mean, len(everyones))
    return metrics
