"""KL-Cov: the tokens that would lower the entropy most are held near the policy before the step."""

import torch

from gcore_trainer.config import FractionAbove0, NotNegative, PolicyLossConfig
from gcore_trainer.objectives.policy import PolicyTokens


def kl_cov(
    tokens: PolicyTokens,
    _config: PolicyLossConfig,
    *,
    kl_cov_ratio: FractionAbove0 = 0.0002,
    ppo_kl_coef: NotNegative = 0.1,
) -> torch.Tensor:
    """Compute -A r, and with c |log_probs - old_log_probs| added for the tokens of the largest covariances.

    Cui et al. (arXiv 2505.22617, eq. 13): c is ``ppo_kl_coef``, and these tokens are ``kl_cov_ratio`` of all, at least
    one, by the covariance of log-probability and advantage (`PolicyTokens.covariances`). As in verl, they are those of
    each micro-batch.
    """
    size = min(tokens.share(kl_cov_ratio), len(tokens.mask))
    largest = tokens.covariances.masked_fill(~tokens.mask, -torch.inf).topk(size).indices
    is_largest = torch.zeros_like(tokens.mask).index_fill(0, largest, True)
    penalty = ppo_kl_coef * (tokens.log_probs - tokens.old_log_probs).abs()
    return -tokens.advantages * tokens.ratio + penalty.masked_fill(~is_largest, 0.0)
