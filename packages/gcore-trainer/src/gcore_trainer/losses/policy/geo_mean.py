"""GMPO: a sequence's ratio, the geometric mean of ratios that are clipped token by token."""

import torch

from gcore_trainer.config import PolicyLossConfig
from gcore_trainer.objectives.policy import LossAndMetrics, PolicyTokens


def geo_mean(tokens: PolicyTokens, config: PolicyLossConfig) -> LossAndMetrics:
    """Compute -A exp(mean_t(clipped log-ratio)): GMPO (arXiv 2507.20673, eq. 4), at every token of a sequence.

    Log-ratios are bounded by ``clip_ratio_high`` where A > 0, and by -``clip_ratio_low`` where A < 0. With one
    advantage for all tokens of a sequence and ``seq-mean-token-mean`` it is GMPO.
    """
    log_ratio = tokens.log_probs - tokens.old_log_probs
    low = -config.clip_ratio_low
    high = config.clip_ratio_high
    is_high = tokens.advantages > 0
    is_low = tokens.advantages < 0
    bounded = torch.where(is_high, log_ratio.clamp(max=high), log_ratio)
    bounded = torch.where(is_low, log_ratio.clamp(min=low), bounded)
    is_outside = (log_ratio < low) | (log_ratio > high)
    metrics = {
        "actor/pg_clipfrac": is_outside & is_high,
        "actor/pg_clipfrac_lower": is_outside & is_low,
    }
    return -tokens.advantages * tokens.sequence_means(bounded).exp(), metrics
