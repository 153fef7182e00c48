"""DPPO with total variation: a token is left out once its probability has moved too far, whatever its ratio."""

import torch

from gcore_trainer.config import PolicyLossConfig
from gcore_trainer.objectives.policy import LossAndMetrics, PolicyTokens, policy_loss_function

_MAX_RATIO = 20.0
"""The weight of a token is at most this much where ``clip_ratio_c`` is None, as in verl."""


@policy_loss_function(has_dual_clip=True)
def dppo_tv(tokens: PolicyTokens, config: PolicyLossConfig) -> LossAndMetrics:
    """Compute `divergence_masked` by |p - q|, the total variation between a token and all others: DPPO-Binary-TV.

    p and q are the token's probabilities under the policy and before the step's first update (arXiv 2602.04879).
    ``clip_ratio_low`` bounds q - p of tokens with A <= 0, and ``clip_ratio_high`` p - q of the others.
    """
    difference = (tokens.log_probs.exp() - tokens.old_log_probs.exp()).detach()
    is_far = torch.where(
        tokens.advantages > 0,
        difference > config.clip_ratio_high,
        difference < -config.clip_ratio_low,
    )
    return divergence_masked(tokens, is_far, config)


def divergence_masked(
    tokens: PolicyTokens, is_far: torch.Tensor, config: PolicyLossConfig
) -> LossAndMetrics:
    """Compute -sg[min(r, c)] A log_probs, c = ``clip_ratio_c`` or 20, and 0 for tokens that are too far."""
    bound = config.clip_ratio_c or _MAX_RATIO
    ratio = tokens.ratio.detach()
    loss = -tokens.advantages * ratio.clamp(max=bound) * tokens.log_probs
    metrics = {
        "actor/pg_clipfrac": is_far,
        "actor/pg_clipfrac_lower": (ratio > bound) & ~is_far,
    }
    return loss.masked_fill(is_far, 0.0), metrics
