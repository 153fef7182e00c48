"""DPPO with a KL divergence: a token is left out once its probability has moved too far, whatever its ratio."""

import torch

from gcore_trainer.config import PolicyLossConfig
from gcore_trainer.losses.policy.dppo_tv import divergence_masked
from gcore_trainer.objectives.policy import LossAndMetrics, PolicyTokens, policy_loss_function

_EPSILON = 1e-8


@policy_loss_function(has_dual_clip=True)
def dppo_kl(tokens: PolicyTokens, config: PolicyLossConfig) -> LossAndMetrics:
    """Compute `divergence_masked` by KL(q || p) between a token and all others: DPPO-Binary-KL.

    p and q are the token's probabilities under the policy and before the step's first update (arXiv 2602.04879), and
    the divergence is q log(q/p) + (1 - q) log((1 - q)/(1 - p)). ``clip_ratio_low`` bounds it for tokens with A <= 0
    that have become less likely, and ``clip_ratio_high`` for the others that have become more likely.
    """
    log_p = tokens.log_probs.detach()
    p = log_p.exp()
    q = tokens.old_log_probs.exp()
    others = torch.log((1.0 - q + _EPSILON) / (1.0 - p + _EPSILON))
    divergence = q * (tokens.old_log_probs - log_p) + (1.0 - q) * others
    is_far = torch.where(
        tokens.advantages > 0,
        ~(divergence <= config.clip_ratio_high) & (p > q),
        ~(divergence <= config.clip_ratio_low) & (p < q),
    )
    return divergence_masked(tokens, is_far, config)
