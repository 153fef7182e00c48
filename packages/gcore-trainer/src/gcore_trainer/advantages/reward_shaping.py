"""Length and KL penalties, which are added to a response's score before advantages are computed."""

import math
from collections.abc import Mapping
from typing import Literal, assert_never

import numpy as np
from numpy.typing import NDArray

from gcore_trainer.checks import require, require_finite
from gcore_trainer.config import MAX_K3
from gcore_trainer.errors import BatchError, ConfigError, StateError

RewardKL = Literal["k1", "k2", "k3"]


def overlong_penalty(
    length: int, *, max_response_length: int, overlong_buffer_len: int, penalty_factor: float = 1.0
) -> float:
    """Return the penalty of a response that comes close to the length limit: DAPO (arXiv 2503.14476, eq. 13).

    0 up to max_response_length - overlong_buffer_len tokens, from there falling linearly to -penalty_factor at the
    limit, and -penalty_factor beyond it.

    Args:
        length: tokens of the response.

    Raises:
        ConfigError: the buffer is not within the limit, or the factor is negative.
    """
    if not 1 <= overlong_buffer_len <= max_response_length:
        raise ConfigError(
            f"overlong_buffer_len is {overlong_buffer_len}; expected 1 to max_response_length={max_response_length}"
        )
    if not 0 <= penalty_factor < math.inf:
        raise ConfigError(f"penalty_factor is {penalty_factor}; expected a finite number, 0 or more")
    exceeded = length - (max_response_length - overlong_buffer_len)
    return -penalty_factor * min(max(exceeded / overlong_buffer_len, 0.0), 1.0)


def kl_estimates(
    log_probs: NDArray[np.floating], ref_log_probs: NDArray[np.floating], mask: NDArray[np.bool_], kind: RewardKL
) -> NDArray[np.float64]:
    """Estimate KL(policy || reference) at every token, shape [R], 0 outside the mask; without a gradient.

    The formulas are those of `gcore_trainer.kl_penalty`. Their mean over a response, and over the batch's
    responses, is what a KL controller is updated with.

    Args:
        log_probs: [R] of the policy.
        ref_log_probs: [R] of the reference policy.
        mask: [R] tokens of the policy.

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
    """Compute the rewards of one response's tokens, with the KL divergence to a reference policy in them.

    -coef * KL_t at every token, and the score on the last one: arXiv 1909.08593, eq. 2, and arXiv 2009.01325,
    section 3.4, where ``kind`` is k1.

    Args:
        score: of the whole response.
        log_probs: [R] of the policy that wrote it, before its update.
        ref_log_probs: [R] of the reference policy.
        mask: [R] tokens of the policy.
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


class FixedKLController:
    """A constant weight of the KL penalty.

    Args:
        kl_coef: the weight.

    Raises:
        ConfigError: the weight is negative or not finite.
    """

    def __init__(self, *, kl_coef: float) -> None:
        require("kl_coef", kl_coef, 0 <= kl_coef < math.inf, "a finite number, 0 or more")
        self.value = float(kl_coef)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Do nothing."""

    def state(self) -> dict[str, float]:
        """Return the state for `load_state`."""
        return {"value": self.value}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Take over a saved weight.

        Raises:
            StateError: the state is not one of `state`.
        """
        if set(state) != {"value"} or not 0 <= state["value"] < math.inf:
            raise StateError(f"state is {dict(state)}; expected one entry 'value', a finite number, 0 or more")
        self.value = float(state["value"])


class AdaptiveKLController(FixedKLController):
    """A weight of the KL penalty that follows the divergence: a controller in log space (arXiv 1909.08593, sec. 2.2).

    e = clip(KL / target_kl - 1, -0.2, 0.2);  value <- value (1 + e n_steps / horizon).

    Args:
        kl_coef: the first value.
        target_kl: divergence that is sought, in the unit that `update` is given.
        horizon: n_steps over which an error takes its full effect.

    Raises:
        ConfigError: a setting is out of its bounds.
    """

    def __init__(self, *, kl_coef: float, target_kl: float, horizon: int) -> None:
        require("target_kl", target_kl, 0 < target_kl < math.inf, "a finite number above 0")
        require("horizon", horizon, horizon >= 1, "1 or more")
        super().__init__(kl_coef=kl_coef)
        self._target_kl = target_kl
        self._horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Follow one batch.

        Args:
            current_kl: mean divergence of the batch.
            n_steps: responses in the batch, or what else the horizon counts.

        Raises:
            BatchError: the divergence is not finite, or n_steps so large that the value could leave the positive side.
        """
        if not math.isfinite(current_kl):
            raise BatchError(f"current_kl is {current_kl}; expected a finite number")
        if not 0 <= n_steps < 5 * self._horizon:
            raise BatchError(
                f"n_steps is {n_steps}; expected 0 or more, and less than five times horizon={self._horizon}"
            )
        error = min(max(current_kl / self._target_kl - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * n_steps / self._horizon
